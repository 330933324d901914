"""The lateness of deliveries: at an even rate, and all at one instant."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

import anyio

from postdate.bench.bench import STUCK_SECONDS, Arrivals, Bench, Services
from postdate.bench.limits import arrived, floor, move_limit
from postdate.bench.processes import Partner
from postdate.bench.result import BenchmarkResult, Figure, LatenessInMilliseconds, lateness
from postdate.bench.targets import Targets
from postdate.bench.workload import Workload, load, number_of
from postdate.clock import SystemClock
from postdate.errors import ConfigurationError, PostdateError

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
        extra |= {f"{at}_of_floor": _by(delivered, bare, f"{at}_ms") for at in ("p50", "p99")}
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


def _by(ours: LatenessInMilliseconds, floor: LatenessInMilliseconds, name: str) -> float:
    return getattr(ours, name) / (getattr(floor, name) or 1.0)


def _stored(
    bench: Bench, targets: Targets, stack: ExitStack, rate: int, n: int, stored_by: str, patience: int
) -> tuple[Workload, Services, Partner | None]:
    """Return the messages, and services that have stored each, or will a second before it is due."""
    apart, clock = timedelta(seconds=1) / rate, SystemClock()
    # So that storing one message does not coincide with delivering another each time.
    lead = _LEAD_SECONDS + 0.37 / rate
    if stored_by == "before":
        messages = load(targets.deployment, range(n), clock.now() + _time_to_store(n) * patience, apart)
        bench.fill(targets, messages)
        running = stack.enter_context(bench.services(targets, at_once=True))
        _sleep_until(messages.due(0) - timedelta(seconds=_AHEAD_SECONDS))
        running.start()
        return messages, running, None
    running = stack.enter_context(bench.services(targets, lead=lead))
    storer = stack.enter_context(bench.storer(targets, "paced", lead)) if stored_by == "other" else None
    messages = load(targets.deployment, range(n), clock.now() + timedelta(seconds=lead + _AHEAD_SECONDS), apart)
    running.start(messages if storer is None else None)
    if storer is not None:
        storer.start(messages)
    return messages, running, storer


def _time_to_store(n: int) -> timedelta:
    return timedelta(seconds=_STARTS_WITHIN_SECONDS + n / _STORED_A_SECOND_AT_LEAST)


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
    receiver, clock = transport.receiver(targets.deployment.queue), SystemClock()
    received: list[tuple[str, float]] = []
    with anyio.move_on_after(patience):
        while len(received) < messages.count:
            for each in await receiver.receive(100):
                now, message_id = clock.now(), each.envelope.message_id
                due = messages.due(number_of(message_id))
                received.append((message_id, (now - due) / timedelta(seconds=1)))
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
        instant = SystemClock().now() + _time_to_store(n) * patience
        messages = load(targets.deployment, range(n), instant, timedelta(0))
        bench.fill(targets, messages)
        running = stack.enter_context(bench.services(targets, at_once=True))
        _sleep_until(messages.due(0) - timedelta(seconds=_AHEAD_SECONDS))
        running.start()
        running.wait_for(n, f"delivering {n:,} messages that are due at one instant")
        running.finish()
        return _herd_result(targets, running, messages, limit)


def _herd_result(targets: Targets, running: Services, messages: Workload, limit: float) -> BenchmarkResult:
    arrivals, late = Arrivals(range(messages.count)), running.lateness_of(messages.dues())
    arrivals.add(arrived(targets, messages.count))
    last_after, limit_s = max(late, default=0.0), messages.count / limit
    found = {"last_after_s": last_after, "limit_s": limit_s, "times_limit": last_after / limit_s}
    return replace(
        running.result("herd", arrivals, limit, found),
        rate=messages.count / last_after if last_after > 0 else 0.0,
        early=arrivals.unexpected + sum(value < 0 for value in late),
        lateness=lateness(late),
    )
