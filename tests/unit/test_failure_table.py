"""The table of ADR 45, failure by point, through a public endpoint on a virtual clock.

Each row is an outage of a minute at one point of a message's way, or one failure. What may not happen whatever fails: a
message that is lost, and one that is delivered twice although its claim was held.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import anyio
import pytest

from postdate import (
    DelayedDelivery,
    Endpoint,
    HandlerContext,
    Headers,
    MemoryStore,
    MemoryTransport,
    Recoverability,
    errors,
)
from postdate.ports import RecordKind
from postdate.testing import Fault, FaultyStore, FaultyTransport, RecordedMetrics, VirtualClock

SECOND = timedelta(seconds=1)
OUTAGE, AFTERWARDS = 60 * SECOND, 90 * SECOND

STORE_AWAY, LOCKED, PAGE = (
    errors.StoreUnreachable("connection refused"),
    errors.StoreUnavailable("locked"),
    errors.StoreTroubled("page 7"),
)
BROKER_AWAY, NACK = errors.TransportUnreachable("connection refused"), errors.TransportUnavailable("nack")
FULL, MISSING, LARGE = (
    errors.DestinationUnavailable("full"),
    errors.QueueNotFound("no such queue"),
    errors.MessageTooLarge("64 KiB"),
)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        place: what fails.
        point: the call that fails, of the store or of the transport.
        error: with which it fails; ``None``: it is never answered.
        calls: how many of these calls fail; ``None``: all of them for a minute.
        early: they fail from the start, and not only once the message is stored.
        also: what else fails meanwhile, once.
        retries: how often the message is tried again.
        copies: times that the message was handled; more than one where the queue gives it out again.
        failures: how many failures of it are recorded.
        code: of the error for which it is in the error queue; ``None``: it is not there.
        breakers: which circuit breakers call for a critical error.
        says: how the first line from *warning* on begins.
        logged: how many such lines there are.
        ended: how many outages are said to be over.
        after: the calls take effect before they fail.
        most: calls that are made at that point while they fail, at the most.
        is_awaited: whether messages wait for a queue that does not exist.
    """

    place: str
    point: str
    error: Exception | None
    calls: int | None = None
    early: bool = False
    also: Fault | None = None
    retries: int = 0
    copies: int = 1
    failures: int = 0
    code: str | None = None
    breakers: str = ""
    says: str = ""
    logged: int = 1
    ended: int = 1
    after: bool = False
    most: int = 120
    is_awaited: bool = True

    def __str__(self) -> str:
        calls = "for a minute" if self.calls is None else f"{self.calls} times"
        error = "without an answer" if self.error is None else getattr(self.error, "code", type(self.error).__name__)
        beside = f" beside {self.also.method}" if self.also else ""
        when = " from the start" if self.early else ""
        effect = " after its effect" if self.after else ""
        at_once = "" if self.is_awaited else ", which is not awaited"
        return f"{self.place} {self.point} {error} {calls}{effect}{beside}{when}{at_once}"


ONE_LINE_A_MINUTE = 2
"""Lines of an outage of a minute: one at its beginning, and one when it has lasted for so long."""

CLAIM, STORE, RECEIVE = (
    "cannot claim due messages",
    "cannot store the delayed messages of sales.timeouts",
    "cannot receive from sales",
)
SEND, SEND_ONE, FULL_QUEUES = (
    "cannot send due messages",
    "cannot send message m-1 to sales",
    "some queues accept no messages now",
)
WRITE, END = "cannot complete or release due messages", "cannot acknowledge messages of sales"
FAILED, NOT_FINISHED = "message m-1 of sales.timeouts failed, attempt 1", "message m-1 was not finished"

BREAKERS = {
    "Failed to store delayed messages: the store has refused them for too long": "Store",
    "Failed to fetch due delayed messages from the store": "Fetch",
    "Failed to dispatch delayed messages to their destination": "Dispatch",
    "Failed to execute error handling for delayed messages: too many failures that could not be dealt with": (
        "FailureHandling"
    ),
    "Failed to receive messages": "Receive",
}
"""Texts of critical errors, and the circuit breakers that call for them."""

BUG, BOTH, REFUSED, CUT = OSError("a bug"), "Dispatch, FailureHandling", Fault("send", NACK), Fault("send", BROKER_AWAY)
OF_ITSELF = [
    errors.StoreFull,
    errors.StoreReadOnly,
    errors.StoreTroubled,
    errors.StoreNotWritable,
    errors.StoreNotSetUp,
    errors.StoreFromNewerVersion,
    errors.NotADatabase,
]

