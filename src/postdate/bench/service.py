"""The service process of a benchmark: an ordinary send-only endpoint that also notes when each batch was in its queue.

Run as ``python -m postdate.bench.service FILE SYNCHRONOUS RECORDING [RATE SECONDS LEAD]``. It says ``ready``, starts at
the first line on its standard input, stops at the second, and then prints one JSON object. With a rate it also stores
that many messages a second itself.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from datetime import datetime
from pathlib import Path

import anyio
import anyio.to_thread

from postdate.bench.storer import paced
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.settings import DelayedDelivery
from postdate.ports import MoveReport, Recording
from postdate.stores.sqlite import SqliteStore
from postdate.transports.local import LocalTransport


class NotingStore(SqliteStore):
    """Notes the machine time after the commit of each move, and how many messages it delivered."""

    def __init__(self, path: Path, *, synchronous: str, recording: Recording) -> None:
        super().__init__(path, synchronous=synchronous, recording=recording)
        self.marks: list[tuple[float, int]] = []

    async def move_due(self, now: datetime, limit: int) -> MoveReport:
        """See :meth:`postdate.ports.MovingStore.move_due`."""
        report = await super().move_due(now, limit)
        if report.delivered:
            self.marks.append((time.time(), report.delivered))
        return report


async def serve(path: Path, synchronous: str, recording: Recording, *pace: str) -> None:
    """Run the service between two lines of standard input."""
    store = NotingStore(path, synchronous=synchronous, recording=recording)
    transport = LocalTransport(path, synchronous=synchronous, recording=recording)
    endpoint = Endpoint("bench", transport=transport, delayed_delivery=DelayedDelivery(store), send_only=True)
    await store.initialize("bench", endpoint.mode)
    print("ready", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)
    used_before = time.process_time()
    dues: list[float] = []
    async with endpoint:
        if pace:
            dues = await paced(store, int(pace[0]), float(pace[1]), float(pace[2]))
        await anyio.to_thread.run_sync(sys.stdin.readline)
    await store.close()
    await transport.close()
    used, memory = time.process_time() - used_before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"marks": store.marks, "dues": dues, "rss_mb": memory, "cpu_s": used}), flush=True)


if __name__ == "__main__":
    anyio.run(serve, Path(sys.argv[1]), sys.argv[2], Recording(sys.argv[3]), *sys.argv[4:])
