"""``postdate bench``: how fast a store stores, how fast a service delivers from it, and how late. Source: ADR 22."""