ROWS = [
    Row("store", "claim_due", STORE_AWAY, breakers="Fetch", says=CLAIM, logged=ONE_LINE_A_MINUTE),
    Row("store", "claim_due", None, says=f"{CLAIM}: FaultyStore did not answer within 40 s"),
    Row("store", "next_attempt", STORE_AWAY, breakers="Fetch", says=CLAIM, logged=ONE_LINE_A_MINUTE),
    # Nothing was claimed and sent a second time: the message is only removed.
    Row("store", "finish", STORE_AWAY, says=WRITE, most=31),
    Row("store", "finish", LOCKED, says=WRITE, most=31),
    Row("store", "finish", None, says=f"{WRITE}: FaultyStore did not answer within 40 s"),
    Row("store", "finish", STORE_AWAY, calls=1, after=True, says=WRITE),
    # Its failure waits to be written, and the message waits with it.
    Row(
        "store", "retry_later", STORE_AWAY, also=REFUSED, retries=5, failures=1, breakers=BOTH, says=SEND_ONE, logged=3
    ),
    Row("store", "retry_later", LOCKED, also=REFUSED, retries=5, failures=1, breakers=BOTH, says=SEND_ONE, logged=3),
    Row("store", "release", STORE_AWAY, also=CUT, breakers=BOTH, says=SEND, logged=3, ended=2),
    # It stays in hand, and is not counted as failed.
    Row("store", "store", STORE_AWAY, early=True, breakers="Store", says=STORE, logged=ONE_LINE_A_MINUTE),
    Row("store", "store", None, early=True, says=f"{STORE}: FaultyStore did not answer within 40 s"),
    *(Row("store", "store", of("itself"), None, True, breakers="Store", says=STORE, logged=2) for of in OF_ITSELF),
    # A refusal counts against the message, and by default one is enough. Nothing else is stored, so the breaker trips.
    Row(
        "store", "store", LOCKED, 1, True, copies=0, code=LOCKED.code, breakers="Store", says=FAILED, logged=2, ended=0
    ),
    Row(
        "store",
        "store",
        BUG,
        1,
        True,
        copies=0,
        code=LOCKED.code,
        breakers="Store",
        says="FaultyStore",
        logged=3,
        ended=0,
    ),
    Row("store", "store", errors.StoreError("never"), 20, True, retries=25, says=FAILED, logged=20, ended=0),
    Row("transport", "receive", BROKER_AWAY, breakers="Receive", says=RECEIVE, logged=ONE_LINE_A_MINUTE),
    Row("transport", "send", BROKER_AWAY, breakers="Dispatch", says=SEND, most=45),
    Row("transport", "send", BROKER_AWAY, calls=1, says=SEND),
    Row("transport", "send", None, breakers="Dispatch", says=f"{FULL_QUEUES}: sales did not answer within 30 s"),
    Row("transport", "send", FULL, breakers="Dispatch", says=FULL_QUEUES, logged=ONE_LINE_A_MINUTE, most=45),
    Row("transport", "send", NACK, 1, copies=0, code=NACK.code, breakers="Dispatch", says=SEND_ONE, logged=2, ended=0),
    Row("transport", "send", NACK, 3, retries=3, failures=3, says=SEND_ONE, logged=3, ended=0),
    Row("transport", "send", MISSING, says=FULL_QUEUES, logged=ONE_LINE_A_MINUTE, most=60),
    Row(
        "transport", "send", MISSING, 1, is_awaited=False, copies=0, code=MISSING.code, says=SEND_ONE, logged=2, ended=0
    ),
    Row("transport", "send", LARGE, 1, copies=0, code=LARGE.code, says=SEND_ONE, logged=2, ended=0),
    # The queue does not take the end of a handled message, so it is handled again each time.
    Row("transport", "commit", NACK, calls=2, copies=3, says=NOT_FINISHED, logged=2, ended=0),
    Row("transport", "commit", BROKER_AWAY, calls=3, copies=4, says=END),
    Row("transport", "commit", None, calls=1, copies=2, says=f"{END}: FaultyReceiver did not answer within 40 s"),
    # The answer to a commit is lost: it is done, and an idle queue is not out of reach for that.
    Row("transport", "commit", BROKER_AWAY, calls=1, after=True, says=END, ended=0),
    # Stored already, it is taken off when it comes again.
    Row("transport", "commit", NACK, 2, True, says=NOT_FINISHED, logged=2, ended=0),
    Row("transport", "commit", BROKER_AWAY, 2, True, says="cannot acknowledge messages of sales.timeouts"),
    Row("transport", "commit", BUG, 1, True, says="FaultyReceiver failed with OSError: a bug", logged=2, ended=0),
    Row("handler", "handle", ValueError("no"), calls=1, copies=2, logged=0, ended=0),
    Row("handler", "handle", ValueError("no"), copies=6, code="", says="message m-1 moved to error queue", ended=0),
]


