"""Limits beneath those of ``postdate bench``: frames made beforehand on a bare socket, the plain SDK, COPY out."""
