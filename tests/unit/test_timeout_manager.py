"""The timeout manager of an endpoint, in memory on a virtual clock (specification 4)."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.timeouts_bench import DISPATCHER, MICROSECOND, SECOND, TIMEOUTS, Bench, FaultyTimeouts, Pay, deferred

from postdate import (
    DelayedDelivery,
    Endpoint,
    Envelope,
    ExternalTimeoutManager,
    Headers,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    Recoverability,
    TimeoutManager,
    TransactionMode,
    errors,
)
from postdate.backends.memory.database import MemoryTimeouts
from postdate.backends.postgres.errors import transport_error_of
from postdate.endpoint.timeout_manager import is_same_queue
from postdate.messages import format_timestamp
from postdate.ports.timeouts import Timeout
from postdate.ports.transports import TransportCapabilities
from postdate.testing import Fault, VirtualClock

SAGA = uuid.UUID("7d9f2f3e-5a1c-4d2e-9b43-0f6c2d6a1e01")
GONE = errors.StoreUnreachable("connection refused")


@pytest.fixture
def bench(clock: VirtualClock) -> Bench:
    return Bench(clock)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_the_wait_is_two_minutes_and_may_be_zero_but_not_negative_row_103() -> None:
    assert TimeoutManager(MemoryTimeouts()).time_to_wait_before_triggering_critical_error == timedelta(minutes=2)
    TimeoutManager(MemoryTimeouts(), time_to_wait_before_triggering_critical_error=timedelta(0))
    for wrong in (-MICROSECOND, 120):
        with pytest.raises(errors.ConfigurationError, match="timedelta of zero or more"):
            TimeoutManager(MemoryTimeouts(), time_to_wait_before_triggering_critical_error=wrong)  # type: ignore[arg-type]


def test_concurrency_is_at_least_two_and_can_be_set() -> None:
    assert TimeoutManager(MemoryTimeouts()).messages_at_once >= 2
    assert TimeoutManager(MemoryTimeouts(), concurrency=1).messages_at_once == 1
    with pytest.raises(errors.ConfigurationError, match="concurrency must be a whole number, 1 or more, not 0"):
        TimeoutManager(MemoryTimeouts(), concurrency=0)


def test_a_storage_without_timeouts_is_refused_and_says_what_to_do_row_104() -> None:
    with pytest.raises(errors.ConfigurationError, match=r"MemoryStore cannot keep timeouts: .*delayed_delivery="):
        TimeoutManager(MemoryStore())  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigurationError, match=r"must be an async method"):
        TimeoutManager(type("Wrong", (MemoryTimeouts,), {"peek": lambda self, timeout_id: None})())
    methods = {name: value for name, value in vars(MemoryTimeouts).items() if not name.startswith("__")}
    for missing, said in (("claim", r"it has no method claim\(\)"), ("database", "it has no property database")):
        persister = type("Mine", (), {name: value for name, value in methods.items() if name != missing})()
        with pytest.raises(errors.ConfigurationError, match=rf"Mine cannot keep timeouts: {said}"):
            TimeoutManager(persister)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigurationError, match=r"TimeoutManager\(persister\)"):
        Endpoint("sales", transport=MemoryTransport(), timeout_manager=MemoryTimeouts())  # type: ignore[arg-type]


def test_settings_that_contradict_each_other_are_refused(bench: Bench) -> None:
    delayed_delivery = DelayedDelivery(MemoryStore())
    with pytest.raises(errors.ConfigurationError, match="external timeout manager"):
        bench.endpoint(timeout_manager=ExternalTimeoutManager("o.Timeouts"), delayed_delivery=delayed_delivery)
    with pytest.raises(errors.ConfigurationError, match="drain_timeout_manager"):
        bench.endpoint(delayed_delivery=replace(delayed_delivery, drain_timeout_manager=True))
    with pytest.raises(errors.ConfigurationError, match="shorter name"):
        bench.endpoint("s" * 185)
    with pytest.raises(errors.ConfigurationError, match="external timeout manager"):
        ExternalTimeoutManager(" ")


async def test_scope_is_refused_where_storage_and_queues_do_not_share_a_database(bench: Bench, tmp_path) -> None:
    transport = LocalTransport(tmp_path / "queues.db", synchronous="normal")
    try:
        with pytest.raises(errors.UnsupportedTransactionMode, match="FaultyTimeouts and LocalTransport"):
            bench.endpoint(transport=transport, transaction_mode="transaction_scope")
        assert bench.endpoint(transport=transport).mode is TransactionMode.SENDS_ATOMIC_WITH_RECEIVE
    finally:
        await transport.close()


# --- routing ----------------------------------------------------------------------------------------------------------


async def test_row_90_both_queues_are_created_only_when_asked_to(bench: Bench) -> None:
    async with bench.endpoint():
        assert {TIMEOUTS, DISPATCHER, "sales", "error"} <= bench.queues.queues.keys()
    others = MemoryTransport()
    await others.create_queues(["sales"])
    async with bench.endpoint(transport=others, create_queues=False):
        await bench.clock.run_until_idle()
        assert others.queues.keys() == {"sales"}


async def test_row_91_a_delayed_send_goes_to_the_timeouts_queue_with_two_headers(bench: Bench) -> None:
    async with bench.endpoint(timeout_manager=ExternalTimeoutManager("other.Timeouts")) as endpoint:
        await bench.queues.create_queues(["other.Timeouts", "billing"])
        id_ = await endpoint.send(Pay(1), destination="billing", delay=5 * SECOND)
        (sent,) = bench.arrived("other.Timeouts")
        assert TIMEOUTS not in bench.queues.queues
    assert sent.headers[Headers.EXPIRE] == format_timestamp(bench.start + 5 * SECOND)
    assert sent.headers[Headers.ROUTE_EXPIRED_TIMEOUT_TO] == "billing"
    assert sent.message_id == sent.headers[Headers.MESSAGE_ID] == id_
    assert not [key for key in sent.headers if key.startswith(Headers.TIMEOUT_PROPERTIES_PREFIX)]


async def test_a_send_only_endpoint_delays_through_another_ones_timeout_manager(bench: Bench) -> None:
    manager = ExternalTimeoutManager(TIMEOUTS)
    shop = bench.endpoint("shop", timeout_manager=manager, send_only=True)
    shop.route(Pay, "sales", name="Pay")
    async with bench.endpoint(), shop:
        await shop.send(Pay(1), delay=5 * SECOND)
        await bench.clock.advance(6 * SECOND)
    assert bench.amounts == [1]


async def test_a_send_only_endpoint_may_run_one_and_has_no_queue_of_its_own(bench: Bench) -> None:
    shop = bench.endpoint("shop")
    async with bench.endpoint(send_only=True), shop:
        await bench.put(deferred(bench.start + 5 * SECOND, destination="shop", amount=2))
        await bench.clock.advance(6 * SECOND)
    assert bench.amounts == [2]
    assert "sales" not in bench.queues.queues


async def test_delay_and_time_to_be_received_are_refused_together_and_without_a_manager_any_delay(
    bench: Bench,
) -> None:
    async with bench.endpoint() as endpoint:
        with pytest.raises(errors.DelayConflict, match="Pay has both"):
            await endpoint.send(Pay(1), delay=SECOND, time_to_be_received=SECOND)
    async with bench.endpoint(timeout_manager=None) as endpoint:
        with pytest.raises(errors.DelayedDeliveryNotConfigured):
            await endpoint.send(Pay(1), delay=SECOND)


@pytest.mark.parametrize("manager", ["its own", "another one's"])
async def test_the_clocks_of_a_zone_are_refused_in_one_sentence_also_for_what_is_due_already(
    bench: Bench, manager: str
) -> None:
    other = ExternalTimeoutManager("other.Timeouts")
    settings: dict[str, Any] = {} if manager == "its own" else {"timeout_manager": other}
    async with bench.endpoint(**settings) as endpoint:
        for year in (2000, 2999):
            with pytest.raises(errors.NotSupported) as refused:
                await endpoint.send(Pay(1), deliver_at=f"{year}-07-01 09:00", zone="Europe/Paris")
            said = "a timeout manager keeps instants: give deliver_at with its offset, and no zone"
            assert str(refused.value) == said
    assert bench.amounts == []


async def test_a_message_is_handled_when_due_never_earlier_and_the_look_waits_for_it(bench: Bench) -> None:
    async with bench.endpoint() as endpoint:
        await endpoint.send(Pay(120), delay=120 * SECOND)
        await endpoint.send(Pay(7), delay=7 * SECOND)
        await bench.clock.advance(7 * SECOND)
        assert bench.handled == []
        await bench.clock.advance(MICROSECOND)
        ((_, _, context),) = bench.handled
        looks = bench.timeouts.faults.calls["next_chunk"]
        await bench.clock.advance(60 * SECOND)
        assert bench.timeouts.faults.calls["next_chunk"] - looks <= 2 * 60 / 5  # not each second
        await bench.clock.advance(60 * SECOND)
    assert bench.amounts == [7, 120]
    assert context.headers[Headers.EXPIRE] == format_timestamp(bench.start + 7 * SECOND)
    assert context.headers[Headers.ROUTE_EXPIRED_TIMEOUT_TO] == "sales"
    assert context.headers[Headers.TIME_SENT] == format_timestamp(bench.start + 7 * SECOND + MICROSECOND)


async def test_what_a_failing_handler_has_delayed_never_leaves_row_52(bench: Bench) -> None:
    endpoint = bench.endpoint(recoverability=Recoverability(immediate_retries=0, delayed_retries=0))

    @endpoint.handler(Pay, name="Pay")
    async def fail(message: Pay, context) -> None:
        await context.send(Pay(2), delay=60 * SECOND)
        await context.send(Pay(3), delay=60 * SECOND, isolated=True)
        if message.amount == 1:
            raise RuntimeError("no")

    async with endpoint:
        await endpoint.send(Pay(1))
        await bench.clock.run_until_idle()
        assert [each.body for each in bench.stored()] == [b'{"amount":3}']


async def test_delayed_retries_go_through_the_timeout_manager(bench: Bench) -> None:
    endpoint = bench.endpoint(recoverability=Recoverability(immediate_retries=0, delayed_retries=2))
    attempts: list[str] = []

    @endpoint.handler(Pay, name="Pay")
    async def fail(message: Pay, context) -> None:
        attempts.append(context.message_id)
        raise RuntimeError("no")

    async with endpoint:
        id_ = await endpoint.send(Pay(1))
        await bench.clock.advance(9 * SECOND)
        assert attempts == [id_]
        await bench.clock.advance(22 * SECOND)
        (copy,) = bench.arrived("error")
    assert attempts == [id_] * 3
    assert (copy.headers[Headers.MESSAGE_ID], copy.headers[Headers.FAILED_QUEUE]) == (id_, "sales")


async def test_a_delayed_retry_does_not_prolong_a_time_to_be_received(bench: Bench) -> None:
    """The time sent is written anew at dispatch, so what counts from it would begin again."""
    endpoint = bench.endpoint(recoverability=Recoverability(immediate_retries=0, delayed_retries=3))

    @endpoint.handler(Pay, name="Pay")
    async def fail(message: Pay, context) -> None:
        bench.handled.append((message, bench.clock.now(), context))
        raise RuntimeError("no")

    async with endpoint:
        await endpoint.send(Pay(1), time_to_be_received=25 * SECOND)
        await bench.clock.advance(120 * SECOND)
        assert bench.arrived("error") == []
    assert [at - bench.start for _, at, _ in bench.handled][::2] == [timedelta(0), 10 * SECOND + MICROSECOND]


# --- the store step ---------------------------------------------------------------------------------------------------


async def test_row_92_a_timeout_has_all_its_fields(bench: Bench) -> None:
    headers = {Headers.SAGA_ID: str(SAGA), "own": "ключ 🔑"}
    envelope = deferred(bench.start + 60 * SECOND, "m-1", "billing", headers=headers)
    async with bench.endpoint():
        await bench.put(envelope)
        await bench.clock.run_until_idle()
        (timeout,) = bench.stored()
    assert (timeout.due, timeout.destination, timeout.body) == (bench.start + 60 * SECOND, "billing", envelope.body)
    assert (timeout.saga_id, timeout.owner) == (str(SAGA), "sales")
    assert timeout.headers == {**envelope.headers, Headers.MESSAGE_ID: "m-1"}


async def test_a_message_received_twice_is_stored_once_and_two_of_one_id_are_two(bench: Bench) -> None:
    first = deferred(bench.start + 60 * SECOND, "m-1")
    async with bench.endpoint():
        await bench.put(first, first, deferred(bench.start + 61 * SECOND, "m-1"), replace(first, message_id="m-2"))
        await bench.clock.run_until_idle()
        assert len(bench.stored()) == 3


@pytest.mark.parametrize(
    ("headers", "code", "says"),
    [
        ({Headers.EXPIRE: ""}, "not_a_delayed_message", "Non timeout message arrived at the timeout manager"),
        ({Headers.EXPIRE: "soon"}, "invalid_timestamp", "'soon'"),
        ({Headers.ROUTE_EXPIRED_TIMEOUT_TO: ""}, "not_a_delayed_message", "its destination is unknown"),
        ({Headers.ROUTE_EXPIRED_TIMEOUT_TO: "q" * 201}, "invalid_message", "201 characters"),
        ({Headers.SAGA_ID: "seven"}, "invalid_message", "'seven', which is not a UUID"),
        ({Headers.CLEAR_TIMEOUTS: "True"}, "not_a_delayed_message", "does not name the saga"),
        ({Headers.CLEAR_TIMEOUTS: "True", Headers.SAGA_ID: "seven"}, "invalid_message", "not a UUID"),
    ],
)
async def test_row_92_what_is_no_timeout_goes_to_the_error_queue_at_once(
    bench: Bench, headers: dict[str, str], code: str, says: str
) -> None:
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 60 * SECOND, "m-1", headers=headers))
        await bench.clock.run_until_idle()
        (copy,) = bench.arrived("error")
        assert bench.arrived(TIMEOUTS) == bench.stored() == []
    assert (copy.message_id, copy.headers[Headers.ERROR_CODE]) == ("m-1", code)
    assert says in copy.headers[Headers.EXCEPTION_MESSAGE]
    assert copy.headers[Headers.FAILED_QUEUE] == TIMEOUTS


async def test_an_error_copy_that_the_queues_refuse_as_too_large_goes_there_in_brief(bench: Bench) -> None:
    """Azure's queues take 64 KiB of a copy, too: otherwise the message would come back for ever."""
    bench.transport.faults.add(Fault("commit", errors.MessageTooLarge("64 KiB"), calls=[1]))
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 60 * SECOND, "m-1", headers={Headers.EXPIRE: ""}))
        await bench.clock.run_until_idle()
        (copy,) = bench.arrived("error")
        assert bench.arrived(TIMEOUTS) == []
    assert Headers.EXCEPTION_STACK_TRACE not in copy.headers
    assert copy.headers[Headers.FAILED_QUEUE] == TIMEOUTS


