-- How many processes died, or lost their connection, while they held the message: see ADR 61.
ALTER TABLE {schema}.queue_message ADD COLUMN unanswered integer NOT NULL DEFAULT 0;
