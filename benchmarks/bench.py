"""Parts that all benchmarks share: make a place for a run, fill it, run services as processes, wait, count arrivals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from benchmarks.deployment import Workload, number_of, parts
from benchmarks.places import Targets, opened
from benchmarks.processes import Partner
from benchmarks.result import BenchmarkResult, Figure
from benchmarks.shared_count import SharedCount
from postdate.cli.bench.messages import STUCK_SECONDS, lateness_of
from postdate.cli.bench.places import Common
from postdate.clock import SystemClock
from postdate.errors import PostdateError
from postdate.ports import TransactionMode

_LOOK_SECONDS = 0.002
_FILLED_BY_US = 50_000
_FILLERS = 2
"""One filler makes messages while the server stores those of the other."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs benchmarks; ``report`` gets lines of progress, again and again while something takes long.

    Args:
        common: what to measure.
        folder: an empty folder on the disk to be measured.
        report: see above.
    """

    common: Common
    folder: Path
    report: Callable[[str], None] = lambda _text: None

    @contextmanager
    def targets(self) -> Generator[Targets]:
        """Open store and queues for a run and create their tables and queues."""
        with opened(self.common, self.folder) as targets:
            anyio.run(targets.set_up)
            yield targets

    # --- storing ------------------------------------------------------------------------------------------------

    def fill(self, targets: Targets, *loads: Workload) -> None:
        for load in loads:
            text = f"storing {load.count:,} messages"
            self.report(text)
            if load.count <= _FILLED_BY_US or not targets.store.is_server:
                anyio.run(_fill, targets, load, partial(self._report_count, text))
            else:
                self._fill_by_others(targets, load, text)
        targets.store.target.settle()

    def _report_count(self, text: str, count: int) -> None:
        self.report(f"{text}: {count:,}")

    def _fill_by_others(self, targets: Targets, load: Workload, text: str) -> None:
        with ExitStack() as stack:
            tallies = [stack.enter_context(self.tally(f"filled{part}")) for part in range(_FILLERS)]
            fillers = [stack.enter_context(self.storer(targets, "fill", tally.path)) for tally in tallies]
            for filler, part in zip(fillers, parts(load, len(fillers)), strict=True):
                filler.start(part)
            self.wait_for(load.count, tallies, fillers, text)
            for filler in fillers:
                filler.found()

    # --- processes ----------------------------------------------------------------------------------------------

    @contextmanager
    def tally(self, name: str) -> Generator[SharedCount]:
        path = self.folder / f"{name}.tally"
        path.unlink(missing_ok=True)
        with SharedCount(path) as tally:
            yield tally

    @staticmethod
    def storer(targets: Targets, what: str, *rest: object) -> Partner:
        return Partner("benchmarks.partners", "storing", targets.deployment, what, *rest)

    @contextmanager
    def services(
        self, targets: Targets, number: int = 1, *, at_once: bool = False, lead: float = 0
    ) -> Generator[Services]:
        with ExitStack() as stack:
            tallies = [stack.enter_context(self.tally(f"delivered{each}")) for each in range(number)]
            arguments = [lead, "now"] if at_once else [lead]
            partners = [
                Partner("benchmarks.partners", "moving", targets.deployment, "deliver", tally.path, *arguments)
                for tally in tallies
            ]
            for partner in partners:
                stack.enter_context(partner)
            yield Services(self, targets, partners, tallies)

    def wait_for(self, n: int, tallies: list[SharedCount], partners: list[Partner], text: str) -> None:
        """Wait until the tallies add up to ``n``; see :meth:`wait_until`."""
        self.wait_until(lambda count, _: count >= n, tallies, partners, text)

    def wait_until(
        self, done: Callable[[int, float], bool], tallies: list[SharedCount], partners: list[Partner], text: str
    ) -> None:
        """Wait until ``done`` is true of the tallies' sum and the seconds since it grew.

        Raises PostdateError if a process has failed, or nothing moved for two minutes.
        """
        seen, since, told = 0, time.monotonic(), time.monotonic()
        while True:
            count, now = sum(tally.value for tally in tallies), time.monotonic()
            if count != seen:
                seen, since = count, now
            if done(count, now - since):
                return
            for partner in partners:
                partner.check()
            if now - since > STUCK_SECONDS:
                raise PostdateError(f"{text}: nothing went on for {STUCK_SECONDS:.0f} s after {count:,}")
            if now - told > 1:
                told = now
                self._report_count(text, count)
            time.sleep(_LOOK_SECONDS)


@dataclass(slots=True)
class Services:
    """Services on the same targets, each a process of its own; ``started`` is machine time."""

    bench: Bench
    targets: Targets
    partners: list[Partner]
    tallies: list[SharedCount]
    started: float = 0.0
    found: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _cpu_before: float | None = None
    _roles_before: dict[str, float] = field(default_factory=dict[str, float])
    server_cpu_s: float | None = None
    server_cpu_by_role: dict[str, float] = field(default_factory=dict[str, float])

    def start(self, load: Workload | None = None) -> None:
        """Let all services look for due messages at the same time; with a load, they also store it."""
        self._cpu_before, self._roles_before = self.targets.cpu_seconds(), self.targets.cpu_seconds_by_role()
        self.started = time.time()
        for partner in self.partners:
            partner.start(load)

    def wait_for(self, n: int, text: str) -> None:
        self.bench.report(text)
        self.bench.wait_for(n, self.tallies, self.partners, text)
        self.count_cpu()

    def count_cpu(self) -> None:
        used = self.targets.cpu_seconds()
        if used is not None and self._cpu_before is not None:
            self.server_cpu_s = used - self._cpu_before
        now = self.targets.cpu_seconds_by_role()
        for role, cpu in now.items():  # a process that has left is not there any more: what it had used stays
            used_here = cpu - self._roles_before.get(role, 0.0)
            self.server_cpu_by_role[role] = max(used_here, self.server_cpu_by_role.get(role, 0.0))

    def finish(self) -> None:
        """Stop the services when they have finished the messages in progress."""
        self.found = [partner.finish() for partner in self.partners]

    @property
    def marks(self) -> list[tuple[float, int]]:
        """Machine time of each delivered batch, and its size, in the order of time."""
        return sorted((at, count) for found in self.found for at, count in found["marks"])

    @property
    def seconds(self) -> float:
        return self.marks[-1][0] - self.started if self.marks else 0.0

    def result(
        self, name: str, arrivals: Arrivals, limit: float | None = None, extra: Mapping[str, Figure] | None = None
    ) -> BenchmarkResult:
        """Return the result of finished services; rate and cores cover the time from start to last delivery."""
        seconds, n = self.seconds, len(arrivals.numbers)
        return BenchmarkResult(
            name,
            n,
            n / seconds if seconds else 0.0,
            limit,
            lost=arrivals.lost,
            duplicated=arrivals.duplicated,
            early=arrivals.unexpected,
            rss_mb=max(found["rss_mb"] for found in self.found),
            cpu_s=sum(found["cpu_s"] for found in self.found),
            server_cpu_s=self.server_cpu_s,
            server_cpu_cores=None if self.server_cpu_s is None or not seconds else self.server_cpu_s / seconds,
            extra=extra,
            servers=self.targets.facts(),
        )

    def lateness_of(self, dues: list[float]) -> list[float]:
        """Return each message's seconds from due to delivered."""
        return lateness_of(dues, self.marks)


