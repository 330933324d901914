"""What `postdate demo` shows."""
