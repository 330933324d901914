"""An endpoint with an outbox: handled once, sent for certain, whatever fails between (specification 7, row 114)."""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from postdate import (
    Audit,
    DelayedDelivery,
    Endpoint,
    Envelope,
    HandlerContext,
    Headers,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    Outbox,
    Recoverability,
    SqliteOutbox,
    SqliteStore,
    errors,
)
from postdate.core.health.deadlines import STOP_DEADLINE
from postdate.core.recoverability import MOST_OWN_FAILURES
from postdate.core.upkeep import wall_times
from postdate.endpoint.outbox import CLEAN_UP_BATCH, OutboxCleanUp
from postdate.messages import DelayedMessage, format_timestamp
from postdate.ports import Operation, OutboxRecord, OutboxStore, OutboxTransaction, TransactionMode, Work
from postdate.testing import Fault, FaultyStore, FaultyTransport, VirtualClock
from postdate.testing.faults import Faults

SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)
ONE_TRY = Recoverability(immediate_retries=0, delayed_retries=0)


@dataclass
class Pay:
    amount: int = 1


@dataclass
class Paid:
    amount: int = 1


class FaultyOutbox(OutboxStore):
    """An outbox that fails as planned and otherwise does what ``store`` does."""

    def __init__(self, store: SqliteOutbox) -> None:
        self.store, self.faults = store, Faults()

    @property
    def database(self) -> object:
        return self.store.database

    @property
    def has_one_writer(self) -> bool:
        return self.store.has_one_writer

    async def setup(self) -> None:
        await self.store.setup()

    async def close(self) -> None:
        await self.store.close()

    async def find(self, endpoint: str, message_id: str) -> OutboxRecord | None:
        return await self.faults.run("find", lambda: self.store.find(endpoint, message_id))

    def outage_of(self, error: Exception) -> errors.PostdateError | None:
        return self.store.outage_of(error)

    def transaction(self, endpoint: str, message_id: str) -> Any:
        return FaultyTransaction(self, self.store.transaction(endpoint, message_id))

    async def mark_dispatched(self, endpoint: str, message_id: str, now: datetime) -> None:
        await self.faults.run("mark", lambda: self.store.mark_dispatched(endpoint, message_id, now))

    async def remove_dispatched(self, endpoint: str, before: datetime, limit: int) -> int:
        return await self.faults.run("remove", lambda: self.store.remove_dispatched(endpoint, before, limit))


class FaultyTransaction(OutboxTransaction):
    """Its commit fails as planned: before, or after it has taken effect."""

    def __init__(self, outbox: FaultyOutbox, transaction: Any) -> None:
        self._outbox, self._transaction = outbox, transaction
        self._lost: errors.StoreUnreachable | None = None

    @property
    def has_begun(self) -> bool:
        return self._transaction.has_begun

    async def begin(self) -> Any:
        return await self._transaction.begin()

    async def roll_back(self) -> None:
        await self._transaction.roll_back()

    async def commit(self, operations: Sequence[Operation], now: datetime, work: Sequence[Work] = ()) -> bool:
        faults = self._outbox.faults
        return await faults.run("outbox commit", lambda: self._transaction.commit(operations, now, work))


class World:
    """Queues in memory, an outbox in a file with a table of the application, and an endpoint that writes to it."""

    def __init__(self, clock: VirtualClock, path: Path) -> None:
        self.clock, self.path, self.start = clock, path, clock.now()
        self.queues, self.delays = MemoryTransport(), MemoryStore()
        self.transport, self.store = FaultyTransport(self.queues), FaultyStore(self.delays)
        self.outbox = FaultyOutbox(SqliteOutbox(path, synchronous="normal"))
        self.calls: list[str] = []
        self.query("CREATE TABLE paid (message TEXT)")

    def query(self, statement: str) -> list[Any]:
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()

    def paid(self) -> list[str]:
        return [message for (message,) in self.query("SELECT message FROM paid ORDER BY message")]

    def endpoint(self, handle: Callable[..., Awaitable[None]] | None = None, **settings: Any) -> Endpoint:
        settings.setdefault("transport", self.transport)
        settings.setdefault("outbox", Outbox(self.outbox, clean_up_every=timedelta(days=1)))
        endpoint = Endpoint(
            settings.pop("name", "sales"),
            delayed_delivery=settings.pop("delayed_delivery", DelayedDelivery(self.store, number_of_retries=1_000)),
            transaction_mode="receive_only",
            clock=self.clock,
            **settings,
        )
        endpoint.handler(Pay, name="Pay")(handle or self.handle)
        return endpoint

    async def handle(self, message: Pay, context: HandlerContext) -> None:
        self.calls.append(context.message_id)
        await self.pay(context)
        await context.send(Paid(), destination="billing")
        await context.send(Paid(), destination="billing", delay=60 * SECOND)

    async def pay(self, context: HandlerContext) -> None:
        (await context.transaction()).execute("INSERT INTO paid VALUES (?)", (context.message_id,))

    def arrived(self, queue: str) -> list[Envelope]:
        return [envelope for envelope, _ in self.queues.queues[queue].messages]

    def ids(self, queue: str) -> list[str]:
        return [envelope.message_id for envelope in self.arrived(queue)]

    async def deliver(self, message_id: str = "m-1", **fields: Any) -> None:
        """Put a message into the queue of the endpoint, as somebody else does."""
        headers = {Headers.MESSAGE_ID: message_id, Headers.ENCLOSED_MESSAGE_TYPES: "Pay", **fields.pop("headers", {})}
        await self.queues.send([Envelope("sales", message_id, headers, b"{}", **fields)], self.clock.now())