@pytest.mark.parametrize("due_in", [0.9, 1, 0, -3600])
async def test_row_93_what_is_due_within_a_second_is_never_stored_and_not_early_either(
    bench: Bench, due_in: float
) -> None:
    async with bench.endpoint():
        await bench.put(deferred(bench.start + due_in * SECOND))
        await bench.clock.run_until_idle()
        assert bench.amounts == ([1] if due_in <= 0 else [])
        await bench.clock.advance(max(due_in, 0) * SECOND)
        assert bench.amounts == [1]
    assert bench.timeouts.faults.calls["add"] == 0


async def test_what_waits_in_hand_is_stored_when_the_clock_is_set_back(bench: Bench) -> None:
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 0.9 * SECOND))
        await bench.clock.run_until_idle()
        bench.clock.step(timedelta(hours=-1))
        await bench.clock.advance(2 * SECOND)
        assert len(bench.stored()) == 1
        await bench.clock.advance(timedelta(hours=1))
    assert bench.amounts == [1]


async def test_what_waits_in_hand_is_given_back_when_the_endpoint_stops(bench: Bench) -> None:
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 0.9 * SECOND))
        await bench.clock.run_until_idle()
    assert len(bench.arrived(TIMEOUTS)) == 1
    async with bench.endpoint():
        await bench.clock.advance(SECOND)
    assert bench.amounts == [1]


