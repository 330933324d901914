"""Damage to what is stored."""


def flipped(body: bytes) -> bytes:
    """Return a body of which one bit is another."""
    return bytes([body[0] ^ 1, *body[1:]])
