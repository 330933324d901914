"""Claims in the name of a holder, and the undoing of claims whose answer was lost."""

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
    """Claims for a store or one receiver, one claim at a time.

    A claim whose answer is lost, or whose caller was cancelled, may hold messages that this process does not know of.
    It is declared void before the next claim; the server then releases its messages, even if the claim arrives later.
    """

    def __init__(self, server: RedisServer, liveness: RedisLiveness) -> None:
        self._server, self._liveness = server, liveness
        self._name = secrets.token_hex(4)
        self._number = 0
        self._doubtful: dict[str, int] = {}
        self._claiming = asyncio.Lock()

    async def claim(self, name: str, where: str, *arguments: Any) -> tuple[str, Any]:
        """Run a script that takes ``where`` (store or queue), holder, token, ``arguments``; return token and answer.

        After an error no message stays claimed.
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
        """Return whether a token is from this claimant, whether still valid or not."""
        return token.split(":")[1] == self._name

    def doubt(self, token: str) -> None:
        """Void a claim before the next one: its messages did not reach the caller."""
        self._doubtful[token] = int(token.rpartition(":")[2])

    async def _settle_doubts(self, holder: str) -> None:
        for token, number in list(self._doubtful.items()):
            if token.startswith(f"{holder}:"):
                await self._server.run("undo", holder, self._name, number, number + 1)
            self._doubtful.pop(token, None)

    async def close(self) -> None:
        """Release all its messages; if that fails, a later beat does it."""
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
        """As `close`, but only logs when the server does not answer."""
        try:
            await self.close()
        except PostdateError as error:
            log.info("what was held in %r is given back later: %s", self._server, error)
