"""The work of a service beside its messages: it removes old records, follows zones and the clock of the store."""
