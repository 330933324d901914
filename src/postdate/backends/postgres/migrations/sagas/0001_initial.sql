-- Saga instances. state is the application's, details are Postdate's own: which timeouts are pending. Both are JSON,
-- kept as text, so that they come back to the letter.
CREATE TABLE {schema}.saga (
    saga_id    text COLLATE "C" NOT NULL,
    saga_type  text COLLATE "C" NOT NULL,
    property   text COLLATE "C" NOT NULL,
    value      text COLLATE "C" NOT NULL,
    version    bigint NOT NULL,
    state      text NOT NULL,
    details    text NOT NULL,
    PRIMARY KEY (saga_type, saga_id),
    UNIQUE (saga_type, property, value)
);
