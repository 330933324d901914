"""The poller and dispatcher of a service inside a Spark task: the core of a sweep. Source: ADR 0011.

This runs on executors; nothing here needs Spark. A dispatcher here makes the same claims as a running service and
writes the same records, so both may run at once. The claims of a killed task are free when its connection is closed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import anyio
import pyarrow as pa
from anyio.from_thread import start_blocking_portal
from typing_extensions import override

from postdate.clock import Clock, SystemClock, later
from postdate.config import Settings
from postdate.core.due.dispatcher import Dispatcher
from postdate.core.due.finishing import NO_JOURNAL, Journal
from postdate.core.due.moving import due_work
from postdate.core.due.poller import DueWork, Poller, PollResult
from postdate.core.health.circuit_breaker import BreakerState, FailureRate, RepeatedFailures
from postdate.core.recoverability import BYTES_IN_FLIGHT, LONGEST_OUTAGE_DELAY, DispatchSettings, Host
from postdate.core.upkeep.store_clock import clock_of_store
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.endpoint.service import RECEIVE_BREAKER, run_timers
from postdate.errors import PostdateError
from postdate.messages import DelayedMessage
from postdate.pipeline.rows import LEDGER_ARROW, Batches
from postdate.pipeline.stores import StoreSpec
from postdate.ports import MovedMessages, RecordKind, TransactionMode, Transport, Wake
from postdate.runtime.reporting import CountedMetrics
from postdate.wiring import absolute_address_of, open_transport, transport_settings

COUNTED: Final = pa.schema([(name, pa.int64()) for name in ("delivered", "expired", "retried", "failed")])
"""The counts of a sweep without a ledger."""

_MOST_LINES: Final = 50_000
"""Number of lines of the ledger that Spark has not fetched yet. Above it, the dispatcher waits."""

_HANDOVER_SECONDS: Final = 0.25
_STOP_CHECK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """A sweep from a store to queues, as a value that is sent to executors. For secrets see :class:`StoreSpec`.

    Args:
        store: the store of the due messages.
        transport: address of the queues, or a reference to it.
        transport_settings: settings of the transport's adapter.
        error_queue: the queue for messages that cannot be sent.
        number_of_retries: number of attempts after the first.
        errors_return_to_destination: see :class:`postdate.core.due.recovery.DispatchSettings`.
        bytes_in_flight: bytes of the bodies that each task sends at once to queues elsewhere.
        missing_queue_wait: how long each task of a continuous sweep lets messages wait for a queue that does not exist.
            Then they go to the error queue. A task that ends earlier leaves them in the store. A sweep of what is due
            now does not wait.
        use_store_clock: the clock of the store decides what is due, if it has one; otherwise that of the executor.
        most_failures_per_second: how many failures of failure handling a second are tolerated, on average.
        patience: how long the store, or every destination, may fail before the job fails.
    """

    store: StoreSpec
    transport: str
    transport_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error_queue: str = "error"
    number_of_retries: int = 0
    errors_return_to_destination: bool = False
    bytes_in_flight: int = BYTES_IN_FLIGHT
    missing_queue_wait: timedelta = timedelta(0)
    use_store_clock: bool = True
    most_failures_per_second: int = 1
    patience: timedelta = RECEIVE_BREAKER

    def __post_init__(self) -> None:
        object.__setattr__(self, "transport", absolute_address_of(self.transport))

    def __repr__(self) -> str:
        return f"SweepSpec({self.store!r}, error_queue={self.error_queue!r})"

    @classmethod
    def of(cls, settings: Settings) -> SweepSpec:
        """Return the sweep that delivers in the same way as ``postdate run`` with these settings.

        Raises:
            ConfigurationError: this store or these queues do not have a setting.
        """
        transport_section, delays = settings.transport, settings.delayed_delivery
        return cls(
            store=StoreSpec.of(settings),
            transport=transport_section.address.reference or str(transport_section.address),
            transport_settings=transport_settings(settings, create=False),
            error_queue=delays.poison_queue or settings.endpoint.error_queue,
            number_of_retries=delays.number_of_retries,
            errors_return_to_destination=delays.errors_return_to == "destination",
            bytes_in_flight=delays.bytes_in_flight,
            missing_queue_wait=delays.missing_queue_wait,
            use_store_clock=delays.use_store_clock,
            most_failures_per_second=delays.maximum_recovery_failures_per_second,
            patience=delays.time_to_trigger_fetch_circuit_breaker,
        )

    def open_transport(self) -> Transport:
        """Return the transport of the queues. It connects at first use.

        Raises:
            ConfigurationError: a reference cannot be followed on this machine, or the driver is not installed here.
        """
        return open_transport(self.transport, **self.transport_settings)


# --- what a sweep reports ---------------------------------------------------------------------------------------------


_RECORDED: Final = {"delivered": "delivered", "expired": "expired", "retried": "retried", "moved_to_error": "failed"}
"""The names of counts, with the kind of record that each of them leaves."""


class DispatchJournal:
    """A journal of Arrow batches. The dispatcher writes it in its own thread, and Spark's thread reads it."""

    def __init__(self) -> None:
        # The condition guards every change: the dispatcher's thread appends, and Spark's thread takes and clears.
        self._batches: deque[pa.RecordBatch] = deque()
        self._lines = 0
        self._complete = False
        self._condition = threading.Condition()

    def record_events(
        self, kind: RecordKind, messages: Sequence[DelayedMessage], at: datetime, detail: str = ""
    ) -> None:
        self._add(
            at,
            detail or None,
            kind=[kind.name.lower()] * len(messages),
            message_id=[message.message_id for message in messages],
            due=[message.due for message in messages],
            destination=[message.destination for message in messages],
        )

    def record_move(self, moved: MovedMessages, at: datetime) -> None:
        if moved.message_ids:
            kind = ["expired" if expired else "delivered" for expired in moved.expired]
            self._add(at, None, kind=kind, message_id=moved.message_ids, due=moved.dues, destination=moved.destinations)

    def _add(self, at: datetime, detail: str | None, **columns: Any) -> None:
        n = len(columns["message_id"])
        batch = pa.RecordBatch.from_pydict({**columns, "at": [at] * n, "detail": [detail] * n}, LEDGER_ARROW)
        with self._condition:
            self._batches.append(batch)
            self._lines += n
            if self._lines > _MOST_LINES:  # Smaller journals are fetched at intervals, in larger batches.
                self._condition.notify_all()

    @property
    def is_full(self) -> bool:
        return self._lines > _MOST_LINES

    def mark_complete(self) -> None:
        """Mark the journal as complete: no more lines follow."""
        with self._condition:
            self._complete = True
            self._condition.notify_all()

    def drain(self, wait_seconds: float) -> Iterator[pa.RecordBatch]:
        """Yield the lines so far, after ``wait_seconds``, or sooner if the journal is full or complete."""
        with self._condition:
            self._condition.wait_for(lambda: self.is_full or self._complete, wait_seconds)
            batches, self._lines = list(self._batches), 0
            self._batches.clear()
        if batches:
            yield from pa.Table.from_batches(batches).combine_chunks().to_batches()


