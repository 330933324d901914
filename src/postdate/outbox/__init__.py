"""Storage of outboxes: which messages were handled, and what their handlers sent. Source: specification 7; ADR 0017."""
