-- Limits of destinations, which all services of a store keep together: see ADR 34. Held messages wait with an attempt
-- time in the lane of their destination. Without limits (an empty text) they were lifted.

CREATE TABLE {schema}.[postdate_destination_limit] (
    lane        bigint        NOT NULL IDENTITY PRIMARY KEY,
    store       nvarchar(10)  COLLATE Latin1_General_BIN2 NOT NULL, -- its number, as keys are texts here
    destination nvarchar(400) COLLATE Latin1_General_BIN2 NOT NULL,
    limits      nvarchar(max) NOT NULL,
    free_at     bigint        NOT NULL
);
CREATE UNIQUE INDEX [destination_limit_name] ON {schema}.[postdate_destination_limit] (store, destination);
