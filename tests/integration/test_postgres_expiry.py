"""What expires in queues of PostgreSQL: by the clock of the server, once, whoever sees to it or is killed."""

import json
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from tests.integration.conftest import Process
from tests.integration.postgres_place import CONTENT, MILLISECOND, SECOND, TABLE, Place, now, placed
from tests.waiting import received, until

from postdate import DelayedMessage, Endpoint, Envelope, HandlerContext, Headers, Recording, TransactionMode
from postdate.backends.postgres.bulk import PostgresRecordStream
from postdate.backends.postgres.expiring import EXPIRED_IN_QUEUE, REAPED_AT_ONCE
from postdate.backends.postgres.transport import PostgresTransport
from postdate.ports import HANDLED, Completion, Received, RecordKind, Scan

DAY = timedelta(days=1)
HALF_A_MINUTE = timedelta(seconds=30)
ELSEWHEN = [datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)]
"""What the clocks of senders say that are years off."""


def lasting(
    message_id: str, span: timedelta | None, queue: str = "done", *, expires_at: datetime | None = None
) -> Envelope:
    return Envelope(queue, message_id, {"kind": "test"}, b"{}", expires_at, time_to_be_received=span)


async def ids_in(place: Place, count: int, queue: str = "done") -> list[str]:
    """Return the ids of the next messages of a queue, which go back."""
    receiver = place.transport.receiver(queue)
    found = await received(receiver, count)
    await receiver.close()
    return [each.envelope.message_id for each in found]


def put(place: Place, first: int, count: int, ends_at: str, queue: str = "done") -> None:
    """Put messages straight into a queue, as if their senders had gone long ago."""
    numbers = f"generate_series({first}, {first + count - 1}) AS n"
    place.run(
        f"WITH sent AS (INSERT INTO queue_message (queue_id, content, message_id, ends_at) "
        f"SELECT queue_id, nextval('number'), 'm-' || n, {ends_at} FROM {numbers}, queue WHERE name = '{queue}' "
        f"RETURNING content) INSERT INTO content SELECT content, '{{}}', '{{}}' FROM sent"
    )


def left_over(place: Place) -> tuple[int, int]:
    """Return how many messages and contents there are, whether or not they have expired."""
    return place.rows("SELECT (SELECT count(*) FROM queue_message), (SELECT count(*) FROM content)")[0]


def discarded(place: Place) -> Counter[str]:
    rows = place.rows("SELECT message_id FROM record WHERE kind = 9 AND detail = %s", EXPIRED_IN_QUEUE)
    return Counter(id_ for (id_,) in rows)


# --- what is in the row -----------------------------------------------------------------------------------------------


def seconds_left(place: Place) -> dict[str, float | None]:
    rows = place.rows("SELECT message_id, extract(epoch FROM ends_at - clock_timestamp())::float8 FROM queue_message")
    return dict(rows)


@pytest.mark.parametrize("sent", [*ELSEWHEN, None], ids=["in 2000", "in 2100", "now"])
async def test_the_row_ends_so_long_after_it_came_whatever_the_senders_clock_says_row_59(
    postgres_url: str, sent: datetime | None
) -> None:
    async with placed(postgres_url) as place:
        answers = await place.transport.send([lasting("m", DAY), lasting("endless", None)], sent or now())
        left = seconds_left(place)
        assert list(answers) == [None, None]
        assert left["endless"] is None
        assert left["m"] is not None
        assert 0 < left["m"] <= DAY.total_seconds()
        assert place.rows("SELECT count(*) FROM queue_message WHERE expires_at IS NOT NULL") == [(0,)]


async def test_of_an_instant_and_a_span_the_earlier_counts_and_the_receiver_is_told_the_instant(
    postgres_url: str,
) -> None:
    async with placed(postgres_url) as place:
        soon, late = now() + HALF_A_MINUTE, now() + 2 * DAY
        sent = [
            lasting("soon", DAY, expires_at=soon),
            lasting("late", HALF_A_MINUTE, expires_at=late),
            lasting("instant", None, expires_at=late),
        ]
        await place.transport.send(sent, now())
        left = {id_: round(seconds or 0, -2) for id_, seconds in seconds_left(place).items()}
        assert left == {"soon": 0, "late": 0, "instant": 172_800}
        found = await received(place.transport.receiver("done"), 3)
        assert [each.envelope.expires_at for each in found] == [soon, late, late]
        assert [each.envelope.time_to_be_received for each in found] == [None, None, None]


