-- Limits of destinations, which all services of a store keep together: see ADR 34. Held messages wait with an attempt
-- time in the lane of their destination. Without limits (an empty text) they were lifted.
CREATE TABLE {schema}.destination_limit (
    lane        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    store       smallint NOT NULL,
    destination text COLLATE "C" NOT NULL,
    limits      text NOT NULL,
    free_at     timestamptz NOT NULL,
    UNIQUE (store, destination)
);
