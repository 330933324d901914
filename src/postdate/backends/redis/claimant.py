"""Claims under a holder, and what becomes of those whose answer is lost."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

from postdate.backends.redis.liveness import RedisLiveness
from postdate.backends.redis.server import RedisServer
from postdate.errors import PostdateError

log = logging.getLogger("postdate.redis")


class Claimant:
    """What claims under a holder, one claim at a time: a store, or one receiver.

    A claim whose answer is lost, or that nobody waits for any more, may hold messages that nobody knows of. It is
    declared void before the next one; the server gives back what it holds, also should it come later.

    Args:
        server: where it claims.
        liveness: of the holder.
    """

    def __init__(self, server: RedisServer, liveness: RedisLiveness) -> None:
        self._server, self._liveness = server, liveness
        self._name = secrets.token_hex(4)
        self._number = 0
        self._doubtful: dict[str, int] = {}
        self._claiming = asyncio.Lock()

    async def claim(self, name: str, where: str, *arguments: Any) -> tuple[str, Any]:
        """Run a script that claims; return the token and its answer.

        Args:
            name: of the script, which takes where, holder, token, and the rest.
            where: store or queue.
            arguments: the rest.

        Raises:
            PostdateError: nothing is held that is not given back.
        """
        async with self._claiming:
            for _ in range(2):
                holder = await self._server.calling(self._liveness.holder())
                await self._settle_doubts(holder)
                self._number += 1
                token = f"{holder}:{self._name}:{self._number}"
                self._doubtful[token] = self._number
                answer = await self._server.run(name, where, holder, token, *arguments)
                del self._doubtful[token]
                if answer is not None:
                    return token, answer
                self._liveness.lose(holder)
            raise self._server.meanings.unreachable(f"{self._server.login.place} forgot this process twice in a row")

    def made(self, token: str) -> bool:
        """Return whether a token is of one of its claims, in force or not."""
        return token.split(":")[1] == self._name

    def doubt(self, token: str) -> None:
        """Have all that was claimed by a token given back before the next claim: it was not handed on."""
        self._doubtful[token] = int(token.rpartition(":")[2])

    async def _settle_doubts(self, holder: str) -> None:
        for token, number in list(self._doubtful.items()):
            if token.startswith(f"{holder}:"):
                await self._server.run("undo", holder, self._name, number, number + 1)
            self._doubtful.pop(token, None)

    async def close(self) -> None:
        """Give back everything that it holds; later, with a beat, when the server does not answer now.

        Raises:
            PostdateError: it does not answer now.
        """
        async with self._claiming:
            holder = self._liveness.holder_now
            if not holder or not self._number:
                return
            undo = (holder, self._name, 0, self._number + 1)
            try:
                await self._server.run("undo", *undo)
            except BaseException:
                self._liveness.undo_later(undo)
                raise

    async def close_soon(self) -> None:
        """Give back everything that it holds, at the latest with a beat once the server answers again."""
        try:
            await self.close()
        except PostdateError as error:
            log.info("what was held in %r is given back later: %s", self._server, error)
