"""What a store and queues of one database of a server share: connections, what is listened to, one sign of life."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from postdate.backends.redis.listening import Listening
from postdate.backends.redis.liveness import HOLDS_AT_MOST, RedisLiveness
from postdate.backends.redis.login import RedisLogin, parse_address
from postdate.backends.redis.server import RedisConnections
from postdate.errors import ConfigurationError

_TIMES: Final = "give it to the database object, not to what is made from it"


class OpenRedis:
    """One database of a server, opened at first use and closed by the last who uses it.

    Args:
        address: ``redis://…`` or ``rediss://…``, or its parts.
        holds_at_most: a process that is not heard for so long loses what it holds; ``None``: 60 s.
        answers_within: after so long a silence a connection is given up; ``None``: 30 s.

    Raises:
        ConfigurationError: the address cannot be.
    """

    def __init__(
        self,
        address: str | RedisLogin,
        *,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        self.login = address if isinstance(address, RedisLogin) else parse_address(address)
        self.connections = RedisConnections(self.login, answers_within)
        self.listening = Listening(self.connections)
        self.liveness = RedisLiveness(self.connections, self.listening, holds_at_most or HOLDS_AT_MOST)
        self._users = set[object]()

    @classmethod
    def of(
        cls, address: str | RedisLogin | OpenRedis, holds_at_most: timedelta | None, answers_within: timedelta | None
    ) -> OpenRedis:
        """Return what an adapter uses: a database that is given, or one of its own at an address.

        Raises:
            ConfigurationError: the address cannot be, or a time is not that of the database that is given.
        """
        if not isinstance(address, OpenRedis):
            return cls(address, holds_at_most=holds_at_most, answers_within=answers_within)
        if holds_at_most not in {None, address.liveness.holds_at_most}:
            raise ConfigurationError(f"holds_at_most={holds_at_most!r} is for all of {address.login.place}: {_TIMES}")
        if answers_within not in {None, address.connections.answers_within}:
            raise ConfigurationError(f"answers_within={answers_within!r} is for all of {address.login.place}: {_TIMES}")
        return address

    def used_by(self, user: object) -> None:
        """Note an adapter that uses it."""
        self._users.add(user)

    async def left_by(self, user: object) -> bool:
        """Note that an adapter is closed; return whether it was the last, and all is closed with it."""
        self._users.discard(user)
        if self._users:
            return False
        await self.liveness.close()
        await self.listening.close()
        await self.connections.close()
        return True
