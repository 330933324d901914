-- Messages that were handled: written in the transaction of the business data. operations are what their handlers sent
-- (MessagePack), NULL once dispatched. Times are whole microseconds since 1970-01-01 UTC.
-- {schema} is replaced by the quoted name of the database. Texts are compared byte by byte, trailing spaces included.
CREATE TABLE IF NOT EXISTS {schema}.`postdate_outbox` (
    number        BIGINT       NOT NULL AUTO_INCREMENT PRIMARY KEY,
    endpoint      VARCHAR(200) NOT NULL,
    message_id    VARCHAR(250) NOT NULL,
    handled_at    BIGINT       NOT NULL,
    dispatched_at BIGINT,
    operations    LONGBLOB,
    UNIQUE KEY outbox_message (endpoint, message_id),
    KEY outbox_dispatched (endpoint, dispatched_at)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
