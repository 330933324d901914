"""Measures the user's own store and queues beside the physical limit of the same run (house-style.md, "Measure")."""
