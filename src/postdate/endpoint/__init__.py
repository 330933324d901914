"""Sending with a delay, handling messages, and running delayed delivery, in the application's process."""