# --- one dispatcher ---------------------------------------------------------------------------------------------------


class _SendBreaker(RepeatedFailures):
    """A circuit breaker that trips only at a failure, not for lack of successes.

    A dispatcher without messages has no successes, and does not fail.
    """

    failed_at: float | None = None

    @override
    def report_failure(self, error: BaseException, seconds: float) -> timedelta:
        self.failed_at = seconds
        return super().report_failure(error, seconds)

    def is_failing(self, seconds: float) -> bool:
        """Return whether the last failure was so recent that its retry may still follow."""
        patience = 2 * LONGEST_OUTAGE_DELAY.total_seconds()
        is_recent = self.failed_at is not None and seconds - self.failed_at < patience
        return self.state is not BreakerState.DISARMED and is_recent


@dataclass(frozen=True, slots=True)
class _Machine:
    """Due work and its circuit breakers. ``trip_errors`` has the errors for which a breaker tripped."""

    work: DueWork
    clock: Clock
    fetching: RepeatedFailures
    sending: _SendBreaker
    rate: FailureRate
    trip_errors: list[BaseException]

    @property
    def is_failing(self) -> bool:
        """Whether polling or sending fails at the moment."""
        return self.fetching.state is BreakerState.ARMED or self.sending.is_failing(SystemClock().monotonic())


