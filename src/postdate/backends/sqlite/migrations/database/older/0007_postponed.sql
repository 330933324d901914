-- What is not attempted when it is due, after a failure or an outage or because of limits, is listed by its due time. No
-- message enters it when it is stored or claimed.
CREATE INDEX delayed_message_postponed ON delayed_message (due) WHERE attempt_at <> due;
