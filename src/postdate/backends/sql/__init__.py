"""What SQL databases keep alike, written once: timeouts, sagas, outboxes, and what an operator asks. ADR 0030."""
