"""The connections to a server: scripts and commands, each with a deadline, and errors in our words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError

from postdate.backends.redis.errors import RedisMeanings, translate
from postdate.backends.redis.layout import Part
from postdate.backends.redis.login import RedisLogin
from postdate.backends.redis.scripts import script

_CONNECTS_WITHIN_SECONDS: Final = 5.0
_CONNECTIONS: Final = 16
_CANCELLED_AGAIN_AFTER_SECONDS: Final = 0.1
ANSWERS_WITHIN: Final = timedelta(seconds=30)
"""After so long a silence a connection is given up, unless the settings say otherwise."""

T = TypeVar("T")


class RedisConnections:
    """A pool of connections to one database of a server, opened at first use, in the event loop of the first caller.

    Its errors are those of the driver, as a store and queues may share it: see :class:`RedisServer`.

    Args:
        login: where the server is.
        answers_within: after so long a silence a connection is given up; ``None``: 30 s.
    """

    def __init__(self, login: RedisLogin, answers_within: timedelta | None = None) -> None:
        self.login = login
        self.answers_within = answers_within or ANSWERS_WITHIN
        self._client: Redis | None = None

    async def run(self, name: str, *arguments: Part) -> Any:
        """Run a script, which is done whole or not at all, and return its answer.

        Raises:
            RedisError, OSError: after a lost connection the script may have run, or may run yet.
        """
        wanted, tag = script(name), self.login.tag
        try:
            return await self.command("EVALSHA", wanted.digest, 1, tag, *arguments)
        except NoScriptError:  # a server that was started anew, or another one by the same name
            return await self.command("EVAL", wanted.text, 1, tag, *arguments)

    async def command(self, *words: Part) -> Any:
        """Send one command and return its answer; see :meth:`run`."""
        try:
            return await self._opened(*words)
        except ReadOnlyError:
            if self._client is not None:  # a master before; by its name another may be found now
                await self._client.connection_pool.disconnect(inuse_connections=False)
            raise

    async def close(self) -> None:
        """Close every connection; the next use opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose(close_connection_pool=True)

    @property
    def _opened(self) -> Callable[..., Awaitable[Any]]:
        """What sends a command and gives its answer."""
        if self._client is None:
            pool = BlockingConnectionPool(
                max_connections=_CONNECTIONS,
                timeout=self.answers_within.total_seconds(),
                connection_class=self._kind,
                **self._settings(),
            )
            self._client = Redis(connection_pool=pool)
            self._client.response_callbacks.clear()  # answers as the server gives them, whatever the driver's version
        return cast("Any", self._client).execute_command  # the driver leaves its types open

    @property
    def _kind(self) -> type[Connection]:
        return SSLConnection if self.login.tls else Connection

    def _settings(self) -> dict[str, Any]:
        login = self.login
        settings: dict[str, Any] = {
            "host": login.host,
            "port": login.port,
            "db": login.database,
            "username": login.user,
            "password": login.password,
            "protocol": 2,
            "socket_connect_timeout": _CONNECTS_WITHIN_SECONDS,
            "socket_timeout": self.answers_within.total_seconds(),
            "socket_keepalive": True,
            "client_name": "postdate",
            # What was sent may have been done: whether to say it again is for the core to judge.
            "retry": Retry(NoBackoff(), 0),
        }
        if login.tls:
            settings |= {"ssl_ca_certs": login.authority, "ssl_check_hostname": True}
        return settings

    async def lone_connection(self) -> Connection:
        """Return a connection of its own, which the caller closes: one that listens can do nothing else.

        Raises:
            RedisError, OSError: there is none now.
        """
        connection = self._kind(**self._settings())
        await connection.connect()
        return connection


class RedisServer:
    """A server as a store sees it, or as queues do: what is asked of it, and errors in our words.

    Args:
        connections: to it.
        meanings: what errors are: to a store, or to queues.
    """

    def __init__(self, connections: RedisConnections, meanings: RedisMeanings) -> None:
        self._connections, self.meanings = connections, meanings
        self.overdrawn = 0
        """Bytes by which, since it is full, more was sent and stored with the ends of messages than ended."""

    def __repr__(self) -> str:
        return f"{self.login.place}, prefix {self.login.prefix!r}"

    @property
    def login(self) -> RedisLogin:
        """Where it is."""
        return self._connections.login

    async def run(self, name: str, *arguments: Part) -> Any:
        """Run a script, which is done whole or not at all, and return its answer.

        Raises:
            PostdateError: as the meanings have it. After a lost connection the script may have run, or may run yet.
        """
        return await self.calling(self._connections.run(name, *arguments))

    async def command(self, *words: Part) -> Any:
        """Send one command and return its answer; see :meth:`run`."""
        return await self.calling(self._connections.command(*words))

    async def calling(self, call: Awaitable[T]) -> T:
        """Return what a call returns that raises the driver's errors.

        Raises:
            PostdateError: as the meanings have it.
        """
        try:
            return await call
        except (RedisError, OSError) as error:
            raise translate(error, self.meanings, self.login.place) from error


async def ended(task: asyncio.Task[None] | None) -> None:
    """Cancel a task of ours and wait for its end.

    More than once where that is needed: a cancellation that comes just as the driver's wait ends is lost in
    ``asyncio.wait_for`` of Python 3.11, and the task would go on for ever.
    """
    while task is not None and not task.done():
        task.cancel()
        await cast("Any", asyncio.wait({task}, timeout=_CANCELLED_AGAIN_AFTER_SECONDS))
