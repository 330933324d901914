"""Ends received messages in batches: outcomes that come during one batch are the next. Source: ADR 0026."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import anyio

from postdate.clock import Clock
from postdate.core.guard import calling_transport
from postdate.core.receive.outcomes import StepOutcome
from postdate.core.receive.watching import WatchedReceiver
from postdate.ports import HANDLED, Ending, Received

AT_ONCE: Final = 500
"""Messages that end in one batch: with more, a commit costs each no less."""

IN_FLIGHT: Final = 2
"""Batches that are ended at a time: while one waits for the disk, the other is made ready."""

LARGEST_BATCH: Final = 4 * 1024 * 1024
"""Bytes that the messages of one batch send or store, at most; one message alone may do more."""

Ended: TypeAlias = tuple[Received, StepOutcome, Exception | None]
"""A message, its outcome, and the error with which ending it failed."""

Left: TypeAlias = Callable[[Sequence[Ended]], None]
"""Called with messages that need more work: ending them failed, or they have an ``afterwards``."""


class Settler:
    """Ends the messages of one receiver. Start :meth:`run` as a task; :meth:`finish` lets it end what there is."""

    def __init__(self, receiver: WatchedReceiver, clock: Clock) -> None:
        self._receiver, self._clock = receiver, clock
        self._waiting: deque[tuple[Received, StepOutcome]] = deque()
        self._some, self._finishes = anyio.Event(), False
        self.count = 0
        """Messages that are not ended yet."""
        self.calls = 0
        """Batches that are being ended."""

    def put(self, received: Received, outcome: StepOutcome) -> None:
        """Have a message ended, soon; its outcome must have an end."""
        self._waiting.append((received, outcome))
        self.count += 1
        if not self._some.is_set():
            self._some.set()

    def finish(self) -> None:
        self._finishes = True
        self._some.set()

    async def run(self, left: Left, made_room: Callable[[], None]) -> None:
        """End messages until finished. Cancelled, it still ends those that were handled."""
        async with anyio.create_task_group() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.start_soon(self._run, left, made_room)

    async def _run(self, left: Left, made_room: Callable[[], None]) -> None:
        try:
            while not self._finishes or self._waiting:
                if self._waiting:
                    await self._end(self._batch(), left)
                    made_room()
                else:
                    if self._some.is_set():
                        self._some = anyio.Event()
                    await self._some.wait()
        finally:
            with anyio.CancelScope(shield=True):
                while self._waiting:
                    await self._end(self._batch(), left)

    def _batch(self) -> Sequence[tuple[Received, StepOutcome]]:
        batch, room = list[tuple[Received, StepOutcome]](), LARGEST_BATCH
        while self._waiting and len(batch) < AT_ONCE:
            received, outcome = self._waiting[0]
            end = outcome.end
            if end is not None and (end.outgoing or end.work):
                stored = len(received.envelope.body) if end.work else 0  # as far as that can be told
                room -= stored + sum(len(each.body) for each in end.outgoing)
                if room < 0 and batch:
                    break
            batch.append(self._waiting.popleft())
        return batch

    async def _end(self, batch: Sequence[tuple[Received, StepOutcome]], left: Left) -> None:
        now = self._clock.now()
        endings = [Ending(received, now, outcome.end or HANDLED) for received, outcome in batch]
        errors: Sequence[Exception | None] = ()
        self.calls += 1
        try:
            with anyio.CancelScope(shield=True), calling_transport(self._receiver):
                errors = await self._receiver.settle(endings)
        except Exception as error:  # noqa: BLE001 - told to each message, which deals with it
            errors = [error] * len(batch)
        finally:
            self.calls -= 1
            self.count -= len(batch)
        some = [
            (received, outcome, error)
            for (received, outcome), error in zip(batch, errors, strict=True)
            if error is not None or outcome.afterwards
        ]
        if some:
            left(some)
