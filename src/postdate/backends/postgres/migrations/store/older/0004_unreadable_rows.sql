-- A row that cannot be read stays where it is, and is marked: unreadable says why, unreadable_at when it was met (ADR 43).
-- Its attempt_at is NULL, so that nothing claims it, and the indexes of claims do not change.
ALTER TABLE {table} ADD COLUMN unreadable text, ADD COLUMN unreadable_at timestamptz;
CREATE INDEX ON {table} (number) WHERE unreadable IS NOT NULL;

-- Rows in the quarantine of earlier versions come back, marked. A message whose last record is its failure has its former
-- number again. Others get a new one, also those whose id was stored anew meanwhile.
DO $move$
DECLARE
    q record;
    store smallint;
    row_number bigint;
BEGIN
    IF to_regclass('{schema_in_text}.quarantine') IS NULL THEN
        RETURN;
    END IF;
    SELECT s.store_id INTO store FROM {schema}.store AS s WHERE s.name = {name};
    FOR q IN SELECT * FROM {schema}.quarantine WHERE queue_id IS NULL AND store_id = store ORDER BY number DESC LOOP
        SELECT r.number INTO row_number FROM {schema}.record AS r
        WHERE r.message_id = q.message_id AND r.store_id = store AND r.kind = 1
            AND NOT EXISTS (SELECT FROM {table} AS p WHERE p.number = r.number)
            AND (SELECT o.kind FROM {schema}.record AS o WHERE o.message_id = q.message_id AND o.kind > 3
                AND (o.store_id = store OR o.store_id IS NULL) ORDER BY o.number DESC LIMIT 1) = 7;
        IF row_number IS NULL THEN
            row_number := nextval('{schema_in_text}.number');
            INSERT INTO {schema}.record (number, at, due, store_id, kind, message_id, destination)
            VALUES (row_number, q.at,
                CASE WHEN q.due BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 23:59:59.999999+00' THEN q.due END,
                store, 1, q.message_id, q.destination)
            ON CONFLICT (message_id, store_id) WHERE kind = 1 DO NOTHING;
        END IF;
        IF q.headers IS NOT NULL AND q.body IS NOT NULL THEN
            INSERT INTO {schema}.content (number, headers, body) VALUES (row_number, q.headers, q.body);
        END IF;
        INSERT INTO {table} (number, due, expires_at, failures, message_id, destination, unreadable, unreadable_at)
        VALUES (row_number, q.due, q.expires_at, q.failures, q.message_id, q.destination, q.reason, q.at);
    END LOOP;
    DELETE FROM {schema}.quarantine WHERE queue_id IS NULL AND store_id = store;
    IF NOT EXISTS (SELECT FROM {schema}.quarantine) THEN
        DROP TABLE {schema}.quarantine;
    END IF;
END
$move$;