async def test_row_94_without_a_destination_it_goes_where_replies_go(bench: Bench) -> None:
    headers = {Headers.ROUTE_EXPIRED_TIMEOUT_TO: "", Headers.REPLY_TO_ADDRESS: "sales"}
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 3 * SECOND, "m-1", headers=headers))
        await bench.clock.advance(4 * SECOND)
    assert bench.amounts == [1]


async def test_timeouts_of_a_saga_are_cleared_and_no_others(bench: Bench) -> None:
    endpoint = bench.endpoint()
    async with endpoint:
        of_saga = {Headers.SAGA_ID: str(SAGA).upper()}
        await bench.put(
            deferred(bench.start + 5 * SECOND, amount=1, headers=of_saga),
            deferred(bench.start + 6 * SECOND, amount=2, headers=of_saga),
            deferred(bench.start + 7 * SECOND, amount=3, headers={Headers.SAGA_ID: str(uuid.UUID(int=0))}),
            deferred(bench.start + 8 * SECOND, amount=4, headers={Headers.SAGA_ID: str(uuid.uuid4())}),
        )
        await bench.clock.run_until_idle()
        order = endpoint.outgoing.clear_order(SAGA)
        assert order is not None
        assert order.headers[Headers.CONTROL_MESSAGE] == order.headers[Headers.CLEAR_TIMEOUTS] == "True"
        await endpoint.outgoing.send([order])
        await bench.clock.advance(9 * SECOND)
        assert bench.arrived("error") == []
    assert bench.amounts == [3, 4]