@pytest.fixture
async def world(clock: VirtualClock, tmp_path: Path):
    world = World(clock, tmp_path / "shop.db")
    await world.queues.create_queues(["billing", "sales"])
    yield world
    await world.outbox.close()


# --- exactly once -----------------------------------------------------------------------------------------------------


async def test_a_delayed_message_that_is_dispatched_twice_has_its_effects_once_row_114(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer to its sending is lost, so it is sent again; what was sent and not removed is not (ADR 52)."""
    caplog.set_level(logging.INFO, "postdate.outbox")
    world.transport.faults.add(Fault("send", errors.TransportUnreachable("no confirm"), calls=[2], after=True))
    async with world.endpoint() as sales:
        await sales.send(Pay(), delay=SECOND, destination="sales", message_id="m-1")
        await world.clock.advance(30 * SECOND)
        assert world.transport.faults.calls["commit"] >= 3  # into the store, and twice from the queue
    assert world.calls == world.paid() == ["m-1"]
    assert len(world.ids("billing")) == 1
    assert "message m-1 was handled before; nothing is left" in caplog.text


AFTER_EACH_STEP = [
    pytest.param(step, done, id=f"{'after' if done else 'before'} {step}")
    for step in ("find", "outbox commit", "send", "mark", "commit")
    for done in (False, True)
]


@pytest.mark.parametrize(("step", "done"), AFTER_EACH_STEP)
async def test_interrupted_at_any_step_a_message_has_its_effects_once_row_114(
    world: World, step: str, done: bool
) -> None:
    """What fails at a step and what crashes there leave the same: the process finds it when the message comes again."""
    async with world.endpoint():
        of_outbox = step in {"find", "outbox commit", "mark"}
        error = errors.StoreUnavailable("now") if of_outbox else errors.TransportUnavailable("now")
        faults = world.outbox.faults if of_outbox else world.transport.faults
        faults.add(Fault(step, error, [faults.calls[step] + 1], after=done))
        await world.deliver()
        await world.clock.advance(30 * SECOND)
        assert world.transport.faults.calls["receive"] >= 3  # it came again
        await world.clock.advance(60 * SECOND)
        assert world.paid() == ["m-1"]
        assert len(world.calls) == (2 if (step, done) == ("outbox commit", False) else 1)
        assert len(set(world.ids("billing"))) == 2  # what was sent again has the same id
        assert world.ids("sales") == world.ids("error") == []
        assert await world.outbox.find("sales", "m-1") == OutboxRecord((), is_dispatched=True)


async def test_in_the_file_of_the_queues_a_record_is_written_with_the_end_of_its_message_row_114(
    clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Received together they are looked up in one query; whether two of them are one message is told at their end."""
    queues = LocalTransport(tmp_path / "all.db", synchronous="normal")
    outbox = SqliteOutbox(tmp_path / "all.db", synchronous="normal")
    handled, asked, find_all = list[str](), list[int](), outbox.find_all
    contexts = dict[str, HandlerContext]()

    async def found(endpoint: str, message_ids: Sequence[str]) -> Sequence[OutboxRecord | None] | None:
        asked.append(len(message_ids))
        return await find_all(endpoint, message_ids)

    async def handle(message: Pay, context: HandlerContext) -> None:
        handled.append(context.message_id)
        contexts[context.message_id] = context
        if context.message_id == "writes":
            (await context.transaction()).execute("INSERT INTO paid VALUES ('writes')")
        if context.message_id == "sends":
            await context.send(Paid(), destination="billing")

    monkeypatch.setattr(outbox, "find_all", found)
    await queues.create_queues(["billing", "sales"])
    with sqlite3.connect(tmp_path / "all.db") as connection:
        connection.execute("CREATE TABLE paid (message TEXT)")
    headers = {Headers.ENCLOSED_MESSAGE_TYPES: "Pay"}
    ids = ["plain", "twice", "writes", "sends", "twice"]
    for _ in range(2):
        for id_ in ids:
            await queues.send([Envelope("sales", id_, {Headers.MESSAGE_ID: id_, **headers}, b"{}")], clock.now())
        endpoint = Endpoint(
            "sales", transport=queues, outbox=Outbox(outbox), transaction_mode="receive_only", clock=clock
        )
        endpoint.handler(Pay, name="Pay")(handle)
        async with endpoint:
            await clock.run_until_idle()
            assert await queues.queue_lengths() == {"billing": 1, "sales": 0, "error": 0}
    assert sorted({*handled}) == sorted({*ids})
    assert {each: handled.count(each) for each in ("plain", "writes", "sends")} == {"plain": 1, "writes": 1, "sends": 1}
    assert [each for each in asked if each > 1] == [5, 5]
    with pytest.raises(errors.StoreError, match="the transaction has ended"):
        await contexts["plain"].transaction()  # from a task that its handler has not waited for
    assert await find_all("sales", ["plain", "twice", "none"]) == [OutboxRecord((), is_dispatched=True)] * 2 + [None]
    with sqlite3.connect(tmp_path / "all.db") as connection:
        assert connection.execute("SELECT * FROM paid").fetchall() == [("writes",)]
    await outbox.close()
    await queues.close()


async def test_what_another_process_has_handled_and_not_sent_meanwhile_is_sent_by_who_meets_it_row_114(
    clock: VirtualClock, tmp_path: Path
) -> None:
    """It is met when the message's end is to write a record: that is given up, and the other's record goes on."""
    queues = LocalTransport(tmp_path / "all.db", synchronous="normal")
    outbox = SqliteOutbox(tmp_path / "all.db", synchronous="normal")
    handled = list[str]()

    async def handle(message: Pay, context: HandlerContext) -> None:
        handled.append(context.message_id)
        if len(handled) == 1:
            left = [Envelope("billing", "left", {Headers.MESSAGE_ID: "left"}, b"{}")]
            assert await outbox.transaction("sales", context.message_id).commit(left, clock.now())

    await queues.create_queues(["billing", "sales"])
    headers = {Headers.ENCLOSED_MESSAGE_TYPES: "Pay"}
    envelopes = [Envelope("sales", id_, {Headers.MESSAGE_ID: id_, **headers}, b"{}") for id_ in ("m-1", "m-2")]
    await queues.send(envelopes, clock.now())
    endpoint = Endpoint(
        "sales", transport=queues, outbox=Outbox(outbox), transaction_mode="receive_only", clock=clock, concurrency=1
    )
    endpoint.handler(Pay, name="Pay")(handle)
    async with endpoint:
        await clock.advance(30 * SECOND)
        assert await queues.queue_lengths() == {"billing": 1, "sales": 0, "error": 0}
    assert handled[0] == "m-1"
    assert (handled.count("m-1"), sorted({*handled})) == (1, ["m-1", "m-2"])
    assert await outbox.find_all("sales", ["m-1", "m-2"]) == [OutboxRecord((), is_dispatched=True)] * 2
    (left,) = await queues.receiver("billing").receive(9)
    assert left.envelope.message_id == "left"
    await outbox.close()
    await queues.close()


async def test_what_is_cut_off_by_force_is_undone_and_handled_after_the_next_start_row_114(world: World) -> None:
    started = anyio.Event()

    async def handle(message: Pay, context: HandlerContext) -> None:
        await world.pay(context)
        await context.send(Paid(), destination="billing")
        started.set()
        await anyio.sleep_forever()

    await world.deliver()
    with anyio.CancelScope() as scope:
        async with world.endpoint(handle):
            await started.wait()
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert (world.paid(), world.ids("billing")) == ([], [])
    async with world.endpoint():
        await world.clock.run_until_idle()
    assert world.paid() == ["m-1"]


async def test_a_message_handled_twice_at_once_is_committed_once_row_114(world: World) -> None:
    both, inside = anyio.Event(), list[str]()

    async def handle(message: Pay, context: HandlerContext) -> None:
        inside.append(context.message_id)
        if len(inside) == 2:
            both.set()
        await both.wait()
        await world.pay(context)
        await context.send(Paid(), destination="billing")

    await world.deliver()
    await world.deliver()
    elsewhere = SqliteOutbox(world.path, synchronous="normal")
    async with world.endpoint(handle, concurrency=1), world.endpoint(handle, concurrency=1, outbox=Outbox(elsewhere)):
        await world.clock.advance(SECOND)
    await elsewhere.close()
    assert inside == ["m-1", "m-1"]
    assert world.paid() == ["m-1"]
    assert len(set(world.ids("billing"))) == 1
    assert world.ids("sales") == []


async def test_an_id_is_known_to_the_endpoint_that_handled_it_only(world: World) -> None:
    """A published message has one id in the queues of all its subscribers."""
    await world.deliver()
    async with world.endpoint() as sales, world.endpoint(name="stock"):
        await sales.send(Pay(), destination="stock", message_id="m-1")
        await world.clock.advance(SECOND)
    assert world.paid() == ["m-1", "m-1"]


@pytest.mark.parametrize("left", [False, True], ids=["waits", "has left"])
async def test_what_was_stored_before_a_crash_is_stored_once_in_the_database_of_the_queues(
    world: World, tmp_path: Path, left: bool
) -> None:
    store, queues = SqliteStore(tmp_path / "q.db"), LocalTransport(tmp_path / "q.db")
    await queues.create_queues(["billing"])

    async def handle(message: Pay, context: HandlerContext) -> None:
        await context.send(Paid(), destination="billing", delay=SECOND / 10 if left else 60 * SECOND, message_id="mine")

    endpoint = world.endpoint(handle, transport=queues, delayed_delivery=DelayedDelivery(store))
    async with endpoint:
        world.outbox.faults.add(Fault("mark", errors.StoreUnavailable("now"), [1]))
        await endpoint.send(Pay(), message_id="m-1")
        await world.clock.advance(61 * SECOND)
        assert world.outbox.faults.calls["mark"] == 2
        assert await queues.lengths_of(["billing", "error", "sales"]) == {"billing": 1, "error": 0, "sales": 0}
    await store.close()
    await queues.close()


async def test_a_zone_is_kept_for_what_is_stored_at_a_second_attempt(world: World, tmp_path: Path) -> None:
    """The first attempt handled the message, and its callbacks were lost with it."""
    store, queues = SqliteStore(tmp_path / "q.db"), LocalTransport(tmp_path / "q.db")
    await queues.create_queues(["billing"])

    async def handle(message: Pay, context: HandlerContext) -> None:
        await context.send(Paid(), destination="billing", deliver_at="2090-07-01 09:00", zone="Europe/Paris")

    endpoint = world.endpoint(handle, transport=queues, delayed_delivery=DelayedDelivery(store))
    async with endpoint:
        world.outbox.faults.add(Fault("mark", errors.StoreUnavailable("now"), [1]))
        await endpoint.send(Pay(), message_id="m-1")
        await world.clock.advance(61 * SECOND)
        assert world.outbox.faults.calls["mark"] == 2
        assert [each.headers["zone"] for each in await wall_times.list_markers(store)] == ["Europe/Paris"]
    await store.close()
    await queues.close()


class Restarting(SqliteStore):
    """Is out of reach when it is asked for a message for the first time: no message is to blame for that."""

    asked = 0

    async def get(self, message_id: str) -> DelayedMessage | None:
        self.asked += 1
        if self.asked == 1:
            raise errors.StoreUnreachable("restarts")
        return await super().get(message_id)


@asynccontextmanager
async def under_a_known_id(
    world: World, tmp_path: Path, handle: Callable[..., Awaitable[None]]
) -> AsyncGenerator[tuple[Restarting, LocalTransport]]:
    """Have a handler take ``m-1`` while another message waits as ``mine`` in the database of the queues."""
    store, queues = Restarting(tmp_path / "q.db"), LocalTransport(tmp_path / "q.db")
    await queues.create_queues(["billing"])
    settings = {"transport": queues, "delayed_delivery": DelayedDelivery(store), "recoverability": ONE_TRY}
    async with world.endpoint(handle, **settings) as endpoint:
        await endpoint.send(Paid(1), destination="billing", delay=60 * SECOND, message_id="mine")
        await endpoint.send(Pay(), message_id="m-1")
        await world.clock.advance(2 * SECOND)
        yield store, queues
    await store.close()
    await queues.close()


async def test_a_send_under_the_id_of_another_message_is_an_error_of_the_handler_and_nothing_is_kept(
    world: World, tmp_path: Path
) -> None:
    """Found out after the commit, it would keep all else that was sent in the outbox."""

    async def handle(message: Pay, context: HandlerContext) -> None:
        await world.pay(context)
        await context.send(Paid(3), destination="billing")
        await context.send(Paid(2), destination="billing", delay=60 * SECOND, message_id="mine")

    async with under_a_known_id(world, tmp_path, handle) as (store, queues):
        assert store.asked == 2
        assert await queues.lengths_of(["error", "billing"]) == {"error": 1, "billing": 0}
        receiver = queues.receiver("error")
        (failed,) = await receiver.receive(10)
        await receiver.close()
        assert failed.envelope.headers[Headers.ERROR_CODE] == errors.DuplicateMessage.code
        assert (await world.outbox.find("sales", "m-1"), world.paid()) == (None, [])
        waiting = await store.get("mine")
        assert waiting is not None
        assert b"1" in waiting.body


async def test_an_isolated_send_that_was_refused_is_no_error_of_a_handler_that_takes_it(
    world: World, tmp_path: Path
) -> None:
    async def handle(message: Pay, context: HandlerContext) -> None:
        with pytest.raises(errors.DuplicateMessage):
            await context.send(Paid(2), destination="billing", delay=60 * SECOND, message_id="mine", isolated=True)
        await context.send(Paid(3), destination="billing")

    async with under_a_known_id(world, tmp_path, handle) as (_, queues):
        assert await queues.lengths_of(["error", "billing"]) == {"error": 0, "billing": 1}


# --- the delay counts from the send -----------------------------------------------------------------------------------


async def test_a_relative_delay_counts_from_the_send_and_not_from_the_dispatch(world: World) -> None:
    """Upstream counts from the dispatch (specification 7), so a crash between shifts what a handler has delayed."""
    await world.deliver()
    async with world.endpoint():
        calls = world.transport.faults.calls["send"]
        outage = Fault("send", errors.TransportUnavailable("out"), range(calls + 1, calls + 500))
        world.transport.faults.add(outage)
        await world.clock.advance(30 * SECOND)
        assert world.calls == ["m-1"]
        assert world.ids("billing") == []  # handled, and not sent yet
        world.transport.faults.clear()
        await world.clock.advance_to(world.start + 60 * SECOND)
        assert len(world.ids("billing")) == 1
        await world.clock.advance(MICROSECOND)
        now, later = world.arrived("billing")
    assert now.headers[Headers.TIME_SENT] == format_timestamp(world.start)
    assert later.due == world.start + 60 * SECOND
    assert later.headers[Headers.DELIVER_AT] == format_timestamp(world.start + 60 * SECOND)


async def test_what_falls_due_before_its_dispatch_is_delivered_by_it(world: World) -> None:
    await world.deliver()
    async with world.endpoint():
        calls = world.transport.faults.calls["send"]
        world.transport.faults.add(Fault("send", errors.TransportUnavailable("out"), range(calls + 1, calls + 500)))
        await world.clock.advance(120 * SECOND)
        world.transport.faults.clear()
        await world.clock.advance(30 * SECOND)
        assert sorted(str(each.due) for each in world.arrived("billing")) == [str(world.start + 60 * SECOND), "None"]


# --- what is no part of it --------------------------------------------------------------------------------------------


async def test_isolated_sends_and_sends_outside_a_handler_leave_at_once(world: World) -> None:
    async def handle(message: Pay, context: HandlerContext) -> None:
        await world.pay(context)
        await context.send(b"isolated", destination="billing", isolated=True)
        await context.send(b"with it", destination="billing")
        raise RuntimeError("after sending")

    await world.deliver()
    async with world.endpoint(handle, recoverability=ONE_TRY) as sales:
        await sales.send(b"outside", destination="billing")
        await world.clock.advance(SECOND)
    assert sorted(each.body for each in world.arrived("billing")) == [b"isolated", b"outside"]
    assert world.paid() == []
    assert world.ids("error") == ["m-1"]
    assert await world.outbox.find("sales", "m-1") is None


async def test_an_isolated_send_into_the_file_of_an_open_transaction_is_refused(
    clock: VirtualClock, tmp_path: Path
) -> None:
    path = tmp_path / "all.db"
    transport, outbox = LocalTransport(path, synchronous="normal"), SqliteOutbox(path, synchronous="normal")
    store = SqliteStore(path, synchronous="normal")
    await transport.create_queues(["billing"])
    raised: list[Exception] = []
    endpoint = Endpoint(
        "sales",
        transport=transport,
        outbox=Outbox(outbox),
        delayed_delivery=DelayedDelivery(store),
        transaction_mode=TransactionMode.RECEIVE_ONLY,
        clock=clock,
    )

    @endpoint.handler(Pay)
    async def handle(message: Pay, context: HandlerContext) -> None:
        await context.send(b"before", destination="billing", isolated=True)
        (await context.transaction()).execute("CREATE TABLE IF NOT EXISTS paid (message TEXT)")
        try:
            await context.send(b"during", destination="billing", isolated=True)
        except errors.NotSupported as error:
            raised.append(error)
        await context.send(b"after", destination="billing")
        await context.send(b"later", destination="billing", delay=SECOND)

    async with endpoint:
        await endpoint.send(Pay())
        await clock.advance(SECOND + MICROSECOND)
    assert len(raised) == 1
    received = await transport.receiver("billing").receive(10)
    assert sorted(each.envelope.body for each in received) == [b"after", b"before", b"later"]
    for each in (transport, store):
        await each.close()
    await outbox.close()


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_failing_handler_is_undone_and_retried_like_any_other(world: World) -> None:
    async def handle(message: Pay, context: HandlerContext) -> None:
        await world.handle(message, context)
        if len(world.calls) < 8:
            raise RuntimeError("not yet")

    await world.deliver()
    async with world.endpoint(handle):
        await world.clock.advance(11 * SECOND)
        assert len(world.calls) == 8
        assert world.paid() == ["m-1"]  # its id is that of the message, also after a delayed retry
        assert len(world.ids("billing")) == 1


async def test_what_cannot_be_sent_stays_in_the_outbox_until_its_message_comes_back(world: World) -> None:
    async def handle(message: Pay, context: HandlerContext) -> None:
        await world.pay(context)
        await context.send(b"to nowhere", destination="nowhere")

    await world.deliver()
    async with world.endpoint(handle, recoverability=ONE_TRY):
        await world.clock.advance(SECOND)
        (copy,) = world.arrived("error")
        assert "nowhere" in copy.headers[Headers.EXCEPTION_MESSAGE]
        assert world.paid() == ["m-1"]
        await world.queues.create_queues(["nowhere"])
        await world.deliver(headers={Headers.FAILED_QUEUE: "sales"})
        await world.clock.advance(SECOND)
    assert [each.body for each in world.arrived("nowhere")] == [b"to nowhere"]
    assert world.paid() == ["m-1"]


async def test_what_a_full_queue_does_not_take_goes_on_later_and_its_message_is_handled_once(world: World) -> None:
    full = errors.DestinationUnavailable("it is full")
    world.transport.faults.add(Fault("send", full, [world.transport.faults.calls["send"] + 1]))
    await world.deliver()
    async with world.endpoint(recoverability=ONE_TRY):
        await world.clock.advance(SECOND)
        assert world.ids("sales") == world.ids("billing") == world.ids("error") == []
        await world.clock.advance(11 * SECOND)
        assert len(world.ids("billing")) == 1
    assert world.calls == world.paid() == ["m-1"]


async def test_a_record_that_cannot_be_read_is_a_failure_of_its_message(world: World) -> None:
    await world.outbox.setup()
    world.query(
        "INSERT INTO postdate_outbox (endpoint, message_id, handled_at, operations) VALUES ('sales', 'm-1', 1, x'ff00')"
    )
    await world.deliver()
    await world.deliver("m-2")
    async with world.endpoint(recoverability=ONE_TRY, concurrency=1):
        await world.clock.advance(SECOND)
        assert world.paid() == ["m-2"]
        (copy,) = world.arrived("error")
    assert (copy.message_id, copy.headers[Headers.ERROR_CODE]) == ("m-1", "store_error")


@pytest.mark.parametrize("step", ["send", "mark", "commit"])
async def test_what_waiting_does_not_mend_is_a_failure_of_the_message(world: World, step: str) -> None:
    async def handle(message: Pay, context: HandlerContext) -> None:
        await world.pay(context)
        await context.send(Paid(), destination="billing")

    faults = world.outbox.faults if step == "mark" else world.transport.faults
    await world.deliver()
    faults.add(Fault(step, errors.NotSupported("not here"), [1]))
    async with world.endpoint(handle, recoverability=ONE_TRY):
        await world.clock.advance(SECOND)
    (copy,) = world.arrived("error")
    assert copy.headers[Headers.ERROR_CODE] == "not_supported"
    assert world.paid() == ["m-1"]


async def test_who_asks_for_the_transaction_after_its_end_is_refused_and_keeps_nobody_waiting(world: World) -> None:
    ended, refused = anyio.Event(), list[Exception]()

    async def too_late(context: HandlerContext) -> None:
        await ended.wait()
        try:
            await context.transaction()
        except errors.StoreError as error:
            refused.append(error)

    async def fail() -> None:
        raise ValueError("the first of two")

    async def handle(message: Pay, context: HandlerContext) -> None:
        if context.message_id == "m-1":
            await asyncio.gather(fail(), too_late(context))
        await world.pay(context)

    await world.deliver()
    async with world.endpoint(handle, recoverability=ONE_TRY):
        await world.clock.advance(SECOND)
        assert world.ids("error") == ["m-1"]
        ended.set()
        await world.clock.advance(SECOND)
        await world.deliver("m-2")
        await world.clock.advance(SECOND)
    assert [("has ended" in str(error)) for error in refused] == [True]
    assert world.paid() == ["m-2"]


async def test_an_outage_of_the_outbox_is_not_the_fault_of_the_message(world: World) -> None:
    async with world.endpoint(recoverability=ONE_TRY):
        calls = world.outbox.faults.calls["find"]
        world.outbox.faults.add(Fault("find", errors.StoreUnreachable("gone"), range(calls + 1, calls + 10)))
        world.outbox.faults.add(Fault("find", OSError("of a store of one's own"), [calls + 10]))
        await world.deliver()
        await world.clock.advance(60 * SECOND)
        assert world.paid() == ["m-1"]
    assert world.ids("error") == []


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with all"])
async def test_a_full_disk_that_the_statement_of_a_handler_meets_is_its_fault_only_if_no_other_meets_it(
    world: World, *, is_alone: bool
) -> None:
    async def handle(message: Pay, context: HandlerContext) -> None:
        world.calls.append(context.message_id)
        connection = await context.transaction()
        if context.message_id == "m-bad" or not is_alone:
            connection.execute("PRAGMA max_page_count = 1")
            try:
                connection.execute("INSERT INTO paid VALUES (zeroblob(1000000))")
            finally:
                connection.execute("PRAGMA max_page_count = 1073741823")
        await world.pay(context)

    async with world.endpoint(handle, recoverability=ONE_TRY):
        await world.deliver("m-bad")
        for number in range(20):
            await world.deliver(f"m-{number}")
            await world.clock.advance(SECOND)
        assert world.calls.count("m-bad") > MOST_OWN_FAILURES
        assert world.ids("error") == ["m-bad"] * is_alone
        assert len(world.paid()) == (20 if is_alone else 0)


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with all"])
@pytest.mark.parametrize(
    ("of", "step"),
    [(FaultyOutbox, "find"), (FaultyTransaction, "commit"), (FaultyOutbox, "mark_dispatched")],
    ids=["find", "commit", "mark"],
)
async def test_a_message_with_which_alone_the_outbox_is_in_trouble_again_and_again_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, of: type[Any], step: str, *, is_alone: bool
) -> None:
    """A damaged row; with damage that all meet, nobody is to blame."""
    call, tried = getattr(of, step), 0

    async def damaged(self: Any, *arguments: Any) -> Any:
        nonlocal tried
        if is_alone and "m-bad" not in repr(arguments):
            return await call(self, *arguments)
        tried += 1
        raise errors.StoreTroubled("page 7 is damaged")

    async with world.endpoint(recoverability=ONE_TRY):
        with monkeypatch.context() as patch:
            patch.setattr(of, step, damaged)
            await world.deliver("m-bad")
            for number in range(20):
                await world.deliver(f"m-{number}")
                await world.clock.advance(SECOND)
        await world.clock.advance(5 * SECOND)
        assert tried > MOST_OWN_FAILURES
        assert world.ids("error") == ["m-bad"] * is_alone
        assert set(world.paid()) >= {f"m-{number}" for number in range(20)}
        assert world.ids("sales") == []


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with all"])
async def test_trouble_with_a_question_about_what_is_to_be_stored_is_compared_with_other_such_questions(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_alone: bool
) -> None:
    """Where nobody is answered, it is an outage, though others end that ask nothing."""
    store, queues = SqliteStore(tmp_path / "q.db"), LocalTransport(tmp_path / "q.db")
    await queues.create_queues(["billing"])
    get = store.get

    async def damaged(message_id: str) -> DelayedMessage | None:
        if message_id == "of m-bad":
            raise errors.StoreTroubled("page 7 is damaged")
        return await get(message_id)

    async def handle(message: Pay, context: HandlerContext) -> None:
        delay = 600 * SECOND if is_alone or context.message_id == "m-bad" else None
        await context.send(Paid(), destination="billing", delay=delay, message_id=f"of {context.message_id}")

    monkeypatch.setattr(store, "get", damaged)
    settings = {"transport": queues, "delayed_delivery": DelayedDelivery(store), "recoverability": ONE_TRY}
    async with world.endpoint(handle, **settings) as endpoint:
        for message_id in ("m-bad", *(f"m-{number}" for number in range(20))):
            await endpoint.send(Pay(), message_id=message_id)
            await world.clock.advance(SECOND)
        assert (await queues.lengths_of(["error"]))["error"] == is_alone
        assert (await queues.lengths_of(["billing"]))["billing"] == (0 if is_alone else 20)
    await store.close()
    await queues.close()


