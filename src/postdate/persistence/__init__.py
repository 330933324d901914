"""What several backends keep in one and the same form: timeouts, numbered migrations. Pure values."""
