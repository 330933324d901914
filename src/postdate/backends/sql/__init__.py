"""The SQL that all databases share: timeouts, sagas, outboxes, and an operator's questions. Source: ADR 0030."""
