"""Real processes on one Azure table: one is killed with -9 while it has the lease, and the other takes over.

At least once is what a table and a queue elsewhere can keep together: what was sent and not yet removed is sent again.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobLeaseClient, BlobServiceClient
from tests.azure_store_subjects import TablePlace

from postdate import DelayedMessage, LocalTransport, SystemClock
from postdate.azure.table_names import lease_container

SCRIPT = Path(__file__).with_name("dispatching.py")
TAKEOVER_WITHIN_SECONDS = 16.0
QUEUES = ["orders", "error", "service.timeouts"]


class Service:
    """A process of ``dispatching.py``."""

    def __init__(self, place: TablePlace, file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), place.table, str(file), str(place.leases)],
            stdout=subprocess.PIPE,
            env={**os.environ, "POSTDATE_AZURITE_CONNECTION": place.connection},
            text=True,
        )

    def is_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        """End it as a power cut would."""
        self._process.kill()
        self._end()

    def stop(self) -> int:
        self._process.terminate()
        return self._end()

    def _end(self) -> int:
        code = self._process.wait(60)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code


@pytest.fixture
async def place(azurite_connection: str) -> AsyncGenerator[TablePlace]:
    place = TablePlace(azurite_connection)
    yield place
    await place.close()


@pytest.fixture
def start(place: TablePlace, tmp_path: Path) -> Iterator[Callable[[], Service]]:
    """Return what starts a service; those that still run at the end of the test are killed."""
    started: list[Service] = []

    def start() -> Service:
        started.append(Service(place, tmp_path / "queues.db"))
        return started[-1]

    yield start
    for service in started:
        service.kill()


@pytest.fixture
async def queues(tmp_path: Path) -> AsyncGenerator[LocalTransport]:
    transport = LocalTransport(tmp_path / "queues.db", synchronous="normal")
    await transport.create_queues(QUEUES)
    yield transport
    await transport.close()


def arrived(queues: LocalTransport) -> Counter[str]:
    """Count by id what has come to the queue ``orders``."""
    rows = queues.file.read_blocking(
        lambda connection: connection.execute("SELECT message_id FROM queue_message").fetchall()
    )
    return Counter(row[0] for row in rows)


def is_leased(place: TablePlace) -> bool:
    with BlobServiceClient.from_connection_string(place.connection) as blobs:
        container = blobs.get_container_client(lease_container(place.table, 0))
        try:
            lease: BlobLeaseClient = container.acquire_lease(15)
        except HttpResponseError:
            return True
        lease.release()
        return False


async def store_from_now_on(place: TablePlace, count: int, over: timedelta) -> None:
    """Store messages that fall due one after the other."""
    store, now = await place.open(), SystemClock().now()
    batch = [DelayedMessage(f"m-{n}", now + n * over / count, "orders", {"n": str(n)}, b"body") for n in range(count)]
    await store.store_many(batch, now)


@pytest.mark.timeout(240)
async def test_row_79_a_service_that_is_killed_while_it_has_the_lease_is_followed_within_16_s_and_nothing_is_lost(
    place: TablePlace, start: Callable[[], Service], queues: LocalTransport, eventually
) -> None:
    messages = 1_000
    await (await place.open()).setup()
    first = start()
    first.is_ready()
    await store_from_now_on(place, messages, over=timedelta(seconds=20))
    eventually(lambda: arrived(queues).total() > 0, "the first dispatches")
    second = start()
    second.is_ready()
    assert is_leased(place)
    eventually(lambda: arrived(queues).total() > 100, "the first is in the middle of it")
    first.kill()
    killed_at, before = time.monotonic(), arrived(queues).total()
    eventually(lambda: arrived(queues).total() > before, "the second dispatches", seconds=TAKEOVER_WITHIN_SECONDS)
    takeover = time.monotonic() - killed_at
    eventually(lambda: len(arrived(queues)) == messages, "all have come", seconds=90)
    eventually(lambda: not place.entities(), "all are removed")
    found = arrived(queues)
    doubled = found.total() - len(found)
    print(f"takeover {takeover:.1f} s; {len(found):,} of {messages:,} came, {doubled:,} more than once")  # noqa: T201
    assert set(found) == {f"m-{n}" for n in range(messages)}
    assert doubled <= 4 * 50, "no more than was in hand"
    assert second.stop() == 0


@pytest.mark.timeout(120)
async def test_row_79_a_service_that_stops_gives_the_lease_up_and_the_other_goes_on_at_once(
    place: TablePlace, start: Callable[[], Service], queues: LocalTransport, eventually
) -> None:
    """Upstream's lease only ends by itself, up to 15 s later."""
    messages = 300
    await (await place.open()).setup()
    first = start()
    first.is_ready()
    await store_from_now_on(place, messages, over=timedelta(seconds=10))
    eventually(lambda: arrived(queues).total() > 20, "the first dispatches")
    second = start()
    second.is_ready()
    assert first.stop() == 0
    stopped_at, before = time.monotonic(), arrived(queues).total()
    eventually(lambda: arrived(queues).total() > before, "the second dispatches", seconds=5)
    print(f"takeover after a stop: {time.monotonic() - stopped_at:.1f} s")  # noqa: T201
    eventually(lambda: len(arrived(queues)) == messages, "all have come", seconds=60)
    assert set(arrived(queues).values()) == {1}, "a stop doubles nothing"
    assert second.stop() == 0
