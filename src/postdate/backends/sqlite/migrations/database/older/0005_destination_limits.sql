-- Limits of destinations, which all services of a store keep together: see ADR 34. Held messages wait with an attempt
-- time in the lane of their destination. Without limits (an empty text) they were lifted.
CREATE TABLE destination_limit (
    lane        INTEGER PRIMARY KEY,
    store       INTEGER NOT NULL,
    destination TEXT NOT NULL,
    limits      TEXT NOT NULL,
    free_at     INTEGER NOT NULL,
    UNIQUE (store, destination)
);
