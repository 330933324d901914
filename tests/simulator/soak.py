"""Many seeds, in several processes; what they find is told as it is found."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context, parent_process
from typing import Final

from tests.simulator.mutations import MUTATIONS
from tests.simulator.run import run
from tests.simulator.site import Breaks

SEEDS_AT_ONCE: Final = 50
_TOLD_EVERY_SECONDS: Final = 10.0
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class SoakShare:
    """What some seeds have found.

    Args:
        seeds: how many they were.
        calls: of ports.
        seconds: of virtual time.
        violations: seed, profile, promise and text of each.
        errors: seed and text of each run that failed itself.
        profiles: how many runs of each.
    """

    seeds: int
    calls: int
    seconds: float
    violations: Sequence[tuple[int, str, str, str]]
    errors: Sequence[tuple[int, str]]
    profiles: Counter[str]


@dataclass(slots=True)
class Found:
    """What all of them have found; see :class:`SoakShare`."""

    seeds: int = 0
    calls: int = 0
    seconds: float = 0.0
    violations: list[tuple[int, str, str, str]] = field(default_factory=list[tuple[int, str, str, str]])
    errors: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    profiles: Counter[str] = field(default_factory=Counter[str])

    def add(self, share: SoakShare) -> None:
        """Add what some seeds have found."""
        self.seeds += share.seeds
        self.calls += share.calls
        self.seconds += share.seconds
        self.violations += share.violations
        self.errors += share.errors
        self.profiles += share.profiles


def live_through(seeds: Sequence[int], without: str | None = None) -> SoakShare:
    """Live through some seeds in this process, with a fix taken out or with none."""
    violations: list[tuple[int, str, str, str]] = []
    errors: list[tuple[int, str]] = []
    profiles: Counter[str] = Counter()
    calls, seconds = 0, 0.0
    with MUTATIONS[without]() if without else nullcontext(Breaks()) as breaks:
        for seed in seeds:
            try:
                result = run(seed, breaks=breaks)
            except Exception as error:  # noqa: BLE001 - told with its seed
                errors.append((seed, f"{type(error).__name__}: {error}"))
                continue
            calls, seconds = calls + result.calls, seconds + result.seconds
            profiles[result.profile] += 1
            if result.violation is not None:
                violations.append((seed, result.profile, result.violation.promise, result.violation.text))
    return SoakShare(len(seeds), calls, seconds, violations, errors, profiles)


def soak(
    seeds: Sequence[int], jobs: int, without: str | None = None, tell: Callable[[str], object] = lambda _: None
) -> Found:
    """Live through seeds in several processes; ``tell`` is given lines about how it goes."""
    found, began = Found(), time.monotonic()
    told = began
    waiting = iter(_shares(seeds))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_the_parent) as pool:
        running = [pool.submit(live_through, share, without) for share in islice(waiting, 2 * jobs)]
        while running:
            share = running.pop(0).result()
            running += [pool.submit(live_through, each, without) for each in islice(waiting, 1)]
            for violation in share.violations[: max(0, _SHOWN - len(found.violations))]:
                tell("seed {} ({}): {}: {}\n".format(*violation))
            found.add(share)
            if time.monotonic() - told > _TOLD_EVERY_SECONDS:
                told = time.monotonic()
                tell(f"{_so_far(found, told - began)}\n")
    for seed, text in found.errors[:_SHOWN]:
        tell(f"seed {seed}: the simulator itself failed: {text}\n")
    tell(f"{_so_far(found, time.monotonic() - began)}\n")
    if found.violations:
        tell(f"replay one: python -m tests.simulator --seed {found.violations[0][0]} --trace\n")
    return found


def _end_with_the_parent() -> None:
    """End this process when that which shares out the seeds has ended, however it did."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="soak-parent", daemon=True).start()


def _shares(seeds: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(seeds), SEEDS_AT_ONCE):
        yield seeds[first : first + SEEDS_AT_ONCE]


def _so_far(found: Found, seconds: float) -> str:
    kinds = Counter(promise for _, _, promise, _ in found.violations)
    what = "".join(f"; {count} x {promise}" for promise, count in kinds.most_common())
    return (
        f"{found.seeds:,} seeds in {seconds:.0f} s ({found.seeds / max(seconds, 0.001):.0f}/s), "
        f"{found.calls:,} port calls, {found.seconds / 3600:,.0f} virtual hours: "
        f"{len(found.violations)} violations, {len(found.errors)} errors{what}"
    )
