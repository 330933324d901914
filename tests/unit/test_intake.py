"""From the timeouts queue into the store (specification 1.6, rows 36, 40, 42, 52)."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import anyio
import pytest
from tests.waiting import until

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    Envelope,
    Headers,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    SqliteStore,
    TransactionMode,
    errors,
)
from postdate.backends.rabbitmq.consuming import Delivery
from postdate.backends.rabbitmq.content import join_parts
from postdate.backends.rabbitmq.delays import create_delayed_message, decode_intake_message
from postdate.backends.rabbitmq.wire import long_bytes, short_bytes
from postdate.backends.sqlite.transport import LocalReceiver
from postdate.clock import SystemClock
from postdate.core.receive.settling import is_stored
from postdate.endpoint.outgoing import timeouts_queue_envelope
from postdate.ports import Outcome, PendingState, Received, Settlement
from postdate.testing import Fault, FaultyStore, FaultyTransport, VirtualClock

SECOND = timedelta(seconds=1)
QUEUE = "sales.timeouts"
STORE_DOWN = errors.StoreUnavailable("the store does not answer")


@pytest.fixture
async def bench(make_bench):
    bench = make_bench()
    await bench.create_queues("billing")
    return bench


async def arrive(bench, message: DelayedMessage) -> Received:
    return await bench.put_in_timeouts_queue(timeouts_queue_envelope(message, QUEUE))


async def test_a_delayed_message_is_stored_and_taken_off_the_queue(bench) -> None:
    message = bench.message(due_in=60, headers={"own": "1"}, body=b"body")
    await bench.pump.handle(await arrive(bench, message))
    assert await bench.memory.get("m-1") == message
    assert bench.ids(QUEUE) == []


async def test_what_is_due_already_is_sent_on_and_never_stored_row_36(bench) -> None:
    await bench.pump.handle(await arrive(bench, bench.message(due_in=-0.000001)))
    assert bench.ids("billing") == ["m-1"]
    assert bench.store.faults.calls.total() == 0
    (arrived,) = bench.arrived("billing")
    assert not [name for name in arrived.headers if name.startswith(Headers.TIMEOUT_PROPERTIES_PREFIX)]


def following(bench, due_in: float, wall_in: float) -> DelayedMessage:
    """Return a message whose sender had other rules of Tokyo than this machine: it is due by them, or by those here."""
    shown = (bench.start + wall_in * SECOND + timedelta(hours=9)).replace(tzinfo=None)
    return bench.message(due_in=due_in, headers={Headers.WALL_TIME: f"{shown.isoformat()} Asia/Tokyo"})


async def test_whether_a_message_is_due_already_is_decided_by_the_rules_of_its_zone_here(bench) -> None:
    bench.intake = bench.intake_of(bench.memory)
    await bench.pump.handle(await arrive(bench, following(bench, due_in=60, wall_in=-60)))
    assert (await bench.memory.get("m-1"), bench.ids("billing")) == (None, ["m-1"])
    await bench.pump.handle(await arrive(bench, following(bench, due_in=-60, wall_in=60)))
    stored = await bench.memory.get("m-1")
    assert (stored and stored.due, bench.ids("billing")) == (bench.start + 60 * SECOND, ["m-1"])


async def test_where_a_store_cannot_follow_a_zone_a_message_keeps_its_instant_and_the_log_says_so(
    bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.pump.handle(await arrive(bench, following(bench, due_in=-60, wall_in=60)))
    assert (await bench.waiting(), bench.ids("billing")) == (None, ["m-1"])
    await bench.pump.handle(await arrive(bench, following(bench, due_in=60, wall_in=-60)))
    assert (await bench.waiting(), bench.ids("billing")) == (bench.start + 60 * SECOND, ["m-1"])
    assert bench.ids("error") == []
    said = [each.message for each in caplog.records if each.name == "postdate.intake"]
    assert len(said) == 2
    assert all("FaultyStore does not support messages with a wall time in Asia/Tokyo" in each for each in said)


async def test_what_is_due_this_very_instant_is_stored(bench) -> None:
    await bench.pump.handle(await arrive(bench, bench.message(due_in=0)))
    assert bench.ids("billing") == []
    assert await bench.waiting() == bench.start


async def test_a_failing_commit_after_storing_is_no_failure_of_the_message(bench) -> None:
    """Upstream, the redelivered message meets its own key, and a copy ends in the error queue beside the stored one."""
    received = await arrive(bench, bench.message(due_in=60))
    bench.transport.faults.add(Fault("commit", errors.TransportUnavailable("lost"), calls=[1]))
    await bench.handle(received)
    (again,) = await bench.receiver.receive(1)
    await bench.pump.handle(again)
    assert bench.ids("error") == bench.ids(QUEUE) == []
    assert (await bench.memory.statistics(bench.start)).pending == 1


async def test_what_was_stored_before_an_outage_of_its_queue_is_not_sent_as_well_once_it_is_due(bench) -> None:
    """Given back without being counted, it looks like one that comes for the first time."""
    received = await arrive(bench, bench.message(due_in=5))
    bench.transport.faults.add(Fault("commit", errors.TransportUnreachable("away"), calls=[1]))
    await bench.handle(received)
    await bench.clock.advance(10 * SECOND)
    (again,) = await bench.receiver.receive(1)
    assert again.failures == 0
    await bench.pump.handle(again)
    assert (bench.ids("billing"), bench.ids(QUEUE)) == ([], [])
    await bench.look()
    assert bench.ids("billing") == ["m-1"]


async def test_what_is_returned_before_its_failed_row_is_removed_waits_and_is_stored_again(bench) -> None:
    """Found stored, it was taken for a repetition; then the row was removed, and it was lost."""
    bench.intake = bench.intake_of(bench.memory)
    message = bench.message(due_in=-1)
    await bench.keep(message)
    (claim,) = await bench.memory.claim_due(bench.start, 1)
    returned = (await arrive(bench, message))._replace(failures=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.pump.handle, returned)
        await bench.clock.advance(10 * SECOND)
        assert bench.transport.faults.calls["commit"] == 0
        assert await bench.memory.finish([claim], Outcome.FAILED, bench.clock.now()) == 1
        await bench.clock.advance(2 * SECOND)
    assert bench.ids(QUEUE) == bench.ids("error") == []
    await bench.look()
    assert bench.ids("billing") == ["m-1"]


async def test_so_does_what_is_returned_while_a_clock_was_set_back(bench, tmp_path: Path) -> None:
    """The row was claimed when it was due, and is not due any more (simulator, seed 41021636)."""
    store = SqliteStore(tmp_path / "delays.db", synchronous="normal")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    bench.intake = bench.intake_of(store)
    message = bench.message(due_in=3600)
    await store.store(message, bench.start)
    (claim,) = await store.claim_due(bench.start + 3601 * SECOND, 1)
    returned = (await arrive(bench, message))._replace(failures=1)
    outcome = await bench.intake.handle(returned)
    assert outcome.completion is None, "it waits"
    assert await store.finish([claim], Outcome.FAILED, bench.clock.now()) == 1
    assert (await bench.intake.handle(returned)).completion is not None
    assert await store.get("m-1") == message
    assert (await bench.intake.handle(returned)).completion is not None, "it is a repetition now"
    assert await store.get("m-1") == message
    await store.close()


async def test_so_does_what_is_returned_while_its_row_is_removed(bench, tmp_path: Path, monkeypatch) -> None:
    """The row is there when it is looked for, and gone when it is asked whether it is claimed."""
    store = SqliteStore(tmp_path / "delays.db", synchronous="normal")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    bench.intake = bench.intake_of(store)
    message = bench.message(due_in=3600)
    await store.store(message, bench.start)
    (claim,) = await store.claim_due(bench.start + 3601 * SECOND, 1)
    observer = store.observer()
    assert observer is not None
    pending_state_of = observer.pending_state_of

    async def remove_first(message_id: str) -> PendingState | None:
        await store.finish([claim], Outcome.FAILED, bench.clock.now())
        return await pending_state_of(message_id)

    monkeypatch.setattr(type(observer), "pending_state_of", lambda _, message_id: remove_first(message_id))
    returned = (await arrive(bench, message))._replace(failures=1)
    assert (await bench.intake.handle(returned)).completion is None, "it waits"
    assert (await bench.intake.handle(returned)).completion is not None
    assert await store.get("m-1") == message
    await store.close()


async def test_what_is_returned_while_its_row_waits_again_takes_its_place(bench) -> None:
    """The row is due now, and has all its attempts."""
    bench.intake = bench.intake_of(bench.memory)
    message = bench.message(due_in=-1)
    await bench.keep(message)
    (claim,) = await bench.memory.claim_due(bench.start, 1)
    await bench.memory.retry_later(claim, bench.start + 60 * SECOND, bench.start, "away")
    await bench.pump.handle((await arrive(bench, message))._replace(failures=1))
    assert bench.ids(QUEUE) == bench.ids("error") == []
    row = await bench.memory.get("m-1")
    assert (row.due, row.number_of_failures) == (bench.clock.now(), 0)
    await bench.clock.advance(SECOND)
    await bench.look()
    assert bench.ids("billing") == ["m-1"]


async def test_what_expires_and_is_returned_while_its_row_waits_ends_with_that(bench) -> None:
    bench.intake = bench.intake_of(bench.memory)
    message = bench.message(due_in=-2, expires_at=bench.start - SECOND)
    await bench.keep(message)
    await bench.pump.handle((await arrive(bench, message))._replace(failures=1))
    assert bench.ids(QUEUE) == bench.ids("error") == []
    assert (await bench.memory.statistics(bench.start)).pending == 1


async def test_what_is_sent_again_in_another_trace_is_the_same_message(bench) -> None:
    first = bench.message(due_in=60)
    bench.intake = bench.intake_of(bench.memory)
    for number in (1, 2):
        trace = {
            Headers.TRACE_PARENT: f"00-{number:032}-{number:016}-01",
            "tracestate": f"a={number}",
            "baggage": f"b={number}",
        }
        await bench.pump.handle(await arrive(bench, replace(first, headers={**first.headers, **trace})))
    assert bench.ids(QUEUE) == bench.ids("error") == []


async def test_a_second_message_under_an_x_delay_id_is_passed_over_also_after_the_first_has_left(bench) -> None:
    """Its publisher says it again: properties and delay are new. Another body, or another destination, is an error."""
    bench.intake = bench.intake_of(bench.memory, read=partial(create_delayed_message, "postdate"))

    async def publish(body: bytes, milliseconds: int, to: str = "billing") -> None:
        said = {"x-delay": str(milliseconds), "x-delay-id": "mine", "x-delay-routing-key": to}
        table = b"".join(short_bytes(name.encode()) + b"S" + long_bytes(value.encode()) for name, value in said.items())
        at = int(bench.clock.now().timestamp())
        properties = join_parts({"headers": long_bytes(table), "timestamp": at.to_bytes(8, "big")})
        came = decode_intake_message(
            "postdate", QUEUE, Delivery(1, False, properties, body, short_bytes(b"postdate") + short_bytes(b"key"))
        )
        await bench.pump.handle(await bench.put_in_timeouts_queue(came.envelope))
        await bench.clock.advance(SECOND)

    def refused() -> list[tuple[bytes, str]]:
        return [(copy.body, copy.headers[Headers.ERROR_CODE]) for copy in bench.arrived("error")]

    await publish(b"1", 5_000)
    await publish(b"1", 4_000)
    assert ((await bench.memory.statistics(bench.start)).pending, refused()) == (1, [])
    stored = await bench.memory.get("mine")
    assert stored is not None
    assert Headers.MAY_REPEAT_SINCE not in stored.headers  # it says nothing to whoever gets the message
    await publish(b"2", 3_000)
    assert refused() == [(b"2", "duplicate_message")]
    await bench.clock.advance(5 * SECOND)
    await bench.look()
    await publish(b"1", 5_000)
    assert (bench.ids("billing"), len(refused())) == (["mine"], 1)
    await publish(b"3", 5_000, to="elsewhere")
    assert refused()[1:] == [(b"3", "duplicate_message")]
    assert (await bench.memory.statistics(bench.start)).pending == 0
    assert bench.ids(QUEUE) == []


async def test_what_comes_again_is_not_sent_past_the_store_that_may_have_sent_it(bench) -> None:
    message = bench.message(due_in=1)
    received = await arrive(bench, message)
    bench.transport.faults.add(Fault("commit", errors.TransportUnavailable("lost"), calls=[1]))
    await bench.handle(received)
    await bench.look()
    (again,) = await bench.receiver.receive(1)
    await bench.pump.handle(again)
    await bench.look()
    assert bench.ids("billing") == ["m-1"]
    assert bench.ids(QUEUE) == []


async def test_what_follows_a_zone_is_the_message_that_rules_of_before_had_due_at_another_time() -> None:
    """It went to the error queue: it had been delivered at the time by the rules of before (simulator, seed 17750)."""
    store, clock = MemoryStore(), VirtualClock()
    delivered = DelayedMessage("m-1", clock.now(), "billing", {Headers.WALL_TIME: "2027-01-31T12:00:00 Etc/UTC"}, b"")
    await store.store(delivered, clock.now())
    claims = await store.claim_due(clock.now() + SECOND, 1)
    await store.finish(claims, Outcome.DELIVERED, clock.now())
    assert await store.get("m-1") is None
    assert await is_stored(store, replace(delivered, due=clock.now() + timedelta(hours=1)))
    assert await is_stored(store, replace(delivered, due=clock.now() - timedelta(hours=1)))
    with pytest.raises(errors.DuplicateMessage):
        await is_stored(store, replace(delivered, due=clock.now() + timedelta(days=1)))
    with pytest.raises(errors.DuplicateMessage):
        await is_stored(store, replace(delivered, due=clock.now() + timedelta(hours=1), headers={}))


async def test_a_store_cut_off_by_force_leaves_the_message_in_its_queue_row_55(bench) -> None:
    """Upstream, in the lower transaction modes, the message is gone (specification 1.6)."""
    received = await arrive(bench, bench.message(due_in=60))

    async def hang(message: DelayedMessage, now: datetime) -> None:
        await anyio.sleep_forever()

    bench.memory.store = hang
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.pump.handle, received)
        await bench.clock.advance(SECOND)
        tasks.cancel_scope.cancel()
    await bench.receiver.close()
    assert bench.ids(QUEUE) == ["m-1"]


async def test_a_time_to_be_received_that_has_lapsed_does_not_discard_a_message_on_its_way_to_the_store(bench) -> None:
    """Upstream 2.x silently discards it (specification 1.6); whoever receives the message in the end decides."""
    headers = {Headers.TIME_SENT: "2020-01-01 00:00:00:000000 Z", Headers.TIME_TO_BE_RECEIVED: "00:00:01"}
    message = bench.message(due_in=60, headers=headers)
    await bench.pump.handle(await arrive(bench, message))
    assert await bench.memory.get("m-1") == message


async def test_in_mode_none_too_a_message_is_only_taken_off_once_it_is_stored_row_42(make_bench) -> None:
    """Upstream, a failing store loses it there (specification 6). The intake is the same in every mode."""
    bench = make_bench(number_of_retries=3)
    await bench.create_queues()
    bench.store.faults.add(Fault("store", STORE_DOWN, calls=[1, 2]))
    received = await arrive(bench, bench.message(due_in=600))
    for _ in range(2):
        await bench.handle(received)
        (received,) = await bench.receiver.receive(1)
    await bench.pump.handle(received)
    assert (await bench.memory.statistics(bench.start)).pending == 1


async def test_an_error_copy_returned_to_the_timeouts_queue_is_sent_to_its_destination_at_once_row_40(bench) -> None:
    await bench.keep(bench.message(due_in=-1, destination="nowhere", headers={"own": "1"}, body=b"body"))
    await bench.look()
    (copy,) = bench.arrived("error")
    await bench.queues.create_queues(["nowhere"])
    returned = Envelope(copy.headers[Headers.FAILED_QUEUE], copy.message_id, copy.headers, copy.body)
    await bench.pump.handle(await bench.put_in_timeouts_queue(returned))
    (arrived,) = bench.arrived("nowhere")
    assert (arrived.message_id, arrived.headers["own"], arrived.body) == ("m-1", "1", b"body")


async def test_queues_that_fail_with_an_error_of_their_own_fail_as_with_one_of_ours(bench) -> None:
    """Given back each time, it would come again for ever."""
    bench.transport.faults.add(Fault("commit", ValueError("a bug"), calls=[1]))
    await bench.handle(await arrive(bench, bench.message(due_in=-1)))
    assert bench.arrived("error")[0].headers[Headers.ERROR_CODE] == "transport_unavailable"
    assert bench.ids(QUEUE) == []


async def test_what_is_due_already_and_has_no_queue_goes_to_the_error_queue_row_38(bench) -> None:
    await bench.pump.handle(await arrive(bench, bench.message(due_in=-1, destination="nowhere")))
    assert bench.arrived("error")[0].headers[Headers.ERROR_CODE] == "queue_not_found"
    assert bench.ids(QUEUE) == []


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (1, 1), (2, 2), (3, 3)])
async def test_a_failing_store_is_tried_as_often_as_specified_row_42(make_bench, retries: int, attempts: int) -> None:
    bench = make_bench(number_of_retries=retries)
    await bench.create_queues()
    bench.store.faults.add(Fault("store", STORE_DOWN))
    received = await arrive(bench, bench.message(due_in=600))
    for attempt in range(1, attempts + 1):
        await bench.handle(received)
        assert bench.store.faults.calls["store"] == attempt
        if attempt < attempts:
            (received,) = await bench.receiver.receive(1)
    assert bench.arrived("error")[0].headers[Headers.ERROR_CODE] == "store_unavailable"
    assert bench.ids(QUEUE) == []


async def test_what_waits_for_a_store_goes_on_as_soon_as_the_poller_finds_that_it_is_back(clock) -> None:
    """Found by the simulator, seed 14356: after an outage of half a minute it waited for up to 10 s more."""
    queues, memory = MemoryTransport(), MemoryStore()
    store = FaultyStore(memory)
    for name in ("store", "claim_due", "next_attempt"):
        store.faults.add(Fault(name, errors.StoreUnreachable("away")))
    endpoint = Endpoint("sales", transport=queues, delayed_delivery=DelayedDelivery(store), clock=clock)
    async with endpoint:
        await endpoint.send(b"", destination="sales", delay=600 * SECOND, message_id="m-1")
        await clock.advance(45 * SECOND)
        tried = store.faults.calls["store"]
        store.faults.clear()
        await memory.store(DelayedMessage("wakes", clock.now() + 300 * SECOND, "sales"), clock.now())
        await clock.advance(SECOND / 10)
        assert store.faults.calls["store"] == tried + 1
        assert await memory.get("m-1") is not None


async def test_what_its_queue_would_drop_soon_goes_to_the_error_queue_while_the_store_is_away(bench) -> None:
    bench.store.faults.add(Fault("store", errors.StoreUnreachable("away")))
    received = await arrive(bench, bench.message(due_in=600))
    await bench.pump.handle(received._replace(is_dropped_if_returned=True))
    assert bench.ids("error") == ["m-1"]
    assert bench.ids(QUEUE) == []


@pytest.mark.parametrize(
    ("kind", "is_its_own"),
    [
        (errors.StoreTroubled, True),
        (errors.NotADatabase, True),
        (errors.StoreReadOnly, False),
        (errors.StoreFull, False),
    ],
)
@pytest.mark.parametrize("retries", [1, 3])
async def test_what_one_message_meets_again_and_again_while_others_are_stored_counts_against_it(
    clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[errors.PostdateError],
    *,
    is_its_own: bool,
    retries: int,
) -> None:
    """One damaged row was an outage without an end, with two lines in the log whenever another message was stored."""
    queues, memory = MemoryTransport(), MemoryStore()
    store = memory.store

    async def all_but_one(message: DelayedMessage, now: datetime) -> None:
        if message.message_id == "bad":
            raise kind("page 7 is damaged")
        await store(message, now)

    monkeypatch.setattr(memory, "store", all_but_one)
    settings = DelayedDelivery(memory, number_of_retries=retries)
    async with Endpoint("sales", transport=queues, delayed_delivery=settings, clock=clock) as endpoint:
        for message_id in ("bad", *(f"m-{number}" for number in range(20))):
            await endpoint.send(b"", destination="sales", delay=600 * SECOND, message_id=message_id)
            await clock.advance(SECOND)
        assert (await memory.statistics(clock.now())).pending == 20
        assert (await queues.queue_lengths())["error"] == is_its_own
        copies = [each.envelope for each in await queues.receiver("error").receive(9)] if is_its_own else []
    if is_its_own:
        assert [(each.message_id, each.headers[Headers.ERROR_CODE]) for each in copies] == [("bad", kind.code)]
        assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) < 20
        assert (await queues.queue_lengths())["sales.timeouts"] == 0


async def test_a_message_is_in_trouble_alone_only_while_others_are_stored(
    bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From then on it waits as in any outage: that is told, and ends for it when another is stored."""
    store, works = bench.memory.store, True

    async def all_but_one(message: DelayedMessage, now: datetime) -> None:
        if message.message_id == "m-bad" and not works:
            raise errors.StoreTroubled("page 7 is damaged")
        await store(message, now)

    async def another_is_stored(number: int) -> None:
        await bench.pump.handle(await arrive(bench, bench.message(f"m-{number}", 600)))

    monkeypatch.setattr(bench.memory, "store", all_but_one)
    await another_is_stored(0)
    works = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.pump.handle, await arrive(bench, bench.message("m-bad", 600)))
        await bench.clock.advance(SECOND / 2)
        assert "other messages are stored" not in caplog.text  # it has failed once: it may be chance
        await another_is_stored(1)
        await bench.clock.advance(SECOND / 2)
        assert "other messages are stored" in caplog.text
        assert bench.store_breaker.deadline is None
        await bench.clock.advance(35 * SECOND)
        assert bench.critical_errors == ["store"]
        works = True
        await another_is_stored(2)
        await bench.clock.advance(SECOND / 10)
        assert await bench.memory.get("m-bad") is not None
        tasks.cancel_scope.cancel()
    assert bench.ids("error") == []


