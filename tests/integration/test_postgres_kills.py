"""Exactly once from a PostgreSQL store to a PostgreSQL queue, whoever is killed with -9 meanwhile."""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.poison import let_a_message_kill_its_processes
from tests.integration.postgres_place import MILLISECOND, SECOND, Place, now, placed
from tests.servers import PostgreSQL
from tests.waiting import claimed, until

from postdate import Envelope
from postdate.ports import RecordKind

ROUNDS = int(os.environ.get("POSTDATE_KILL_ROUNDS", "5"))


async def fill(place: Place, numbers: range, seconds: float) -> None:
    """Store messages that fall due one after the other."""
    first_due, apart = now(), seconds * SECOND / len(numbers)
    work = [place.work(number, first_due + (number - numbers[0]) * apart) for number in numbers]
    await place.store.store_many(work, now())


def all_are_done(place: Place, messages: int, eventually: Callable) -> None:
    """Wait until so many messages are done."""
    for count in range(100, messages + 1, 100):
        eventually(lambda count=count: place.length("done") >= count, f"{count:,} messages done")


async def check_all_done_once(place: Place, messages: int, eventually: Callable) -> None:
    """Every message was handled exactly once and not early, and nothing is left of it but its records."""
    done = place.in_queue("done")
    assert Counter(id_ for id_, _ in done) == Counter(f"done-{n}" for n in range(messages)), "lost or doubled"
    assert min(body["late_microseconds"] for _, body in done) > 0, "early"
    assert place.rows('SELECT count(*) FROM "service.timeouts"') == [(0,)]
    assert place.rows("SELECT count(*) FROM content") == [(messages,)], "bodies of messages that are gone"
    lengths = await place.transport.queue_lengths()
    assert {name: length for name, length in lengths.items() if length} == {"done": messages}
    kinds = await place.store.record_counts()
    assert kinds == {
        RecordKind.SCHEDULED: messages,
        RecordKind.DELIVERED: messages,
        RecordKind.HANDLED: messages,
    }
    place.transport.database.listener().wait_for_holder()  # somebody has to look for what the dead have left
    eventually(lambda: place.rows("SELECT count(*) FROM holder") == [(1,)], "the dead are forgotten")


PROOFS = (
    "tests/integration/test_postgres_kills.py::test_what_a_killed_process_had_locked_is_delivered_by_another_row_25",
    "tests/integration/test_postgres_kills.py::test_messages_of_a_queue_that_a_killed_process_held_are_received_by_another",
    "tests/integration/test_postgres_doubt.py::test_the_rest_of_a_batch_whose_commit_is_in_doubt_can_be_given_back",
    "tests/integration/test_postgres_doubt.py::test_received_messages_whose_claim_is_in_doubt_are_received_again",
)