async def test_past_its_time_to_be_received_a_new_message_is_discarded_and_a_handled_one_goes_on(world: World) -> None:
    lapses = {
        Headers.TIME_SENT: format_timestamp(world.start),
        Headers.TIME_TO_BE_RECEIVED: "00:00:05",
    }
    await world.deliver("m-1", headers=lapses)
    async with world.endpoint():
        calls = world.transport.faults.calls["send"]
        world.transport.faults.add(Fault("send", errors.TransportUnavailable("out"), range(calls + 1, calls + 500)))
        await world.clock.advance(30 * SECOND)
        assert (world.paid(), world.ids("billing")) == (["m-1"], [])
        world.transport.faults.clear()
        await world.deliver("m-2", headers=lapses)
        await world.deliver("m-3", headers={**lapses, Headers.TIME_SENT: "when?"})
        await world.clock.advance(20 * SECOND)
    assert world.paid() == ["m-1"]
    assert len(world.ids("billing")) == 1
    assert world.ids("error") == ["m-3"]


async def test_a_cancellation_that_a_handler_lets_out_is_a_failure_of_its_message(world: World) -> None:
    async def handle(message: Pay, context: HandlerContext) -> None:
        await world.pay(context)
        raise anyio.get_cancelled_exc_class()

    await world.deliver()
    async with world.endpoint(handle, recoverability=ONE_TRY):
        await world.clock.advance(SECOND)
    assert (world.ids("error"), world.paid()) == (["m-1"], [])


