"""Real processes on one Azure table: one is killed with -9 while it has the lease, and the other takes over.

At least once is what a table and a queue elsewhere can keep together: what was sent and not yet removed is sent again.
"""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobLeaseClient, BlobServiceClient
from tests.azure_store_subjects import TablePlace
from tests.waiting import freeze_processes

from postdate import DelayedMessage, LocalTransport, SystemClock

SCRIPT = Path(__file__).with_name("dispatching.py")
QUEUES = ["orders", "error", "service.timeouts"]


class Service:
    """A process of ``dispatching.py``."""

    def __init__(self, place: TablePlace, file: Path, *more: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), place.table, str(file), *more],
            stdout=subprocess.PIPE,
            env={**os.environ, "POSTDATE_AZURITE_CONNECTION": place.connection},
            text=True,
        )
        self._unread = list[str]()

    def is_ready(self) -> None:
        self._says("ready")

    def is_sending(self) -> None:
        self._says("sending")

    def freeze(self) -> None:
        freeze_processes(self._process.pid)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def takes(self) -> None:
        """Wait until it has taken the lease."""
        self._says("dispatches under the lease on")

    def _says(self, what: str) -> None:
        """Wait for a line, whatever it says before: it may have a lease before it is ready, or after."""
        assert self._process.stdout is not None
        for line in self._unread:
            if line.startswith(what):
                self._unread.remove(line)
                return
        for line in self._process.stdout:
            if line.startswith(what):
                return
            self._unread.append(line)
        raise AssertionError(f"it ended and never said: {what}")

    def kill(self) -> None:
        """End it as a power cut would."""
        self._process.kill()
        self._end()

    def stop(self) -> int:
        self._process.terminate()
        return self._end()

    def _end(self) -> int:
        code = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code


@dataclass
class Site:
    """A table, the queues that are dispatched to, and the services that do it."""

    place: TablePlace
    queues: LocalTransport
    file: Path
    started: list[Service] = field(default_factory=list[Service])

    def start(self, *more: str) -> Service:
        self.started.append(Service(self.place, self.file, *more))
        return self.started[-1]

    def arrived(self, queue: str = "orders") -> Counter[str]:
        """Count by id what has come to a queue."""
        sql = "SELECT message_id FROM queue_message JOIN queue USING (queue_id) WHERE name = ?"
        rows = self.queues.file.read_blocking(lambda connection: connection.execute(sql, (queue,)).fetchall())
        return Counter(row[0] for row in rows)

    def goes_on(self, messages: Sequence[DelayedMessage], since: datetime) -> bool:
        """Tell whether something has come that was due after an instant."""
        found = self.arrived()
        return any(message.due > since and message.message_id in found for message in messages)

    async def store(self, count: int, over: timedelta) -> list[DelayedMessage]:
        """Store messages that fall due one after the other from now on."""
        store, now = await self.place.open(), SystemClock().now()
        due = [now + n * over / count for n in range(count)]
        messages = [DelayedMessage(f"m-{n}", due[n], "orders", {"n": str(n)}, b"body") for n in range(count)]
        await store.store_many(messages, now)
        return messages


@pytest.fixture
async def site(azurite_connection: str, tmp_path: Path) -> AsyncGenerator[Site]:
    """A site, whose services are killed that still run at the end."""
    file = tmp_path / "queues.db"
    site = Site(TablePlace(azurite_connection), LocalTransport(file, synchronous="normal"), file)
    await site.queues.create_queues(QUEUES)
    await (await site.place.open()).setup()
    yield site
    for service in site.started:
        service.kill()
    await site.queues.close()
    await site.place.close()


def is_leased(place: TablePlace) -> bool:
    with BlobServiceClient.from_connection_string(place.connection) as blobs:
        container = blobs.get_container_client(place.table)
        try:
            lease: BlobLeaseClient = container.acquire_lease(15)
        except HttpResponseError:
            return True
        lease.release()
        return False


