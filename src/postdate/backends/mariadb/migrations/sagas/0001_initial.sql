-- Saga instances. state is the application's, details are Postdate's own: which timeouts are pending. Both are JSON.
-- {schema} is replaced by the quoted name of the database. Texts are compared byte by byte, trailing spaces included.
CREATE TABLE IF NOT EXISTS {schema}.`postdate_saga` (
    saga_id   VARCHAR(36)  NOT NULL,
    saga_type VARCHAR(250) NOT NULL,
    property  VARCHAR(128) NOT NULL,
    value     VARCHAR(200) NOT NULL,
    version   BIGINT       NOT NULL,
    state     LONGTEXT     NOT NULL,
    details   LONGTEXT     NOT NULL,
    PRIMARY KEY (saga_type, saga_id),
    UNIQUE KEY saga_correlation (saga_type, property, value)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
