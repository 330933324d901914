PRAGMA user_version = 0;
PRAGMA application_id = 0;
BEGIN TRANSACTION;
CREATE TABLE claimant (
    claimant   INTEGER PRIMARY KEY AUTOINCREMENT,
    pid        INTEGER NOT NULL,
    started_at INTEGER NOT NULL
);
CREATE TABLE content (
    seq     INTEGER PRIMARY KEY,
    headers TEXT NOT NULL,
    body    BLOB NOT NULL
);
INSERT INTO "content" VALUES(1,'{"kind":"new"}',X'7365636F6E64');
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
INSERT INTO "delayed_message" VALUES(2,'stored-anew',1769860800000000,1769860800000000,'orders',NULL,0,NULL,1);
CREATE TABLE destination_limit (
    lane        INTEGER PRIMARY KEY,
    store       INTEGER NOT NULL,
    destination TEXT NOT NULL,
    limits      TEXT NOT NULL,
    free_at     INTEGER NOT NULL,
    UNIQUE (store, destination)
);
CREATE TABLE listener (
    claimant INTEGER NOT NULL,
    topic    TEXT    NOT NULL,
    port     INTEGER NOT NULL,
    PRIMARY KEY (topic, claimant)
) WITHOUT ROWID;
CREATE TABLE postdate_migration (version INTEGER NOT NULL, name TEXT NOT NULL, subject TEXT NOT NULL DEFAULT '', PRIMARY KEY (subject, version));
INSERT INTO "postdate_migration" VALUES(1,'initial','');
INSERT INTO "postdate_migration" VALUES(2,'expiry in queues','');
INSERT INTO "postdate_migration" VALUES(3,'quarantine','');
INSERT INTO "postdate_migration" VALUES(4,'retention','');
INSERT INTO "postdate_migration" VALUES(5,'destination limits','');
INSERT INTO "postdate_migration" VALUES(6,'after the end','');
INSERT INTO "postdate_migration" VALUES(7,'postponed','');
INSERT INTO "postdate_migration" VALUES(8,'keys','');
CREATE TABLE quarantine (
    number      INTEGER PRIMARY KEY AUTOINCREMENT,
    place       TEXT    NOT NULL,
    reason      TEXT    NOT NULL,
    at          INTEGER NOT NULL,
    message_id,
    due,
    destination,
    expires_at,
    ends_at,
    dead_letter,
    failures,
    headers,
    body
);
INSERT INTO "quarantine" VALUES(1,'','headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)',1769860801000000,'torn',1769860800000000,'orders',NULL,NULL,NULL,0,'{torn',X'00746F726E');
INSERT INTO "quarantine" VALUES(2,'','headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)',1769860801000000,'stored-anew',1769860800000000,'orders',NULL,NULL,NULL,0,'{torn',X'0073746F7265642D616E6577');
INSERT INTO "quarantine" VALUES(3,'','headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)',1769860801000000,'delivered-anew',1769860800000000,'orders',NULL,NULL,NULL,0,'{torn',X'0064656C6976657265642D616E6577');
INSERT INTO "quarantine" VALUES(4,'','the headers are gone',1769860801000000,'no-content',1769860800000000,'orders',NULL,NULL,NULL,0,NULL,NULL);
INSERT INTO "quarantine" VALUES(5,'orders','headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)',1795942816981141,'moved',1769860799000000,'orders',NULL,NULL,0,0,'{torn',X'006D6F766564');
INSERT INTO "quarantine" VALUES(6,'orders','headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)',1795942816981141,'sent',NULL,'orders',NULL,NULL,0,0,'{torn',X'0073656E74');
CREATE TABLE queue (
    queue_id INTEGER PRIMARY KEY,
    name     TEXT NOT NULL UNIQUE
);
INSERT INTO "queue" VALUES(1,'orders');
CREATE TABLE queue_message (
    seq        INTEGER PRIMARY KEY,
    queue_id   INTEGER NOT NULL,
    message_id TEXT    NOT NULL,
    due        INTEGER,                       -- of a delayed message: what its lateness is measured against
    expires_at INTEGER,
    failures   INTEGER NOT NULL DEFAULT 0,
    claimant   INTEGER,
    content    INTEGER NOT NULL
, ends_at INTEGER, dead_letter INTEGER NOT NULL DEFAULT 0);
CREATE TABLE record (
    seq         INTEGER PRIMARY KEY,
    kind        INTEGER NOT NULL,
    message_id  TEXT    NOT NULL,
    at          INTEGER NOT NULL,
    due         INTEGER,
    destination TEXT,
    detail      TEXT
);
INSERT INTO "record" VALUES(1,1,'torn',1769860800000000,1769860800000000,'orders',NULL);
INSERT INTO "record" VALUES(2,1,'stored-anew',1769860800000000,1769860800000000,'orders',NULL);
INSERT INTO "record" VALUES(3,1,'delivered-anew',1769860800000000,1769860800000000,'orders',NULL);
INSERT INTO "record" VALUES(4,1,'no-content',1769860800000000,1769860800000000,'orders',NULL);
INSERT INTO "record" VALUES(5,7,'torn',1769860801000000,1769860800000000,'orders','unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO "record" VALUES(6,7,'stored-anew',1769860801000000,1769860800000000,'orders','unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO "record" VALUES(7,7,'delivered-anew',1769860801000000,1769860800000000,'orders','unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO "record" VALUES(8,7,'no-content',1769860801000000,1769860800000000,'orders','unreadable: the headers are gone');
INSERT INTO "record" VALUES(9,8,'delivered-anew',1769860800000000,1769860800000000,'orders','came back from the error queue');
INSERT INTO "record" VALUES(10,2,'delivered-anew',1769860800000000,1769860800000000,'orders',NULL);
INSERT INTO "record" VALUES(11,8,'stored-anew',1769860800000000,1769860800000000,'orders','came back from the error queue');
INSERT INTO "record" VALUES(12,1,'moved',1769860798000000,1769860799000000,'orders',NULL);
INSERT INTO "record" VALUES(13,2,'moved',1769860800000000,1769860799000000,'orders',NULL);
INSERT INTO "record" VALUES(14,7,'moved',1795942816981141,1769860799000000,'orders','unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO "record" VALUES(15,7,'sent',1795942816981141,NULL,'orders','unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
CREATE INDEX delayed_message_attempt ON delayed_message (attempt_at);
CREATE INDEX delayed_message_failing ON delayed_message (due) WHERE failures > 0;
CREATE INDEX delayed_message_held ON delayed_message (claimant) WHERE claimant IS NOT NULL;
CREATE UNIQUE INDEX record_scheduled ON record (message_id) WHERE kind = 1;
CREATE INDEX record_failed ON record (message_id) WHERE kind = 7;
CREATE INDEX queue_message_free ON queue_message (queue_id) WHERE claimant IS NULL;
CREATE INDEX queue_message_held ON queue_message (claimant) WHERE claimant IS NOT NULL;
CREATE INDEX queue_message_ending ON queue_message (ends_at, queue_id) WHERE ends_at IS NOT NULL AND claimant IS NULL;
CREATE INDEX quarantine_place ON quarantine (place);
CREATE INDEX record_after_end ON record (message_id) WHERE kind BETWEEN 8 AND 11;
CREATE INDEX delayed_message_postponed ON delayed_message (due) WHERE attempt_at <> due;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('claimant',1);
INSERT INTO "sqlite_sequence" VALUES('quarantine',6);
COMMIT;
