"""The way of a due message from its store to its queue."""
