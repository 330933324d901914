"""The demo of ``postdate demo``."""

QUEUE = "passengers"
"""The queue of all its processes."""
