-- What all stores of one database share. {schema} is replaced by the quoted name of the database.
-- Times are whole microseconds since 1970-01-01 UTC. MariaDB commits after each of these statements, so each may be
-- run again. Texts are compared byte by byte, trailing spaces included.

CREATE TABLE IF NOT EXISTS {schema}.`postdate_store` (
    store_id SMALLINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    name     VARCHAR(64) NOT NULL UNIQUE               -- of its table of waiting messages
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- What happened, append-only; kinds are postdate.ports.RecordKind. The 'scheduled' record (1) is also what makes an id
-- unique, also after delivery: it alone has a 1 in the column once, and NULLs are not compared.
CREATE TABLE IF NOT EXISTS {schema}.`postdate_record` (
    number      BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at          BIGINT NOT NULL,
    due         BIGINT,
    store_id    SMALLINT NOT NULL,
    kind        TINYINT NOT NULL,
    once        TINYINT,
    message_id  VARCHAR(250) NOT NULL,
    destination VARCHAR(200),
    detail      MEDIUMTEXT,
    UNIQUE KEY record_scheduled (message_id, store_id, once)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- Processes that hold messages; the connection of each has the lock of that name for as long as it lives.
CREATE TABLE IF NOT EXISTS {schema}.`postdate_holder` (
    holder     BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    store_id   SMALLINT NOT NULL,
    lock_name  VARCHAR(64) NOT NULL,
    pid        INTEGER NOT NULL,
    machine    VARCHAR(255) NOT NULL,
    started_at BIGINT NOT NULL,
    ahead      BIGINT                                  -- how far its clock is ahead of the server's, in microseconds
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- Limits of destinations, which all services of a store keep together: see ADR 34. Messages over the limits wait with an
-- attempt time in the lane of their destination. Without limits (an empty text) they were lifted.
CREATE TABLE IF NOT EXISTS {schema}.`postdate_destination_limit` (
    lane        BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    store       SMALLINT NOT NULL,
    destination VARCHAR(200) NOT NULL,
    limits      TEXT NOT NULL,
    free_at     BIGINT NOT NULL,
    UNIQUE KEY destination_limit_name (store, destination)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
