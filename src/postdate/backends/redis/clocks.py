"""How far the clocks of the processes under a prefix deviate from the server's. Source: ADR 0019."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from postdate.backends.redis.facts import server_now
from postdate.backends.redis.layout import pairs, read_instant, written
from postdate.backends.redis.server import RedisServer

_LIVES_FOR: Final = timedelta(minutes=2)
"""Every half minute each process looks at the clock, and so writes its line."""

_MICROSECOND: Final = timedelta(microseconds=1)


class Clocks:
    """A hash of the prefix, with a field for each process."""

    def __init__(self, server: RedisServer) -> None:
        self._server, self._key = server, f"{server.login.tag}:clocks"

    async def report(self, ahead: timedelta) -> None:
        name = f"{platform.node()}:{os.getpid()}"
        now = written(await server_now(self._server))
        await self._server.run("little", "HSET", self._key, name, f"{now} {ahead // _MICROSECOND}")

    async def reported(self) -> Mapping[str, timedelta]:
        """Deletes the fields of dead processes."""
        now = await server_now(self._server)
        living: dict[str, timedelta] = {}
        for name, line in pairs(await self._server.command("HGETALL", self._key)).items():
            at, _, ahead = line.partition(b" ")
            if read_instant(at, "the time of a report") < now - _LIVES_FOR:
                await self._server.command("HDEL", self._key, name)
            else:
                living[name.decode()] = int(ahead) * _MICROSECOND
        return living