# --- the look for due timeouts ----------------------------------------------------------------------------------------


async def test_row_96_each_due_timeout_is_told_of_by_one_control_message(bench: Bench) -> None:
    timeouts = [await bench.stored_elsewhere(amount, -60 + amount) for amount in range(3)]
    bench.timeouts.faults.add(Fault("peek", GONE))
    async with bench.endpoint():
        await bench.clock.advance(60 * SECOND)
    told = [each.headers for each in bench.arrived(DISPATCHER)]  # given back
    assert sorted(each[Headers.TIMEOUT_ID] for each in told) == sorted(each.timeout_id for each in timeouts)
    assert [each[Headers.CONTROL_MESSAGE] for each in told] == ["True"] * 3


async def test_row_97_a_control_message_that_could_not_be_sent_is_sent_by_the_next_look(bench: Bench) -> None:
    for amount in range(3):
        await bench.stored_elsewhere(amount, -60)
    bench.transport.faults.add(Fault("send", errors.TransportUnavailable("no"), calls=[1]))
    async with bench.endpoint():
        await bench.clock.run_until_idle()
        assert bench.handled == []
        await bench.clock.advance(2 * SECOND)
    assert sorted(bench.amounts) == [0, 1, 2]


async def test_row_98_what_is_committed_late_with_an_earlier_due_time_fires_without_a_restart(bench: Bench) -> None:
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 30 * SECOND, amount=30))
        await bench.clock.advance(31 * SECOND)
        assert bench.amounts == [30]
        await bench.stored_elsewhere(20, 20)
        await bench.stored_elsewhere(29, 30)  # at the very time that the look has passed
        await bench.stored_elsewhere(-9, -9 * 365 * 86_400)
        await bench.clock.advance(5 * SECOND)
    assert sorted(bench.amounts) == [-9, 20, 29, 30]


async def test_row_98_what_another_process_stores_is_found_within_seconds(bench: Bench) -> None:
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 3600 * SECOND, amount=1))
        await bench.clock.advance(60 * SECOND)
        await bench.stored_elsewhere(61, 61)
        await bench.clock.advance(6 * SECOND)
        assert bench.amounts == [61]


