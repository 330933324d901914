-- A range, as SQLite makes a list of its own for each record that is written: a fifth of the work of a delivery.
DROP INDEX record_after_end;
CREATE INDEX record_after_end ON record (message_id) WHERE kind BETWEEN 8 AND 11;
