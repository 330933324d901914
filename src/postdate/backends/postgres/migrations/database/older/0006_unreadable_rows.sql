-- A row that cannot be read stays where it is, and is marked: unreadable says why, unreadable_at when it was met (ADR 43).
-- In a queue its queue_id is negative, so that nothing claims it, and the indexes of claims do not change.
ALTER TABLE {schema}.queue_message ADD COLUMN unreadable text, ADD COLUMN unreadable_at timestamptz;
CREATE INDEX queue_message_unreadable ON {schema}.queue_message (number) WHERE unreadable IS NOT NULL;

-- Rows of queues in the quarantine of earlier versions come back, marked. Those of stores come back with the next
-- migration of each store; the table goes with the last row.
DO $move$
DECLARE
    q record;
    content_number bigint;
BEGIN
    FOR q IN SELECT * FROM {schema}.quarantine WHERE queue_id IS NOT NULL ORDER BY number LOOP
        content_number := nextval('{schema_in_text}.number');
        IF q.headers IS NOT NULL AND q.body IS NOT NULL THEN
            INSERT INTO {schema}.content (number, headers, body) VALUES (content_number, q.headers, q.body);
        END IF;
        INSERT INTO {schema}.queue_message
            (queue_id, content, due, expires_at, failures, store_id, message_id, unreadable, unreadable_at)
        VALUES (-q.queue_id, content_number, q.due, q.expires_at, q.failures, q.store_id, q.message_id, q.reason, q.at);
    END LOOP;
    DELETE FROM {schema}.quarantine WHERE queue_id IS NOT NULL;
    IF NOT EXISTS (SELECT FROM {schema}.quarantine) THEN
        DROP TABLE {schema}.quarantine;
    END IF;
END
$move$;
