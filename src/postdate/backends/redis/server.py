"""Connections to a server: scripts and commands with a deadline, and translated errors."""

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
"""Default; a connection that is silent for so long is given up."""

T = TypeVar("T")


class RedisConnections:
    """A pool of connections to one database of a server, opened at first use, in the event loop of the first caller.

    Raises the driver's errors, as a store and queues may share it; :class:`RedisServer` translates them.
    """

    def __init__(self, login: RedisLogin, answers_within: timedelta | None = None) -> None:
        self.login = login
        self.answers_within = answers_within or ANSWERS_WITHIN
        self._client: Redis | None = None

    async def run(self, name: str, *arguments: Part) -> Any:
        """Run a script, which is atomic. After a lost connection it may have run, or may run yet."""
        wanted, tag = script(name), self.login.tag
        try:
            return await self.command("EVALSHA", wanted.digest, 1, tag, *arguments)
        except NoScriptError:  # the server was restarted, or replaced
            return await self.command("EVAL", wanted.text, 1, tag, *arguments)

    async def command(self, *words: Part) -> Any:
        """Send one command; raises as :meth:`run`."""
        try:
            return await self._opened(*words)
        except ReadOnlyError:
            if self._client is not None:  # a demoted master: its host name may lead to the new one
                await self._client.connection_pool.disconnect(inuse_connections=False)
            raise

    async def close(self) -> None:
        """Close every connection; the next use opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose(close_connection_pool=True)

    @property
    def _opened(self) -> Callable[..., Awaitable[Any]]:
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
            # A lost command may have run: the core decides whether to repeat it.
            "retry": Retry(NoBackoff(), 0),
        }
        if login.tls:
            settings |= {"ssl_ca_certs": login.authority, "ssl_check_hostname": True}
        return settings

    async def lone_connection(self) -> Connection:
        """Return a connection outside the pool, which the caller closes: a subscribed one can do nothing else."""
        connection = self._kind(**self._settings())
        await connection.connect()
        return connection


class RedisServer:
    """A server as a store or as queues see it: as `RedisConnections`, with errors translated by ``meanings``."""

    def __init__(self, connections: RedisConnections, meanings: RedisMeanings) -> None:
        self._connections, self.meanings = connections, meanings
        self.overdrawn = 0
        """Bytes added minus bytes ended by commits, since the memory is full."""

    def __repr__(self) -> str:
        return f"{self.login.place}, prefix {self.login.prefix!r}"

    @property
    def login(self) -> RedisLogin:
        return self._connections.login

    async def run(self, name: str, *arguments: Part) -> Any:
        """Run a script, which is atomic. After a lost connection it may have run, or may run yet."""
        return await self.calling(self._connections.run(name, *arguments))

    async def command(self, *words: Part) -> Any:
        return await self.calling(self._connections.command(*words))

    async def calling(self, call: Awaitable[T]) -> T:
        """Await a call and translate the driver's errors."""
        try:
            return await call
        except (RedisError, OSError) as error:
            raise translate(error, self.meanings, self.login.place) from error


async def ended(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end.

    Repeats the cancellation: one that comes just as the driver's wait ends is lost in ``asyncio.wait_for`` of Python
    3.11, and the task would go on for ever.
    """
    while task is not None and not task.done():
        task.cancel()
        await cast("Any", asyncio.wait({task}, timeout=_CANCELLED_AGAIN_AFTER_SECONDS))