@pytest.mark.parametrize("span", [timedelta.max, timedelta(days=366_000)])
async def test_a_span_beyond_all_calendars_is_for_ever(postgres_url: str, span: timedelta) -> None:
    async with placed(postgres_url) as place:
        assert list(await place.transport.send([lasting("m", span)], now())) == [None]
        assert seconds_left(place) == {"m": None}


async def test_a_copy_in_the_error_queue_does_not_end(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        failed = {Headers.FAILED_QUEUE: "done"}
        copy = Envelope("error", "m", failed, b"", ELSEWHEN[0], time_to_be_received=MILLISECOND)
        await place.transport.send([copy], now())
        assert seconds_left(place) == {"m": None}
        assert await ids_in(place, 1, "error") == ["m"]


@dataclass
class Ask:
    """Handled by the endpoint that sends."""


@dataclass
class Answer:
    """What its handler sends."""


@pytest.mark.parametrize("mode", TransactionMode, ids=lambda mode: mode.value)
async def test_in_every_mode_a_handler_may_send_what_ends_row_62(postgres_url: str, mode: TransactionMode) -> None:
    """Each message of a transaction has an end of its own, and the header, too."""
    async with placed(postgres_url) as place:
        endpoint = Endpoint("consumer", transport=place.transport, transaction_mode=mode)
        handled = anyio.Event()

        @endpoint.handler(Ask)
        async def ask(message: Ask, context: HandlerContext) -> None:
            await context.send(Answer(), destination="done", time_to_be_received=HALF_A_MINUTE, message_id="short")
            await context.send(Answer(), destination="done", time_to_be_received=DAY, message_id="long")
            await context.send(Answer(), destination="done", message_id="endless")
            handled.set()

        async with endpoint:
            await endpoint.send(Ask(), destination="consumer", time_to_be_received=DAY)
            await until(handled.is_set)
        left = {id_: None if seconds is None else round(seconds, -2) for id_, seconds in seconds_left(place).items()}
        assert left == {"short": 0, "long": 86_400, "endless": None}
        headers = dict(
            place.rows("SELECT message_id, headers FROM queue_message JOIN content AS c ON c.number = content")
        )
        spans = {id_: json.loads(text).get(Headers.TIME_TO_BE_RECEIVED) for id_, text in headers.items()}
        assert spans == {"short": "00:00:30", "long": "1.00:00:00", "endless": None}


# --- leaving without being received -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ELSEWHEN, ids=["in 2000", "in 2100"])
async def test_what_is_not_read_in_time_is_gone_though_there_is_nobody_but_its_sender_row_60(
    postgres_url: str, eventually: Callable, sent: datetime
) -> None:
    async with placed(postgres_url) as place:
        await place.transport.send(
            [lasting("gone", MILLISECOND), lasting("lives", DAY), lasting("endless", None)], sent
        )
        eventually(lambda: left_over(place) == (2, 2), "the expired message leaves the table")
        assert discarded(place) == {"gone": 1}
        assert place.rows("SELECT due, store_id, destination FROM record") == [(None, None, "done")]
        assert await ids_in(place, 2) == ["lives", "endless"]


async def test_what_has_expired_is_not_counted_nor_taken_before_it_is_removed(postgres_url: str) -> None:
    """Nobody removes it here: a process that has sent nothing that ends, and receives nothing, does not look."""
    async with placed(postgres_url) as place:
        put(place, 0, 3, "clock_timestamp() - interval '1 s'")
        put(place, 3, 2, "clock_timestamp() + interval '1 day'")
        put(place, 5, 1, "NULL")
        assert left_over(place) == (6, 6)
        assert (await place.transport.queue_lengths())["done"] == 3
        assert await place.transport.lengths_of(["done", "nowhere", "error"]) == {"done": 3, "error": 0}
        assert (await place.transport.observer().queue_lengths())["done"] == 3
        receiver = place.transport.receiver("done")
        assert await receiver.receive_by_id("m-2") is None
        taken = await receiver.receive_by_id("m-4")
        assert taken is not None
        place.run("UPDATE queue_message SET ends_at = clock_timestamp() WHERE message_id = 'm-4'")
        assert (await place.transport.queue_lengths())["done"] == 3, "in somebody's hands it counts"
        await receiver.commit(taken, now())
        await receiver.close()


async def test_a_message_given_back_after_its_end_is_not_received_again(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        put(place, 0, 1, "clock_timestamp() + interval '1 day'")
        receiver = place.transport.receiver("done")
        (held,) = await received(receiver, 1)
        place.run("UPDATE queue_message SET ends_at = clock_timestamp()")
        await receiver.roll_back(held)
        await place.transport.send([lasting("behind", None)], now())
        assert [each.envelope.message_id for each in await received(receiver, 1)] == ["behind"]
        assert discarded(place) == {"m-0": 1}
        await receiver.close()


async def test_what_was_stored_with_an_expiry_ends_in_its_queue(postgres_url: str, eventually: Callable) -> None:
    """A delayed message that was moved in time, and then not read: an end of a message that a store knows."""
    async with placed(postgres_url) as place:
        due, end = now() - SECOND, now() + DAY
        await place.store.store(DelayedMessage("m", due, "done", {}, b"{}", end), due - SECOND)
        moved = await place.store.move_due(now(), 10)
        assert (moved.delivered, moved.expired) == (1, 0)
        near = "SELECT expires_at = %s, abs(extract(epoch FROM ends_at - expires_at)) < 3600 FROM queue_message"
        assert place.rows(near, end) == [(True, True)]
        place.run("UPDATE queue_message SET ends_at = clock_timestamp()")
        place.store.database.listener()
        eventually(lambda: left_over(place) == (0, 0), "it leaves its queue")
        kinds = [(record.kind, record.due) for record in await place.store.history("m")]
        expected = [RecordKind.SCHEDULED, RecordKind.DELIVERED, RecordKind.DISCARDED]
        assert kinds == [(kind, due) for kind in expected]


@pytest.mark.parametrize("role", ["service", "consumer"])
async def test_a_process_that_only_delivers_or_receives_elsewhere_removes_it(
    postgres_url: str, start: Callable[..., Process], eventually: Callable, role: str
) -> None:
    """Two of them: more than one batch, in a queue of which they know nothing, and each message once."""
    count = 2 * REAPED_AT_ONCE + 1
    async with placed(postgres_url) as place:
        put(place, 0, count, "clock_timestamp()")
        put(place, count, 5, "clock_timestamp() + interval '1 day'")
        processes = [start(role, place.address) for _ in range(2)]
        eventually(lambda: left_over(place) == (5, 5), "those that expired, and no others, are gone")
        for process in processes:
            process.says("ready")
            process.stop()
        assert discarded(place) == {f"m-{n}": 1 for n in range(count)}


async def test_a_role_that_may_not_remove_it_says_so_once_and_hears_on(
    postgres_url: str, eventually: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    async with placed(postgres_url) as place:
        place.run("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$")
        place.run("CREATE TRIGGER refuse BEFORE DELETE ON queue_message EXECUTE FUNCTION refuse()")
        put(place, 0, 1, "clock_timestamp()")
        holder = place.transport.database.listener().wait_for_holder()
        eventually(lambda: "cannot be removed" in caplog.text, "the complaint")
        assert left_over(place) == (1, 1)
        place.run("DROP TRIGGER refuse ON queue_message")
        eventually(lambda: left_over(place) == (0, 0), "it is removed as soon as that is possible")
        assert place.transport.database.listener().wait_for_holder() == holder, "the same connection"
        assert caplog.text.count("cannot be removed") == 1


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recording", Recording, ids=lambda recording: recording.value)
async def test_the_end_of_what_was_never_delayed_is_recorded(
    postgres_url: str, eventually: Callable, recording: Recording
) -> None:
    """Discarded by its receiver, or expired in its queue; that it was handled is nobody's business."""
    async with placed(postgres_url) as place:
        transport = PostgresTransport(postgres_url, schema=place.schema, recording=recording)
        await transport.send(
            [lasting("discarded", None), lasting("handled", None), lasting("late", MILLISECOND)], now()
        )
        receiver = transport.receiver("done")
        ends = [Completion(RecordKind.DISCARDED, "expired at noon"), HANDLED]
        held = list[Received]()
        while len(held) < len(ends):
            held += await until(lambda: receiver.receive(1))
        for each, end in zip(held, ends, strict=True):
            await receiver.commit(each, now(), end)
        eventually(lambda: left_over(place) == (0, 0), "all are gone")
        await transport.close()
        rows = place.rows("SELECT message_id, detail, due, store_id, destination FROM record ORDER BY message_id")
        assert rows == [
            ("discarded", "expired at noon", None, None, "done"),
            ("late", EXPIRED_IN_QUEUE, None, None, "done"),
        ]


async def test_whoever_reads_records_reads_those_of_messages_that_were_never_delayed(
    postgres_url: str, eventually: Callable
) -> None:
    async with placed(postgres_url) as place:
        await place.transport.send([lasting("m", MILLISECOND)], now())
        eventually(lambda: discarded(place) == {"m": 1}, "its record")
        (record,) = await place.store.history("m")
        assert (record.kind, record.due, record.detail) == (RecordKind.DISCARDED, None, EXPIRED_IN_QUEUE)
        assert await place.store.record_counts() == {RecordKind.DISCARDED: 1}
        assert await place.store.observer().pending_state_of("m") is None
        assert await place.store.observer().find_in_queues("m") == []
        columns = ("kind", "message_id", "due", "destination", "detail")
        (part,) = place.store.scan_parts("records", 1)
        scanned = [row for page in place.store.scan(Scan("records", columns), part, 10) for row in page]
        with closing(PostgresRecordStream(postgres_url, schema=place.schema, table=TABLE)) as stream:
            followed = [row for page in stream.read_records(0, stream.safe_end(), columns, 10) for row in page]
        assert scanned == followed == [(RecordKind.DISCARDED, "m", None, "done", EXPIRED_IN_QUEUE)]


# --- many, and everybody at once --------------------------------------------------------------------------------------


async def test_a_live_message_behind_thousands_that_expired_is_received(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        count = 20_000
        put(place, 0, count, "clock_timestamp()")
        await place.transport.send([lasting("behind", None)], now())
        assert await ids_in(place, 1) == ["behind"]
        assert (len(discarded(place)), left_over(place)) == (count, (1, 1))


async def test_a_removal_that_is_interrupted_leaves_nothing_half_done(
    postgres_url: str, start: Callable[..., Process], eventually: Callable
) -> None:
    """It has removed messages and contents, and stands before their records, as it is killed."""
    count = 100
    counts = (
        "SELECT (SELECT count(*) FROM queue_message), (SELECT count(*) FROM content), (SELECT count(*) FROM record)"
    )
    async with placed(postgres_url) as place:
        key = zlib.crc32(place.schema.encode()) >> 1
        place.run(
            "CREATE FUNCTION stand() RETURNS trigger LANGUAGE plpgsql AS "
            f"'BEGIN PERFORM pg_advisory_xact_lock_shared({key}); RETURN NEW; END';"
            "CREATE TRIGGER stand BEFORE INSERT ON record FOR EACH ROW EXECUTE FUNCTION stand()"
        )
        standing = f"FROM pg_locks WHERE locktype = 'advisory' AND objid = {key} AND NOT granted"
        put(place, 0, count, "clock_timestamp()")
        with place.connect() as other:
            other.execute("SELECT pg_advisory_lock(%s)", (key,))
            remover = start("service", place.address)
            eventually(lambda: place.rows(f"SELECT pid {standing}"), "it is in the middle of it")
            remover.kill()
            place.run(f"SELECT pg_terminate_backend(pid) {standing}")  # its server would finish what it was told
            eventually(lambda: not place.rows(f"SELECT pid {standing}"), "its session has ended")
            assert place.rows(counts) == [(count, count, 0)]
        last = start("service", place.address)
        eventually(lambda: left_over(place) == (0, 0), "all are removed")
        last.kill()  # it may not have begun to listen to signals
        assert discarded(place) == {f"m-{n}": 1 for n in range(count)}


PROOFS = (
    "tests/integration/test_postgres_expiry.py::test_a_removal_that_is_interrupted_leaves_nothing_half_done",
    "tests/integration/test_postgres_expiry.py::test_a_process_that_only_delivers_or_receives_elsewhere_removes_it",
    "tests/integration/test_postgres_expiry.py::test_a_live_message_behind_thousands_that_expired_is_received",
)


async def fill(place: Place, numbers: range, chance: random.Random) -> set[int]:
    """Send work of which every second one ends, some while it is waited for; return the numbers of those."""
    mortal = {number for number in numbers if number % 2}
    for first in range(numbers[0], numbers[-1] + 1, 100):
        sent = [
            Envelope(
                "consumer",
                f"m-{number}",
                CONTENT,
                json.dumps({"number": number}).encode(),
                due=now(),
                time_to_be_received=chance.random() * SECOND if number in mortal else None,
            )
            for number in range(first, first + 100)
        ]
        answers = await place.transport.send(sent, chance.choice(ELSEWHEN))
        assert set(answers) == {None}
    return mortal


def check_each_ended_once(place: Place, numbers: range, mortal: set[int]) -> None:
    """Everything was handled or has expired, never both, and nothing twice; and only what could expire has."""
    done = Counter(id_ for id_, _ in place.in_queue("done"))
    gone = discarded(place)
    handled = Counter(int(id_.removeprefix("done-")) for id_ in done.elements())
    expired = Counter(int(id_.removeprefix("m-")) for id_ in gone.elements())
    assert handled + expired == Counter(numbers), "lost or doubled"
    assert set(expired) <= mortal
    assert handled, "nothing was handled"
    assert expired, "nothing has expired"
    assert left_over(place) == (handled.total(), handled.total())


@pytest.mark.soak("kills processes at random moments", part="kills", proven_by=PROOFS)
async def test_receivers_and_removers_of_several_processes_end_each_message_once(
    postgres_url: str, start: Callable[..., Process], eventually: Callable, chance: random.Random
) -> None:
    """Two that handle and two that only deliver, some of them killed again and again; the server's clock decides."""
    numbers = range(4_000)
    over = threading.Event()

    def kill_again_and_again(role: str, chance: random.Random) -> None:
        while not over.is_set():
            process = start(role, place.address)
            process.says("ready")
            process.kill_after(chance.random())

    async with placed(postgres_url) as place:
        killers = [
            threading.Thread(target=kill_again_and_again, args=(role, random.Random(chance.random())))
            for role in ("service", "consumer")
        ]
        for killer in killers:
            killer.start()
        try:
            mortal = await fill(place, numbers[:2_000], chance)
            steady = [start("consumer", place.address), start("service", place.address)]
            mortal |= await fill(place, numbers[2_000:], chance)
        finally:
            over.set()
            for killer in killers:
                killer.join()
        eventually(lambda: place.length("consumer") == 0, "all of them end")
        for process in steady:
            process.stop()
        check_each_ended_once(place, numbers, mortal)


@pytest.mark.soak("kills processes at random moments", part="kills", proven_by=PROOFS)
async def test_a_remover_that_is_killed_leaves_nothing_half_done(
    postgres_url: str, start: Callable[..., Process], eventually: Callable, chance: random.Random
) -> None:
    """Processes are killed while they remove many: each message is there, or gone with its content and recorded."""
    count, interrupted = 0, 0

    def counted() -> tuple[int, int, int]:
        """In one look: what the dead have asked the server for may still be on its way."""
        return place.rows(
            "SELECT (SELECT count(*) FROM queue_message), (SELECT count(*) FROM content), (SELECT count(*) FROM record)"
        )[0]

    async with placed(postgres_url) as place:
        while interrupted < 3:  # the others were killed after their work
            put(place, count, 10_000, "clock_timestamp()")
            count += 10_000
            before, *_ = counted()
            process = start("service", place.address)
            eventually(lambda before=before: counted()[0] < before, "it has begun")
            process.kill_after(chance.random() * 0.05)
            left, contents, recorded = counted()
            assert (left + recorded, contents) == (count, left)
            interrupted += left > 0
        last = start("service", place.address)
        eventually(lambda: left_over(place) == (0, 0), "the rest is removed")
        last.kill()  # it may not have begun to listen to signals: the others may have left nothing to it
        assert discarded(place) == {f"m-{n}": 1 for n in range(count)}