class _LedgerLimitedWork:
    """Due work that waits while the ledger is full, so that no message is dispatched that Spark cannot record."""

    def __init__(self, work: DueWork, ledger: DispatchJournal) -> None:
        self._work, self._ledger = work, ledger

    def overlap_batches(self) -> AbstractAsyncContextManager[None]:
        return self._work.overlap_batches()

    async def deliver_due(self, now: datetime) -> PollResult:
        if self._ledger.is_full:
            await anyio.sleep(_HANDOVER_SECONDS / 10)
            return PollResult(0, has_more=True)
        return await self._work.deliver_due(now)

    async def listen(self, wake: Wake) -> Callable[[], None]:
        return await self._work.listen(wake)


@asynccontextmanager
async def _open_machine(spec: SweepSpec, counts: CountedMetrics, journal: Journal) -> AsyncGenerator[_Machine]:
    trip_errors, endpoint = list[BaseException](), spec.store.endpoint

    def add_trip_error(_text: str, error: BaseException) -> None:
        trip_errors.append(error)

    async with AsyncExitStack() as stack:
        store = spec.store.open(create=False)
        stack.push_async_callback(_close_shielded, store.close)
        transport = spec.open_transport()
        stack.push_async_callback(_close_shielded, transport.close)
        await store.initialize(endpoint, TransactionMode.RECEIVE_ONLY)
        store_clock = clock_of_store(SystemClock(), store, is_authoritative=spec.use_store_clock)
        clock: Clock = store_clock or SystemClock()
        if store_clock is not None:  # Measure before any claim: a message might not be due by the clock of the store.
            await store_clock.measure()
        fetching = RepeatedFailures("SweepFetch", "cannot claim due messages", spec.patience, add_trip_error)
        sending = _SendBreaker("SweepDispatch", "cannot send due messages", spec.patience, add_trip_error)
        limit = spec.most_failures_per_second
        rate = FailureRate("SweepFailureHandling", "cannot deal with failures", limit, add_trip_error)
        settings = DispatchSettings(
            timeouts_queue(endpoint),
            spec.error_queue,
            spec.number_of_retries,
            Host(endpoint),
            errors_return_to_destination=spec.errors_return_to_destination,
            bytes_in_flight=spec.bytes_in_flight,
            missing_queue_wait=spec.missing_queue_wait,
        )
        dispatcher = Dispatcher(store, transport, settings, clock, sending, rate, counts, journal)
        work = due_work(store, transport, dispatcher, clock, counts, journal)
        work_of_machine = _LedgerLimitedWork(work, journal) if isinstance(journal, DispatchJournal) else work
        yield _Machine(work_of_machine, clock, fetching, sending, rate, trip_errors)


async def _close_shielded(close: Callable[[], Awaitable[None]]) -> None:
    """Close even if the task is being cancelled, because Python's worker continues with the next task."""
    with anyio.CancelScope(shield=True):
        await close()


async def _drain(machine: _Machine) -> None:
    """Dispatch until no due message is left that this process could claim."""
    while True:
        async with machine.work.overlap_batches():  # The end of this block waits for messages in flight.
            count, next_attempt, error = await _drain_once(machine)
        if error is not None:  # The error is raised only here: a task group would wrap it in an exception group.
            raise error
        soon = later(machine.clock.now(), LONGEST_OUTAGE_DELAY)
        # Another process may have claimed and sent the released messages, so a success of this process is not required.
        is_drained = count == 0 and (next_attempt is None or next_attempt > soon)
        if machine.sending.state is BreakerState.DISARMED or is_drained:
            return
        await anyio.sleep(1)


