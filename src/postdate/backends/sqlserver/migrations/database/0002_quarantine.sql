-- Messages that cannot be read, set aside with their bytes so that they hold up nothing else.
-- {schema} is replaced by the quoted name of the schema.

CREATE TABLE {schema}.[postdate_quarantine] (
    number      bigint         NOT NULL IDENTITY PRIMARY KEY,
    store_id    smallint       NOT NULL,
    at          bigint         NOT NULL,
    reason      nvarchar(max)  NOT NULL,
    message_id  nvarchar(500)  COLLATE Latin1_General_BIN2 NOT NULL,
    due         bigint         NOT NULL,
    destination nvarchar(400)  COLLATE Latin1_General_BIN2 NOT NULL,
    expires_at  bigint,
    failures    int            NOT NULL,
    headers     nvarchar(max)  NOT NULL,
    body        varbinary(max) NOT NULL
);
CREATE INDEX [quarantine_store] ON {schema}.[postdate_quarantine] (store_id, number);

-- When a process last showed that it lives, and how far its clock is ahead of the server's, in microseconds.
ALTER TABLE {schema}.[postdate_holder] ADD seen_at bigint NULL, ahead bigint NULL;

-- Thousands of records in one statement must not become a lock on the table that all stores of the schema share.
ALTER TABLE {schema}.[postdate_record] SET (LOCK_ESCALATION = DISABLE);
