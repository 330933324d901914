"""The messages of one run: create them, store them in time, note their deliveries, and count them where they arrive.

A message has about 200 bytes of headers and 300 of body. An id contains the number of its message, from which its due
time follows. The ids of one run ascend, like the ids that Postdate creates (UUID v7).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import anyio

from postdate import ports
from postdate.cli.bench.places import Trial, queue_names
from postdate.clock import SystemClock
from postdate.errors import PostdateError
from postdate.messages import DelayedMessage, Envelope, Headers

BODY: Final = b"x" * 300
BATCH: Final = 5_000


def id_of(number: int, run: str) -> str:
    """Return the id of a message: in the form of a UUID, ordered by number. ``run`` is twelve hexadecimal digits."""
    digits = f"{number:012x}"
    return f"{digits[:8]}-{digits[8:]}-7000-8000-{run}"


def headers_of(message_id: str) -> dict[str, str]:
    """Return the headers of a message."""
    return {Headers.MESSAGE_ID: message_id, "Bench.Filler": "y" * 140}


def message_of(number: int, run: str, queue: str, due: datetime) -> DelayedMessage:
    """Return a message."""
    message_id = id_of(number, run)
    return DelayedMessage(message_id, due, queue, headers_of(message_id), BODY)


def messages_of(
    trial: Trial, n: int, first_due: datetime, spacing: timedelta, batch: int
) -> Iterator[list[DelayedMessage]]:
    """Yield ``n`` messages of a run in batches, in the order of their due times."""
    queue = queue_names(trial.run).arrived
    for first in range(0, n, batch):
        numbers = range(first, min(first + batch, n))
        yield [message_of(number, trial.run, queue, first_due + number * spacing) for number in numbers]


_QUIET_SECONDS: Final = 0.3
_PATIENCE_SECONDS: Final = 10.0
_RECEIVE_BATCH: Final = 1_000


async def receive_ids(transport: ports.Transport, queue: str, n: int) -> list[str]:
    """Receive all messages of a queue, of which ``n`` are expected, and return their ids."""
    clock, receiver, message_ids = SystemClock(), transport.receiver(queue), list[str]()
    try:
        while True:
            batch = None
            with anyio.move_on_after(_QUIET_SECONDS if len(message_ids) >= n else _PATIENCE_SECONDS):
                batch = await receiver.receive(_RECEIVE_BATCH)
            if batch is None:
                return message_ids
            message_ids += [each.envelope.message_id for each in batch]
            for error in await receiver.settle(
                [ports.Settlement(each, clock.now(), ports.Completion(record=None)) for each in batch]
            ):
                if error is not None:
                    raise error
    finally:
        await receiver.close()


STUCK_SECONDS: Final = 120.0
_MOST_STORING: Final = 16


class Deliveries:
    """Notes the deliveries of a service. The service polls for due messages only when ``gate`` is open.

    Args:
        expected: number of messages to deliver.
    """

    def __init__(self, expected: int = 0) -> None:
        # For each batch: the wall-clock time when it was durably in its queue, in seconds since 1970, and its size.
        self.marks: list[tuple[float, int]] = []
        self.gate = anyio.Event()
        self._expected = expected
        self._delivered_count = 0
        self._all_delivered = anyio.Event()

    def add_deliveries(self, count: int) -> None:
        """Note that ``count`` messages are durably in their queue now."""
        if count:
            self.marks.append((time.time(), count))
            self._delivered_count += count
            if self._delivered_count >= self._expected:
                self._all_delivered.set()

    async def wait_until_complete(self) -> None:
        """Wait until all messages are delivered. Raise PostdateError if nothing is delivered for two minutes."""
        while not self._all_delivered.is_set():
            count_before = self._delivered_count
            with anyio.move_on_after(STUCK_SECONDS):
                await self._all_delivered.wait()
            if not self._all_delivered.is_set() and self._delivered_count == count_before:
                raise PostdateError(f"nothing was delivered for {STUCK_SECONDS:.0f} s after {count_before:,} messages")


def instrument_adapters(store: ports.ClaimingStore, transport: ports.Transport, deliveries: Deliveries) -> None:
    """Hold back claims until the gate opens, and note deliveries.

    This patches the two objects, not their classes, so that the endpoint sees their capabilities unchanged.
    """
    claim_due, send = store.claim_due, transport.send

    async def claim_when_open(now: datetime, limit: int) -> Sequence[ports.Claim]:
        await deliveries.gate.wait()
        return await claim_due(now, limit)

    async def send_and_count(
        envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        errors = await send(envelopes, now, work=work)
        deliveries.add_deliveries(sum(error is None for error in errors))
        return errors

    vars(store)["claim_due"] = claim_when_open
    vars(transport)["send"] = send_and_count
    if isinstance(store, ports.MovingStore):
        move_due = store.move_due

        async def move_and_count(now: datetime, limit: int, **options: Any) -> ports.MoveReport:
            await deliveries.gate.wait()
            report = await move_due(now, limit, **options)
            deliveries.add_deliveries(report.delivered)
            return report

        vars(store)["move_due"] = move_and_count


async def store_paced(store: ports.ClaimingStore, messages: Iterable[DelayedMessage], lead_seconds: float) -> int:
    """Store each message ``lead_seconds`` before it is due, one commit each, several at the same time.

    Returns how many messages were already due when they were stored: their lateness is unknown.
    """
    clock, stored_when_due, limiter = SystemClock(), 0, anyio.CapacityLimiter(_MOST_STORING)

    async def store_one(message: DelayedMessage) -> None:
        nonlocal stored_when_due
        async with limiter:
            await store.store(message, clock.now())
            stored_when_due += clock.now() >= message.due

    async with anyio.create_task_group() as tasks:
        for message in messages:
            await anyio.sleep(max(message.due.timestamp() - lead_seconds - time.time(), 0))
            tasks.start_soon(store_one, message)
    return stored_when_due


def lateness_of(dues: Iterable[float], marks: Iterable[tuple[float, int]]) -> list[float]:
    """Return the seconds from due to delivered of each message, if batches are sent in the order of due times."""
    commits = (at for at, count in marks for _ in range(count))
    return [at - due for due, at in zip(sorted(dues), commits, strict=False)]


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return percentiles of lateness given in seconds, in milliseconds; all are 0 without values."""
    ordered = sorted(seconds) or [0.0]

    def percentile(share: float) -> float:
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1_000

    return {
        "p50_ms": percentile(0.5),
        "p95_ms": percentile(0.95),
        "p99_ms": percentile(0.99),
        "max_ms": ordered[-1] * 1_000,
    }
