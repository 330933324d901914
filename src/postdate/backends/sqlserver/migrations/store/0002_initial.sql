-- The table of waiting messages of one store. {table} is replaced by its quoted name, schema included; {schema} and
-- {name} by those of the schema and of the table.
--
-- attempt_at is the instant after which the next attempt may be made: the due time at first, later after a failure,
-- NULL while a process holds the message beyond its row lock, so that one index answers "what may be attempted now" and
-- "what is held". Row locks must stay row locks: escalated, one batch would hold the table.
--
-- A row that cannot be read stays where it is, and is marked (ADR 43): unreadable says why, unreadable_at since when.
-- Its attempt_at is before every time, so that nothing claims it, and the indexes of claims do not change.
CREATE TABLE {table} (
    number        bigint         NOT NULL PRIMARY KEY, -- of its 'scheduled' record
    due           bigint         NOT NULL,
    attempt_at    bigint,
    expires_at    bigint,
    holder        bigint,
    failures      int            NOT NULL DEFAULT 0,
    message_id    nvarchar(500)  COLLATE Latin1_General_BIN2 NOT NULL,
    destination   nvarchar(400)  COLLATE Latin1_General_BIN2 NOT NULL,
    headers       nvarchar(max)  NOT NULL,
    body          varbinary(max) NOT NULL,
    unreadable    nvarchar(max),
    unreadable_at bigint
);
CREATE INDEX [attempt] ON {table} (attempt_at, number);
CREATE INDEX [due] ON {table} (due, number) INCLUDE (failures);
ALTER TABLE {table} SET (LOCK_ESCALATION = DISABLE);
INSERT INTO {schema}.[postdate_store] (name) VALUES ({name});
