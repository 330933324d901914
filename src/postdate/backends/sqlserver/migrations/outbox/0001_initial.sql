-- Messages that were handled: written in the transaction of the business data. operations are what their handlers sent
-- (MessagePack), NULL once dispatched. Times are whole microseconds since 1970-01-01 UTC.
-- {schema} is replaced by the quoted name of the schema. Texts are compared by code point; since SQL Server ignores
-- trailing spaces even so, the length of an id is part of its key. Columns are as wide as UTF-16 needs it.
CREATE TABLE {schema}.[postdate_outbox] (
    number           bigint         NOT NULL IDENTITY PRIMARY KEY,
    endpoint         nvarchar(200)  COLLATE Latin1_General_BIN2 NOT NULL,
    message_id       nvarchar(500)  COLLATE Latin1_General_BIN2 NOT NULL,
    message_id_bytes AS CAST(DATALENGTH(message_id) AS smallint) PERSISTED NOT NULL,
    handled_at       bigint         NOT NULL,
    dispatched_at    bigint,
    operations       varbinary(max)
);
CREATE UNIQUE INDEX [outbox_message] ON {schema}.[postdate_outbox] (endpoint, message_id, message_id_bytes);
CREATE INDEX [outbox_dispatched] ON {schema}.[postdate_outbox] (endpoint, dispatched_at);
