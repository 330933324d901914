-- What all stores and queues of one schema share. {schema} is replaced by the quoted name of the schema.

CREATE TABLE {schema}.store (
    store_id smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name     text COLLATE "C" NOT NULL UNIQUE          -- of its table of waiting messages
);

-- One sequence for messages and records: the number of a delayed message is that of its 'scheduled' record.
CREATE SEQUENCE {schema}.number;

-- What is in the messages: written once, and left where it is while the message moves from waiting to its queue. So a
-- delivery moves only small rows, however large the messages are.
CREATE TABLE {schema}.content (
    number  bigint PRIMARY KEY,
    headers text   NOT NULL,
    body    bytea  NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);

-- What happened, append-only; kinds are postdate.ports.RecordKind. The 'scheduled' record (1) is also what makes an id
-- unique, also after delivery.
CREATE TABLE {schema}.record (
    number      bigint      NOT NULL DEFAULT nextval('{schema_in_text}.number'),
    at          timestamptz NOT NULL,
    due         timestamptz,
    store_id    smallint,
    kind        smallint    NOT NULL,
    message_id  text COLLATE "C" NOT NULL,
    destination text COLLATE "C",
    detail      text
);
CREATE UNIQUE INDEX record_scheduled ON {schema}.record (message_id, store_id) WHERE kind = 1;
-- Deliveries are most of the records. They come in the order of their due times, so an index of ranges of pages finds
-- them by due time and costs a delivery nothing, where one on the id costs a quarter (ADR 0007). The few others are
-- found by id.
CREATE INDEX record_delivered ON {schema}.record USING brin (due) WITH (pages_per_range = 32, autosummarize = on)
    WHERE kind IN (2, 3);
CREATE INDEX record_other ON {schema}.record (message_id) WHERE kind > 3;
-- Records come in the order of their numbers, nearly: whoever follows them finds new ones by this index of ranges of
-- pages. It costs a record a third of a microsecond and no write of its own (ADR 0011).
CREATE INDEX record_number ON {schema}.record USING brin (number) WITH (pages_per_range = 32, autosummarize = on);

CREATE TABLE {schema}.queue (
    queue_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name     text COLLATE "C" NOT NULL UNIQUE
);
-- ends_at is when the queue itself is done with a message, by the clock of the server; NULL: never. Beside it expires_at
-- stays as the sender wrote it, by whatever clock.
--
-- A row that cannot be read stays where it is, and is marked (ADR 43): unreadable says why, unreadable_at since when.
-- In a queue its queue_id is negative, so that nothing claims it, and the indexes of claims do not change.
CREATE TABLE {schema}.queue_message (
    queue_id      integer     NOT NULL,
    number        bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    content       bigint      NOT NULL,
    due           timestamptz,                         -- of a delayed message: what its lateness is measured against
    expires_at    timestamptz,
    holder        bigint,
    failures      integer     NOT NULL DEFAULT 0,
    store_id      smallint,                            -- the store that it waited in
    message_id    text COLLATE "C" NOT NULL,
    ends_at       timestamptz,
    unreadable    text,
    unreadable_at timestamptz,
    PRIMARY KEY (queue_id, number)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX queue_message_held ON {schema}.queue_message (holder) WHERE holder IS NOT NULL;
-- What has run out is found here, from whatever queue. A message without an end has no entry, and one that is received
-- gets none for its new version.
CREATE INDEX queue_message_ends ON {schema}.queue_message (ends_at) WHERE ends_at IS NOT NULL AND holder IS NULL;
CREATE INDEX queue_message_unreadable ON {schema}.queue_message (number) WHERE unreadable IS NOT NULL;

-- Connections that hold messages; each has an advisory lock on its number for as long as it lives. Its process may stand
-- still nevertheless: it shows life every few seconds, and one that has not for holds_at_most is ended.
CREATE SEQUENCE {schema}.holder_number MAXVALUE 2147483647 CYCLE;
CREATE TABLE {schema}.holder (
    holder        bigint      PRIMARY KEY,
    pid           integer     NOT NULL,
    machine       text        NOT NULL,
    started_at    timestamptz NOT NULL,
    delivers      boolean     NOT NULL DEFAULT false,
    receives      text[]      NOT NULL DEFAULT ARRAY[]::text[],
    mark          text,                                -- at the end of the names of its sessions
    seen          timestamptz,
    holds_at_most interval,
    ahead         interval                             -- how far its clock is ahead of the server's
);

-- Limits of destinations, which all services of a store keep together: see ADR 34. Messages over the limits wait with an
-- attempt time in the lane of their destination. Without limits (an empty text) they were lifted.
CREATE TABLE {schema}.destination_limit (
    lane        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    store       smallint NOT NULL,
    destination text COLLATE "C" NOT NULL,
    limits      text NOT NULL,
    free_at     timestamptz NOT NULL,
    UNIQUE (store, destination)
);
