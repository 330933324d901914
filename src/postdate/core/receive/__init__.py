"""How every received message goes from its queue through what handles it to its end."""
