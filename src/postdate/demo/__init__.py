"""The demo of ``postdate demo``."""
