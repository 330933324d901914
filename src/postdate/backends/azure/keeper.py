"""A task of the store: it renews leases, takes what is free, and looks for what other processes stored. ADR 0013."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Final

import anyio

from postdate.backends.azure.groups import Operation, Table
from postdate.backends.azure.layout import changed_at
from postdate.backends.azure.lease import LASTS_SECONDS, Leases
from postdate.backends.azure.pages import BackOff
from postdate.errors import PostdateError
from postdate.runtime.outage_log import OutageLog

ROUND_SECONDS: Final = 0.5
"""A lease that is free is taken within this: with its 15 seconds, and a first look and send, a takeover takes 16 s."""

_APPEARS_EVERY_SECONDS: Final = 3.0
_GONE_AFTER: Final = timedelta(seconds=10)
"""With the time between two looks it is shorter than a lease lasts: its heirs know by then that they may take more."""

_PARTITION: Final = "process"

log = logging.getLogger("postdate.azure.keeper")


class Keeper:
    """Runs in the event loop of whoever starts it first, until it is stopped.

    Args:
        leases: to keep.
        attendance: of the processes that share them.
        took: called when another lease is ours.
        is_idle: says of a lease whether nothing is held under it.
        look: looks for what other processes stored.
        back_off: how long to wait between two such looks.
    """

    def __init__(
        self,
        leases: Leases,
        attendance: TableLiveness,
        took: Callable[[], None],
        is_idle: Callable[[int], bool],
        look: Callable[[], Awaitable[None]],
        back_off: BackOff,
    ) -> None:
        self._leases, self._attendance, self._took, self._is_idle = leases, attendance, took, is_idle
        self._look, self._back_off = look, back_off
        self._task: asyncio.Task[None] | None = None
        self._outage = OutageLog(log, "leases cannot be kept", "the store is", logging.WARNING)
        self._rounds_since_appearance = 0
        self.is_listening = False
        """Whether somebody waits for messages: then free leases are taken and looks are made."""

    def start(self) -> None:
        """Start the task if it does not run."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="postdate-azure-keeper")

    async def begin(self) -> None:
        """Start the task if it does not run, and take what is free at once: nobody need be woken for that later."""
        if self._task is None or self._task.done():
            await self._safely(self._round)
        self.start()

    async def stop(self, until: float) -> None:
        """End the task, give up every lease, and let others know that we are gone.

        Args:
            until: seconds of the event loop's clock; then it is left to others to notice.
        """
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        with anyio.CancelScope(deadline=until) as giving_up:
            await self._leases.give_up_all()
        if giving_up.cancelled_caught:
            log.info("the leases of this process could not be given up and end within %d s", LASTS_SECONDS)
        with anyio.CancelScope(deadline=until):  # asks another service, which may not answer where this one did
            await self._attendance.leave()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_round = next_look = loop.time()
        while True:
            if loop.time() >= next_round:
                await self._safely(self._round)
                next_round = loop.time() + ROUND_SECONDS
            if loop.time() >= next_look:
                if self.is_listening and self._leases.held():
                    await self._safely(self._look)
                next_look = loop.time() + self._back_off.longer().total_seconds()
            await asyncio.sleep(max(min(next_round, next_look) - loop.time(), 0.0))

    async def _safely(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do a step. Nothing that goes wrong may end the task: without it the leases would."""
        now = asyncio.get_running_loop().time()
        try:
            await step()
        except PostdateError as error:
            self._outage.failed(error, now)
        except Exception:
            log.exception("leases cannot be kept for a reason that nobody thought of")
        else:
            if self._outage.is_out:
                self._outage.succeeded(now)

    async def _round(self) -> None:
        self._leases.end_what_is_over()
        before = self._leases.held()
        if not (before or self.is_listening):
            return
        if self._leases.count > 1:
            await self._share()
        if self.is_listening:
            if await self._leases.hold() - before:
                self._back_off.reset()
                self._took()
        else:
            await self._leases.renew()

    async def _share(self) -> None:
        """Hold no more than a fair share, so that others have some."""
        if self._rounds_since_appearance % round(_APPEARS_EVERY_SECONDS / ROUND_SECONDS) == 0:
            processes = await self._attendance.appear()
            self._leases.at_most = -(-self._leases.count // processes)
        self._rounds_since_appearance += 1
        for number in self._leases.surplus():
            if self._is_idle(number):
                await self._leases.give_up(number)


class TableLiveness:
    """Which processes work on a store: each writes a row now and then, and the server says when it was.

    Args:
        table: of the records.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._keys = {"PartitionKey": _PARTITION, "RowKey": uuid.uuid4().hex}
        self._appeared = False

    async def appear(self) -> int:
        """Write our row; return how many processes there are, this one included. Rows of the dead are taken away."""
        await self._table.atomically([Operation("upsert", self._keys)])
        self._appeared = True
        rows = self._table.query(f"PartitionKey eq '{_PARTITION}'")
        seen: dict[str, datetime] = {row["RowKey"]: changed_at(row) async for row in rows}
        ours = seen[self._keys["RowKey"]]
        dead = [row for row, at in seen.items() if at < ours - _GONE_AFTER]
        await self._table.each([Operation("delete", {**self._keys, "RowKey": row}) for row in dead])
        return len(seen) - len(dead)

    async def leave(self) -> None:
        """Take our row away; whoever cannot is counted for a few seconds more."""
        if not self._appeared:
            return
        try:
            await self._table.atomically([Operation("delete", self._keys)])
        except PostdateError as error:
            log.info("this process is taken for one that dispatches for some seconds more: %s", error)
