-- When the queue itself is done with a message, by the clock of the machine; NULL: never. Beside it expires_at stays as
-- the sender wrote it, by whatever clock. Messages from before have no end: their receivers discard them, as ever.
ALTER TABLE queue_message ADD COLUMN ends_at INTEGER;
-- Whether it is then kept among the dead letters.
ALTER TABLE queue_message ADD COLUMN dead_letter INTEGER NOT NULL DEFAULT 0;
CREATE INDEX queue_message_ending ON queue_message (ends_at, queue_id) WHERE ends_at IS NOT NULL AND claimant IS NULL;
