"""What our own loops need: threads, wake-ups, group commit, what is counted, outages logged once."""
