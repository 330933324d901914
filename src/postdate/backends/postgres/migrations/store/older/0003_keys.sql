-- A message that waits under a key is told by its 'scheduled' record from one that was sent under a like id (ADR 41).
-- Until now the form of the id told it.
UPDATE {schema}.record AS r SET detail = 'under a key' FROM {table} AS p, {schema}.store AS s
WHERE s.name = {name} AND r.message_id = p.message_id AND r.store_id = s.store_id AND r.kind = 1
    AND r.detail IS NULL AND right(p.message_id, 9) ~ '^~[0-9]+$';