async def _drain_once(machine: _Machine) -> tuple[int, datetime | None, BaseException | None]:
    """Claim and dispatch until nothing is left, or until sending fails: further claims would only be released again.

    Returns the number of claimed messages, the time of the next attempt, and the error of a tripped breaker.
    """
    clock, count = SystemClock(), 0
    while not machine.trip_errors:
        try:
            result = await machine.work.deliver_due(machine.clock.now())
        except PostdateError as error:
            if not error.transient:
                return count, None, error
            pause = machine.fetching.report_failure(error, clock.monotonic())
            machine.fetching.update_state(clock.monotonic() + pause.total_seconds())
            if not machine.trip_errors:
                await anyio.sleep(pause.total_seconds())
            continue
        machine.fetching.report_success()
        count += result.count
        if not result.has_more or machine.sending.state is not BreakerState.DISARMED:
            return count, result.next_attempt, None
    return count, None, machine.trip_errors[-1]


async def _poll_for(machine: _Machine, seconds: float, stop: Callable[[], bool]) -> None:
    """Poll for some seconds.

    Continue while polling or sending fails, so that patience does not restart in each task.
    """
    clock = SystemClock()
    poller = Poller(machine.work, machine.clock, machine.fetching)
    deadline = clock.monotonic() + seconds
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poller.run)
        async with anyio.create_task_group() as timer_tasks:
            timer_tasks.start_soon(run_timers, [machine.fetching, machine.rate], machine.clock)
            while not stop() and not machine.trip_errors and (clock.monotonic() < deadline or machine.is_failing):
                remaining = max(deadline - clock.monotonic(), 0.001)
                await anyio.sleep(min(remaining, _STOP_CHECK_SECONDS))
            poller.stop()
            timer_tasks.cancel_scope.cancel()
    if machine.trip_errors:
        raise machine.trip_errors[-1]


async def _run(
    spec: SweepSpec, counts: CountedMetrics, journal: Journal, seconds: float | None, stop: Callable[[], bool]
) -> None:
    if seconds is None:  # A sweep that ends cannot wait: it would end well, and leave messages that it does not count.
        spec = replace(spec, missing_queue_wait=timedelta(0))
    async with _open_machine(spec, counts, journal) as machine:
        await (_drain(machine) if seconds is None else _poll_for(machine, seconds, stop))


def drain_due(spec: SweepSpec) -> Counter[str]:
    """Dispatch all due messages that no other process has claimed. Return counts by kind of record.

    Raises PostdateError. It is transient only if store or transport failed for longer than the patience.
    """
    tally = CountedMetrics()
    anyio.run(_run, spec, tally, NO_JOURNAL, None, lambda: False)
    return Counter({_RECORDED[name]: count for name, count in tally.counts.items() if name in _RECORDED})


def sweep_in_thread(spec: SweepSpec, seconds: float | None, stop_file: Path | None = None) -> Generator[pa.RecordBatch]:
    """Dispatch in another thread, and yield its ledger meanwhile. ``None`` seconds: until nothing is due.

    The sweep ends early when ``stop_file`` exists. After the whole ledger, it raises the errors of :func:`drain_due`.
    """
    ledger, abandoned = DispatchJournal(), threading.Event()

    def stop() -> bool:
        return abandoned.is_set() or (stop_file is not None and stop_file.exists())

    with start_blocking_portal() as portal:
        sweep_future = portal.start_task_soon(_run, spec, CountedMetrics(), ledger, seconds, stop)
        sweep_future.add_done_callback(lambda _: ledger.mark_complete())
        try:
            while not sweep_future.done():
                yield from ledger.drain(_HANDOVER_SECONDS)
            yield from ledger.drain(0)
            sweep_future.result()
        finally:
            # Spark may close this generator early, for example at the end of a task: a resident dispatcher must stop.
            abandoned.set()


# --- the work of tasks: their rows are slots, each of which is one dispatcher -----------------------------------------


def count_delivered(spec: SweepSpec, slots: Batches) -> Batches:
    for slot in slots:
        for _ in range(slot.num_rows):
            counts = drain_due(spec)
            yield pa.RecordBatch.from_pylist([{name: counts[name] for name in COUNTED.names}], COUNTED)


def sweep_slots(spec: SweepSpec, seconds: float | None, stop_file: Path | None, slots: Batches) -> Batches:
    for slot in slots:
        for _ in range(slot.num_rows):
            yield from sweep_in_thread(spec, seconds, stop_file)
