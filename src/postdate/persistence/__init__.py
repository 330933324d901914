"""What several backends keep in one and the same form: timeouts, outboxes, numbered migrations. Pure values."""
