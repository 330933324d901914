"""The main job on real input: flights that are scheduled by Spark, delivered by a service, and audited by Spark."""

QUEUE = "passengers"
"""The queue of all its processes."""
