"""Connections, subscriptions and liveness that a store and queues of one database share."""

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
    """One database of a server, opened at first use and closed by its last user. See :class:`Redis`."""

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
        """Return the given database, or a new one at the address; times must not differ from the given database's."""
        if not isinstance(address, OpenRedis):
            return cls(address, holds_at_most=holds_at_most, answers_within=answers_within)
        if holds_at_most not in {None, address.liveness.holds_at_most}:
            raise ConfigurationError(f"holds_at_most={holds_at_most!r} is for all of {address.login.place}: {_TIMES}")
        if answers_within not in {None, address.connections.answers_within}:
            raise ConfigurationError(f"answers_within={answers_within!r} is for all of {address.login.place}: {_TIMES}")
        return address

    def used_by(self, user: object) -> None:
        self._users.add(user)

    async def left_by(self, user: object) -> bool:
        """Note that an adapter is closed; the last one closes the database: then return ``True``."""
        self._users.discard(user)
        if self._users:
            return False
        await self.liveness.close()
        await self.listening.close()
        await self.connections.close()
        return True