async def test_a_commit_that_the_database_refuses_is_a_failure_of_the_message(world: World) -> None:
    world.query("CREATE TABLE parent (id INTEGER PRIMARY KEY)")
    world.query("CREATE TABLE child (id INTEGER REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)")

    async def handle(message: Pay, context: HandlerContext) -> None:
        connection = await context.transaction()
        await world.pay(context)
        connection.execute("INSERT INTO child VALUES (1)")

    await world.outbox.store.setup()
    assert world.outbox.store._connection is not None
    world.outbox.store._connection.execute("PRAGMA foreign_keys = on")
    await world.deliver()
    async with world.endpoint(handle, recoverability=ONE_TRY):
        await world.clock.advance(SECOND)
    (copy,) = world.arrived("error")
    assert "FOREIGN KEY" in copy.headers[Headers.EXCEPTION_MESSAGE]
    assert world.paid() == []


async def test_the_copy_for_the_audit_is_part_of_what_leaves(world: World) -> None:
    await world.deliver()
    async with world.endpoint(audit=Audit("audit")):
        await world.clock.advance(SECOND)
    assert world.ids("audit") == ["m-1"]


# --- retention --------------------------------------------------------------------------------------------------------


async def test_what_is_older_than_the_retention_is_forgotten_in_batches(world: World) -> None:
    await world.outbox.setup()
    values = ",".join(f"('sales', 'older-{number}', 0, 0)" for number in range(CLEAN_UP_BATCH))
    world.query(f"INSERT INTO postdate_outbox (endpoint, message_id, handled_at, dispatched_at) VALUES {values}")
    await world.deliver()
    outbox = Outbox(world.outbox, retention=timedelta(days=2), clean_up_every=timedelta(hours=1))
    async with world.endpoint(outbox=outbox):
        await world.clock.advance(SECOND)
        assert world.outbox.faults.calls["remove"] == 2
        assert world.query("SELECT message_id FROM postdate_outbox") == [("m-1",)]
        world.outbox.faults.add(Fault("remove", errors.StoreUnavailable("now"), [3, 4]))
        await world.clock.advance(timedelta(days=2))
        assert len(world.query("SELECT * FROM postdate_outbox")) == 1
        await world.deliver()
        await world.clock.advance(timedelta(hours=1))
        assert world.query("SELECT * FROM postdate_outbox") == []
        assert world.paid() == ["m-1"]
        await world.deliver()  # a duplicate that comes after the retention is handled again
        await world.clock.advance(SECOND)
        assert world.paid() == ["m-1", "m-1"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"retention": timedelta(0)},
        {"retention": 7},
        {"retention": timedelta(days=36_501)},
        {"clean_up_every": -SECOND},
        {"clean_up_every": timedelta(days=1) + MICROSECOND},
    ],
)
def test_a_retention_that_cannot_be_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigurationError, match=next(iter(wrong))):
        Outbox(SqliteOutbox(tmp_path / "shop.db"), **wrong)


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "none", "sends_atomic_with_receive", TransactionMode.TRANSACTION_SCOPE])
def test_without_receive_only_an_outbox_is_refused(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "all.db"
    transport, store = LocalTransport(path), SqliteStore(path)
    with pytest.raises(errors.UnsupportedTransactionMode, match="transaction_mode='receive_only'"):
        Endpoint(
            "sales",
            transport=transport,
            delayed_delivery=DelayedDelivery(store),
            transaction_mode=mode,
            outbox=Outbox(SqliteOutbox(path)),
        )
    for file in (transport.file, store.file):
        file.close()


def test_who_handles_nothing_has_no_outbox(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigurationError, match="send-only"):
        Endpoint(
            "sales",
            transport=MemoryTransport(),
            transaction_mode="receive_only",
            send_only=True,
            outbox=Outbox(SqliteOutbox(tmp_path / "shop.db")),
        )


def test_what_is_no_storage_of_outboxes_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="SqliteOutbox or PostgresOutbox, not MemoryStore"):
        Outbox(MemoryStore())  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigurationError, match="synchronous"):
        SqliteOutbox("shop.db", synchronous="off")


