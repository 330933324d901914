"""What SQL databases keep in the same tables by the same steps, written once: timeouts, sagas, outboxes. ADR 0030."""
