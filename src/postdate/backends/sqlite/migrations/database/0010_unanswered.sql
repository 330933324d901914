-- How many processes ended, or fell silent, while they held the message: see ADR 61.
ALTER TABLE queue_message ADD COLUMN unanswered INTEGER NOT NULL DEFAULT 0;
