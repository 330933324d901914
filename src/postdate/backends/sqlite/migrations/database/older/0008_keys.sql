-- A message that waits under a key is told by its 'scheduled' record from one that was sent under a like id (ADR 41).
-- Until now the form of the id told it.
UPDATE record SET detail = 'under a key' WHERE kind = 1 AND detail IS NULL AND seq IN (
    SELECT seq FROM delayed_message WHERE message_id GLOB '*~[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]');
