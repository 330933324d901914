-- Saga instances. state is the application's, details are Postdate's own: which timeouts are pending. Both are JSON.
CREATE TABLE saga (
    saga_id    TEXT    NOT NULL,
    saga_type  TEXT    NOT NULL,
    property   TEXT    NOT NULL,
    value      TEXT    NOT NULL,
    version    INTEGER NOT NULL,
    state      TEXT    NOT NULL,
    details    TEXT    NOT NULL,
    PRIMARY KEY (saga_type, saga_id),
    UNIQUE (saga_type, property, value)
);
