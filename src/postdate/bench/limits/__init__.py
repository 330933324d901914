"""Physical limits, measured in the same run as our own figures: the barest way to do the same, without us."""