async def test_what_a_store_refuses_while_it_takes_others_is_tried_once_a_second(
    bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not whenever another is stored, which may be thousands of times a second."""
    store, tries = bench.memory.store, 0

    async def all_but_one(message: DelayedMessage, now: datetime) -> None:
        nonlocal tries
        if message.message_id == "m-bad":
            tries += 1
            raise errors.StoreFull("there is room for small ones only")
        await store(message, now)

    monkeypatch.setattr(bench.memory, "store", all_but_one)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.pump.handle, await arrive(bench, bench.message("m-bad", 600)))
        for number in range(40):
            await bench.clock.advance(SECOND / 20)
            await bench.pump.handle(await arrive(bench, bench.message(f"m-{number}", 600)))
        tasks.cancel_scope.cancel()
    assert 2 <= tries <= 4
    assert (await bench.memory.statistics(bench.start)).pending == 40


async def test_a_call_that_fails_just_after_a_store_is_back_is_soon_tried_again(bench) -> None:
    """It hung until then: what failed before is no reason to wait as long as in an outage."""
    bench.store.faults.add(Fault("store", errors.StoreUnreachable("away")))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.pump.handle, await arrive(bench, bench.message("m-1", 600)))
        await bench.clock.advance(45 * SECOND)
        bench.intake.outage.resume()
        await bench.clock.advance(SECOND / 10)
        bench.store.faults.clear()
        await bench.clock.advance(SECOND)
        assert await bench.memory.get("m-1") is not None
        tasks.cancel_scope.cancel()


async def test_without_an_error_queue_a_bad_message_stays_in_its_queue_row_41(
    bench, caplog: pytest.LogCaptureFixture
) -> None:
    del bench.queues.queues["error"]
    received = await bench.put_in_timeouts_queue(Envelope(QUEUE, "m-1"))
    await bench.handle(received)
    (again,) = await bench.receiver.receive(1)
    assert (again.envelope.message_id, again.failures) == ("m-1", 1)
    assert "no queue 'error'" in caplog.text


async def test_in_one_database_storing_and_taking_off_are_one_transaction_row_52(bench, tmp_path: Path) -> None:
    path = tmp_path / "one.db"
    store, transport = SqliteStore(path, synchronous="normal"), LocalTransport(path, synchronous="normal")
    await transport.create_queues([QUEUE, "error"])
    faulty = FaultyTransport(transport, Fault("commit", errors.TransportUnavailable("lost"), calls=[2], after=True))
    receiver, bench.transport = faulty.receiver(QUEUE), faulty
    bench.intake, bench.pump = bench.intake_of(store), bench.pump_of(receiver)
    await transport.send([timeouts_queue_envelope(bench.message(f"m-{n}", 60), QUEUE) for n in range(2)], bench.start)
    first, second = await receiver.receive(10)
    await bench.handle(first)
    await bench.handle(second)  # The answer to the second commit is lost, its effect is not.
    assert (await store.statistics(bench.start)).pending == 2
    assert await transport.queue_lengths() == {QUEUE: 0, "error": 0}
    await receiver.close()
    await store.close()
    await transport.close()


async def test_in_one_database_what_arrives_together_is_taken_off_together(bench, tmp_path: Path) -> None:
    """With what is due already among it; one under a used id spoils none of the others. ADR 26."""
    path, batches = tmp_path / "one.db", list[int]()
    store, transport = SqliteStore(path, synchronous="normal"), LocalTransport(path, synchronous="normal")
    settle = LocalReceiver.settle

    async def noted(self: LocalReceiver, endings: Sequence[Settlement]) -> Sequence[Exception | None]:
        batches.append(len(endings))
        return await settle(self, endings)

    def soon(id_: str, due_in: float, body: bytes = b"") -> Envelope:
        now = SystemClock().now()
        return timeouts_queue_envelope(DelayedMessage(id_, now + due_in * SECOND, "billing", body=body), QUEUE)

    async def is_done() -> bool:
        return (await transport.queue_lengths())[QUEUE] == 0

    await transport.create_queues([QUEUE, "billing", "error"])
    await store.store(DelayedMessage("m-7", SystemClock().now() + 600 * SECOND, "billing", body=b"first"), bench.start)
    sent = [soon(f"m-{n}", -1 if n % 10 == 1 else 600, b"second") for n in range(200)]
    await transport.send(sent, SystemClock().now())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalReceiver, "settle", noted)
        async with Endpoint("sales", transport=transport, delayed_delivery=DelayedDelivery(store), send_only=True):
            await until(is_done)
    assert max(batches) >= 10
    assert (await store.statistics(bench.start)).pending == 180
    assert await transport.queue_lengths() == {QUEUE: 0, "billing": 20, "error": 1}
    await store.close()
    await transport.close()