_LEASE = "tests/integration/azure/test_lease.py"


@pytest.mark.soak(
    "kills a process, and waits for the end of its lease",
    part="kills",
    proven_by=(
        f"{_LEASE}::test_row_79_the_lease_of_a_process_that_died_goes_with_what_it_had_in_hand_to_who_waits",
        f"{_LEASE}::test_row_81_nothing_more_is_claimed_finished_or_given_back_once_the_lease_is_stolen",
    ),
)
async def test_row_79_whoever_is_killed_while_it_has_the_lease_is_followed_and_nothing_is_lost(
    site: Site, eventually
) -> None:
    """On a machine at rest within 16 s: the lease of 15 s ends by itself, and whoever waits for it asks each second."""
    messages = 1_000
    victim = site.start()
    victim.takes()
    survivor = site.start()
    survivor.is_ready()
    stored = await site.store(messages, over=timedelta(seconds=20))
    eventually(lambda: site.arrived().total() > messages // 20, "they are in the middle of it")
    assert is_leased(site.place)
    victim.kill()
    since = SystemClock().now()
    eventually(lambda: site.goes_on(stored, since), "the other goes on")
    takeover = SystemClock().now() - since
    eventually(lambda: len(site.arrived()) == messages, "all have come")
    eventually(lambda: not site.place.entities(), "all are removed")
    found = site.arrived()
    doubled = found.total() - len(found)
    print(f"takeover {takeover.total_seconds():.1f} s; {doubled:,} of {messages:,} more than once")  # noqa: T201
    assert set(found) == {f"m-{n}" for n in range(messages)}
    assert doubled <= 4 * 50, "no more than was in hand"
    assert survivor.stop() == 0


@pytest.mark.soak(
    "processes that are stopped and frozen",
    part="kills",
    proven_by=f"{_LEASE}::test_row_79_a_process_that_closes_its_store_lets_another_dispatch_at_once",
)
async def test_row_79_a_service_that_stops_gives_the_lease_up_and_the_other_goes_on_at_once(
    site: Site, eventually
) -> None:
    """Upstream's lease only ends by itself, up to 15 s later."""
    messages = 300
    first = site.start()
    first.is_ready()
    first.takes()
    second = site.start()
    second.is_ready()
    await site.store(messages, over=timedelta(seconds=10))
    eventually(lambda: site.arrived().total() > 20, "the first dispatches")
    second.freeze()
    assert is_leased(site.place)
    assert first.stop() == 0
    assert not is_leased(site.place), "nobody has to wait for its end"
    second.wake()
    second.takes()
    eventually(lambda: len(site.arrived()) == messages, "all have come")
    assert set(site.arrived().values()) == {1}, "a stop doubles nothing"
    assert second.stop() == 0


@pytest.mark.soak(
    "a process is frozen until its lease has ended",
    part="silence",
    proven_by=(
        f"{_LEASE}::test_a_claim_is_void_as_soon_as_its_lease_is_over_by_our_own_clock",
        f"{_LEASE}::test_row_81_what_is_being_sent_is_cut_off_when_the_lease_is_lost",
    ),
)
async def test_a_process_that_was_frozen_puts_nothing_into_the_error_queue_on_waking(
    site: Site, eventually, tmp_path: Path
) -> None:
    """Another has taken its lease and delivered everything: all that is left to say of its own sends is a duplicate."""
    messages, mark = 100, tmp_path / "mark"
    frozen = site.start(str(mark))
    frozen.is_ready()
    await site.store(messages, over=timedelta(seconds=0))
    frozen.is_sending()
    frozen.freeze()
    healthy = site.start()
    eventually(lambda: len(site.arrived()) == messages, "the other delivers all")
    eventually(lambda: not site.place.entities(), "all are removed")
    mark.touch()
    frozen.wake()
    assert frozen.stop() == 0
    assert site.arrived("error").total() == 0
    assert set(site.arrived().values()) == {1}
    assert healthy.stop() == 0
