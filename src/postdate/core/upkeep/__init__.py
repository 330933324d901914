"""What a service does beside its messages: removing old records, zones, the clock of the store."""
