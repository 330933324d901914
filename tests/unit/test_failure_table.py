"""The table of ADR 45, failure by point, through a public endpoint on a virtual clock.

Each row is an outage of a minute at one point of a message's way, or one failure. What may not happen whatever fails: a
message that is lost, and one that is delivered twice although its claim was held.
"""

import logging
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from postdate import DelayedDelivery, Endpoint, HandlerContext, MemoryStore, MemoryTransport
from postdate.errors import (
    DestinationUnavailable,
    MessageTooLarge,
    PostdateError,
    QueueNotFound,
    StoreTroubled,
    StoreUnavailable,
    StoreUnreachable,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.testing import Fault, FaultyStore, FaultyTransport, VirtualClock

SECOND = timedelta(seconds=1)
OUTAGE, AFTERWARDS = 60 * SECOND, 90 * SECOND

STORE_AWAY, LOCKED, PAGE = StoreUnreachable("connection refused"), StoreUnavailable("locked"), StoreTroubled("page 7")
BROKER_AWAY, NACK = TransportUnreachable("connection refused"), TransportUnavailable("nack")
FULL, MISSING, LARGE = DestinationUnavailable("full"), QueueNotFound("no such queue"), MessageTooLarge("64 KiB")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        place: what fails.
        point: the call that fails, of the store or of the transport.
        error: with which it fails.
        calls: how many of these calls fail; ``None``: all of them for a minute.
        copies: times that the message was handled; more than one where the queue gives it out again.
        in_error_queue: whether it ends in the error queue.
        critical: how many critical errors there are.
        logged: how many lines from *warning* on there are.
        after: the calls take effect before they fail.
    """

    place: str
    point: str
    error: PostdateError
    calls: int | None = None
    copies: int = 1
    in_error_queue: bool = False
    critical: int = 0
    logged: int = 0
    after: bool = False

    def __str__(self) -> str:
        calls = "for a minute" if self.calls is None else f"{self.calls} times"
        return f"{self.place} {self.point} {self.error.code} {calls}{' after its effect' if self.after else ''}"


ONE_LINE_A_MINUTE = 2
"""Lines of an outage of a minute: one at its beginning, and one when it has lasted for so long."""

ROWS = [
    Row("store", "claim_due", STORE_AWAY, critical=1, logged=ONE_LINE_A_MINUTE),
    Row("store", "next_attempt", STORE_AWAY, critical=1, logged=ONE_LINE_A_MINUTE),
    # Nothing was claimed and sent a second time: the message is only removed.
    Row("store", "finish", STORE_AWAY, logged=1),
    Row("store", "finish", LOCKED, logged=1),
    Row("store", "finish", STORE_AWAY, calls=1, after=True, logged=1),
    # It stays in hand, and is not counted as failed.
    Row("store", "store", STORE_AWAY, critical=1, logged=ONE_LINE_A_MINUTE),
    Row("store", "store", PAGE, critical=1, logged=ONE_LINE_A_MINUTE),
    # A refusal counts against the message, and by default one is enough. Nothing else is stored, so the breaker trips.
    Row("store", "store", LOCKED, calls=1, copies=0, in_error_queue=True, critical=1, logged=2),
    Row("transport", "receive", BROKER_AWAY, critical=1, logged=ONE_LINE_A_MINUTE),
    Row("transport", "send", BROKER_AWAY, critical=1, logged=1),
    Row("transport", "send", FULL, critical=1, logged=ONE_LINE_A_MINUTE),
    Row("transport", "send", NACK, calls=1, copies=0, in_error_queue=True, critical=1, logged=2),
    Row("transport", "send", MISSING, calls=1, copies=0, in_error_queue=True, logged=2),
    Row("transport", "send", LARGE, calls=1, copies=0, in_error_queue=True, logged=2),
    # The queue does not take the end of a handled message, so it is handled again each time.
    Row("transport", "commit", NACK, calls=2, copies=3, logged=2),
    Row("transport", "commit", BROKER_AWAY, calls=3, copies=4, logged=1),
    # The answer to a commit is lost: it is done, and an idle queue is not out of reach for that.
    Row("transport", "commit", BROKER_AWAY, calls=1, after=True, logged=1),
]


@dataclass
class Life:
    """What became of the message of one row."""

    handled: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    critical: list[str] = field(default_factory=list)
    waiting: int = 0


async def live(row: Row, clock: VirtualClock) -> Life:
    """Send a message through an endpoint while one call fails, and for a while afterwards."""
    life, memory, queues = Life(), MemoryStore(), MemoryTransport()
    store, transport = FaultyStore(memory), FaultyTransport(queues)
    endpoint = Endpoint(
        "sales",
        transport=transport,
        delayed_delivery=DelayedDelivery(store),
        clock=clock,
        critical_error=lambda text, error: life.critical.append(text),
    )

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        life.handled.append(context.message_id)

    target = store if row.place == "store" else transport
    calls = None if row.calls is None else range(1, row.calls + 1)
    is_stored = row.point != "store"
    async with endpoint:
        if not is_stored:
            target.faults.add(Fault(row.point, row.error, calls, row.after))
        await endpoint.send(b"", destination="sales", delay=5 * SECOND, message_id="m-1")
        await clock.advance(SECOND)
        if is_stored:
            done = target.faults.calls[row.point]
            calls = None if row.calls is None else range(done + 1, done + row.calls + 1)
            target.faults.add(Fault(row.point, row.error, calls, row.after))
        await clock.advance(5 * SECOND + OUTAGE)
        target.faults.clear()
        await clock.advance(AFTERWARDS)
        life.waiting = (await memory.statistics(clock.now())).pending
        life.errors = [each.message_id for each, _ in queues.queues["error"].messages]
    return life


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_what_becomes_of_a_message(row: Row, clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "postdate")
    life = await live(row, clock)
    logged = [record.getMessage() for record in caplog.records]
    assert life.handled == ["m-1"] * row.copies
    assert life.errors == ["m-1"] * row.in_error_queue
    assert life.waiting == 0
    assert len(life.critical) == row.critical
    assert len(logged) == row.logged, logged


async def test_a_transport_without_an_answer_for_a_message_has_not_sent_it(clock: VirtualClock) -> None:
    """Found by the simulator, seed 6393: its sender was told that it was sent."""
    queues = MemoryTransport()
    await queues.create_queues(["billing"])

    async def answer_nothing(*_: object, **__: object) -> list[PostdateError | None]:
        return []

    queues.send = answer_nothing
    async with Endpoint("sales", transport=queues, clock=clock, send_only=True) as endpoint:
        with pytest.raises(TransportUnavailable, match="answered for 0 of 1 messages"):
            await endpoint.send(b"", destination="billing")
