-- A message that waits under a key is told by its 'scheduled' record from one that was sent under a like id (ADR 41).
-- Until now the form of the id told it.
UPDATE {schema}.`postdate_record` AS r JOIN {table} AS p ON p.number = r.number SET r.detail = 'under a key'
WHERE r.once = 1 AND r.detail IS NULL AND RIGHT(p.message_id, 9) REGEXP '^~[0-9]+$';