async def test_row_98_looking_again_announces_nothing_twice(bench: Bench) -> None:
    """While the storage refuses to tell of a timeout its control message waits; there is never another."""
    await bench.stored_elsewhere(1, -1)
    bench.timeouts.faults.add(Fault("peek", GONE))
    async with bench.endpoint():
        await bench.clock.advance(timedelta(minutes=30))
        bench.timeouts.faults.clear()
        await bench.clock.advance(2 * SECOND)
    assert bench.amounts == [1]
    assert bench.transport.faults.calls["send"] == 2  # the control message, and the message


async def test_row_98_a_timeout_whose_control_message_failed_for_good_is_announced_at_the_next_start(
    bench: Bench,
) -> None:
    await bench.queues.create_queues(["sales"])
    await bench.stored_elsewhere(1, -1, headers={Headers.ROUTE_EXPIRED_TIMEOUT_TO: "missing"})
    async with bench.endpoint():
        await bench.clock.advance(timedelta(minutes=10))
        (copy,) = bench.arrived("error")
        assert copy.headers[Headers.FAILED_QUEUE] == DISPATCHER
        await bench.queues.create_queues(["missing"])
        await bench.put(Envelope(DISPATCHER, copy.message_id, copy.headers))
        await bench.clock.run_until_idle()
        (arrived,) = bench.arrived("missing")
        assert arrived.body == b'{"amount":1}'
        assert bench.stored() == []


async def test_row_105_what_fell_due_while_the_endpoint_was_stopped_is_sent_at_its_next_start(bench: Bench) -> None:
    async with bench.endpoint() as endpoint:
        await endpoint.send(Pay(1), delay=timedelta(days=3))
        await bench.clock.run_until_idle()
    bench.clock.step(timedelta(days=3000))
    assert bench.handled == []
    async with bench.endpoint():
        await bench.clock.run_until_idle()
    assert bench.amounts == [1]


async def test_row_104_timeouts_in_memory_are_lost_with_their_process(bench: Bench) -> None:
    async with bench.endpoint(timeout_manager=TimeoutManager(MemoryTimeouts())) as endpoint:
        await endpoint.send(Pay(1), delay=5 * SECOND)
        await bench.clock.run_until_idle()
    async with bench.endpoint(timeout_manager=TimeoutManager(MemoryTimeouts())):
        await bench.clock.advance(60 * SECOND)
    assert bench.handled == []


# --- the dispatch step ------------------------------------------------------------------------------------------------


async def test_row_99_a_timeout_that_is_gone_is_success(bench: Bench) -> None:
    async with bench.endpoint():
        await bench.put(Envelope(DISPATCHER, "c-1", {Headers.TIMEOUT_ID: str(uuid.uuid4())}))
        await bench.put(Envelope(DISPATCHER, "c-2", {Headers.TIMEOUT_ID: "not one"}))
        await bench.clock.run_until_idle()
        assert bench.arrived(DISPATCHER) == bench.arrived("error") == []


async def test_row_99_what_is_sent_is_related_to_its_timeout_and_keeps_its_headers(bench: Bench) -> None:
    await bench.queues.create_queues(["billing"])
    envelope = deferred(bench.start + 5 * SECOND, "m-1", "billing", headers={Headers.TIME_SENT: "2020", "own": "1"})
    async with bench.endpoint():
        await bench.put(envelope)
        await bench.clock.run_until_idle()
        (timeout,) = bench.stored()
        await bench.clock.advance(6 * SECOND)
        (sent,) = bench.arrived("billing")
    assert sent.message_id == timeout.timeout_id == sent.headers[Headers.RELATED_TO_TIMEOUT_ID]
    assert sent.headers[Headers.MESSAGE_ID] == "m-1"
    assert sent.headers[Headers.TIME_SENT] == format_timestamp(bench.start + 5 * SECOND + MICROSECOND)
    assert envelope.headers.items() - sent.headers.items() == {(Headers.TIME_SENT, "2020")}
    assert sent.body == envelope.body


@pytest.mark.parametrize("destination", ["", None])
async def test_a_row_without_a_destination_goes_where_replies_go(bench: Bench, destination: Any) -> None:
    await bench.queues.create_queues(["billing"])
    timeout = await bench.stored_elsewhere(1, -1, headers={Headers.REPLY_TO_ADDRESS: "billing"})
    bench.memory._timeouts[timeout.timeout_id] = replace(timeout, destination=destination)
    async with bench.endpoint():
        await bench.clock.run_until_idle()
        assert len(bench.arrived("billing")) == 1
        assert bench.stored() == bench.arrived("error") == []


