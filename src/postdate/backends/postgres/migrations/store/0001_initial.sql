-- The table of waiting messages of one store. {table} is replaced by its quoted name, schema included.
--
-- attempt_at is the instant after which the next attempt may be made: the due time at first, later after a failure,
-- NULL while a process holds the message beyond its row lock, so that one index answers "what may be attempted now".
CREATE TABLE {table} (
    number      bigint      PRIMARY KEY,               -- of its 'scheduled' record
    due         timestamptz NOT NULL,
    attempt_at  timestamptz,
    expires_at  timestamptz,
    holder      bigint,
    failures    integer     NOT NULL DEFAULT 0,
    message_id  text COLLATE "C" NOT NULL,
    destination text COLLATE "C" NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ON {table} (attempt_at, number);
CREATE INDEX ON {table} (due) WHERE failures > 0;
CREATE INDEX ON {table} (holder) WHERE holder IS NOT NULL;
INSERT INTO {schema}.store (name) VALUES ({name});
