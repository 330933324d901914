"""The store's task: renews or takes the lease, and looks for messages of other processes. Source: ADR 0013."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from postdate.backends.azure.lease import LASTS_SECONDS, ContainerLease
from postdate.backends.azure.pages import BackOff
from postdate.errors import PostdateError
from postdate.runtime.reporting import OutageLog

ROUND_SECONDS: Final = 0.5
"""A free lease is taken within this: with its 15 s, a first look and a send, a takeover takes 16 s."""

log = logging.getLogger("postdate.azure.keeper")


class Keeper:
    """Runs in the event loop of its first caller, until it is stopped.

    ``took`` is called when the lease was taken anew; ``look`` looks for messages that other processes stored.
    """

    def __init__(
        self,
        lease: ContainerLease,
        took: Callable[[], None],
        look: Callable[[], Awaitable[None]],
        back_off: BackOff,
    ) -> None:
        self._lease, self._took, self._look, self._back_off = lease, took, look, back_off
        self._task: asyncio.Task[None] | None = None
        self._outage = OutageLog(log, "the lease cannot be kept", "the store is", logging.WARNING)
        self.is_listening = False
        """Whether a poller waits: only then a free lease is taken, and looks are made."""

    def start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="postdate-azure-keeper")

    async def begin(self) -> None:
        """As `start`, but tries to take the lease before it returns, so that no wake-up is needed for that."""
        if self._task is None or self._task.done():
            await self._safely(self._round)
        self.start()

    async def stop(self, until: float) -> None:
        """End the task and give up the lease; after ``until`` (loop's clock) the lease is left to expire."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        with anyio.CancelScope(deadline=until) as giving_up:
            await self._lease.give_up()
        if giving_up.cancelled_caught:
            log.info("the lease of this process could not be given up and ends within %d s", LASTS_SECONDS)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_round = next_look = loop.time()
        while True:
            if loop.time() >= next_round:
                await self._safely(self._round)
                next_round = loop.time() + ROUND_SECONDS
            if loop.time() >= next_look:
                if self.is_listening and self._lease.is_held:
                    await self._safely(self._look)
                next_look = loop.time() + self._back_off.longer().total_seconds()
            await asyncio.sleep(max(min(next_round, next_look) - loop.time(), 0.0))

    async def _safely(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do a step and log any error: if the task ended, the lease would be lost."""
        now = asyncio.get_running_loop().time()
        try:
            await step()
        except PostdateError as error:
            self._outage.failed(error, now)
        except Exception:
            log.exception("the lease cannot be kept for a reason that nobody thought of")
        else:
            if self._outage.is_out:
                self._outage.succeeded(now)

    async def _round(self) -> None:
        self._lease.look()
        was_held = self._lease.is_held
        if not self.is_listening:
            await self._lease.renew()
        elif await self._lease.hold() and not was_held:
            self._back_off.reset()
            self._took()
