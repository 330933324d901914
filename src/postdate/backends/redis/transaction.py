"""What is collected and then done in one script, whole or not at all: the native transaction of these queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from postdate.backends.redis.layout import Part
from postdate.backends.redis.server import RedisServer
from postdate.errors import ClaimLost, DuplicateMessage, QueueNotFound, UnsupportedTransactionMode
from postdate.ports import Claim


class RedisTransaction:
    """Parts of ``transact.lua``; nothing is changed before :meth:`commit`.

    Args:
        database: identity of the database in which it is done.
    """

    def __init__(self, database: object) -> None:
        self.database = database
        self.afterwards: list[Callable[[], None]] = []
        """Called once everything is done; not when nothing was, or when nobody knows."""
        self.makes_room = False
        """Whether it ends a message: that is done, with all that belongs to it, also where the server is full."""
        self._parts: list[Part] = []

    def add(self, *parts: Part) -> None:
        """Have one thing more done; see ``transact.lua`` for how it is written."""
        self._parts += parts

    async def commit(self, server: RedisServer) -> Sequence[int]:
        """Do everything; return the places, in a send that is not strict, of messages whose queue is missing.

        Raises:
            ClaimLost: what was held is held no more; nothing was done.
            DuplicateMessage: what was to be stored has an id that is known; nothing was done.
            QueueNotFound: in a strict send; nothing was done.
            PostdateError: as the server's meanings have it.
        """
        kind, *rest = await server.run("settle" if self.makes_room else "transact", *self._parts)
        match kind:
            case b"done":
                for each in self.afterwards:
                    each()
                return rest[0]
            case b"queue":
                raise QueueNotFound(f"there is no queue {rest[0].decode()!r}")
            case b"known":
                id_ = rest[0].decode(errors="replace")
                raise DuplicateMessage(f"message {id_!r} was stored before; the first one is unchanged")
            case b"claim":
                raise ClaimLost(f"message {rest[0].decode(errors='replace')!r} of the store is no longer held here")
            case _:
                raise ClaimLost("the message is no longer held here")


def transaction_of(transaction: Any, database: object) -> RedisTransaction:
    """Return a transaction if it is one of ours, in the database of a store.

    Raises:
        UnsupportedTransactionMode: it is not.
    """
    if not isinstance(transaction, RedisTransaction) or transaction.database != database:
        raise UnsupportedTransactionMode("a store in Redis shares transactions with queues of its own database only")
    return transaction


def finish_parts(claims: Sequence[Claim]) -> list[Part]:
    """Return how claims are written for a script: their number, and id and token of each."""
    return [len(claims), *(part for claim in claims for part in (claim.message.message_id, str(claim.token)))]
