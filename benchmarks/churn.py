"""Whether the rate holds while messages flow: stored, delivered and taken off the queue, for long."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise

from benchmarks.bench import Arrivals, Bench, Services
from benchmarks.deployment import load
from benchmarks.limits import arrived
from benchmarks.places import Targets
from benchmarks.processes import Partner
from benchmarks.result import BenchmarkResult, Figure
from benchmarks.shared_count import SharedCount
from benchmarks.targets.postgres import PostgresTarget
from postdate.cli.bench.messages import STUCK_SECONDS
from postdate.clock import SystemClock
from postdate.errors import ConfigurationError, PostdateError

_TENTHS = 10
_TAKEN_AT_ONCE = 1_000
_UNDERWAY = 20_000
_NOTHING_THERE_SECONDS = 0.002


def churn(bench: Bench, n: int, pending: int, batch: int, *, idle_transaction: bool) -> BenchmarkResult:
    """Let ``n`` messages through above ``pending`` that are not due; ``tenths`` is the rate over time."""
    with bench.targets() as targets, ExitStack() as stack:
        now = SystemClock().now()
        bench.fill(
            targets, load(targets.deployment, range(n, n + pending), now + timedelta(days=1), timedelta(milliseconds=1))
        )
        if idle_transaction:
            if not isinstance(targets.store.target, PostgresTarget):
                name = targets.store.name
                raise ConfigurationError(
                    f"--idle-transaction needs a store that keeps old row versions; {name} does not"
                )
            stack.enter_context(targets.store.target.idle_transaction())
        stored, taken = stack.enter_context(bench.tally("stored")), stack.enter_context(bench.tally("taken"))
        window = max(_UNDERWAY, 2 * batch)
        storer = stack.enter_context(
            Partner("benchmarks.closed_loop", "storing", targets.deployment, window, stored.path, taken.path)
        )
        running = stack.enter_context(bench.services(targets))
        running.start()
        storer.start(load(targets.deployment, range(n), now, timedelta(0), batch))
        arrivals = Arrivals(range(n))
        _take_all(bench, targets, arrivals, taken, [storer, *running.partners])
        running.count_cpu()
        storer.found()
        running.finish()
        arrivals.add(arrived(targets, 0))
        tenths = rates(running, n)
        found: dict[str, Figure] = {"pending": pending, "tenths": tenths, "last_by_first": tenths[-1] / tenths[0]}
        return running.result("churn", arrivals, extra=found)


def _take_all(bench: Bench, targets: Targets, arrivals: Arrivals, taken: SharedCount, partners: list[Partner]) -> None:
    n, told, since = len(arrivals.numbers), time.monotonic(), time.monotonic()
    while taken.value < n:
        count = arrivals.add(targets.queues.target.take(targets.deployment.names.arrived, _TAKEN_AT_ONCE))
        taken.add(count)
        now = time.monotonic()
        if count:
            since = now
        else:
            for partner in partners:
                partner.check()
            if now - since > STUCK_SECONDS:
                raise PostdateError(f"nothing arrived for {STUCK_SECONDS:.0f} s after {taken.value:,} of {n:,}")
            time.sleep(_NOTHING_THERE_SECONDS)
        if now - told > 1:
            told = now
            bench.report(f"stored, delivered and taken: {taken.value:,} of {n:,}")


def rates(running: Services, n: int) -> list[float]:
    """Return messages a second in each tenth of the messages delivered."""
    instants, total = [running.started], 0
    for at, count in running.marks:
        total += count
        while len(instants) <= _TENTHS and total * _TENTHS >= n * len(instants):
            instants.append(at)
    return [n / _TENTHS / max(end - start, 1e-6) for start, end in pairwise(instants)]
