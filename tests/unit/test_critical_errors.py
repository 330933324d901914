"""Critical errors of a running endpoint: when they come, how often, and what is done (rows 43 to 47, 113)."""

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import anyio
import pytest

from postdate import DelayedDelivery, Endpoint, MemoryStore, MemoryTimeouts, MemoryTransport, TimeoutManager
from postdate.core.health.circuit_breaker import RepeatedFailures
from postdate.endpoint.service import CriticalErrors, run_timers
from postdate.errors import StoreUnavailable, StoreUnreachable, TransportError, TransportUnavailable
from postdate.messages import Envelope
from postdate.testing import Fault, FaultyStore, FaultyTransport, RecordedMetrics, VirtualClock

SECOND = timedelta(seconds=1)
STORE_DOWN, DOWN = StoreUnavailable("the store is down"), TransportUnavailable("the broker is down")


class Service:
    """An endpoint that only delivers, around adapters that fail on demand."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.start = clock, clock.now()
        self.memory, self.queues = MemoryStore(), MemoryTransport()
        self.store, self.transport = FaultyStore(self.memory), FaultyTransport(self.queues)
        self.critical: list[tuple[float, str, BaseException]] = []
        self.metrics = RecordedMetrics()

    def note(self, text: str, error: BaseException) -> None:
        self.critical.append(((self.clock.now() - self.start).total_seconds(), text, error))

    def endpoint(self, critical_error: Callable | None = None, **delayed_delivery) -> Endpoint:
        return Endpoint(
            "sales",
            transport=self.transport,
            delayed_delivery=DelayedDelivery(self.store, **delayed_delivery),
            send_only=True,
            clock=self.clock,
            critical_error=critical_error or self.note,
            metrics=self.metrics,
        )

    @property
    def texts(self) -> list[str]:
        return [text for _, text, _ in self.critical]


@pytest.fixture
async def service(clock: VirtualClock) -> Service:
    service = Service(clock)
    await service.queues.create_queues(["billing"])
    return service


async def send(endpoint: Endpoint, id_: str = "m-1", destination: str = "billing", delay: timedelta = SECOND) -> None:
    await endpoint.send(b"", destination=destination, delay=delay, message_id=id_)


# --- the four breakers ------------------------------------------------------------------------------------------------


async def test_the_store_breaker_trips_after_its_time_although_nothing_is_stored_any_more_row_43(
    service: Service,
) -> None:
    """One message, one attempt: it is in the error queue long before the breaker trips by itself."""
    service.store.faults.add(Fault("store", STORE_DOWN))
    async with service.endpoint() as sales:
        await send(sales, delay=60 * SECOND)
        await service.clock.advance(29.9 * SECOND)
        assert len(service.queues.queues["error"].messages) == 1
        assert service.critical == []
        await service.clock.advance(0.1 * SECOND)
        ((at, text, error),) = service.critical
        assert at == 30
        assert text.startswith("Failed to store delayed messages")
        assert error is STORE_DOWN
        await service.clock.advance(120 * SECOND)
    assert len(service.critical) == 1


async def test_a_store_breaker_of_ones_own_time_row_43(service: Service) -> None:
    service.store.faults.add(Fault("store", STORE_DOWN))
    async with service.endpoint(time_to_trigger_store_circuit_breaker=5 * SECOND) as sales:
        await send(sales, delay=60 * SECOND)
        await service.clock.advance(60 * SECOND)
    assert [at for at, _, _ in service.critical] == [5]


async def test_one_message_stored_in_time_prevents_it_row_43(service: Service) -> None:
    service.store.faults.add(Fault("store", STORE_DOWN, calls=[1]))
    async with service.endpoint() as sales:
        await send(sales, "m-1", delay=600 * SECOND)
        await service.clock.advance(20 * SECOND)
        await send(sales, "m-2", delay=600 * SECOND)
        await service.clock.advance(60 * SECOND)
    assert service.critical == []
    store = "DelayedDeliveryStore sales"
    assert service.metrics.breaker_changes == [(store, "armed"), (store, "disarmed")]


async def test_a_failing_fetch_is_a_critical_error_and_one_success_in_time_prevents_it_row_44(service: Service) -> None:
    fetch = Fault("claim_due", STORE_DOWN)
    service.store.faults.add(fetch)
    async with service.endpoint() as sales:
        await service.clock.advance(28.5 * SECOND)
        service.store.faults.clear()
        await service.clock.advance(2 * SECOND)
        assert service.critical == []
        service.store.faults.add(fetch)
        await send(sales)
        await service.clock.advance(32 * SECOND)
    assert [text for text in service.texts if "fetch" in text] == service.texts
    assert len(service.critical) == 1


async def test_one_outage_that_trips_several_breakers_is_one_critical_error(service: Service) -> None:
    """The store neither stores nor gives out messages: an operator is told once, and again by the next outage."""
    gone = StoreUnreachable("connection refused")
    async with service.endpoint() as sales:
        for number in range(2):
            service.store.faults.add(Fault("store", gone))
            service.store.faults.add(Fault("claim_due", gone))
            await send(sales, f"m-{number}", delay=60 * SECOND)
            await service.clock.advance(150 * SECOND)
            assert list(service.metrics.breakers.values()).count("triggered") == 2
            assert len(service.critical) == number + 1
            service.store.faults.clear()
            await send(sales, f"well-{number}", delay=600 * SECOND)
            await service.clock.advance(60 * SECOND)
            assert set(service.metrics.breakers.values()) == {"disarmed"}


async def test_refusals_long_after_an_outage_are_a_critical_error_of_their_own(service: Service) -> None:
    """The store is in reach, and refuses: that begins no outage, and is none that was told before."""
    async with service.endpoint() as sales:
        service.store.faults.add(Fault("claim_due", StoreUnreachable("connection refused")))
        await service.clock.advance(150 * SECOND)
        service.store.faults.clear()
        await service.clock.advance(3_600 * SECOND)
        assert ["fetch" in text for text in service.texts] == [True]
        service.store.faults.add(Fault("store", STORE_DOWN))
        await send(sales, delay=600 * SECOND)
        await service.clock.advance(60 * SECOND)
    assert service.texts[-1].startswith("Failed to store delayed messages")
    assert len(service.texts) == 2


def test_an_action_that_fails_keeps_nothing_from_the_message(caplog: pytest.LogCaptureFixture) -> None:
    def act(text: str, error: BaseException) -> None:
        raise ConnectionError("the pager is away")

    CriticalErrors(act)("cannot go on", STORE_DOWN)
    ((_, level, text),) = caplog.record_tuples
    assert (level, text) == (logging.CRITICAL, "the critical-error action failed on 'cannot go on'")


async def test_failing_sends_are_a_critical_error_by_themselves_row_45(service: Service) -> None:
    """The message went to the error queue at the first failure; nothing succeeds in the 30 s that follow."""
    async with service.endpoint() as sales:
        await send(sales)
        await service.clock.run_until_idle()
        service.transport.faults.add(lambda call: DOWN if call.method == "send" and call.number == 2 else None)
        await service.clock.advance(90 * SECOND)
    ((at, text, error),) = service.critical
    assert at == pytest.approx(31)
    assert "dispatch" in text
    assert error is DOWN


async def test_what_can_not_be_removed_for_a_minute_is_a_critical_error_row_46(service: Service) -> None:
    """The message is neither delivered for good nor in the error queue; few are attempted while that is so (ADR 52)."""
    service.store.faults.add(Fault("finish", STORE_DOWN))
    async with service.endpoint() as sales:
        for number in range(32):
            await send(sales, f"m-{number}", delay=(10 + number / 10) * SECOND)
        await service.clock.advance(80 * SECOND)
    assert [text for text in service.texts if "error handling" in text]
    assert service.queues.queues["error"].messages == type(service.queues.queues["error"].messages)()
    assert (await service.memory.statistics(service.clock.now())).pending == 32


@pytest.mark.parametrize(("limit", "too_many"), [(1, True), (100, False)])
async def test_a_higher_limit_bears_more_row_46(service: Service, limit: int, too_many: bool) -> None:
    limits: dict[str, Any] = {"maximum_recovery_failures_per_second": limit, "missing_queue_wait": timedelta(0)}
    async with service.endpoint(**limits) as sales:
        del service.queues.queues["error"]
        for number in range(32):
            await send(sales, f"m-{number}", "nowhere", delay=(10 + number / 10) * SECOND)
        await service.clock.advance(14 * SECOND)
        assert bool([text for text in service.texts if "error handling" in text]) is too_many


# --- pauses -----------------------------------------------------------------------------------------------------------


async def test_stopping_ends_the_pause_of_the_intake_row_47(service: Service) -> None:
    service.store.faults.add(Fault("store", STORE_DOWN))
    async with service.endpoint(number_of_retries=100) as sales:
        await send(sales, delay=60 * SECOND)
        await service.clock.run_until_idle()
    assert service.clock.now() == service.start
    assert len(service.queues.queues["sales.timeouts"].messages) == 1


async def test_the_intake_pauses_a_second_and_ten_once_it_has_tripped_row_47(service: Service) -> None:
    service.store.faults.add(Fault("store", STORE_DOWN))
    async with service.endpoint(number_of_retries=1_000) as sales:
        await send(sales, delay=600 * SECOND)
        await service.clock.advance(29.5 * SECOND)
        assert service.store.faults.calls["store"] == 30
        await service.clock.advance(31 * SECOND)
        assert 33 <= service.store.faults.calls["store"] <= 35


# --- the action -------------------------------------------------------------------------------------------------------


async def test_an_asynchronous_action_runs_beside_the_endpoint_row_113(service: Service) -> None:
    called: list[str] = []
    go_on = anyio.Event()

    async def act(text: str, error: BaseException) -> None:
        called.append(text)
        await go_on.wait()
        called.append("done")

    service.store.faults.add(Fault("store", STORE_DOWN))
    async with service.endpoint(act) as sales:
        await send(sales, delay=60 * SECOND)
        await service.clock.advance(31 * SECOND)
        assert len(called) == 1
        service.store.faults.clear()
        await send(sales, "m-2")
        await service.clock.advance(2 * SECOND)
        assert len(service.queues.queues["billing"].messages) == 1
        go_on.set()
    assert called[1:] == ["done"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_action_that_fails_is_logged_and_the_endpoint_goes_on_row_47(
    service: Service, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    def fail(text: str, error: BaseException) -> Awaitable[None]:
        if not is_async:
            raise RuntimeError("the action")
        return fail_later()

    async def fail_later() -> None:
        raise RuntimeError("the action")

    service.store.faults.add(Fault("store", STORE_DOWN))
    async with service.endpoint(fail) as sales:
        await send(sales, delay=60 * SECOND)
        await service.clock.advance(31 * SECOND)
        service.store.faults.clear()
        await send(sales, "m-2")
        await service.clock.advance(2 * SECOND)
        assert len(service.queues.queues["billing"].messages) == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert "the critical-error action failed" in record.message


async def test_an_asynchronous_action_without_a_running_endpoint_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def act(text: str, error: BaseException) -> None:
        raise AssertionError("not run")

    CriticalErrors(act)("cannot receive", OSError("down"))
    assert caplog.records[0].message == "cannot receive: down"


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(DOWN, False), (TransportError("no such thing"), True)], ids=["outage", "other"]
)
async def test_by_default_it_is_logged_with_its_text_and_what_is_no_outage_with_its_traceback_row_113(
    service: Service, caplog: pytest.LogCaptureFixture, error: Exception, has_traceback: bool
) -> None:
    service.transport.faults.add(Fault("receive", error))
    endpoint = Endpoint(
        "sales",
        transport=service.transport,
        delayed_delivery=DelayedDelivery(service.store),
        send_only=True,
        clock=service.clock,
    )
    async with endpoint:
        await service.clock.advance(40 * SECOND)
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert record.message == f"Failed to receive delayed messages: {error}"
    assert (record.exc_info is not None) is has_traceback


# --- what metrics tell ------------------------------------------------------------------------------------------------


async def test_a_breaker_that_recovered_does_not_hide_one_of_another_endpoint_or_queue(clock: VirtualClock) -> None:
    metrics, queues = RecordedMetrics(), MemoryTransport()
    transports = {name: FaultyTransport(queues, Fault("receive", DOWN)) for name in ("sales", "billing")}
    async with AsyncExitStack() as running:
        for name, transport in transports.items():
            delays, manager = DelayedDelivery(MemoryStore()), TimeoutManager(MemoryTimeouts())
            endpoint = Endpoint(
                name,
                transport=transport,
                delayed_delivery=delays,
                timeout_manager=manager,
                clock=clock,
                critical_error=lambda _text, _error: None,
                metrics=metrics,
            )
            await running.enter_async_context(endpoint)
        await clock.advance(31 * SECOND)
        receives = [
            "Receive {0}",
            "DelayedDeliveryReceive {0}.timeouts",
            "TimeoutManagerReceive {0}.Timeouts",
            "TimeoutManagerReceive {0}.TimeoutsDispatcher",
        ]
        assert metrics.breakers == {each.format(name): "triggered" for name in transports for each in receives}
        transports["sales"].faults.clear()
        own = [name for name in queues.queues if name.startswith("sales")]
        await queues.send([Envelope(queue, queue, {}, b"") for queue in own], clock.now())
        await clock.advance(20 * SECOND)
        triggered = {name for name, state in metrics.breakers.items() if state == "triggered"}
        assert triggered == {each.format("billing") for each in receives}


async def test_a_breaker_of_a_run_that_ended_is_triggered_no_more(service: Service) -> None:
    service.transport.faults.add(Fault("receive", DOWN))
    sales = service.endpoint()
    async with sales:
        await service.clock.advance(31 * SECOND)
        assert set(service.metrics.breakers.values()) == {"triggered"}
    assert set(service.metrics.breakers.values()) == {"disarmed"}
    service.transport.faults.clear()
    async with sales:
        await service.clock.advance(SECOND)
        assert set(service.metrics.breakers.values()) == {"disarmed"}


# --- the timers -------------------------------------------------------------------------------------------------------


async def test_each_breaker_trips_at_its_own_time(clock: VirtualClock) -> None:
    start, tripped = clock.now(), list[tuple[str, timedelta]]()

    def note(text: str, error: BaseException) -> None:
        tripped.append((text, clock.now() - start))

    breakers = [RepeatedFailures(f"b-{n}", f"b-{n}", n * SECOND, note) for n in (30, 5, 10)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_timers, breakers, clock)
        await clock.advance(SECOND)
        for breaker in breakers:
            breaker.report_failure(OSError("down"), clock.monotonic())
        await clock.advance(SECOND)
        breakers[2].report_success()
        await clock.advance(60 * SECOND)
        tasks.cancel_scope.cancel()
    assert tripped == [("b-5", 6 * SECOND), ("b-30", 31 * SECOND)]
    assert clock.next_wait is None


# --- adapters that raise what they should not -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["claim_due", "finish", "retry_later", "next_attempt", "store", "listen"])
async def test_whatever_a_store_raises_does_not_end_the_service(service: Service, method: str) -> None:
    service.store.faults.add(Fault(method, KeyError("a bug"), calls=range(1, 4)))
    service.transport.faults.add(Fault("send", DOWN, calls=[2]))
    async with service.endpoint(number_of_retries=100) as sales:
        await send(sales)
        await service.clock.advance(60 * SECOND)
        assert len(service.queues.queues["billing"].messages) >= 1
    assert await service.memory.next_due() is None


@pytest.mark.parametrize("method", ["send", "receive", "commit", "roll_back"])
async def test_whatever_a_transport_raises_does_not_end_the_service(service: Service, method: str) -> None:
    first = 2 if method == "send" else 1
    service.transport.faults.add(Fault(method, KeyError("a bug"), calls=range(first, first + 3)))
    service.store.faults.add(Fault("store", STORE_DOWN, calls=[1]))
    async with service.endpoint(number_of_retries=100) as sales:
        await send(sales)
        await service.clock.advance(60 * SECOND)
        assert len(service.queues.queues["billing"].messages) == 1
    assert await service.memory.next_due() is None
