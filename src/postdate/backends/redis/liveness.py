"""By what others know that a process lives: a subscription, which ends with it, and a beat, which ends when it freezes.

A process that holds messages is a *holder*. While its subscription stands and its beat comes in time, what it holds is
its own. Whoever beats looks after the others: a holder whose subscription is gone and whose beat has been missing for
some seconds is dead; one that has not been heard for ``holds_at_most`` is frozen. What either holds is free again, and
what it does with old tokens has no effect.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from postdate.backends.redis.layout import written
from postdate.backends.redis.listening import Listening
from postdate.backends.redis.server import RedisServer, ended
from postdate.clock import SystemClock
from postdate.errors import PostdateError

HOLDS_AT_MOST: Final = timedelta(seconds=60)
_BEATS_EVERY_SECONDS: Final = 1.0
_DEAD_AFTER: Final = timedelta(seconds=3)
"""Without subscription and without beat; longer than it takes to connect anew after a connection was lost."""

Undo = tuple[str, str, int, int]
"""Holder, claimant, first and last number: see ``undo.lua``."""

_MICROSECOND: Final = timedelta(microseconds=1)

log = logging.getLogger("postdate.redis")


class Liveness:
    """One holder, from the first claim on.

    Args:
        server: where it lives.
        listening: for its subscription.
        holds_at_most: after so long a silence others take what it holds.
        about: what it says of itself besides; it may change.
        lost: called when what it held is void.
    """

    def __init__(
        self,
        server: RedisServer,
        listening: Listening,
        holds_at_most: timedelta,
        about: Mapping[str, Any],
        lost: Callable[[], None],
    ) -> None:
        self._server, self._listening, self._about, self._lost = server, listening, about, lost
        self._holds_at_most, self._clock = holds_at_most, SystemClock()
        self._started_at: datetime | None = None
        self._name: str | None = None
        self._holder: str | None = None
        self._in_force_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._registering = asyncio.Lock()
        self._undone_later: list[Undo] = []

    @property
    def holder_now(self) -> str:
        """The name of the holder; empty when it holds nothing."""
        return self._holder or ""

    @property
    def is_in_force(self) -> bool:
        """Whether by our own clock nobody can have taken what we hold."""
        return self._holder is not None and self._clock.since_boot() < self._in_force_until

    async def holder(self) -> str:
        """Return the name under which messages are held now, known to the server.

        Raises:
            PostdateError: the server does not answer.
        """
        async with self._registering:
            if self._holder is None:
                self._holder = await self._register()
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._beat(), name="postdate-redis-liveness")
            return self._holder

    async def _register(self) -> str:
        holder = self._name = self._name or secrets.token_hex(8)  # kept until it is known: a name is a subscription
        await self._listening.listen(f"{self._server.login.tag}:alive:{holder}", _nothing)
        began = self._clock.since_boot()
        self._started_at = self._started_at or self._clock.now()
        await self._server.run("register", holder, self._told(), self._holds_at_most // _MICROSECOND)
        self._in_force_until = began + self._holds_at_most.total_seconds()
        return holder

    def _told(self) -> str:
        started = written(self._started_at or self._clock.now())
        return json.dumps({"pid": os.getpid(), "machine": platform.node(), "started": started, **self._about})

    def lose(self) -> None:
        """Note that the server does not know this holder any more: all claims are void."""
        if self._holder is not None:
            log.warning("others may have what this process held in %r: it was not heard in time", self._server)
            self._holder = self._name = None
            self._lost()

    async def _beat(self) -> None:
        grace = _DEAD_AFTER // _MICROSECOND
        while True:
            await asyncio.sleep(_BEATS_EVERY_SECONDS)
            holder, began = self._holder, self._clock.since_boot()
            if holder is None:
                continue
            try:
                known = await self._beat_once(holder, grace)
            except PostdateError as error:
                log.debug("no beat of %s: %s", holder, error)
                continue
            if known:
                self._in_force_until = began + self._holds_at_most.total_seconds()
                await self._undo()
            elif holder == self._holder:
                self.lose()

    async def _beat_once(self, holder: str, grace: int) -> bool:
        """Beat; return whether what the holder holds is its own.

        It is not once it was not in force by our own clock, though nobody may have taken anything: who asked then
        (:attr:`is_in_force`) has let go of claims without a word to the server, which would hold them for ever.
        """
        known = bool(await self._server.run("beat", holder, grace, self._told()))
        if known and not self.is_in_force and holder == self._holder:
            await self._server.run("unregister", holder)
            return False
        return known

    def undo_later(self, undo: Undo) -> None:
        """Have a script ``undo`` run once the server answers again."""
        self._undone_later.append(undo)

    async def _undo(self) -> None:
        while self._undone_later:
            try:
                await self._server.run("undo", *self._undone_later[0])
            except PostdateError as error:
                log.debug("what was held is given back later: %s", error)
                return
            self._undone_later.pop(0)

    async def close(self) -> None:
        """Give back everything that is held."""
        task, self._task = self._task, None
        await ended(task)
        holder, self._holder, self._name = self._holder, None, None
        if holder is not None:
            try:
                await self._server.run("unregister", holder)
            except PostdateError as error:  # others find out that it is gone
                log.info("what was held in %r is free only when others notice the end: %s", self._server, error)


def _nothing(_text: bytes | None) -> None:
    """Hear nothing: the subscription itself is what counts."""


class Claimant:
    """What claims under a holder, one claim at a time: a store, or one receiver.

    A claim whose answer is lost, or that nobody waits for any more, may hold messages that nobody knows of. It is
    declared void before the next one; the server gives back what it holds, also should it come later.

    Args:
        server: where it claims.
        liveness: of the holder.
    """

    def __init__(self, server: RedisServer, liveness: Liveness) -> None:
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
                holder = await self._liveness.holder()
                await self._settle_doubts(holder)
                self._number += 1
                token = f"{holder}:{self._name}:{self._number}"
                self._doubtful[token] = self._number
                answer = await self._server.run(name, where, holder, token, *arguments)
                del self._doubtful[token]
                if answer is not None:
                    return token, answer
                if holder == self._liveness.holder_now:
                    self._liveness.lose()
            raise self._server.meanings.unreachable(f"{self._server.login.place} forgot this process twice in a row")

    def doubt(self, token: str) -> None:
        """Have all that was claimed by a token given back before the next claim: it was not handed on."""
        self._doubtful[token] = int(token.rpartition(":")[2])

    async def _settle_doubts(self, holder: str) -> None:
        for token, number in list(self._doubtful.items()):
            if token.startswith(f"{holder}:"):
                await self._server.run("undo", holder, self._name, number, number + 1)
            self._doubtful.pop(token, None)

    async def close(self) -> None:
        """Give back everything that it holds; later, with a beat, when the server does not answer now."""
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
