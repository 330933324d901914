-- Limits of destinations, which all services of a store keep together: see ADR 34. Held messages wait with an attempt
-- time in the lane of their destination. Without limits (an empty text) they were lifted.

CREATE TABLE IF NOT EXISTS {schema}.`postdate_destination_limit` (
    lane        BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    store       SMALLINT NOT NULL,
    destination VARCHAR(200) NOT NULL,
    limits      TEXT NOT NULL,
    free_at     BIGINT NOT NULL,
    UNIQUE KEY destination_limit_name (store, destination)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
