"""What measures, and is not for users: it is not in the wheel. See ADR 22."""
