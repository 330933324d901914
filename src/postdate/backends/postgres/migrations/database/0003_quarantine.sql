-- What cannot be read and is set aside, with what it holds as it was: from a store (queue_id is NULL) or from a queue.
CREATE TABLE {schema}.quarantine (
    number      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz NOT NULL,
    reason      text        NOT NULL,
    store_id    smallint,                              -- in which it waits or waited
    queue_id    integer,
    place       bigint      NOT NULL,                  -- its number there
    message_id  text COLLATE "C" NOT NULL,
    destination text COLLATE "C",
    due         timestamptz,
    expires_at  timestamptz,
    failures    integer     NOT NULL,
    headers     text,
    body        bytea
);
