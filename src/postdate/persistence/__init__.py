"""Formats that several backends share: timeouts, numbered migrations. Pure values."""
