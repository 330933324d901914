"""What each technology does without us: bare rows, frames made beforehand on a bare socket, the plain SDK."""
