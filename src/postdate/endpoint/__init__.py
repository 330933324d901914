"""Endpoints: they send with a delay, handle messages, and run delayed delivery in the process of an application."""
