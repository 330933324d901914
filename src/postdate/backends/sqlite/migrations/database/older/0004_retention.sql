-- What happened to a message after its end, or moved that, is asked for each record that is old enough to be removed.
CREATE INDEX record_after_end ON record (message_id) WHERE kind IN (8, 9, 10, 11);
