"""How due messages get from their store to their queues."""
