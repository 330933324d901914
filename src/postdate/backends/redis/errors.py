"""Translates errors of Redis and its driver."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from redis import exceptions

from postdate.errors import (
    PostdateError,
    StoreError,
    StoreFull,
    StoreUnreachable,
    TransportError,
    TransportUnreachable,
    first_line,
)


@dataclass(frozen=True, slots=True)
class RedisMeanings:
    """Which errors the server's answers become, for a store or for queues.

    ``unreachable``: no answer, or the server says that it cannot work now; ``full``: its memory or disk is.
    """

    unreachable: type[PostdateError]
    full: type[PostdateError]
    other: type[PostdateError]


STORE: Final = RedisMeanings(StoreUnreachable, StoreFull, StoreError)
QUEUES: Final = RedisMeanings(TransportUnreachable, TransportUnreachable, TransportError)

_ELSEWHERE: Final = (exceptions.MovedError, exceptions.AskError)
_OUTAGES: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.InvalidResponse,
)
_OF_ITSELF: Final = re.compile("(?!WRONGTYPE|BUSYKEY|BUSYGROUP|NOGROUP)[A-Z]{4,} ")
"""Errors about the server begin like this; the driver has exceptions of their own for those about the command."""


def translate(error: Exception, meanings: RedisMeanings, place: str) -> PostdateError:
    """Return the error for a :class:`redis.exceptions.RedisError` or an :class:`OSError`."""
    said = first_line(error)
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        kind, text = meanings.unreachable, f"refuses us: {said}; check user and password of the address"
    elif isinstance(error, exceptions.NoPermissionError):
        kind, text = meanings.unreachable, f"refuses us: {said}; our user needs all commands on keys of the prefix"
    elif isinstance(error, _ELSEWHERE):
        kind, text = meanings.other, f"is a node of a cluster, and the keys of this prefix are on another: {said}"
    elif isinstance(error, exceptions.OutOfMemoryError):
        kind, text = meanings.full, f"has no memory left (maxmemory) and takes nothing until there is room: {said}"
    elif said.startswith("MISCONF"):
        kind, text = meanings.full, f"cannot write to its disk and takes nothing until it can: {said}"
    elif isinstance(error, exceptions.ReadOnlyError):
        kind, text = meanings.unreachable, "is a read-only replica, maybe after a fail-over; name the master's address"
    elif said.startswith("BUSY "):
        kind, text = meanings.unreachable, f"is busy with a script of somebody else: {said}"
    elif isinstance(error, (*_OUTAGES, OSError)):
        kind, text = meanings.unreachable, f"cannot be reached: {said}"
    elif _OF_ITSELF.match(said):
        kind, text = meanings.unreachable, f"does not work for us now: {said}"
    else:
        kind, text = meanings.other, f"does not do what was asked: {said}"
    return kind(f"{place} {text}")
