-- A row that cannot be read stays where it is, and is marked: unreadable says why, unreadable_at when it was met (ADR 43).
-- Its attempt_at is before every time, so that nothing claims it, and the indexes of claims do not change.
ALTER TABLE {table} ADD COLUMN IF NOT EXISTS unreadable TEXT, ADD COLUMN IF NOT EXISTS unreadable_at BIGINT;

-- Rows in the quarantine of earlier versions come back, marked. A message whose last record is its failure has its former
-- number again. Others get a new one, that of a record which says so. The table has the rows of other stores, too; it is
-- dropped with the last row, so another store may not find it any more.
CREATE TABLE IF NOT EXISTS {schema}.`postdate_quarantine` (
    number      BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    store_id    SMALLINT NOT NULL,
    at          BIGINT NOT NULL,
    reason      TEXT NOT NULL,
    message_id  VARCHAR(250) NOT NULL,
    due         BIGINT NOT NULL,
    destination VARCHAR(200) NOT NULL,
    expires_at  BIGINT,
    failures    INTEGER NOT NULL,
    headers     LONGTEXT NOT NULL,
    body        LONGBLOB NOT NULL,
    KEY quarantine_store (store_id, number)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;
ALTER TABLE {schema}.`postdate_quarantine` ADD COLUMN IF NOT EXISTS came_back_as BIGINT;
UPDATE {schema}.`postdate_quarantine` AS q
JOIN {schema}.`postdate_store` AS s ON s.store_id = q.store_id AND s.name = {name}
JOIN (SELECT MAX(number) AS number FROM {schema}.`postdate_quarantine` GROUP BY store_id, message_id) AS latest
    ON latest.number = q.number
JOIN {schema}.`postdate_record` AS r ON r.message_id = q.message_id AND r.store_id = q.store_id AND r.once = 1
SET q.came_back_as = r.number
WHERE q.came_back_as IS NULL AND NOT EXISTS (SELECT 1 FROM {table} AS p WHERE p.number = r.number)
    AND (SELECT o.kind FROM {schema}.`postdate_record` AS o
        WHERE o.message_id = q.message_id AND o.store_id = q.store_id ORDER BY o.number DESC LIMIT 1) = 7;
INSERT IGNORE INTO {schema}.`postdate_record` (at, due, store_id, kind, once, message_id, destination, detail)
SELECT q.at, IF(q.due BETWEEN -62135596800000000 AND 253402300799999999, q.due, NULL), q.store_id, 1, 1, q.message_id,
    q.destination, CONCAT('unreadable row ', q.number)
FROM {schema}.`postdate_quarantine` AS q
JOIN {schema}.`postdate_store` AS s ON s.store_id = q.store_id AND s.name = {name}
WHERE q.came_back_as IS NULL ORDER BY q.number;
INSERT INTO {schema}.`postdate_record` (at, due, store_id, kind, message_id, destination, detail)
SELECT q.at, IF(q.due BETWEEN -62135596800000000 AND 253402300799999999, q.due, NULL), q.store_id, 4, q.message_id,
    q.destination, CONCAT('unreadable row ', q.number)
FROM {schema}.`postdate_quarantine` AS q
JOIN {schema}.`postdate_store` AS s ON s.store_id = q.store_id AND s.name = {name}
WHERE q.came_back_as IS NULL AND NOT EXISTS (
    SELECT 1 FROM {schema}.`postdate_record` AS r WHERE r.message_id = q.message_id AND r.store_id = q.store_id
        AND r.detail = CONCAT('unreadable row ', q.number))
ORDER BY q.number;
UPDATE {schema}.`postdate_quarantine` AS q
JOIN {schema}.`postdate_store` AS s ON s.store_id = q.store_id AND s.name = {name}
JOIN {schema}.`postdate_record` AS r ON r.message_id = q.message_id AND r.store_id = q.store_id
    AND r.detail = CONCAT('unreadable row ', q.number)
SET q.came_back_as = r.number
WHERE q.came_back_as IS NULL;
INSERT INTO {table} (number, due, attempt_at, expires_at, failures, message_id, destination, headers, body, unreadable, unreadable_at)
SELECT q.came_back_as, q.due, -9223372036854775807, q.expires_at, q.failures, q.message_id, q.destination, q.headers, q.body, q.reason, q.at
FROM {schema}.`postdate_quarantine` AS q
JOIN {schema}.`postdate_store` AS s ON s.store_id = q.store_id AND s.name = {name}
WHERE NOT EXISTS (SELECT 1 FROM {table} AS p WHERE p.number = q.came_back_as);
DELETE FROM {schema}.`postdate_quarantine`
WHERE store_id = (SELECT s.store_id FROM {schema}.`postdate_store` AS s WHERE s.name = {name});
SET @postdate_end = (SELECT IF(COUNT(*) = 0, {drop_quarantine}, 'DO 0') FROM {schema}.`postdate_quarantine`);
PREPARE postdate_end FROM @postdate_end;
EXECUTE postdate_end;
DEALLOCATE PREPARE postdate_end;
