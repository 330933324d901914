"""The rate at which due messages are delivered: by one service, by two services, beside a writer, above a backlog."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

from postdate.bench.bench import Arrivals, Bench
from postdate.bench.limits import arrived, move_limit
from postdate.bench.result import BenchmarkResult, Figure
from postdate.bench.targets import Targets
from postdate.bench.workload import load
from postdate.clock import SystemClock

_MILLISECOND = timedelta(milliseconds=1)
_WRITES_SECONDS = 3.0
_UNTIL_AT_FULL_SPEED_SECONDS = 0.3


def drain(bench: Bench, n: int, *, services: int = 1, beside_writer: bool = False) -> BenchmarkResult:
    """Deliver ``n`` due messages; with several services, ``of_one`` is their rate divided by the rate of one."""
    if services == 1:
        return _drain(bench, "drain", n, beside_writer=beside_writer)
    one = _drain(bench, "drain", n, beside_writer=beside_writer)
    several = _drain(bench, "drain", n, services=services, beside_writer=beside_writer, limited=False)
    found = {"services": services, "one_rate": one.rate or 0, "of_one": (several.rate or 0) / (one.rate or 1)}
    return replace(_both(one, several), extra={**(several.extra or {}), **found})


def backlog(bench: Bench, n: int, pending: int) -> BenchmarkResult:
    """Drain ``n`` from an empty store, then above ``pending`` messages; ``of_empty`` divides second by first rate."""
    empty = _drain(bench, "backlog", n)
    above = _drain(bench, "backlog", n, pending=pending, limited=False)
    found = {"pending": pending, "empty_rate": empty.rate or 0, "of_empty": (above.rate or 0) / (empty.rate or 1)}
    return replace(_both(empty, above), extra={**(above.extra or {}), **found})


def _both(first: BenchmarkResult, second: BenchmarkResult) -> BenchmarkResult:
    """Return the second result with the limit of the first, and the lost, duplicated and early messages of both."""
    return replace(
        second,
        limit=first.limit,
        lost=(first.lost or 0) + (second.lost or 0),
        duplicated=(first.duplicated or 0) + (second.duplicated or 0),
        early=(first.early or 0) + (second.early or 0),
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
