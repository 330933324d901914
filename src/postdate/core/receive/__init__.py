"""Receiving: messages are received from a queue, handled by a step, and acknowledged or rejected."""
