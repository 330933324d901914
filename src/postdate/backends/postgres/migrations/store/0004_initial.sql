-- The table of waiting messages of one store. {table} is replaced by its quoted name, schema included.
--
-- attempt_at is the instant after which the next attempt may be made: the due time at first, later after a failure,
-- NULL while a process holds the message beyond its row lock, so that one index answers "what may be attempted now".
--
-- A row that cannot be read stays where it is, and is marked (ADR 43): unreadable says why, unreadable_at since when.
-- Its attempt_at is NULL, so that nothing claims it, and the indexes of claims do not change.
CREATE TABLE {table} (
    number        bigint      PRIMARY KEY,             -- of its 'scheduled' record
    due           timestamptz NOT NULL,
    attempt_at    timestamptz,
    expires_at    timestamptz,
    holder        bigint,
    failures      integer     NOT NULL DEFAULT 0,
    message_id    text COLLATE "C" NOT NULL,
    destination   text COLLATE "C" NOT NULL,
    unreadable    text,
    unreadable_at timestamptz
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ON {table} (attempt_at, number);
CREATE INDEX ON {table} (due) WHERE failures > 0;
CREATE INDEX ON {table} (holder) WHERE holder IS NOT NULL;
-- What is not attempted when it is due, after a failure or an outage or because of limits, is listed by its due time. No
-- message enters it when it is stored or claimed.
CREATE INDEX ON {table} (due, number) WHERE attempt_at <> due;
CREATE INDEX ON {table} (number) WHERE unreadable IS NOT NULL;
INSERT INTO {schema}.store (name) VALUES ({name});