async def test_row_99_a_concurrent_removal_is_a_failure_and_the_next_attempt_a_success(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    timeout = await bench.stored_elsewhere(1, -1)

    class RemovesFirst(FaultyTimeouts):
        async def try_remove(self, timeout_id: str) -> bool:
            await bench.memory.try_remove(timeout_id)
            return await super().try_remove(timeout_id)

    bench.timeouts = RemovesFirst(bench.memory)
    async with bench.endpoint():
        await bench.clock.run_until_idle()
        assert bench.arrived(DISPATCHER) == bench.arrived("error") == []
    assert bench.amounts == [1]  # at least once: it had left already
    assert f"timeout {timeout.timeout_id} was concurrently processed" in caplog.text


async def test_row_100_below_scope_a_failing_removal_lets_the_message_go_and_fails_the_control_message(
    bench: Bench,
) -> None:
    await bench.stored_elsewhere(1, -1)
    bench.timeouts.faults.add(Fault("try_remove", errors.StoreError("no")))
    async with bench.endpoint(transaction_mode="sends_atomic_with_receive"):
        await bench.clock.advance(60 * SECOND)
        (copy,) = bench.arrived("error")
        assert Headers.TIMEOUT_ID in copy.headers
        assert len(bench.stored()) == 1
    assert bench.amounts == [1]  # once, although removing was tried five times


async def test_a_storage_that_is_read_and_cannot_be_written_has_it_sent_once(bench: Bench) -> None:
    await bench.stored_elsewhere(1, -1)
    bench.timeouts.faults.add(Fault("try_remove", GONE))
    async with bench.endpoint(transaction_mode="sends_atomic_with_receive"):
        await bench.clock.advance(timedelta(minutes=10))
        assert bench.amounts == [1]
        bench.timeouts.faults.clear()
        await bench.clock.advance(2 * SECOND)
    assert bench.amounts == [1]
    assert bench.stored() == []


# --- failures ---------------------------------------------------------------------------------------------------------

REFUSES = [errors.StoreError("no"), errors.StoreUnavailable("locked")]


@pytest.mark.parametrize("error", REFUSES, ids=lambda error: error.code)
async def test_row_101_storing_is_tried_five_times(bench: Bench, error: errors.PostdateError) -> None:
    bench.timeouts.faults.add(Fault("add", error))
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 60 * SECOND, "m-1"))
        await bench.clock.advance(30 * SECOND)
        (copy,) = bench.arrived("error")
    assert bench.timeouts.faults.calls["add"] == 5
    assert (copy.message_id, copy.headers[Headers.FAILED_QUEUE]) == ("m-1", TIMEOUTS)
    assert copy.headers[Headers.EXPIRE] == format_timestamp(bench.start + 60 * SECOND)


@pytest.mark.parametrize("error", [*REFUSES, RuntimeError("a bug")], ids=lambda error: type(error).__name__)
async def test_row_101_dispatching_is_tried_five_times_and_the_timeout_stays(bench: Bench, error: Exception) -> None:
    timeout = await bench.stored_elsewhere(1, -1)
    bench.timeouts.faults.add(Fault("peek", error))
    async with bench.endpoint():
        await bench.clock.advance(60 * SECOND)
        (copy,) = bench.arrived("error")
    assert bench.timeouts.faults.calls["peek"] == 5
    assert (copy.headers[Headers.TIMEOUT_ID], copy.headers[Headers.FAILED_QUEUE]) == (timeout.timeout_id, DISPATCHER)
    assert bench.stored() == [timeout]


async def test_row_101_what_fails_with_no_error_of_ours_is_tried_five_times(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.core.timeout_manager.steps.timeout_of", lambda *_: 1 / 0)
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 60 * SECOND, "m-1"))
        await bench.clock.advance(30 * SECOND)
        (copy,) = bench.arrived("error")
    assert (copy.message_id, copy.headers[Headers.FAILED_QUEUE]) == ("m-1", TIMEOUTS)


DAMAGED = errors.StoreTroubled("page 7 is damaged")


@pytest.mark.parametrize(
    ("error", "given_up"),
    [(DAMAGED, ["m-bad"]), (transport_error_of(DAMAGED), ["m-bad"]), (GONE, [])],
    ids=["damage", "damage in the database of the queues", "an outage"],
)
async def test_a_message_that_meets_trouble_alone_again_and_again_is_tried_five_times(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: errors.PostdateError, given_up: list[str]
) -> None:
    add = bench.timeouts.add

    async def damaged(timeout: Timeout) -> bool:
        if "m-bad" in repr(timeout):
            raise error
        return await add(timeout)

    monkeypatch.setattr(bench.timeouts, "add", damaged)
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 600 * SECOND, "m-bad"))
        for number in range(20):
            await bench.put(deferred(bench.start + 600 * SECOND, f"m-{number}"))
            await bench.clock.advance(SECOND)
        assert [each.message_id for each in bench.arrived("error")] == given_up
        assert len(bench.stored()) == 20


@pytest.mark.parametrize("method", ["add", "peek", "try_remove"])
@pytest.mark.parametrize("error", [GONE, errors.StoreNotSetUp("no tables")], ids=lambda error: error.code)
async def test_no_message_is_given_up_while_the_storage_is_out_of_reach(
    bench: Bench, method: str, error: errors.PostdateError
) -> None:
    bench.timeouts.faults.add(Fault(method, error))
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 5 * SECOND))
        await bench.clock.advance(timedelta(minutes=5))
        assert bench.arrived("error") == []
        bench.timeouts.faults.clear()
        await bench.clock.advance(2 * SECOND)
    assert set(bench.amounts) == {1}
    assert bench.stored() == []


