-- What is not attempted when it is due, after a failure or an outage or because of limits, is listed by its due time. No
-- message enters it when it is stored or claimed. Building it reads the table once, and nothing is stored meanwhile.
CREATE INDEX ON {table} (due, number) WHERE attempt_at <> due;
