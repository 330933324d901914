"""The benchmarks: storing in bulk, delivering, the lateness of deliveries, and handling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

import anyio

from benchmarks.bench import Arrivals, Bench, Services
from benchmarks.deployment import Deployment, Ping, Workload, load, number_of
from benchmarks.limits import arrived, floor, insert_limit, move_limit, receive_limit
from benchmarks.places import Targets
from benchmarks.processes import Partner
from benchmarks.result import BenchmarkResult, Figure, lateness
from benchmarks.shared_count import SharedCount
from postdate.cli.bench.messages import STUCK_SECONDS, id_of
from postdate.clock import SystemClock
from postdate.endpoint.message_types import MessageTypes
from postdate.endpoint.outgoing import outgoing_message, sender_headers
from postdate.endpoint.send_options import SendOptions
from postdate.errors import ConfigurationError, PostdateError
from postdate.messages import Envelope
from postdate.ports import AdministrableStore, TransactionMode

# --- storing in bulk --------------------------------------------------------------------------------------------------


def schedule(bench: Bench, n: int, batch: int) -> BenchmarkResult:
    """Store ``n`` messages in batches; the limit is bare rows in the same batches. Making messages is not counted."""
    with bench.targets() as targets:
        bench.report(f"limit: inserting {n:,} bare rows, {batch:,} at a time")
        limit = insert_limit(targets, n, batch)
        bench.report(f"storing {n:,} messages, {batch:,} at a time")
        messages = load(
            targets.deployment, range(n), SystemClock().now() + timedelta(hours=1), timedelta(milliseconds=1), batch
        )
        return anyio.run(_schedule, targets, messages, limit)


async def _schedule(targets: Targets, messages: Workload, limit: float | None) -> BenchmarkResult:
    store, clock, seconds, used = targets.deployment.open_store(), SystemClock(), 0.0, 0.0
    try:
        await store.initialize(targets.deployment.names.endpoint, TransactionMode.RECEIVE_ONLY)
        if not isinstance(store, AdministrableStore):
            raise ConfigurationError("this store cannot count what it has")
        before = targets.cpu_seconds()
        for group in messages.batches():
            started, used_before = time.perf_counter(), time.process_time()
            await store.store_many(group, clock.now())
            seconds += time.perf_counter() - started
            used += time.process_time() - used_before
        after = targets.cpu_seconds()
        stored = (await store.statistics(clock.now())).pending
    finally:
        await store.close()
    server = None if before is None or after is None else after - before
    return BenchmarkResult(
        "schedule", messages.count, messages.count / seconds, limit, lost=messages.count - stored, duplicated=0,
        cpu_s=used, server_cpu_s=server, servers={targets.store.name: targets.store.facts},
    )  # fmt: skip


# --- the rate at which due messages are delivered: by one service or two, beside a writer, above a backlog ------------


_MILLISECOND = timedelta(milliseconds=1)
_WRITES_SECONDS = 3.0
_UNTIL_AT_FULL_SPEED_SECONDS = 0.3


def drain(bench: Bench, n: int, *, services: int = 1, beside_writer: bool = False) -> BenchmarkResult:
    """Deliver ``n`` due messages; with several services, ``of_one`` is their rate divided by the rate of one."""
    one = _drain(bench, "drain", n, beside_writer=beside_writer)
    if services == 1:
        return one
    several = _drain(bench, "drain", n, services=services, beside_writer=beside_writer, limited=False)
    found = {"services": services, "one_rate": one.rate or 0, "of_one": (several.rate or 0) / (one.rate or 1)}
    return _both(one, several, found)


def backlog(bench: Bench, n: int, pending: int) -> BenchmarkResult:
    """Drain ``n`` from an empty store, then above ``pending`` messages; ``of_empty`` divides second by first rate."""
    empty = _drain(bench, "backlog", n)
    above = _drain(bench, "backlog", n, pending=pending, limited=False)
    found = {"pending": pending, "empty_rate": empty.rate or 0, "of_empty": (above.rate or 0) / (empty.rate or 1)}
    return _both(empty, above, found)


def _both(first: BenchmarkResult, second: BenchmarkResult, found: Mapping[str, Figure]) -> BenchmarkResult:
    """Return the second result with the limit of the first, what both lost, doubled or had early, and ``found``."""
    return replace(
        second,
        limit=first.limit,
        lost=(first.lost or 0) + (second.lost or 0),
        duplicated=(first.duplicated or 0) + (second.duplicated or 0),
        early=(first.early or 0) + (second.early or 0),
        extra={**(second.extra or {}), **found},
    )


def _drain(
    bench: Bench,
    name: str,
    n: int,
    *,
    pending: int = 0,
    services: int = 1,
    beside_writer: bool = False,
    limited: bool = True,
) -> BenchmarkResult:
    with bench.targets() as targets, ExitStack() as stack:
        limit = None
        if limited:
            bench.report(f"limit: {n:,} bare messages")
            limit = move_limit(targets, n)
        found: dict[str, Figure] = {"fill_s": _fill(bench, targets, n, pending)}
        storer = None
        if beside_writer:
            storer = stack.enter_context(bench.storer(targets, "flat-out", _WRITES_SECONDS))
        running = stack.enter_context(bench.services(targets, services))
        if storer is not None:
            storer.start(load(targets.deployment, range(0), SystemClock().now(), _MILLISECOND))
            time.sleep(_UNTIL_AT_FULL_SPEED_SECONDS)
        running.start()
        running.wait_for(n, f"delivering {n:,} messages")
        if storer is not None:
            found |= storer.found()
        running.finish()
        arrivals = Arrivals(range(n))
        arrivals.add(arrived(targets, n))
        return running.result(name, arrivals, limit, found)


def _fill(bench: Bench, targets: Targets, n: int, pending: int) -> float:
    now, started = SystemClock().now(), time.monotonic()
    later = load(targets.deployment, range(n, n + pending), now + timedelta(days=1), _MILLISECOND)
    due = load(targets.deployment, range(n), now - timedelta(days=1), timedelta(microseconds=100))
    bench.fill(targets, *([later] if pending else []), due)
    return time.monotonic() - started


STORED_BY = ("service", "other", "before")

_FLOOR_SECONDS = 10.0
_LEAD_SECONDS = 1.0
_AHEAD_SECONDS = 0.2
_STARTS_WITHIN_SECONDS = 3.0
_STORED_A_SECOND_AT_LEAST = 10_000
_TRIES = 4


class _StoredTooLate(PostdateError): ...


def _with_time(measured: Callable[[int], BenchmarkResult]) -> BenchmarkResult:
    """Measure again with twice the time for storing beforehand, as often as that time was too short."""
    for number in range(_TRIES - 1):
        try:
            return measured(2**number)
        except _StoredTooLate:
            continue
    return measured(2 ** (_TRIES - 1))


# --- at an even rate ---------------------------------------------------------------------------------------------


def even(bench: Bench, rate: int, seconds: float, *, stored_by: str, receiver: bool) -> BenchmarkResult:
    """Deliver ``rate`` messages a second, stored by the service, another process, or beforehand (``STORED_BY``)."""
    if stored_by not in STORED_BY:
        raise ConfigurationError(f"--stored-by must be one of {', '.join(STORED_BY)}, not {stored_by!r}")
    return _with_time(partial(_even, bench, rate, seconds, stored_by, receiver))


def _even(bench: Bench, rate: int, seconds: float, stored_by: str, receiver: bool, patience: int) -> BenchmarkResult:
    n, short = int(rate * seconds), min(seconds, _FLOOR_SECONDS)
    with bench.targets() as targets, ExitStack() as stack:
        bench.report(f"floor: the barest loop, {rate:,} messages a second for {short:.0f} s")
        bare, thread = floor(targets, rate, short)
        messages, running, storer = _stored(bench, targets, stack, rate, n, stored_by, patience)
        text, arrivals, received = f"delivering {rate:,} messages a second", Arrivals(range(n)), list[float]()
        if receiver:
            bench.report(text)
            taken = anyio.run(_receive, running, messages, seconds + STUCK_SECONDS)
            arrivals.add(message_id for message_id, _ in taken)
            received = [late for _, late in taken]
        running.wait_for(n, text)
        stored = storer.found() if storer is not None else None
        running.finish()
        arrivals.add(arrived(targets, 0 if receiver else n))
        late = running.lateness_of(messages.dues())
        delivered, extra = lateness(late), dict[str, Figure](stored or running.found[0]["stored"])
        if thread is not None:
            extra["thread_floor_p99_ms"] = thread.p99_ms
        extra |= {
            f"{at}_of_floor": getattr(delivered, f"{at}_ms") / (getattr(bare, f"{at}_ms") or 1.0)
            for at in ("p50", "p99")
        }
        if running.server_cpu_by_role:
            extra["server_cpu_cores_of"] = {
                role: used / running.seconds for role, used in running.server_cpu_by_role.items()
            }
        return replace(
            running.result("lateness", arrivals, extra=extra),
            rate=None,
            early=arrivals.unexpected + sum(value < 0 for value in (*late, *received)),
            lateness=delivered,
            received=lateness(received) if received else None,
            floor=bare,
        )


def _stored(
    bench: Bench, targets: Targets, stack: ExitStack, rate: int, n: int, stored_by: str, patience: int
) -> tuple[Workload, Services, Partner | None]:
    """Return the messages, and services that have stored each, or will a second before it is due."""
    apart = timedelta(seconds=1) / rate
    # So that storing one message does not coincide with delivering another each time.
    lead = _LEAD_SECONDS + 0.37 / rate
    if stored_by == "before":
        return *_stored_before(bench, targets, stack, n, apart, patience), None
    running = stack.enter_context(bench.services(targets, lead=lead))
    storer = stack.enter_context(bench.storer(targets, "paced", lead)) if stored_by == "other" else None
    messages = load(targets.deployment, range(n), SystemClock().now() + timedelta(seconds=lead + _AHEAD_SECONDS), apart)
    running.start(messages if storer is None else None)
    if storer is not None:
        storer.start(messages)
    return messages, running, storer


def _stored_before(
    bench: Bench, targets: Targets, stack: ExitStack, n: int, apart: timedelta, patience: int
) -> tuple[Workload, Services]:
    """Return messages that are stored already, and services that begin just before the first is due."""
    time_to_store = timedelta(seconds=_STARTS_WITHIN_SECONDS + n / _STORED_A_SECOND_AT_LEAST)
    messages = load(targets.deployment, range(n), SystemClock().now() + time_to_store * patience, apart)
    bench.fill(targets, messages)
    running = stack.enter_context(bench.services(targets, at_once=True))
    _sleep_until(messages.due(0) - timedelta(seconds=_AHEAD_SECONDS))
    running.start()
    return messages, running


def _sleep_until(instant: datetime) -> None:
    """Sleep until ``instant``; raise _StoredTooLate if it has passed."""
    left = (instant - SystemClock().now()).total_seconds()
    if left < 0:
        raise _StoredTooLate(
            f"storing took {-left:.1f} s longer than foreseen, again and again: the messages are due already; try fewer"
        )
    time.sleep(left)


async def _receive(running: Services, messages: Workload, patience: float) -> list[tuple[str, float]]:
    """Receive all messages and return ids with seconds since due; fewer when ``patience`` (seconds) ends first."""
    targets = running.targets
    transport = targets.deployment.seen_as("receiving").open_transport()
    receiver, clock = transport.receiver(targets.deployment.names.arrived), SystemClock()
    received: list[tuple[str, float]] = []
    with anyio.move_on_after(patience):
        while len(received) < messages.count:
            for each in await receiver.receive(100):
                now, message_id = clock.now(), each.envelope.message_id
                received.append((message_id, (now - messages.due(number_of(message_id))) / timedelta(seconds=1)))
                await receiver.commit(each, now)
    running.count_cpu()
    await receiver.close()
    await transport.close()
    return received


# --- all at one instant ------------------------------------------------------------------------------------------


def herd(bench: Bench, n: int) -> BenchmarkResult:
    """Deliver ``n`` messages due at one instant; the limit is the time in which the barest way moves them."""
    return _with_time(partial(_herd, bench, n))


def _herd(bench: Bench, n: int, patience: int) -> BenchmarkResult:
    with bench.targets() as targets, ExitStack() as stack:
        bench.report(f"limit: {n:,} bare messages")
        limit = move_limit(targets, n)
        messages, running = _stored_before(bench, targets, stack, n, timedelta(0), patience)
        running.wait_for(n, f"delivering {n:,} messages that are due at one instant")
        running.finish()
        arrivals, late = Arrivals(range(n)), running.lateness_of(messages.dues())
        arrivals.add(arrived(targets, n))
        last_after, limit_s = max(late, default=0.0), n / limit
        found = {"last_after_s": last_after, "limit_s": limit_s, "times_limit": last_after / limit_s}
        return replace(
            running.result("herd", arrivals, limit, found),
            rate=n / last_after if last_after > 0 else 0.0,
            early=arrivals.unexpected + sum(value < 0 for value in late),
            lateness=lateness(late),
        )


# --- handling: an endpoint with an empty handler and the messages of its queue ----------------------------------------


_SENT_AT_ONCE = 1_000
_IDLE_SECONDS = 1.0


def handle(bench: Bench, n: int, concurrency: int) -> BenchmarkResult:
    """Handle ``n`` messages that are queued before the endpoint starts, until the queue is empty."""
    with bench.targets() as targets:
        queues = targets.queues
        _queue_up(bench, targets, n)
        bench.report(f"limit: taking {n:,} messages off the queue")
        limit = receive_limit(targets, targets.deployment.names.endpoint, n)
        fill_s = _queue_up(bench, targets, n)
        with (
            bench.tally("handled") as tally,
            Partner(
                "benchmarks.partners", "receiving", targets.deployment, "handle", tally.path, n, concurrency
            ) as partner,
        ):
            before = queues.cpu_seconds()
            partner.start()
            ended = _wait_until_empty(bench, targets, n, tally, partner)
            after = queues.cpu_seconds()
            found = partner.finish()
        seconds = ended - found["started"]
        server = None if before is None or after is None else after - before
        return BenchmarkResult(
            "handle", n, n / seconds, limit, lost=found["lost"], duplicated=found["duplicated"],
            rss_mb=found["rss_mb"], cpu_s=found["cpu_s"], server_cpu_s=server,
            server_cpu_cores=None if server is None else server / seconds,
            extra={"concurrency": concurrency, "start_s": found["start_s"], "fill_s": fill_s},
            servers={queues.name: queues.facts},
        )  # fmt: skip


def _queue_up(bench: Bench, targets: Targets, n: int) -> float:
    bench.report(f"sending {n:,} messages")
    started = time.monotonic()
    anyio.run(partial(_send, targets.deployment, n))
    targets.queues.target.settle()
    return time.monotonic() - started


async def _send(deployment: Deployment, n: int) -> None:
    transport, clock, types = deployment.open_transport(), SystemClock(), MessageTypes()
    sender = sender_headers(deployment.names.endpoint, None)
    try:
        await transport.create_queues([deployment.names.endpoint])
        for first in range(0, n, _SENT_AT_ONCE):
            now, envelopes = clock.now(), list[Envelope]()
            for number in range(first, min(first + _SENT_AT_ONCE, n)):
                content, body = types.encode(Ping(number))
                options = SendOptions(message_id=id_of(number, deployment.run))
                message = outgoing_message(sender, content, body, deployment.names.endpoint, options, clock)
                assert isinstance(message, Envelope), "there is no delay"
                envelopes.append(message)
            for error in await transport.send(envelopes, now):
                if error is not None:
                    raise error
    finally:
        await transport.close()


def _wait_until_empty(bench: Bench, targets: Targets, n: int, tally: SharedCount, partner: Partner) -> float:
    """Wait until the queue is empty and return the machine time of that moment.

    Looks at the queue only when all messages were handled or nothing moved for a second, because counting a long queue
    costs the server time.
    """

    def is_empty(count: int, idle_seconds: float) -> bool:
        looks = count >= n or idle_seconds > _IDLE_SECONDS
        return looks and targets.queues.target.is_empty(targets.deployment.names.endpoint)

    text = f"handling {n:,} messages"
    bench.report(text)
    bench.wait_until(is_empty, [tally], [partner], text)
    return time.time()
