-- Messages that cannot be read, set aside with their bytes so that they hold up nothing else.
-- {schema} is replaced by the quoted name of the database.

CREATE TABLE IF NOT EXISTS {schema}.`postdate_quarantine` (
    number      BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    store_id    SMALLINT NOT NULL,
    at          BIGINT NOT NULL,
    reason      TEXT NOT NULL,
    message_id  VARCHAR(250) NOT NULL,
    due         BIGINT NOT NULL,
    destination VARCHAR(200) NOT NULL,
    expires_at  BIGINT,
    failures    INTEGER NOT NULL,
    headers     LONGTEXT NOT NULL,
    body        LONGBLOB NOT NULL,
    KEY quarantine_store (store_id, number)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- How far the clock of a process is ahead of the server's, in microseconds, as it has measured.
ALTER TABLE {schema}.`postdate_holder` ADD COLUMN IF NOT EXISTS ahead BIGINT;
