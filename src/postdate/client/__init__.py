"""The application's own way to delayed messages: :func:`postdate.connect`. Source: ADR 31."""
