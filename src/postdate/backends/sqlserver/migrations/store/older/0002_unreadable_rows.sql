-- A row that cannot be read stays where it is, and is marked: unreadable says why, unreadable_at when it was met (ADR 43).
-- Its attempt_at is before every time, so that nothing claims it, and the indexes of claims do not change.
ALTER TABLE {table} ADD unreadable nvarchar(max) NULL, unreadable_at bigint NULL;

-- Rows in the quarantine of earlier versions come back, marked. A message whose last record is its failure has its former
-- number again. Others get a new one, that of a record which says so. The table has the rows of other stores, too; it is
-- dropped with the last row. In EXEC, as the new columns are unknown when the batch is compiled.
IF OBJECT_ID(N'{schema_in_text}.[postdate_quarantine]', N'U') IS NOT NULL EXEC (N'
DECLARE @store smallint = (SELECT store_id FROM {schema_in_text}.[postdate_store] WHERE name = {name_in_text})
DECLARE @back TABLE (number bigint NOT NULL PRIMARY KEY, came_back_as bigint NOT NULL)
INSERT INTO @back (number, came_back_as)
SELECT q.number, r.number FROM {schema_in_text}.[postdate_quarantine] AS q JOIN {schema_in_text}.[postdate_record] AS r
    ON r.message_id = q.message_id AND r.message_id_bytes = DATALENGTH(q.message_id) AND r.store_id = q.store_id AND r.kind = 1
WHERE q.store_id = @store
    AND NOT EXISTS (SELECT 1 FROM {table_in_text} AS p WHERE p.number = r.number)
    AND NOT EXISTS (SELECT 1 FROM {schema_in_text}.[postdate_quarantine] AS o WHERE o.store_id = @store
        AND o.message_id = q.message_id AND DATALENGTH(o.message_id) = DATALENGTH(q.message_id) AND o.number > q.number)
    AND (SELECT TOP (1) l.kind FROM {schema_in_text}.[postdate_record] AS l WHERE l.message_id = q.message_id
        AND l.message_id_bytes = DATALENGTH(q.message_id) AND l.store_id = q.store_id ORDER BY l.number DESC) = 7
INSERT INTO {schema_in_text}.[postdate_record] (at, due, store_id, kind, message_id, destination, detail)
SELECT q.at, CASE WHEN q.due BETWEEN -62135596800000000 AND 253402300799999999 THEN q.due END, q.store_id,
    CASE WHEN EXISTS (SELECT 1 FROM {schema_in_text}.[postdate_record] AS r WHERE r.message_id = q.message_id
        AND r.message_id_bytes = DATALENGTH(q.message_id) AND r.store_id = q.store_id AND r.kind = 1)
    OR EXISTS (SELECT 1 FROM {schema_in_text}.[postdate_quarantine] AS o WHERE o.store_id = @store
        AND o.message_id = q.message_id AND DATALENGTH(o.message_id) = DATALENGTH(q.message_id) AND o.number < q.number)
    THEN 4 ELSE 1 END,
    q.message_id, q.destination, CONCAT(N''unreadable row '', q.number)
FROM {schema_in_text}.[postdate_quarantine] AS q
WHERE q.store_id = @store AND NOT EXISTS (SELECT 1 FROM @back AS b WHERE b.number = q.number)
INSERT INTO @back (number, came_back_as)
SELECT q.number, r.number FROM {schema_in_text}.[postdate_quarantine] AS q JOIN {schema_in_text}.[postdate_record] AS r
    ON r.message_id = q.message_id AND r.message_id_bytes = DATALENGTH(q.message_id) AND r.store_id = q.store_id
    AND r.detail = CONCAT(N''unreadable row '', q.number)
WHERE q.store_id = @store AND NOT EXISTS (SELECT 1 FROM @back AS b WHERE b.number = q.number)
INSERT INTO {table_in_text}
    (number, due, attempt_at, expires_at, failures, message_id, destination, headers, body, unreadable, unreadable_at)
SELECT b.came_back_as, q.due, -9223372036854775807, q.expires_at, q.failures, q.message_id, q.destination, q.headers,
    q.body, q.reason, q.at
FROM {schema_in_text}.[postdate_quarantine] AS q JOIN @back AS b ON b.number = q.number
DELETE FROM {schema_in_text}.[postdate_quarantine] WHERE store_id = @store
IF NOT EXISTS (SELECT 1 FROM {schema_in_text}.[postdate_quarantine]) DROP TABLE {schema_in_text}.[postdate_quarantine]
');
