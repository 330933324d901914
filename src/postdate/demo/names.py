"""Names that the processes of the demo share."""

QUEUE = "passengers"
"""The queue that every message of the demo is for."""
