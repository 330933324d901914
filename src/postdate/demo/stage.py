"""The processes of the demo, observed from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from postdate.backends.sqlite.store import SqliteStore
from postdate.backends.sqlite.transport import LocalTransport
from postdate.clock import Clock, ScaledClock, from_microseconds
from postdate.demo.names import QUEUE
from postdate.errors import PostdateError
from postdate.ports import RecordKind, Scan

_STOP_SECONDS = 20.0
_RECENT_RECORDS = 400


@dataclass(frozen=True, slots=True)
class Scene:
    """The state of the demo at one moment; times and seconds are on its clock.

    Args:
        pending: messages that wait in the store.
        queued: messages in the destination queue, not yet handled.
        recent_lateness: seconds, of messages delivered lately; oldest first.
    """

    now: datetime
    pending: int
    queued: int
    next_due: datetime | None
    recent_lateness: tuple[float, ...] = ()


class Stage:
    """Runs service and consumers as processes on one file; all live by ``clock``."""

    def __init__(self, file: Path, clock: Clock, consumers: int = 1) -> None:
        self._file, self._clock, self._consumers = file, clock, consumers
        self._store, self._transport = SqliteStore(file), LocalTransport(file)
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Self:
        anyio.run(self._transport.create_queues, [QUEUE])
        for _ in range(self._consumers):
            self._start("the consumer", "postdate.demo.consumer", str(self._file), *self._clock_arguments())
        options = self._clock_arguments()
        clock = (
            ["--clock-start", options[0], "--clock-real-start", options[1], "--clock-speed", options[2]]
            if options
            else []
        )
        addresses = ["--store", f"sqlite:///{self._file}", "--transport", f"local:///{self._file}"]
        self._start("the service", "postdate.cli", "run", *addresses, "--log-level", "warning", *clock)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, process in self._processes:
            process.terminate()
        for _, process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            process.kill()
            process.wait()
        self._store.file.close()
        self._transport.file.close()

    def _start(self, name: str, module: str, *arguments: str) -> None:
        self._processes.append((name, subprocess.Popen([sys.executable, "-m", module, *arguments])))

    def _clock_arguments(self) -> tuple[str, ...]:
        if not isinstance(self._clock, ScaledClock):
            return ()
        return (self._clock.starts_at.isoformat(), repr(self._clock.real_start), repr(self._clock.speed))

    def look(self, *, recent: bool = False) -> Scene:
        """Look at the file, with ``recent`` also at the latest deliveries; fail if one of the processes has ended."""
        for name, process in self._processes:
            if process.poll() is not None:
                raise PostdateError(f"{name} ended with exit status {process.returncode}; see its message above")
        now = self._clock.now()
        statistics = anyio.run(self._store.statistics, now)
        queued = anyio.run(self._transport.queue_lengths).get(QUEUE, 0)
        lateness = self._recent_lateness() if recent else ()
        return Scene(now, statistics.pending, queued, statistics.next_due, lateness)

    def _recent_lateness(self) -> tuple[float, ...]:
        parts = self._store.scan_parts("records", 1)
        if not parts:
            return ()
        last = type(parts[0])(max(parts[0].first, parts[0].end - _RECENT_RECORDS), parts[0].end)
        wanted = Scan("records", ("kind", "at", "due"))
        rows = [row for page in self._store.scan(wanted, last, 1_000) for row in page]
        return tuple(
            (from_microseconds(at) - from_microseconds(due)).total_seconds()
            for kind, at, due in rows
            if kind == RecordKind.DELIVERED
        )


def pause(seconds: float) -> None:
    """Let the other processes work before the next look."""
    time.sleep(seconds)  # noqa: TID251 - a live view, nothing depends on it
