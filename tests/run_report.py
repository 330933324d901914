"""What a run of several workers cost, printed at its end: time, processors, idle workers, the slowest tests.

Whoever makes the suite slower sees it, and where.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from heapq import nlargest
from pathlib import Path
from typing import Final

import pytest

_SLOWEST: Final = 10
_STAT: Final = Path("/proc/stat")


class RunReport:
    """Counts what the workers tell of each test.

    Args:
        turn_of: names the turn of a test.
        record: is told at the end how many seconds each turn took.
    """

    def __init__(
        self, turn_of: Callable[[str], str], record: Callable[[Mapping[str, float]], None] | None = None
    ) -> None:
        self._turn_of, self._record = turn_of, record
        self._began, self._busy = time.monotonic(), _busy_seconds()
        self._first: float | None = None
        self._of_tests, self._of_turns, self._of_workers = (defaultdict[str, float](float) for _ in range(3))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._first = self._first or time.monotonic()
        self._of_tests[report.nodeid] += report.duration
        self._of_turns[self._turn_of(report.nodeid)] += report.duration
        self._of_workers[getattr(report, "worker_id", "")] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        now, busy = time.monotonic(), _busy_seconds() - self._busy
        wall, tests = now - self._began, now - (self._first or now)
        total, workers = sum(self._of_tests.values()), len(self._of_workers)
        say = terminalreporter.write_line
        terminalreporter.section("what it cost")
        say(f"{wall:.0f} s, {tests:.0f} s of it tests: {len(self._of_tests)} took {total:.0f} s in {workers} workers,")
        say(f"which were idle for {workers * tests - total:.0f} s; {busy:.0f} s of {os.cpu_count()} processors")
        for turn, seconds in _longest(self._of_turns, 3):
            say(f"{seconds:7.1f} s  turn {turn}")
        for test, seconds in _longest(self._of_tests, _SLOWEST):
            say(f"{seconds:7.1f} s  {test}")
        if self._record is not None:
            self._record(self._of_turns)


def _longest(seconds: Mapping[str, float], count: int) -> list[tuple[str, float]]:
    return nlargest(count, seconds.items(), key=lambda each: each[1])


def _busy_seconds() -> float:
    """Return the processor time of the whole machine: servers and their Java are no children that we wait for."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _idle, _waiting, *interrupts = map(int, _STAT.read_text().partition("\n")[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
