"""The benchmarks. Each works in a folder of its own, with a service in a process of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

import anyio

from postdate.bench.limits import event_loop_floor, sleep_floor, sqlite_insert_limit, sqlite_move_limit
from postdate.bench.processes import Partner
from postdate.bench.result import Result, lateness
from postdate.bench.workload import QUEUE, batches
from postdate.clock import SystemClock, to_microseconds
from postdate.errors import PostdateError
from postdate.ports import Recording
from postdate.stores.sqlite import SqliteStore
from postdate.transports.local import LocalTransport

_LOOK_SECONDS = 0.002
_STUCK_SECONDS = 120.0
_LEAD_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how to measure.

    Args:
        folder: empty; on the disk to be measured.
        synchronous: durability of store, queues and limit alike.
        recording: how much is recorded.
        report: told in words what is going on.
    """

    folder: Path
    synchronous: str = "full"
    recording: str = "all"
    report: Callable[[str], None] = lambda _text: None

    def _service(self, file: Path, *pace: str) -> Partner:
        return Partner("postdate.bench.service", str(file), self.synchronous, self.recording, *pace)

    def _storer(self, file: Path, *work: str) -> Partner:
        return Partner("postdate.bench.storer", str(file), self.synchronous, *work)

    # --- schedule -----------------------------------------------------------------------------------------------

    def schedule(self, n: int, batch: int) -> Result:
        """Store ``n`` messages in batches; the limit is bare inserts in the same batches."""
        self.report(f"limit: inserting {n:,} bare rows, {batch:,} at a time")
        limit = sqlite_insert_limit(self.folder, n, batch, self.synchronous)
        self.report(f"storing {n:,} messages, {batch:,} at a time")
        with _Opened(self, self.folder / "schedule.db") as opened:
            now = SystemClock().now()
            ready = [
                group[start : start + batch]
                for group in batches(n, now + timedelta(hours=1), timedelta(milliseconds=1))
                for start in range(0, len(group), batch)
            ]
            started, used_before = time.perf_counter(), time.process_time()
            for group in ready:
                opened.store.store_many_blocking(group, now)
            seconds = time.perf_counter() - started
            cpu = time.process_time() - used_before
            stored = opened.count("SELECT count(*) FROM delayed_message")
        return Result("schedule", n, n / seconds, limit, lost=n - stored, duplicated=0, cpu_s=cpu)

    # --- drain --------------------------------------------------------------------------------------------------

    def drain(self, n: int, *, pending: int = 0, beside_writer: bool = False) -> Result:
        """Deliver ``n`` messages that are due, above ``pending`` that are not, maybe beside another writing process."""
        self.report(f"limit: moving {n:,} bare rows")
        limit = sqlite_move_limit(self.folder, n, self.synchronous)
        file = self.folder / f"drain-{pending}-{beside_writer}.db"
        with _Opened(self, file) as opened, ExitStack() as stack:
            self.report(f"storing {pending + n:,} messages")
            now = SystemClock().now()
            opened.fill(pending, now + timedelta(days=1), now)
            opened.fill(n, now - timedelta(days=1), now)
            opened.store.file.checkpoint_blocking()
            storer = stack.enter_context(self._storer(file, "flat-out", "3")) if beside_writer else None
            service = stack.enter_context(self._service(file))
            self.report(f"delivering {n:,} messages")
            if storer is not None:
                storer.say()
                time.sleep(0.3)  # the other writer is at full speed when the drain begins
            seconds = opened.drained(service)
            found = service.finish()
            extra = dict[str, float](json.loads(storer.hear())) if storer is not None else None
            counts = opened.deliveries()
        return Result(
            "drain" if not pending else "backlog",
            n,
            n / seconds,
            limit,
            lost=n - len(counts),
            duplicated=sum(count > 1 for count in counts.values()),
            early=0,
            rss_mb=found["rss_mb"],
            cpu_s=found["cpu_s"],
            extra=extra,
        )

    def backlog(self, n: int, pending: int) -> Result:
        """Drain ``n`` with an empty store and above ``pending`` messages; ``of_empty`` is the second by the first."""
        empty, full = self.drain(n), self.drain(n, pending=pending)
        extra = {
            "pending": float(pending),
            "empty_rate": empty.rate or 0,
            "of_empty": (full.rate or 0) / (empty.rate or 1),
        }
        return Result(
            "backlog", n, full.rate, full.limit, full.lost, full.duplicated, full.early,
            rss_mb=full.rss_mb, cpu_s=full.cpu_s, extra=extra,
        )  # fmt: skip

    # --- lateness -----------------------------------------------------------------------------------------------

    def lateness(self, rate: int, seconds: float, *, by_service: bool) -> Result:
        """Deliver ``rate`` messages a second that the service or another process stores; a third one receives them."""
        self.report("floor: a loop that only sleeps")
        floor = anyio.run(event_loop_floor, rate, min(seconds, 10))
        thread_floor = sleep_floor(rate, min(seconds, 10))
        n = int(rate * seconds)
        file, pace = self.folder / "lateness.db", (str(rate), str(seconds), str(_LEAD_SECONDS))
        self.report(f"storing and delivering {rate} messages a second for {seconds:.0f} s")
        with _Opened(self, file) as opened, ExitStack() as stack:
            service = stack.enter_context(self._service(file, *(pace if by_service else ())))
            storer = None if by_service else stack.enter_context(self._storer(file, "paced", *pace))
            service.say()
            if storer is not None:
                storer.say()
            received = anyio.run(_receive, opened.transport, n, seconds + _STUCK_SECONDS)
            dues = list[float](json.loads(storer.hear())) if storer is not None else None
            found = service.finish()
        dues = dues or list[float](found["dues"])
        late = _lateness_of_batches(dues, found["marks"])
        arrived = Counter(message_id for message_id, _ in received)
        return Result(
            "lateness",
            n,
            rate=None,
            lost=n - len(arrived),
            duplicated=sum(count > 1 for count in arrived.values()),
            early=sum(value < 0 for value in late) + sum(value < 0 for _, value in received),
            lateness=lateness(late),
            received=lateness([value for _, value in received]),
            floor=floor,
            extra={"thread_floor_p99_ms": thread_floor.p99_ms},
            rss_mb=found["rss_mb"],
            cpu_s=found["cpu_s"],
        )


