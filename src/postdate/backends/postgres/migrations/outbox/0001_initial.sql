-- Messages that were handled: written in the transaction of the business data. operations are what their handlers sent
-- (MessagePack), NULL once dispatched.
CREATE TABLE {schema}.outbox (
    endpoint      text        NOT NULL,
    message_id    text        NOT NULL,
    handled_at    timestamptz NOT NULL,
    dispatched_at timestamptz,
    operations    bytea,
    PRIMARY KEY (endpoint, message_id)
);
CREATE INDEX outbox_dispatched ON {schema}.outbox (endpoint, dispatched_at) WHERE dispatched_at IS NOT NULL;
