-- What all stores of one schema share. {schema} is replaced by the quoted name of the schema.
-- Times are whole microseconds since 1970-01-01 UTC. Texts are compared by code point; since SQL Server ignores trailing
-- spaces even so, the length of an id is part of its key. Columns are as wide as UTF-16 needs it.

CREATE TABLE {schema}.[postdate_store] (
    store_id smallint      NOT NULL IDENTITY PRIMARY KEY,
    name     nvarchar(128) COLLATE Latin1_General_BIN2 NOT NULL UNIQUE   -- of its table of waiting messages
);

-- What happened, append-only; kinds are postdate.ports.RecordKind. The 'scheduled' record (1) is also what makes an id
-- unique, also after delivery.
CREATE TABLE {schema}.[postdate_record] (
    number           bigint        NOT NULL IDENTITY PRIMARY KEY,
    at               bigint        NOT NULL,
    due              bigint,
    store_id         smallint      NOT NULL,
    kind             tinyint       NOT NULL,
    message_id       nvarchar(500) COLLATE Latin1_General_BIN2 NOT NULL,
    message_id_bytes AS CAST(DATALENGTH(message_id) AS smallint) PERSISTED NOT NULL,
    destination      nvarchar(400) COLLATE Latin1_General_BIN2,
    detail           nvarchar(max)
);
CREATE UNIQUE INDEX [record_scheduled] ON {schema}.[postdate_record] (message_id, message_id_bytes, store_id) WHERE kind = 1;
CREATE INDEX [record_other] ON {schema}.[postdate_record] (message_id, store_id) WHERE kind > 1;

-- Thousands of records in one statement must not become a lock on the table that all stores of the schema share.
ALTER TABLE {schema}.[postdate_record] SET (LOCK_ESCALATION = DISABLE);

-- Processes that hold messages; the connection of each has the application lock of that name for as long as it lives.
CREATE TABLE {schema}.[postdate_holder] (
    holder     bigint        NOT NULL IDENTITY PRIMARY KEY,
    store_id   smallint      NOT NULL,
    lock_name  nvarchar(128) NOT NULL,
    pid        int           NOT NULL,
    machine    nvarchar(255) NOT NULL,
    started_at bigint        NOT NULL,
    seen_at    bigint,                                 -- when it last showed that it lives
    ahead      bigint                                  -- how far its clock is ahead of the server's, in microseconds
);

-- Limits of destinations, which all services of a store keep together: see ADR 34. Messages over the limits wait with an
-- attempt time in the lane of their destination. Without limits (an empty text) they were lifted.
CREATE TABLE {schema}.[postdate_destination_limit] (
    lane        bigint        NOT NULL IDENTITY PRIMARY KEY,
    store       nvarchar(10)  COLLATE Latin1_General_BIN2 NOT NULL, -- its number, as keys are texts here
    destination nvarchar(400) COLLATE Latin1_General_BIN2 NOT NULL,
    limits      nvarchar(max) NOT NULL,
    free_at     bigint        NOT NULL
);
CREATE UNIQUE INDEX [destination_limit_name] ON {schema}.[postdate_destination_limit] (store, destination);
