"""TCP connections to database servers, made as the stores need them."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import Final

from postdate.errors import ConfigurationError

_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
"""A server that vanished without a word is noticed within 15 s or so."""


def connected(address: tuple[str, int], seconds: float) -> socket.socket:
    """Return a connected socket whose every operation takes ``seconds`` at most, as connecting does.

    Raises:
        OSError: nobody answers there.
    """
    opened = socket.create_connection(address, seconds)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        with suppress(AttributeError, OSError):  # not every system has all of them
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened


def check_answers_within(within: timedelta | None) -> timedelta | None:
    """Return how long a server may be silent.

    Raises:
        ConfigurationError: no time at all.
    """
    if within is not None and within <= timedelta(0):
        raise ConfigurationError(f"answers_within must be above 0, not {within}")
    return within
