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
--
-- A row that cannot be read stays where it is, and is marked (ADR 43): unreadable says why, unreadable_at since when.
-- Nothing claims it, as its attempt_at is NULL, and in a queue its queue_id is negative: the indexes of claims do not
-- change. Without a number of its own, content that is gone has the number 0.
CREATE TABLE delayed_message (
    seq           INTEGER PRIMARY KEY,        -- number of its 'scheduled' record
    message_id    TEXT    NOT NULL,
    due           INTEGER NOT NULL,
    attempt_at    INTEGER,
    destination   TEXT    NOT NULL,
    expires_at    INTEGER,
    failures      INTEGER NOT NULL DEFAULT 0,
    claimant      INTEGER,
    content       INTEGER NOT NULL,
    unreadable    TEXT,
    unreadable_at INTEGER
);
CREATE INDEX delayed_message_attempt ON delayed_message (attempt_at);
CREATE INDEX delayed_message_failing ON delayed_message (due) WHERE failures > 0;
CREATE INDEX delayed_message_held ON delayed_message (claimant) WHERE claimant IS NOT NULL;
-- What is not attempted when it is due, after a failure or an outage or because of limits, is listed by its due time. No
-- message enters it when it is stored or claimed.
CREATE INDEX delayed_message_postponed ON delayed_message (due) WHERE attempt_at <> due;
CREATE INDEX delayed_message_unreadable ON delayed_message (seq) WHERE unreadable IS NOT NULL;

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
-- What happened to a message after its end, or moved that, is asked for each record that is old enough to be removed.
-- A range, as SQLite makes a list of its own for each record that is written: a fifth of the work of a delivery.
CREATE INDEX record_after_end ON record (message_id) WHERE kind BETWEEN 8 AND 11;

CREATE TABLE queue (
    queue_id INTEGER PRIMARY KEY,
    name     TEXT NOT NULL UNIQUE
);
-- ends_at is when the queue itself is done with a message, by the clock of the machine; NULL: never. Beside it expires_at
-- stays as the sender wrote it, by whatever clock. dead_letter: whether it is then kept among the dead letters.
CREATE TABLE queue_message (
    seq           INTEGER PRIMARY KEY,
    queue_id      INTEGER NOT NULL,
    message_id    TEXT    NOT NULL,
    due           INTEGER,                    -- of a delayed message: what its lateness is measured against
    expires_at    INTEGER,
    failures      INTEGER NOT NULL DEFAULT 0,
    claimant      INTEGER,
    content       INTEGER NOT NULL,
    ends_at       INTEGER,
    dead_letter   INTEGER NOT NULL DEFAULT 0,
    unreadable    TEXT,
    unreadable_at INTEGER
);
CREATE INDEX queue_message_free ON queue_message (queue_id) WHERE claimant IS NULL;
CREATE INDEX queue_message_held ON queue_message (claimant) WHERE claimant IS NOT NULL;
CREATE INDEX queue_message_ending ON queue_message (ends_at, queue_id) WHERE ends_at IS NOT NULL AND claimant IS NULL;
CREATE INDEX queue_message_unreadable ON queue_message (seq) WHERE unreadable IS NOT NULL;

-- Limits of destinations, which all services of a store keep together: see ADR 34. Messages over the limits wait with an
-- attempt time in the lane of their destination. Without limits (an empty text) they were lifted.
CREATE TABLE destination_limit (
    lane        INTEGER PRIMARY KEY,
    store       INTEGER NOT NULL,
    destination TEXT NOT NULL,
    limits      TEXT NOT NULL,
    free_at     INTEGER NOT NULL,
    UNIQUE (store, destination)
);

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
