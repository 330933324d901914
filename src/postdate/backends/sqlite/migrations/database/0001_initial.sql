-- Times are whole microseconds since 1970-01-01 UTC.

-- What is in the messages: written once, and left where it is while the message moves from waiting to its queue. So a
-- delivery moves only small rows, however large the messages are.
CREATE TABLE content (
    seq     INTEGER PRIMARY KEY,
    headers TEXT NOT NULL,
    body    BLOB NOT NULL
);

-- Messages that wait. attempt_at is the instant after which the next attempt may be made: the due time at first, later
-- after a failure, NULL while a process holds the message, so that one index answers "what may be attempted now".
CREATE TABLE delayed_message (
    seq         INTEGER PRIMARY KEY,          -- number of its 'scheduled' record
    message_id  TEXT    NOT NULL,
    due         INTEGER NOT NULL,
    attempt_at  INTEGER,
    destination TEXT    NOT NULL,
    expires_at  INTEGER,
    failures    INTEGER NOT NULL DEFAULT 0,
    claimant    INTEGER,
    content     INTEGER NOT NULL
);
CREATE INDEX delayed_message_attempt ON delayed_message (attempt_at);
CREATE INDEX delayed_message_failing ON delayed_message (due) WHERE failures > 0;
CREATE INDEX delayed_message_held ON delayed_message (claimant) WHERE claimant IS NOT NULL;

-- What happened, append-only; kinds are postdate.ports.RecordKind. The 'scheduled' record (1) is also what makes an id
-- unique, also after delivery: the table of waiting messages needs no index on the id, which deliveries would have to
-- take apart at random places.
CREATE TABLE record (
    seq         INTEGER PRIMARY KEY,
    kind        INTEGER NOT NULL,
    message_id  TEXT    NOT NULL,
    at          INTEGER NOT NULL,
    due         INTEGER,
    destination TEXT,
    detail      TEXT
);
CREATE UNIQUE INDEX record_scheduled ON record (message_id) WHERE kind = 1;
CREATE INDEX record_failed ON record (message_id) WHERE kind = 7;   -- few; asked when a message comes back

CREATE TABLE queue (
    queue_id INTEGER PRIMARY KEY,
    name     TEXT NOT NULL UNIQUE
);
CREATE TABLE queue_message (
    seq        INTEGER PRIMARY KEY,
    queue_id   INTEGER NOT NULL,
    message_id TEXT    NOT NULL,
    due        INTEGER,                       -- of a delayed message: what its lateness is measured against
    expires_at INTEGER,
    failures   INTEGER NOT NULL DEFAULT 0,
    claimant   INTEGER,
    content    INTEGER NOT NULL
);
CREATE INDEX queue_message_free ON queue_message (queue_id) WHERE claimant IS NULL;
CREATE INDEX queue_message_held ON queue_message (claimant) WHERE claimant IS NOT NULL;

-- Processes that hold messages; each has a locked file beside the database for as long as it lives.
CREATE TABLE claimant (
    claimant   INTEGER PRIMARY KEY AUTOINCREMENT,
    pid        INTEGER NOT NULL,
    started_at INTEGER NOT NULL
);
-- Who wants to be told on the loopback interface when a topic has news.
CREATE TABLE listener (
    claimant INTEGER NOT NULL,
    topic    TEXT    NOT NULL,
    port     INTEGER NOT NULL,
    PRIMARY KEY (topic, claimant)
) WITHOUT ROWID;