async def test_what_waits_for_the_storage_is_given_back_when_the_endpoint_stops(bench: Bench) -> None:
    bench.timeouts.faults.add(Fault("add", GONE))
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 60 * SECOND))
        await bench.clock.advance(5 * SECOND)
    assert [failures for _, failures in bench.queues.queues[TIMEOUTS].messages] == [0]


FULL = errors.DestinationUnavailable("it is full")


async def test_a_full_queue_holds_up_no_due_timeouts_of_others_and_gets_its_own_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = bench.queues.send

    async def refuse(envelopes, now, *, work=()):
        return [FULL if each.destination == "full" else (await send([each], now))[0] for each in envelopes]

    monkeypatch.setattr(bench.queues, "send", refuse)
    async with bench.endpoint(transaction_mode="receive_only", manager={"concurrency": 1}):
        await bench.queues.create_queues(["full"])
        for number in range(8):
            await bench.stored_elsewhere(number, -1, destination="full")
        await bench.stored_elsewhere(9, 20)
        await bench.clock.advance(26 * SECOND)
        assert bench.amounts == [9]
        assert len(bench.stored()) == 8
        monkeypatch.undo()
        await bench.clock.advance(12 * SECOND)
        assert len(bench.arrived("full")) == 8
        assert bench.stored() == bench.arrived("error") == []


async def test_what_is_due_already_is_stored_when_its_queue_is_full(bench: Bench) -> None:
    bench.transport.faults.add(Fault("commit", FULL, calls=[1]))
    async with bench.endpoint(manager={"concurrency": 1}):
        await bench.put(deferred(bench.start - SECOND))
        await bench.clock.run_until_idle()
        assert bench.timeouts.faults.calls["add"] == 1
        await bench.clock.advance(6 * SECOND)
        assert bench.stored() == bench.arrived("error") == []
    assert bench.amounts == [1]


async def test_queues_out_of_reach_are_the_pumps_affair(bench: Bench) -> None:
    bench.transport.faults.add(Fault("commit", errors.TransportUnreachable("refused"), calls=range(1, 8)))
    async with bench.endpoint():
        await bench.put(deferred(bench.start + 60 * SECOND))
        await bench.clock.advance(20 * SECOND)
        assert bench.arrived("error") == []
        assert len(bench.stored()) == 1
        await bench.clock.advance(60 * SECOND)
    assert bench.amounts == [1]


async def test_what_was_stored_and_dispatched_before_it_was_off_its_queue_is_not_stored_again(bench: Bench) -> None:
    gone = errors.TransportUnreachable("refused")
    for method in ("commit", "roll_back"):
        bench.transport.faults.add(Fault(method, gone, calls=range(1, 4)))
    async with bench.endpoint(transaction_mode="receive_only"):
        await bench.put(deferred(bench.start + 2 * SECOND))
        await bench.clock.advance(60 * SECOND)
        assert bench.stored() == bench.arrived(TIMEOUTS) == bench.arrived("error") == []
    assert bench.amounts == [1]
    assert bench.timeouts.faults.calls["add"] == 1


# --- outages ----------------------------------------------------------------------------------------------------------

CRITICAL = "Repeated failures when fetching timeouts from storage, endpoint will be terminated."


async def test_row_102_outages_of_a_second_are_no_critical_error_and_a_longer_one_is_exactly_one(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "postdate.circuit_breaker")
    async with bench.endpoint(manager={"time_to_wait_before_triggering_critical_error": 3 * SECOND}):
        await bench.clock.run_until_idle()
        for _ in range(20):
            bench.timeouts.faults.add(Fault("next_chunk", GONE))
            await bench.put(deferred(bench.clock.now() + 2 * SECOND))  # so that it does look
            await bench.clock.advance(SECOND)
            bench.timeouts.faults.clear()
            await bench.clock.advance(SECOND)
        assert bench.critical == []
        bench.timeouts.faults.add(Fault("next_chunk", GONE))
        await bench.clock.advance(timedelta(minutes=5))
        assert [text for text, _ in bench.critical] == [CRITICAL]
        bench.timeouts.faults.clear()
        await bench.clock.advance(timedelta(minutes=1))
        bench.timeouts.faults.add(Fault("next_chunk", GONE))
        await bench.clock.advance(timedelta(minutes=1))
    assert [text for text, _ in bench.critical] == [CRITICAL] * 2  # once for each outage
    assert "circuit breaker TimeoutStorageConnectivity sales triggered after 0:00:03" in caplog.text


async def test_row_103_the_wait_is_used_and_zero_means_at_once(bench: Bench) -> None:
    bench.timeouts.faults.add(Fault("next_chunk", GONE))
    async with bench.endpoint():
        await bench.clock.advance(timedelta(seconds=119))
        assert bench.critical == []
        await bench.clock.advance(2 * SECOND)
        assert len(bench.critical) == 1
    bench.critical.clear()
    async with bench.endpoint(manager={"time_to_wait_before_triggering_critical_error": timedelta(0)}):
        await bench.clock.run_until_idle()
        assert len(bench.critical) == 1


