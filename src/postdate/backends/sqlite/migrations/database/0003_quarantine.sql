-- What cannot be read, out of the way of everything else, as it stood in its row: these columns have no type, so that
-- SQLite converts nothing. place is the queue it was in, or empty: it waited.
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
CREATE INDEX quarantine_place ON quarantine (place);