@dataclass(slots=True)
class Arrivals:
    """Counts which messages arrived, and how often; ``numbers`` should arrive."""

    numbers: range
    _times: bytearray = field(init=False)
    _others: Counter[int] = field(default_factory=Counter[int])

    def __post_init__(self) -> None:
        self._times = bytearray(len(self.numbers))

    def add(self, message_ids: Iterable[str]) -> int:
        """Count arrivals and return how many ids there were."""
        count, first, end = 0, self.numbers.start, self.numbers.stop
        for count, message_id in enumerate(message_ids, 1):  # noqa: B007 - read after the loop
            number = number_of(message_id)
            if first <= number < end:
                self._times[number - first] = min(self._times[number - first] + 1, 255)
            else:
                self._others[number] += 1
        return count

    @property
    def lost(self) -> int:
        return self._times.count(0)

    @property
    def duplicated(self) -> int:
        several = len(self._times) - self._times.count(0) - self._times.count(1)
        return several + sum(times > 1 for times in self._others.values())

    @property
    def unexpected(self) -> int:
        """Messages that arrived and are not in ``numbers``."""
        return len(self._others)


async def _fill(targets: Targets, load: Workload, stored: Callable[[int], None]) -> None:
    store, clock, count, told = targets.deployment.open_store(), SystemClock(), 0, time.monotonic()
    try:
        await store.initialize(targets.deployment.names.endpoint, TransactionMode.RECEIVE_ONLY)
        for batch in load.batches():
            count += (await store.store_many(batch, clock.now())).stored
            if time.monotonic() - told > 1:
                told = time.monotonic()
                stored(count)
    finally:
        await store.close()
