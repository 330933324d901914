-- Times are whole microseconds since 1970-01-01 UTC.

-- Messages that were handled: written in the transaction of the business data. operations are what their handlers sent
-- (MessagePack), NULL once dispatched.
CREATE TABLE postdate_outbox (
    seq           INTEGER PRIMARY KEY,
    endpoint      TEXT    NOT NULL,
    message_id    TEXT    NOT NULL,
    handled_at    INTEGER NOT NULL,
    dispatched_at INTEGER,
    operations    BLOB,
    UNIQUE (endpoint, message_id)
);
CREATE INDEX postdate_outbox_dispatched ON postdate_outbox (endpoint, dispatched_at) WHERE dispatched_at IS NOT NULL;
