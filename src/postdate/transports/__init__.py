"""Transports, one file each."""
