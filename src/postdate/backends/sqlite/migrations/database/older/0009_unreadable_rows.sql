-- A row that cannot be read stays where it is, and is marked: unreadable says why, unreadable_at when it was met (ADR 43).
-- Nothing claims it, as its attempt_at is NULL, and in a queue its queue_id is negative: the indexes of claims do not
-- change. Without a number of its own, content that is gone has the number 0.
ALTER TABLE delayed_message ADD COLUMN unreadable TEXT;
ALTER TABLE delayed_message ADD COLUMN unreadable_at INTEGER;
CREATE INDEX delayed_message_unreadable ON delayed_message (seq) WHERE unreadable IS NOT NULL;
ALTER TABLE queue_message ADD COLUMN unreadable TEXT;
ALTER TABLE queue_message ADD COLUMN unreadable_at INTEGER;
CREATE INDEX queue_message_unreadable ON queue_message (seq) WHERE unreadable IS NOT NULL;

-- Rows in the quarantine of earlier versions come back, marked. A message of the store whose last record is its failure
-- has its former number again. Others get a new one, also those whose id was stored anew meanwhile.
CREATE TABLE came_back (number INTEGER PRIMARY KEY, seq INTEGER, content INTEGER NOT NULL);
INSERT INTO came_back (number, content)
SELECT number, iif(headers IS NULL OR body IS NULL, 0, (SELECT coalesce(max(seq), 0) FROM content) + number)
FROM quarantine;
INSERT INTO content (seq, headers, body)
SELECT r.content, q.headers, q.body FROM quarantine AS q JOIN came_back AS r USING (number) WHERE r.content > 0;
UPDATE came_back SET seq = (
    SELECT s.seq FROM quarantine AS q JOIN record AS s ON s.kind = 1 AND s.message_id = q.message_id
    WHERE q.number = came_back.number AND q.place = ''
        AND NOT EXISTS (SELECT 1 FROM delayed_message AS d WHERE d.seq = s.seq)
        AND NOT EXISTS (SELECT 1 FROM quarantine AS o
            WHERE o.place = '' AND o.message_id = q.message_id AND o.number > q.number)
        AND NOT EXISTS (SELECT 1 FROM record AS later
            WHERE later.message_id = q.message_id AND later.kind IN (2, 3, 5, 6, 9) AND later.seq > (
                SELECT max(f.seq) FROM record AS f WHERE f.kind = 7 AND f.message_id = q.message_id)));
UPDATE came_back SET seq = number + max(
    (SELECT coalesce(max(seq), 0) FROM record), (SELECT coalesce(max(seq), 0) FROM delayed_message))
WHERE seq IS NULL;
INSERT INTO record (seq, kind, message_id, at, due, destination)
SELECT r.seq, 1, q.message_id, q.at, iif(typeof(q.due) = 'integer', q.due, NULL), q.destination
FROM quarantine AS q JOIN came_back AS r USING (number)
WHERE q.place = '' AND typeof(q.message_id) = 'text' AND NOT EXISTS (SELECT 1 FROM record AS s WHERE s.seq = r.seq)
ORDER BY q.number DESC
ON CONFLICT (message_id) WHERE kind = 1 DO NOTHING;
INSERT INTO delayed_message (seq, message_id, due, destination, expires_at, failures, content, unreadable, unreadable_at)
SELECT r.seq, q.message_id, q.due, q.destination, q.expires_at, q.failures, r.content, q.reason, q.at
FROM quarantine AS q JOIN came_back AS r USING (number) WHERE q.place = '';
INSERT INTO queue (name) SELECT DISTINCT place FROM quarantine WHERE place <> '' ON CONFLICT DO NOTHING;
INSERT INTO queue_message (queue_id, message_id, due, expires_at, failures, dead_letter, content, unreadable, unreadable_at)
SELECT -n.queue_id, q.message_id, q.due, q.expires_at, q.failures, coalesce(q.dead_letter, 0), r.content, q.reason, q.at
FROM quarantine AS q JOIN came_back AS r USING (number) JOIN queue AS n ON n.name = q.place ORDER BY q.number;
DROP TABLE came_back;
DROP TABLE quarantine;
