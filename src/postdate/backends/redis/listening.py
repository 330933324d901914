"""Subscriptions to channels, on one connection that is renewed as long as somebody listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from redis.asyncio.connection import Connection
from redis.exceptions import RedisError

from postdate.backends.redis.server import RedisConnections, ended

Heard = Callable[[bytes | None], None]
"""Called with the text of a message; with ``None`` when some may have been missed."""

_SPEAK_EVERY_SECONDS: Final = 5.0
_CONNECT_AGAIN_AFTER_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0)

log = logging.getLogger("postdate.redis")


class Listening:
    def __init__(self, connections: RedisConnections) -> None:
        self._connections = connections
        self._heard: dict[bytes, list[Heard]] = {}
        self._subscribed: dict[bytes, asyncio.Event] = {}
        self._connection: Connection | None = None
        self._was_connected = False
        self._task: asyncio.Task[None] | None = None
        self._failure: RedisError | OSError | None = None

    async def listen(self, channel: str, heard: Heard) -> Callable[[], None]:
        """Call ``heard`` with each message on a channel from now on; return a function that stops it."""
        name = channel.encode()
        self._heard.setdefault(name, []).append(heard)
        subscribed = self._subscribed.setdefault(name, asyncio.Event())
        if self._task is None or self._task.done():
            self._failure = None
            self._task = asyncio.create_task(self._run(), name="postdate-redis-listening")
        try:
            if not subscribed.is_set():
                await self._subscribe(name)  # perhaps again: an earlier caller may have given up
            await self._wait(subscribed)
        except BaseException:
            self._stop(name, heard)
            raise
        return lambda: self._stop(name, heard)

    async def _wait(self, subscribed: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self._connections.answers_within.total_seconds()):
                await subscribed.wait()
        except TimeoutError as error:
            raise self._failure or TimeoutError("a subscription was not answered") from error

    def _stop(self, name: bytes, heard: Heard) -> None:
        listeners = self._heard.get(name, [])
        if heard in listeners:
            listeners.remove(heard)
        if not listeners:  # later messages are ignored until the connection is renewed
            self._heard.pop(name, None)

    async def close(self) -> None:
        task, self._task = self._task, None
        await ended(task)
        self._heard.clear()
        self._subscribed.clear()

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._serve()
            except (RedisError, OSError) as error:
                failures = 0 if self._was_connected else failures + 1
                if failures == 0:
                    log.info("not listening to %s for now: %s", self._connections.login.place, error)
                self._failure = error
            pauses = _CONNECT_AGAIN_AFTER_SECONDS
            await asyncio.sleep(pauses[min(failures, len(pauses) - 1)])

    async def _serve(self) -> None:
        """Read from one connection until it is lost."""
        self._was_connected = False
        connection = await self._connections.lone_connection()
        try:
            self._was_connected, self._connection = True, connection
            self._subscribed = {name: self._subscribed.get(name, asyncio.Event()) for name in self._heard}
            await self._subscribe(*self._heard)
            await self._read(connection)
        finally:
            self._connection = None
            await connection.disconnect(nowait=True)

    async def _read(self, connection: Connection) -> None:
        clock = asyncio.get_running_loop().time
        last_heard = clock()
        while True:
            message = await cast("Any", connection).read_response(timeout=_SPEAK_EVERY_SECONDS)
            if message is not None:
                last_heard = clock()
                self._hear(message)
            elif clock() - last_heard > self._connections.answers_within.total_seconds():
                raise ConnectionError(f"nothing was heard for {clock() - last_heard:.0f} s")
            else:
                await connection.send_command("PING")

    def _hear(self, message: Sequence[Any]) -> None:
        if len(message) < 3:
            return  # the answer to PING
        kind, name, text = message[:3]
        if kind == b"subscribe":
            self._subscribed.setdefault(name, asyncio.Event()).set()
            text = None  # no message is missed from here on; listeners must look again once
        elif kind != b"message":
            return
        for heard in list(self._heard.get(name, ())):
            heard(text)

    async def _subscribe(self, *names: bytes) -> None:
        """Subscribe if connected; otherwise the next connection does it."""
        connection = self._connection
        if connection is None or not names:
            return
        if not connection.is_connected:  # it would reconnect without a reader
            return
        try:
            await connection.send_command("SUBSCRIBE", *names)
        except (RedisError, OSError) as error:  # the reader notices, too, and subscribes again
            log.debug("a subscription could not be sent: %s", error)
