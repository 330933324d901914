-- When the queue itself is done with a message, by the clock of the server; NULL: never. Beside it expires_at stays as
-- the sender wrote it, by whatever clock. Messages from before have no end: their receivers discard them, as ever.
ALTER TABLE {schema}.queue_message ADD COLUMN ends_at timestamptz;
-- What has run out is found here, from whatever queue. A message without an end has no entry, and one that is received
-- gets none for its new version.
CREATE INDEX queue_message_ends ON {schema}.queue_message (ends_at) WHERE ends_at IS NOT NULL AND holder IS NULL;
-- Schemas that were made before following records needed it do not have it yet.
CREATE INDEX IF NOT EXISTS record_number ON {schema}.record
    USING brin (number) WITH (pages_per_range = 32, autosummarize = on);