@pytest.mark.soak("kills processes at random moments", part="kills", proven_by=PROOFS)
async def test_kills_of_processes_during_deliveries_lose_and_double_nothing(
    postgres_url: str, start, eventually, chance: random.Random
) -> None:
    """The service is killed in each round and the consumer in every other, side by side, at random moments."""
    messages = 500 * ROUNDS

    def kill_again_and_again(role: str, rounds: int, chance: random.Random) -> None:
        for left in reversed(range(rounds)):
            process = start(role, place.address)
            if chance.random() < 0.8:  # the others die while they start
                process.says("ready")
            if not left:  # on a busy machine nothing may have been done by then
                eventually(lambda: place.length("done"), "something is done before the last kill")
            process.kill_after(chance.random() * 0.3)

    async with placed(postgres_url) as place:
        await fill(place, range(messages), seconds=0.6 * ROUNDS)
        killers = [
            threading.Thread(target=kill_again_and_again, args=(role, rounds, random.Random(chance.random())))
            for role, rounds in (("service", ROUNDS), ("consumer", ROUNDS // 2))
        ]
        for killer in killers:
            killer.start()
        for killer in killers:
            killer.join()
        last = [start("service", place.address), start("consumer", place.address)]
        all_are_done(place, messages, eventually)
        for process in last:
            process.stop()
        await check_all_done_once(place, messages, eventually)


@pytest.mark.soak("kills a server of its own", part="kills", proven_by=PROOFS)
async def test_kills_of_the_server_during_deliveries_lose_and_double_nothing(
    server_folder: Path, start, eventually, chance: random.Random
) -> None:
    """The server syncs to disk; service and consumer live through it all and find it again by themselves."""
    each = 300
    messages = ROUNDS * each
    server = PostgreSQL(server_folder / "postgres", durable=True)
    server.start()
    place = Place(server.url)
    try:
        await place.create()
        processes = [start("service", place.address), start("consumer", place.address)]
        for process in processes:
            process.says("ready")
        done = 0
        for first in range(0, messages, each):
            await fill(place, range(first, first + each), seconds=0.5)
            more = done + chance.randrange(each)
            eventually(lambda more=more: place.length("done") > more, "they go on by themselves")
            seen = place.length("done")
            server.kill()
            server.start()
            done = place.length("done")
            assert done >= seen, "what was committed is gone"
        all_are_done(place, messages, eventually)
        for process in processes:
            process.stop()
        await check_all_done_once(place, messages, eventually)
    finally:
        await place.close(drop=False)
        server.stop()


async def test_what_a_killed_process_had_locked_is_free_at_once_row_25(postgres_url: str, start, eventually) -> None:
    async with placed(postgres_url) as place:
        await place.store.store_many([place.work(n, now(), "done") for n in range(100)], now())
        holder = start("holder", place.address)
        assert holder.says("ready") == "ready 100"
        assert await place.store.claim_due(now(), 1_000) == []
        holder.kill()
        assert len(await claimed(place.store, 100, now())) == 100


async def test_what_a_killed_process_had_locked_is_delivered_by_another_row_25(
    postgres_url: str, start, eventually
) -> None:
    async with placed(postgres_url) as place:
        await place.store.store_many([place.work(n, now(), "done") for n in range(100)], now())
        holder = start("holder", place.address)
        assert holder.says("ready") == "ready 100"
        service = start("service", place.address)
        service.says("ready")
        assert place.length("done") == 0
        holder.kill()
        eventually(lambda: place.length("done") >= 100, "100 messages delivered")
        service.stop()
        assert place.length("done") == 100
        assert min(place.lateness()) > 0 * MILLISECOND


async def test_messages_of_a_queue_that_a_killed_process_held_are_received_by_another(
    postgres_url: str, start, eventually, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with placed(postgres_url) as place:
        killed = start("slow_consumer", place.address, go)
        killed.says("ready")
        await place.store.store(place.work(7, now() + 10 * MILLISECOND), now())
        service = start("service", place.address)
        killed.says("handling")
        killed.kill()
        go.touch()
        consumer = start("slow_consumer", place.address, go)
        eventually(lambda: place.length("done") >= 1, "handled by the other one")
        for process in (consumer, service):
            process.stop()
        assert [body["number"] for _, body in place.in_queue("done")] == [7]


async def test_a_queue_counts_the_processes_that_died_with_a_message_and_gives_a_suspect_out_alone(
    postgres_url: str,
) -> None:
    async with placed(postgres_url) as place:
        await place.transport.send([Envelope("done", name) for name in ("first", "a", "b")], now())
        nobody = 1_234_567
        held = f"UPDATE queue_message SET holder = {nobody}, unanswered = 2 WHERE message_id IN ('a', 'b') RETURNING 1"
        assert place.rows(held) == [(1,), (1,)]
        receiver = place.transport.receiver("done")
        freed = "SELECT count(*) FROM queue_message WHERE holder IS NULL AND unanswered = 3"
        (first,) = await receiver.receive(10)
        await until(lambda: place.rows(freed) == [(2,)])
        await receiver.roll_back(first, failed=False)
        for expected in (("first", 0, 0, False), ("a", 3, 3, True), ("b", 3, 3, True)):
            (each,) = await receiver.receive(10)
            assert (each.envelope.message_id, each.failures, each.unanswered, each.is_suspect) == expected
        await receiver.close()
        assert place.rows("SELECT sum(unanswered) FROM queue_message WHERE holder IS NULL") == [(6,)]


@pytest.mark.soak(
    "kills a process seven times",
    part="kills",
    proven_by=(
        "tests/integration/test_processes.py::test_a_message_that_kills_its_process_each_time_goes_alone_to_the_error_queue",
        "tests/integration/test_postgres_kills.py::test_a_queue_counts_the_processes_that_died_with_a_message_and_gives_a_suspect_out_alone",
    ),
)
async def test_a_message_that_kills_its_process_each_time_goes_alone_to_the_error_queue(
    postgres_url: str, start
) -> None:
    async with placed(postgres_url) as place:
        await let_a_message_kill_its_processes(start, place.address, place.transport)


async def test_two_processes_move_thousands_of_messages_and_double_none(postgres_url: str, start, eventually) -> None:
    messages = 2_000
    async with placed(postgres_url) as place:
        begin = now()
        work = [place.work(n, begin + (n % 1_000) * MILLISECOND, "done") for n in range(messages)]
        await place.store.store_many(work, begin)
        services = [start("service", place.address) for _ in range(2)]
        for service in services:
            service.says("ready")
        eventually(lambda: place.length("done") >= messages, f"{messages:,} messages delivered")
        for service in services:
            service.stop()
        ids = place.rows("SELECT message_id FROM queue_message")
        assert Counter(id_ for (id_,) in ids) == Counter(f"m-{n}" for n in range(messages))
        late = place.lateness()
        assert len(late) == messages
        assert min(late) > 0 * MILLISECOND