class _Opened:
    """Store and transport of one file, in this process."""

    def __init__(self, bench: Bench, file: Path) -> None:
        recording = Recording(bench.recording)
        self.store = SqliteStore(file, synchronous=bench.synchronous, recording=recording)
        self.transport = LocalTransport(file, synchronous=bench.synchronous, recording=recording)

    def __enter__(self) -> Self:
        asyncio.run(self.transport.create_queues([QUEUE]))
        return self

    def __exit__(self, *_: object) -> None:
        self.store.file.close()
        self.transport.file.close()

    def fill(self, n: int, first_due: datetime, now: datetime) -> None:
        for group in batches(n, first_due, timedelta(milliseconds=1)):
            self.store.store_many_blocking(group, now)

    def count(self, sql: str, *values: int) -> int:
        return int(self.store.file.read_blocking(lambda c: c.execute(sql, values).fetchone())[0])

    def drained(self, service: Partner) -> float:
        """Start the service and return the seconds until nothing due is left."""
        now = to_microseconds(SystemClock().now())
        service.say()
        started = time.perf_counter()
        while self.count("SELECT EXISTS (SELECT 1 FROM delayed_message WHERE attempt_at < ?)", now):
            time.sleep(_LOOK_SECONDS)  # looks from outside, seldom enough not to disturb
            if time.perf_counter() - started > _STUCK_SECONDS:
                raise PostdateError(f"the service delivered nothing for {_STUCK_SECONDS:.0f} s")
        return time.perf_counter() - started

    def deliveries(self) -> Counter[str]:
        """Count the messages of the destination queue by id."""
        rows = self.store.file.read_blocking(lambda c: c.execute("SELECT message_id FROM queue_message").fetchall())
        return Counter(message_id for (message_id,) in rows)


async def _receive(transport: LocalTransport, n: int, patience: float) -> list[tuple[str, float]]:
    """Receive ``n`` messages and return their ids and seconds since they were due; fewer when patience ends."""
    receiver, clock = transport.receiver(QUEUE), SystemClock()
    received: list[tuple[str, float]] = []
    with anyio.move_on_after(patience):
        while len(received) < n:
            for each in await receiver.receive(100):
                now = clock.now()
                due = each.envelope.due or now
                received.append((each.envelope.message_id, (now - due) / timedelta(seconds=1)))
                await receiver.commit(each, now)
    await receiver.close()
    return received


def _lateness_of_batches(dues: list[float], marks: list[tuple[float, int]]) -> list[float]:
    """Return the seconds from due to the commit of the batch of each message: batches go in the order of due times."""
    commits: Iterator[float] = (at for at, count in marks for _ in range(count))
    return [at - due for due, at in zip(sorted(dues), commits, strict=False)]