async def test_row_102_the_endpoint_starts_while_the_storage_is_down(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.timeouts.faults.add(Fault("setup", GONE))
    bench.timeouts.faults.add(Fault("add", errors.StoreNotSetUp("no tables")))
    async with bench.endpoint() as endpoint:
        assert "the storage of timeouts cannot be set up yet" in caplog.text
        await endpoint.send(Pay(1), delay=30 * SECOND)
        await endpoint.send(Pay(0))
        await bench.clock.advance(20 * SECOND)
        assert bench.timeouts.faults.calls["next_chunk"] == 0
        assert bench.amounts == [0]
        bench.timeouts.faults.clear()
        await bench.clock.advance(15 * SECOND)
        assert bench.amounts == [0, 1]
        assert bench.critical == []
        done = bench.timeouts.faults.calls["setup"]
        await bench.clock.advance(60 * SECOND)
    assert bench.timeouts.faults.calls["setup"] == done


async def test_a_storage_that_can_never_be_set_up_is_told_at_the_start(bench: Bench) -> None:
    bench.timeouts.faults.add(Fault("setup", errors.StoreError("it is something else")))
    with pytest.raises(errors.StoreError, match="something else"):
        async with bench.endpoint():
            pass


# --- hybrid -----------------------------------------------------------------------------------------------------------


async def test_row_88_new_delays_are_native_and_old_timeouts_still_fire(bench: Bench) -> None:
    store = MemoryStore()
    await bench.stored_elsewhere(1, 20)
    async with bench.endpoint(delayed_delivery=DelayedDelivery(store)) as endpoint:
        await endpoint.send(Pay(2), delay=10 * SECOND)
        await bench.put(deferred(bench.start + 30 * SECOND, amount=3))  # from an endpoint of old
        await bench.clock.run_until_idle()
        assert (await store.statistics(bench.start)).pending == 1
        assert len(bench.stored()) == 2
        await bench.clock.advance(31 * SECOND)
        assert bench.stored() == []
    assert bench.amounts == [2, 1, 3]
    async with bench.endpoint(delayed_delivery=DelayedDelivery(store), timeout_manager=None) as endpoint:
        await bench.stored_elsewhere(4, 40)
        await bench.clock.advance(60 * SECOND)
    assert bench.amounts == [2, 1, 3]


class FoldingTransport(MemoryTransport):
    """Queues that do not tell upper case from lower case, named as those of Azure Storage."""

    @property
    def capabilities(self) -> TransportCapabilities:
        return replace(super().capabilities, queue_names_fold_case=True, queue_name_separator="-")

    @staticmethod
    def folded(name: str) -> str:
        return name.lower().replace(".", "-")

    async def create_queues(self, names) -> None:
        await super().create_queues([self.folded(name) for name in names])

    async def send(self, envelopes, now, *, work=()):
        folded = [replace(each, destination=self.folded(each.destination)) for each in envelopes]
        return await super().send(folded, now, work=work)

    def receiver(self, queue: str):
        return super().receiver(self.folded(queue))


async def test_row_88_where_both_have_one_queue_the_delayed_delivery_serves_it_alone(bench: Bench) -> None:
    store, transport = MemoryStore(), FoldingTransport(clock=bench.clock)
    bench.queues = transport
    await bench.stored_elsewhere(1, 20)
    await bench.stored_elsewhere(7, 50, headers={Headers.SAGA_ID: str(SAGA)})
    hybrid = DelayedDelivery(store)
    async with bench.endpoint(transport=transport, delayed_delivery=hybrid) as endpoint:
        assert transport.queues.keys() == {"sales", "sales-timeouts", "sales-timeoutsdispatcher", "error"}
        await bench.clock.run_until_idle()
        assert len(transport.queues["sales-timeouts"].wake_ups) == 1  # one pump
        await endpoint.send(Pay(2), delay=10 * SECOND)
        await bench.put(replace(deferred(bench.start + 30 * SECOND, amount=3), destination="sales-Timeouts"))
        await bench.clock.run_until_idle()
        assert (await store.statistics(bench.start)).pending == 2
        order = endpoint.outgoing.clear_order(SAGA)
        assert order is not None
        await endpoint.outgoing.send([order])
        await bench.clock.advance(60 * SECOND)
        assert bench.arrived("error") == bench.stored() == []
    assert bench.amounts == [2, 1, 3]


def test_names_are_one_queue_only_where_case_is_folded() -> None:
    exact = TransportCapabilities(durable=True, transaction_modes=frozenset())
    folding = replace(exact, queue_names_fold_case=True)
    azure = replace(folding, queue_name_separator="-")
    assert not is_same_queue("a.Timeouts", "a.timeouts", exact)
    assert is_same_queue("a.Timeouts", "a.timeouts", folding)
    assert is_same_queue("a-Timeouts", "a.timeouts", azure)
    assert not is_same_queue("a-Timeouts", "a.timeouts", folding)
