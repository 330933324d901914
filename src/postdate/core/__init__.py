"""Decides; does no I/O of its own."""