@dataclass
class Life:
    """What became of the message of one row."""

    handled: list[str] = field(default_factory=list)
    codes: list[str | None] = field(default_factory=list)
    critical: list[str] = field(default_factory=list)
    failures: int = 0
    waiting: int = 0
    calls: int = 0
    metrics: RecordedMetrics = field(default_factory=RecordedMetrics)


class Silence:
    """Calls of one method that are not answered."""

    def __init__(self, target: FaultyStore | FaultyTransport, row: Row) -> None:
        self.answers, self.calls, self.row = anyio.Event(), 0, row
        self._run, target.faults.run = target.faults.run, self.run

    async def run(self, method: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if method == self.row.point and not self.answers.is_set():
            self.calls += 1
            if self.row.calls is None or self.calls <= self.row.calls:
                await self.answers.wait()
        return await self._run(method, call)


async def live(row: Row, clock: VirtualClock) -> Life:
    """Send a message through an endpoint while one call fails, and for a while afterwards."""
    life, memory, queues = Life(), MemoryStore(), MemoryTransport()
    store, transport = FaultyStore(memory), FaultyTransport(queues)
    delayed_delivery = DelayedDelivery(store, number_of_retries=row.retries)
    if not row.is_awaited:
        delayed_delivery = replace(delayed_delivery, missing_queue_wait=timedelta(0))
    endpoint = Endpoint(
        "sales",
        transport=transport,
        delayed_delivery=delayed_delivery,
        recoverability=Recoverability(delayed_retries=0),
        clock=clock,
        critical_error=lambda text, error: life.critical.append(text),
        metrics=life.metrics,
    )

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        life.handled.append(context.message_id)
        if row.place == "handler" and (row.calls is None or len(life.handled) <= row.calls):
            assert row.error is not None
            raise row.error

    target = store if row.place == "store" else transport

    def begin() -> Silence | None:
        if row.also:
            made = transport.faults.calls[row.also.method]
            transport.faults.add(Fault(row.also.method, row.also.error, [made + 1]))
        if row.error is None:
            return Silence(target, row)
        made = target.faults.calls[row.point]
        calls = None if row.calls is None else range(made + 1, made + row.calls + 1)
        target.faults.add(Fault(row.point, row.error, calls, row.after))
        return None

    async with endpoint:
        silence = begin() if row.early else None
        await endpoint.send(b"", destination="sales", delay=5 * SECOND, message_id="m-1")
        await clock.advance(SECOND)
        silence = silence if row.early else begin()
        before = target.faults.calls[row.point]
        await clock.advance(5 * SECOND + OUTAGE)
        life.calls = target.faults.calls[row.point] - before
        for each in (store, transport):
            each.faults.clear()
        if silence:
            silence.answers.set()
        await clock.advance(AFTERWARDS)
        life.waiting = (await memory.statistics(clock.now())).pending
        life.failures = sum(each.kind is RecordKind.RETRIED for each in await memory.history("m-1"))
        life.codes = [each.headers.get(Headers.ERROR_CODE, "") for each, _ in queues.queues["error"].messages]
    return life


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_what_becomes_of_a_message(row: Row, clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "postdate")
    life = await live(row, clock)
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    ended = [record.getMessage() for record in caplog.records if "reachable again" in record.getMessage()]
    assert life.handled == ["m-1"] * row.copies
    assert life.codes == ([] if row.code is None else [row.code])
    assert life.waiting == 0
    assert life.failures == row.failures
    assert ", ".join(BREAKERS[text] for text in life.critical) == row.breakers
    assert len(texts) == row.logged, texts
    assert "".join(texts).startswith(row.says)
    assert len(ended) == row.ended, ended
    assert life.calls <= row.most
    assert life.metrics.counts.get("moved_to_error", 0) == len(life.codes)
    assert life.metrics.counts.get("stored", 0) == (not (row.point == "store" and life.codes))


async def test_a_transport_without_an_answer_for_a_message_has_not_sent_it(clock: VirtualClock) -> None:
    """Found by the simulator, seed 6393: its sender was told that it was sent."""
    queues = MemoryTransport()
    await queues.create_queues(["billing"])

    async def answer_nothing(*_: object, **__: object) -> list[errors.PostdateError | None]:
        return []

    queues.send = answer_nothing
    async with Endpoint("sales", transport=queues, clock=clock, send_only=True) as endpoint:
        with pytest.raises(errors.TransportUnavailable, match="answered for 0 of 1 messages"):
            await endpoint.send(b"", destination="billing")
