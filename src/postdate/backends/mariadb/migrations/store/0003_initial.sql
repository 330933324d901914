-- The table of waiting messages of one store. {table} is replaced by its quoted name, database included; {schema} and
-- {name} by those of the database and of the table.
--
-- attempt_at is the instant after which the next attempt may be made: the due time at first, later after a failure,
-- NULL while a process holds the message beyond its row lock, so that one index answers "what may be attempted now" and
-- "what is held".
--
-- A row that cannot be read stays where it is, and is marked (ADR 43): unreadable says why, unreadable_at since when.
-- Its attempt_at is before every time, so that nothing claims it, and the indexes of claims do not change.
CREATE TABLE IF NOT EXISTS {table} (
    number        BIGINT NOT NULL PRIMARY KEY,         -- of its 'scheduled' record
    due           BIGINT NOT NULL,
    attempt_at    BIGINT,
    expires_at    BIGINT,
    holder        BIGINT,
    failures      INTEGER NOT NULL DEFAULT 0,
    message_id    VARCHAR(250) NOT NULL,
    destination   VARCHAR(200) NOT NULL,
    headers       LONGTEXT NOT NULL,
    body          LONGBLOB NOT NULL,
    unreadable    TEXT,
    unreadable_at BIGINT,
    KEY attempt (attempt_at, number),
    KEY due (due, number, failures)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
INSERT IGNORE INTO {schema}.`postdate_store` (name) VALUES ({name});
