"""Delayed message stores, one file each."""