async def test_without_an_outbox_there_is_no_transaction(clock: VirtualClock) -> None:
    queues = MemoryTransport()
    endpoint = Endpoint("sales", transport=queues, clock=clock, recoverability=ONE_TRY)

    @endpoint.handler(Pay)
    async def handle(message: Pay, context: HandlerContext) -> None:
        await context.transaction()

    async with endpoint:
        await endpoint.send(Pay())
        await clock.advance(SECOND)
    ((copy, _),) = queues.queues["error"].messages
    assert "has no outbox" in copy.headers[Headers.EXCEPTION_MESSAGE]


async def test_tables_are_only_created_on_request_and_missed_at_the_start(world: World) -> None:
    with pytest.raises(errors.StoreNotSetUp):
        async with world.endpoint(create_queues=False):
            pass


async def test_an_endpoint_starts_although_its_outbox_is_out_of_reach(world: World) -> None:
    await world.outbox.setup()
    world.outbox.faults.add(Fault("find", errors.StoreUnreachable("connection refused")))
    async with world.endpoint(create_queues=False):
        world.outbox.faults.clear()
        await world.deliver()
        await world.clock.advance(30 * SECOND)
        assert world.paid() == ["m-1"]


async def test_a_clean_up_that_gets_no_answer_does_not_keep_a_stop_waiting(clock: VirtualClock) -> None:
    class Silent(OutboxStore):
        async def remove_dispatched(self, endpoint: str, before: datetime, limit: int) -> int:
            await anyio.sleep_forever()
            raise AssertionError

    silent = Silent.__new__(type("SilentStore", (Silent,), dict.fromkeys(Silent.__abstractmethods__)))
    clean_up = OutboxCleanUp(Outbox(silent), "sales", clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clean_up.run)
        await clock.run_until_idle()
        clean_up.stop()
        await clock.advance(STOP_DEADLINE + SECOND)
