"""Azure Storage: where an account is and how to log in, what its errors mean, and the wire formats of its queues."""
