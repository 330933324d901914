-- Saga instances. state is the application's, details are Postdate's own: which timeouts are pending. Both are JSON.
-- {schema} is replaced by the quoted name of the schema. Texts are compared by code point; since SQL Server ignores
-- trailing spaces even so, the length of a value is part of its key. Columns are as wide as UTF-16 needs it.
CREATE TABLE {schema}.[postdate_saga] (
    saga_id     nvarchar(36)  COLLATE Latin1_General_BIN2 NOT NULL,
    saga_type   nvarchar(250) COLLATE Latin1_General_BIN2 NOT NULL,
    property    nvarchar(128) COLLATE Latin1_General_BIN2 NOT NULL,
    value       nvarchar(400) COLLATE Latin1_General_BIN2 NOT NULL,
    value_bytes AS CAST(DATALENGTH(value) AS smallint) PERSISTED NOT NULL,
    version     bigint        NOT NULL,
    state       nvarchar(max) NOT NULL,
    details     nvarchar(max) NOT NULL,
    PRIMARY KEY (saga_type, saga_id)
);
CREATE UNIQUE INDEX [saga_correlation] ON {schema}.[postdate_saga] (saga_type, property, value, value_bytes);
