"""Clients: applications send and change delayed messages with them, see :func:`postdate.connect`. Source: ADR 31."""
