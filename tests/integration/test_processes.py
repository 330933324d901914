"""Several real processes on one file (rows 35, 53 to 57)."""

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.integration.poison import let_a_message_kill_its_processes
from tests.waiting import UntilWoken, until

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    Headers,
    LocalTransport,
    SqliteStore,
    SystemClock,
)
from postdate.clock import from_microseconds, to_microseconds
from postdate.messages import format_timestamp, parse_timestamp
from postdate.ports import RecordKind

MILLISECOND = timedelta(milliseconds=1)
CONTENT = {Headers.ENCLOSED_MESSAGE_TYPES: "Work", Headers.CONTENT_TYPE: "application/json"}
KILLS_OF_EACH = int(os.environ.get("POSTDATE_KILL_ROUNDS", "5"))
MESSAGES = 1_000 * KILLS_OF_EACH


class OneFile:
    """Store and queues of the test itself, on the file that the processes share."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "one.db"
        self.store = SqliteStore(self.path, synchronous="normal")
        self.transport = LocalTransport(self.path, synchronous="normal")

    async def create_queues(self) -> None:
        await self.transport.create_queues(["consumer", "done", "error", "service.timeouts", "consumer.timeouts"])

    def work(self, number: int, due: datetime, destination: str = "consumer") -> DelayedMessage:
        body = json.dumps({"number": number}).encode()
        return DelayedMessage(f"m-{number}", due, destination, CONTENT, body)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self.store.file.read_blocking(lambda connection: connection.execute(sql).fetchall())

    def length(self, queue: str) -> int:
        sql = f"SELECT count(*) FROM queue_message JOIN queue USING (queue_id) WHERE name = '{queue}'"
        return self.rows(sql)[0][0]

    def in_queue(self, queue: str) -> list[tuple[str, dict[str, int]]]:
        sql = f"""
            SELECT message_id, body FROM queue_message AS m JOIN queue USING (queue_id)
            JOIN content AS c ON c.seq = content
            WHERE name = '{queue}'"""
        return [(id_, json.loads(body)) for id_, body in self.rows(sql)]

    def service(self, clock: SystemClock) -> Endpoint:
        """Return what delivers in the process of the test."""
        delivery = DelayedDelivery(self.store)
        return Endpoint("service", transport=self.transport, delayed_delivery=delivery, send_only=True, clock=clock)

    def close(self) -> None:
        self.store.file.close()
        self.transport.file.close()


@pytest.fixture
async def one_file(tmp_path: Path):
    one_file = OneFile(tmp_path)
    await one_file.create_queues()
    yield one_file
    one_file.close()


def now() -> datetime:
    return SystemClock().now()


@pytest.mark.soak(
    "kills processes at random moments",
    part="kills",
    proven_by=(
        "tests/property/test_delivery_under_faults.py::test_dying_at_every_single_call_loses_nothing",
        "tests/integration/test_processes.py::test_what_a_killed_process_held_is_delivered_by_another_row_25",
    ),
)
async def test_kills_during_deliveries_lose_and_double_nothing(
    one_file: OneFile, start, eventually, chance: random.Random
) -> None:
    """Exactly once through kill -9: service and consumer are killed again and again, at random moments."""
    first_due = now() + timedelta(seconds=1)
    for batch in range(0, MESSAGES, 1_000):
        messages = [one_file.work(n, first_due + n * 0.8 * MILLISECOND) for n in range(batch, batch + 1_000)]
        await one_file.store.store_many(messages, now())
    kill_both(one_file, start, eventually, chance)
    last = [start("service", one_file.path), start("consumer", one_file.path)]
    for count in range(1_000, MESSAGES + 1, 1_000):
        eventually(lambda count=count: one_file.length("done") >= count, f"{count:,} messages done")
    for process in last:
        process.stop()
    done = one_file.in_queue("done")
    counts = Counter(id_ for id_, _ in done)
    assert len(done) == MESSAGES
    assert counts == Counter(f"done-{n}" for n in range(MESSAGES)), "lost or doubled"
    assert min(body["late_microseconds"] for _, body in done) > 0, "early"
    await nothing_is_left_behind(one_file, eventually)


def kill_both(one_file: OneFile, start: Callable, eventually: Callable, chance: random.Random) -> None:
    """Kill each of the two processes in each round, side by side."""

    def kill_again_and_again(role: str, chance: random.Random) -> None:
        for left in reversed(range(KILLS_OF_EACH)):
            process = start(role, one_file.path)
            if chance.random() < 0.8:  # the others die while they start
                process.says("ready")
            if not left:  # on a busy machine nothing may have been done by then
                eventually(lambda: one_file.length("done"), "something is done before the last kill")
            process.kill_after(chance.random() * 0.4)

    killers = [
        threading.Thread(target=kill_again_and_again, args=(role, random.Random(chance.random())))
        for role in ("service", "consumer")
    ]
    for killer in killers:
        killer.start()
    for killer in killers:
        killer.join()


async def nothing_is_left_behind(one_file: OneFile, eventually: Callable) -> None:
    """No message, no claim, no registration of a dead process, no lock file but our own."""
    assert one_file.rows("SELECT count(*) FROM delayed_message") == [(0,)]
    assert one_file.rows("SELECT count(*) FROM content") == [(MESSAGES,)], "bodies of messages that are gone"
    lengths = await one_file.transport.queue_lengths()
    assert {name: length for name, length in lengths.items() if length} == {"done": MESSAGES}
    one_file.store.file._upkeep.release_dead_claims()
    ((own,),) = one_file.rows("SELECT claimant FROM claimant")
    left = {each.name for each in one_file.path.with_name(f"{one_file.path.name}-claimants").iterdir()}
    assert left == {f"{own}.lock", f"{own}.alive", "opening.lock", "log-of"}
    kinds = await one_file.store.record_counts()
    assert {kind: count for kind, count in kinds.items() if kind is not RecordKind.HANDLED} == {
        RecordKind.SCHEDULED: MESSAGES,
        RecordKind.DELIVERED: MESSAGES,
    }
    assert kinds[RecordKind.HANDLED] == MESSAGES


async def test_four_pollers_on_one_file_deliver_each_message_once_row_56(one_file: OneFile, start, eventually) -> None:
    services = [start("service", one_file.path) for _ in range(4)]
    for service in services:
        service.says("ready")
    begin = now()
    messages = [one_file.work(n, begin + (n % 100) * MILLISECOND, "done") for n in range(1_000)]
    await one_file.store.store_many(messages, begin)
    eventually(lambda: one_file.length("done") >= 1_000, "1,000 messages delivered")
    for service in services:
        service.stop()
    assert Counter(id_ for id_, _ in one_file.in_queue("done")) == Counter(f"m-{n}" for n in range(1_000))
    late = [at - due for at, due in one_file.rows(f"SELECT at, due FROM record WHERE kind = {RecordKind.DELIVERED}")]
    assert len(late) == 1_000
    assert min(late) > 0


async def lateness_of_what_wakes_a_sleeping_poller(one_file: OneFile, start) -> timedelta:
    await one_file.store.store(one_file.work(0, now() + timedelta(minutes=10), "done"), now())
    clock = UntilWoken()
    async with one_file.service(clock):
        await clock.sleeps_again()
        storer = start("storer", one_file.path, 1, 1)
        assert await anyio.to_thread.run_sync(storer.end) == 0
        await until(lambda: one_file.length("done") >= 1)
    (delivered,) = [record for record in await one_file.store.history("m-1") if record.kind is RecordKind.DELIVERED]
    assert delivered.due is not None
    return delivered.at - delivered.due


async def test_a_message_stored_by_another_process_wakes_the_sleeping_poller_row_35(one_file: OneFile, start) -> None:
    assert await lateness_of_what_wakes_a_sleeping_poller(one_file, start) > timedelta(0)


@pytest.mark.soak(
    "measures lateness",
    part="clocks",
    proven_by="tests/integration/test_processes.py::test_a_message_stored_by_another_process_wakes_the_sleeping_poller_row_35",
)
async def test_what_another_process_stores_is_in_time_row_35(one_file: OneFile, start) -> None:
    assert timedelta(0) < await lateness_of_what_wakes_a_sleeping_poller(one_file, start) < 500 * MILLISECOND


async def test_what_a_killed_process_held_is_delivered_by_another_row_25(one_file: OneFile, start, eventually) -> None:
    await one_file.store.store_many([one_file.work(n, now(), "done") for n in range(100)], now())
    holder = start("holder", one_file.path)
    assert holder.says("ready") == "ready 100"
    service = start("service", one_file.path)
    service.says("ready")
    assert one_file.length("done") == 0
    holder.kill()
    eventually(lambda: one_file.length("done") >= 100, "100 messages delivered")
    service.stop()
    assert one_file.length("done") == 100
    assert all(claimant is None for (claimant,) in one_file.rows("SELECT claimant FROM queue_message"))


async def test_a_message_that_kills_its_process_each_time_goes_alone_to_the_error_queue(
    one_file: OneFile, start
) -> None:
    await let_a_message_kill_its_processes(start, str(one_file.path), one_file.transport)


async def test_while_another_process_holds_what_is_due_a_poller_hardly_works_row_57(one_file: OneFile, start) -> None:
    """It sleeps until it is woken, as by the end of the other process."""
    await one_file.store.store(one_file.work(0, now(), "done"), now())
    holder, clock = start("holder", one_file.path), UntilWoken()
    assert await anyio.to_thread.run_sync(holder.says, "ready") == "ready 1"
    async with one_file.service(clock):
        await clock.sleeps_again()
        assert one_file.length("done") == 0
        holder.kill()
        await until(lambda: one_file.length("done") == 1)


async def test_sigterm_lets_what_is_in_hand_finish_row_55(one_file: OneFile, start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    consumer = start("slow_consumer", one_file.path, go)
    consumer.says("ready")
    await one_file.store.store(one_file.work(7, now()), now())
    consumer.says("handling")
    consumer.terminate()
    consumer.says("ending")
    assert consumer.is_running
    assert one_file.length("done") == 0
    go.touch()
    assert consumer.end() == 0
    assert [body["number"] for _, body in one_file.in_queue("done")] == [7]
    assert one_file.length("consumer") == 0
    counts = await one_file.store.record_counts()
    assert counts == {RecordKind.SCHEDULED: 1, RecordKind.DELIVERED: 1, RecordKind.HANDLED: 1}


ZONES = [
    "UTC",
    "Pacific/Apia",
    "America/St_Johns",
    "Australia/Lord_Howe",
    "Asia/Kathmandu",
    "Pacific/Kiritimati",
    "XYZ-13:37:11",
]


async def test_instants_are_the_same_in_every_time_zone(tmp_path: Path) -> None:
    """With time is done everything that a local time zone could spoil."""
    noon = parse_timestamp("2026-03-29 01:30:00:123456 Z")
    for number, zone in enumerate(ZONES):
        with local_time_zone(zone):
            store = SqliteStore(tmp_path / f"{number}.db", synchronous="normal")
            ambiguous = parse_timestamp("2026-04-04 14:45:00:000001 Z").astimezone()  # local, in whatever zone
            await store.store(DelayedMessage("noon", noon, "queue"), noon)
            await store.store(DelayedMessage("ambiguous", ambiguous, "queue"), noon)
            found = await store.claim_due(noon + timedelta(days=365), 10)
            (scheduled,) = await store.history("noon")
            await store.close()
            assert [(claim.message.message_id, format_timestamp(claim.message.due)) for claim in found] == [
                ("noon", "2026-03-29 01:30:00:123456 Z"),
                ("ambiguous", "2026-04-04 14:45:00:000001 Z"),
            ]
            assert format_timestamp(scheduled.at) == "2026-03-29 01:30:00:123456 Z"
            assert to_microseconds(noon) == 1_774_747_800_123_456
            assert format_timestamp(from_microseconds(to_microseconds(ambiguous))) == "2026-04-04 14:45:00:000001 Z"
            local = datetime.fromtimestamp(1_775_313_900).astimezone()
            assert format_timestamp(local) == "2026-04-04 14:45:00:000000 Z"
            before, shown, after = time.time(), now(), time.time()  # noqa: TID251 - compared with what the clock shows
            assert before <= shown.timestamp() <= after
            assert shown.utcoffset() == timedelta(0)


@contextmanager
def local_time_zone(zone: str) -> Generator[None]:
    """Have the time zone of this process be another one."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            yield
    finally:
        time.tzset()
