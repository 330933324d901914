"""Messages with a time to be received in the queues of a file: they leave it in time, and their room with them."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from tests.conftest import as_another_process
from tests.waiting import patience, until

from postdate import DelayedMessage, Envelope, LocalTransport, SqliteStore
from postdate.backends.sqlite.connection import setup_script
from postdate.backends.sqlite.housekeeping import (
    BATCH,
    DEAD_LETTER_HEADER,
    DEAD_LETTERS,
    ROUNDS_UNUSED,
    remove_expired,
)
from postdate.errors import ConfigurationError, TimeToBeReceivedInTransaction
from postdate.messages import Headers
from postdate.ports import Completion, Record, Recording, RecordKind
from postdate.ports.transports import ExpiryRules
from postdate.testing import VirtualClock

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)
HALF_A_MINUTE = timedelta(seconds=30)
TTBR_HEADERS = {Headers.TIME_TO_BE_RECEIVED: "00:00:30"}


def lasting(
    message_id: str,
    span: timedelta | None = HALF_A_MINUTE,
    *,
    to: str = "orders",
    keep: bool | None = None,
    size: int = 4,
) -> Envelope:
    headers = TTBR_HEADERS if span is not None else {}
    body = os.urandom(size)
    return Envelope(to, message_id, headers, body, time_to_be_received=span, use_dead_letter_queue=keep)


class Place:
    """A file, queues in it that live by a clock of the test, and what is found in the file."""

    def __init__(self, path: Path, *, expiry: ExpiryRules | None = None, recording: Recording = Recording.ALL) -> None:
        self.path, self.clock = path, VirtualClock(NOW)
        self.transport = LocalTransport(
            path, synchronous="normal", recording=recording, expiry=expiry, clock=self.clock
        )
        self.store = SqliteStore(path, synchronous="normal", recording=recording)
        self.receiver = self.transport.receiver("orders")

    async def send(self, *envelopes: Envelope) -> None:
        assert list(await self.transport.send(envelopes, self.clock.now())) == [None] * len(envelopes)

    async def received(self) -> list[str]:
        """Return what can be received, and leave it there: what is sent last arrives last."""
        await self.send(Envelope("orders", "probe"))
        receiver, found = self.transport.receiver("orders"), list[str]()
        while "probe" not in found:
            for each in await receiver.receive(100):
                found.append(each.envelope.message_id)
                if found[-1] == "probe":
                    await receiver.commit(each, self.clock.now(), Completion(None))
        await receiver.close()
        return found[:-1]

    def keep_house(self) -> None:
        """Do what a thread does every second, now."""
        self.transport.file._upkeep.run_chores()

    def ask(self, sql: str) -> list[tuple]:
        return self.transport.file.read_blocking(lambda c: c.execute(sql).fetchall())

    def queued(self) -> list[tuple]:
        return self.ask("SELECT message_id, ends_at, dead_letter FROM queue_message ORDER BY seq")

    def ends(self) -> dict[str, timedelta | None]:
        """Return how long each message has left in its queue."""
        now = self.transport.file.rules.now()
        return {name: None if end is None else timedelta(microseconds=end - now) for name, end, _ in self.queued()}

    def kept(self) -> dict[str, bool]:
        """Return which messages would become dead letters."""
        return {name: bool(keep) for name, _, keep in self.queued()}

    async def history(self, message_id: str) -> Sequence[Record]:
        return await self.store.history(message_id)


@asynccontextmanager
async def place(path: Path, **settings) -> AsyncGenerator[Place]:
    made = Place(path, **settings)
    try:
        with patience():
            await made.transport.create_queues(["orders", "out"])
            yield made
    finally:
        await made.receiver.close()
        await made.store.close()
        await made.transport.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queues.db"


async def held_one(at: Place):
    (received,) = await at.receiver.receive(1)
    return received


# --- native expiry ----------------------------------------------------------------------------------------------------


async def test_outside_a_transaction_the_queue_has_the_time_to_be_received_row_59(path: Path) -> None:
    async with place(path) as at:
        await at.send(lasting("m"), lasting("endless", None), lasting("for ever", timedelta.max))
        assert at.ends() == {"m": HALF_A_MINUTE, "endless": None, "for ever": None}
        received = await held_one(at)
        assert received.envelope.headers == TTBR_HEADERS


async def test_a_message_is_received_until_its_time_has_passed_and_never_later_row_60(path: Path) -> None:
    async with place(path) as at:
        await at.send(lasting("m"), lasting("endless", None))
        await at.clock.advance(HALF_A_MINUTE)
        assert await at.received() == ["m", "endless"]
        await at.clock.advance(MICROSECOND)
        assert await at.received() == ["endless"]
        assert await at.receiver.receive_by_id("m") is None
        assert await at.transport.lengths_of(["orders", "out", "nowhere", "\0"]) == {"orders": 1, "out": 0}


async def test_unread_it_leaves_the_file_and_a_record_says_so_row_60(path: Path) -> None:
    async with place(path) as at:
        await at.send(lasting("m"), lasting("endless", None))
        await at.clock.advance(HALF_A_MINUTE + MICROSECOND)
        at.keep_house()
        at.keep_house()
        assert at.ask("SELECT message_id FROM queue_message") == [("endless",)]
        assert at.ask("SELECT count(*) FROM content") == [(1,)]
        (record,) = await at.history("m")
        assert (record.kind, record.due, record.destination) == (RecordKind.DISCARDED, None, "orders")
        assert record.detail == f"expired in its queue at {(NOW + HALF_A_MINUTE).isoformat()}"
        assert record.at == at.clock.now()


async def test_by_the_clock_of_the_machine_it_leaves_without_anybody_receiving_row_60(path: Path) -> None:
    """In a process that sends once and then does nothing: a thread of the file keeps house."""
    transport = LocalTransport(path, synchronous="normal")
    await transport.create_queues(["orders"])
    await transport.send([lasting(f"m-{n}", MICROSECOND) for n in range(3)], NOW)
    await until(lambda: not transport.file.read_blocking(lambda c: c.execute("SELECT 1 FROM queue_message").fetchone()))
    await transport.close()


@pytest.mark.parametrize("year", [2000, 2100])
async def test_an_expiry_counts_from_the_clock_of_the_sender_on(path: Path, year: int) -> None:
    """Whose clock is years behind, or ahead, or a virtual one: it has as long as its sender meant."""
    async with place(path) as at:
        sent_at = NOW.replace(year=year)
        envelope = Envelope("orders", "m", expires_at=sent_at + HALF_A_MINUTE)
        await at.transport.send([envelope], sent_at)
        assert at.ends() == {"m": HALF_A_MINUTE}
        received = await held_one(at)
        assert received.envelope.expires_at == envelope.expires_at


async def test_of_two_times_the_first_counts(path: Path) -> None:
    async with place(path) as at:
        early, late = NOW + SECOND, NOW + 60 * SECOND
        for name, expires_at in (("early", early), ("late", late)):
            await at.send(Envelope("orders", name, expires_at=expires_at, time_to_be_received=HALF_A_MINUTE))
        assert at.ends() == {"early": SECOND, "late": HALF_A_MINUTE}


async def test_a_delayed_message_expires_in_the_queue_it_was_moved_to(path: Path) -> None:
    """The mover may live by another clock than the machine."""
    async with place(path) as at:
        await at.store.store(DelayedMessage("m", NOW, "orders", expires_at=NOW + 2 * SECOND), NOW)
        await at.clock.advance(SECOND * 1_000)
        await at.store.move_due(NOW + SECOND, 10)
        assert at.ends() == {"m": SECOND}
        await at.clock.advance(SECOND + MICROSECOND)
        at.keep_house()
        assert at.queued() == []
        kinds = [(record.kind, record.due) for record in await at.history("m")]
        assert kinds == [(kind, NOW) for kind in (RecordKind.SCHEDULED, RecordKind.DELIVERED, RecordKind.DISCARDED)]


async def test_a_held_message_survives_its_time_and_can_be_committed(path: Path) -> None:
    async with place(path) as at:
        await at.send(lasting("m"))
        held = await held_one(at)
        await at.clock.advance(HALF_A_MINUTE * 2)
        at.keep_house()
        assert [name for name, _, _ in at.queued()] == ["m"]
        await at.receiver.commit(held, at.clock.now(), Completion(outgoing=[lasting("sent", None, to="out")]))
        assert [name for name, _, _ in at.queued()] == ["sent"]
        assert await at.history("m") == []


async def test_given_back_after_its_time_it_leaves(path: Path) -> None:
    async with place(path) as at:
        await at.send(lasting("m"))
        held = await held_one(at)
        await at.clock.advance(HALF_A_MINUTE * 2)
        await at.receiver.roll_back(held)
        assert await at.received() == []
        at.keep_house()
        assert at.queued() == []


@pytest.mark.parametrize("recording", Recording)
async def test_what_a_receiver_discards_is_recorded_though_it_was_not_delayed(path: Path, recording: Recording) -> None:
    async with place(path, recording=recording) as at:
        for kind in (RecordKind.DISCARDED, RecordKind.HANDLED):
            await at.send(lasting(kind.name))
            await at.receiver.commit(await held_one(at), NOW, Completion(kind, "because"))
        assert [record.detail for record in await at.history("DISCARDED")] == ["because"]
        assert await at.history("HANDLED") == []


# --- the rules of MSMQ ------------------------------------------------------------------------------------------------


async def test_strict_queues_refuse_a_time_to_be_received_in_a_commit_row_61(path: Path) -> None:
    async with place(path, expiry=ExpiryRules()) as at:
        assert not at.transport.capabilities.time_to_be_received_in_transactions
        await at.send(lasting("in", None))
        held = await held_one(at)
        outgoing = [lasting("without", None, to="out"), lasting("with", to="out")]
        with pytest.raises(TimeToBeReceivedInTransaction, match=r"'with' to out.* transactional MSMQ\.$"):
            await at.receiver.commit(held, NOW, Completion(outgoing=outgoing))
        assert [name for name, _, _ in at.queued()] == ["in"]
        await at.receiver.commit(held, NOW, Completion(outgoing=outgoing[:1]))
        assert [name for name, _, _ in at.queued()] == ["without"]


async def test_strict_queues_refuse_it_with_the_work_of_the_caller_row_61(path: Path) -> None:
    done = list[str]()
    async with place(path, expiry=ExpiryRules()) as at:
        with pytest.raises(TimeToBeReceivedInTransaction, match="to orders"):
            await at.transport.send([lasting("m")], NOW, work=[lambda _: done.append("work")])
        assert at.queued() == done == []


async def test_strict_queues_take_it_outside_a_transaction_row_62(path: Path) -> None:
    """What a handler sends at once, isolated, or in the modes none and receive only, is such a send of its own."""
    async with place(path, expiry=ExpiryRules()) as at:
        await at.send(lasting("in", None))
        await held_one(at)
        await at.send(lasting("isolated", to="out"))
        assert at.ends()["isolated"] == HALF_A_MINUTE
        receiver = at.transport.receiver("out")
        (received,) = await receiver.receive(1)
        assert received.envelope.headers == TTBR_HEADERS
        await receiver.close()


@pytest.mark.parametrize("expiry", [None, ExpiryRules(one_per_transaction=False)])
async def test_queues_that_can_give_each_message_of_a_commit_its_own_time_row_62(
    path: Path, expiry: ExpiryRules | None
) -> None:
    async with place(path, expiry=expiry) as at:
        assert at.transport.capabilities.time_to_be_received_in_transactions
        await at.send(lasting("in", None))
        outgoing = [lasting("a", to="out"), lasting("b", SECOND, to="out"), lasting("c", None, to="out")]
        await at.receiver.commit(await held_one(at), NOW, Completion(outgoing=outgoing))
        assert at.ends() == {"a": HALF_A_MINUTE, "b": SECOND, "c": None}


async def test_rather_than_refuse_they_leave_it_to_the_receiver_row_63(path: Path) -> None:
    rules = ExpiryRules(disable_native_time_to_be_received_in_transactions=True)
    async with place(path, expiry=rules) as at:
        await at.send(lasting("in", None))
        held = await held_one(at)
        await at.receiver.commit(held, NOW, Completion(outgoing=[lasting("committed", to="orders")]))
        await at.transport.send([lasting("with work", to="orders")], NOW, work=[lambda _: None])
        assert at.ends() == {"committed": None, "with work": None}
        received = await held_one(at)
        assert received.envelope.headers == TTBR_HEADERS


async def test_outside_a_transaction_it_stays_native_with_that_setting_row_64(path: Path) -> None:
    rules = ExpiryRules(disable_native_time_to_be_received_in_transactions=True)
    async with place(path, expiry=rules) as at:
        await at.send(lasting("m"))
        assert at.ends() == {"m": HALF_A_MINUTE}


async def test_dead_letters_are_for_messages_without_a_time_unless_told_otherwise_row_71(path: Path) -> None:
    async with place(path, expiry=ExpiryRules()) as at:
        assert at.transport.capabilities.dead_letters
        await at.send(
            lasting("with"), lasting("without", None), Envelope("orders", "expiring", expires_at=NOW + SECOND)
        )
        await at.send(lasting("asked", keep=True), lasting("refused", None, keep=False))
        assert at.kept() == {"with": False, "without": True, "expiring": False, "asked": True, "refused": False}


async def test_a_setting_makes_dead_letters_of_all_and_a_message_can_still_refuse_row_71(path: Path) -> None:
    rules = ExpiryRules(use_dead_letter_queue_for_messages_with_time_to_be_received=True)
    async with place(path, expiry=rules) as at:
        await at.store.store(DelayedMessage("delayed", NOW, "orders", expires_at=NOW + HALF_A_MINUTE), NOW)
        await at.store.move_due(NOW + SECOND, 10)
        await at.send(lasting("with"), lasting("refused", keep=False))
        assert at.kept() == {"delayed": True, "with": True, "refused": False}


async def test_without_rules_there_are_no_dead_letters_row_71(path: Path) -> None:
    async with place(path) as at:
        assert not at.transport.capabilities.dead_letters
        await at.send(lasting("m", keep=True))
        assert at.kept() == {"m": False}


async def test_a_dead_letter_keeps_all_it_had_and_says_where_it_was_row_71(path: Path) -> None:
    async with place(path, expiry=ExpiryRules()) as at:
        letter = lasting("dead", keep=True)
        await at.send(letter, lasting("gone"))
        assert DEAD_LETTERS not in await at.transport.queue_lengths()
        await at.clock.advance(HALF_A_MINUTE + MICROSECOND)
        at.keep_house()
        await at.clock.advance(HALF_A_MINUTE * 10)
        at.keep_house()
        assert await at.transport.queue_lengths() == {"orders": 0, "out": 0, DEAD_LETTERS: 1}
        receiver = at.transport.receiver(DEAD_LETTERS)
        (received,) = await receiver.receive(10)
        await receiver.close()
        said = "expired in orders at 2026-01-31 12:00:30:000000 Z"
        assert received.envelope.headers == {**TTBR_HEADERS, DEAD_LETTER_HEADER: said}
        assert (received.envelope.message_id, received.envelope.body) == ("dead", letter.body)
        assert (received.envelope.expires_at, received.failures) == (None, 0)
        (record,) = await at.history("dead")
        assert (record.kind, record.destination) == (RecordKind.DISCARDED, "orders")
        assert record.detail.endswith(f"; kept in {DEAD_LETTERS}")


async def test_who_waits_for_dead_letters_is_woken(path: Path) -> None:
    async with place(path, expiry=ExpiryRules()) as at:
        await at.transport.create_queues([DEAD_LETTERS])
        receiver = at.transport.receiver(DEAD_LETTERS)
        await at.send(lasting("dead", keep=True))

        async def receive() -> None:
            (received,) = await receiver.receive(1)
            assert received.envelope.message_id == "dead"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await at.clock.advance(HALF_A_MINUTE + MICROSECOND)
        await receiver.close()


async def test_transports_on_one_file_have_the_same_clock_and_rules(path: Path) -> None:
    async with place(path) as at:
        for clock, expiry in ((VirtualClock(NOW), None), (at.clock, ExpiryRules()), (None, None)):
            with pytest.raises(ConfigurationError, match="same clock and rules of expiry"):
                LocalTransport(path, synchronous="normal", clock=clock, expiry=expiry)


# --- room on the disk -------------------------------------------------------------------------------------------------


def size_of(path: Path) -> int:
    return path.stat().st_size


async def test_the_file_shrinks_without_a_receiver(path: Path) -> None:
    async with place(path) as at:
        await at.send(*[lasting(f"m-{n}", size=20_000) for n in range(1_500)], lasting("endless", None))
        at.transport.file.checkpoint_blocking()
        full = size_of(path)
        assert full > 30_000_000
        await at.clock.advance(HALF_A_MINUTE * 2)
        for _ in range(2):
            at.keep_house()
        assert [name for name, _, _ in at.queued()] == ["endless"]
        at.transport.file.checkpoint_blocking()
        assert size_of(path) == full, "room that was in use a moment ago is not given back at once"
        # By as many rounds as it takes: the file's own thread looks, too, and may be between two of them.
        await until(lambda: at.keep_house() or size_of(path) + size_of(path.with_name(path.name + "-wal")) < 2_000_000)
        assert at.ask("PRAGMA integrity_check") == [("ok",)]
        assert await at.received() == ["endless"]


async def test_a_file_that_an_administrator_made_stays_as_large_as_it_is(path: Path) -> None:
    """Its pages can only be used again; a message that was in it has no end in its queue."""
    make_by_script(path)
    async with place(path) as at:
        assert await at.received() == ["old"]
        await at.send(*[lasting(f"m-{n}", size=20_000) for n in range(1_000)])
        await at.clock.advance(HALF_A_MINUTE * 2)
        for _ in range(2 + ROUNDS_UNUSED):
            at.keep_house()
        assert at.ends() == {"old": None}
        at.transport.file.checkpoint_blocking()
        assert size_of(path) > 20_000_000


def make_by_script(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(setup_script("database"))
    connection.executescript("""
        INSERT INTO content (seq, headers, body) VALUES (1, '{}', x'00');
        INSERT INTO queue (queue_id, name) VALUES (1, 'orders');
        INSERT INTO queue_message (queue_id, message_id, expires_at, content) VALUES (1, 'old', 1, 1)""")
    connection.close()


# --- several processes, and trouble -----------------------------------------------------------------------------------

KEEPER = """
import sys, anyio
from postdate import LocalTransport
transport = LocalTransport(sys.argv[1], synchronous="normal")
anyio.run(transport.create_queues, ["orders"])
sys.stdin.read()
anyio.run(transport.close)
"""


def keeper(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", "-c", KEEPER, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)


async def test_two_processes_keep_house_in_one_file_and_record_each_message_once(path: Path) -> None:
    transport = LocalTransport(path, synchronous="normal")
    await transport.create_queues(["orders"])
    await transport.send([lasting(f"m-{n}", SECOND) for n in range(5 * BATCH)], NOW)
    await transport.close()
    processes = [keeper(path) for _ in range(2)]
    looking = sqlite3.connect(path)

    def is_empty() -> bool:
        assert all(process.poll() is None for process in processes)
        return looking.execute("SELECT count(*) FROM queue_message").fetchone() == (0,)

    try:
        await until(is_empty)
    finally:
        errors = [process.communicate()[1] for process in processes]
    counts = looking.execute("SELECT kind, count(*), count(DISTINCT message_id) FROM record GROUP BY kind").fetchall()
    looking.close()
    assert errors == [b"", b""]
    assert counts == [(int(RecordKind.DISCARDED), 5 * BATCH, 5 * BATCH)]


async def test_at_the_same_moment_each_message_is_taken_out_by_one(path: Path) -> None:
    async with place(path) as at:
        await at.send(*[lasting(f"m-{n}") for n in range(4 * BATCH)])
        await at.clock.advance(HALF_A_MINUTE * 2)
        other = as_another_process(lambda: LocalTransport(path, synchronous="normal", clock=at.clock))
        now, together, taken = at.transport.file.rules.now(), threading.Barrier(2), list[int]()

        def take_out(transport: LocalTransport) -> None:
            together.wait()
            while True:
                batch = transport.file.write_blocking(lambda tx: remove_expired(tx, now, 100))
                if not batch.deleted_count:
                    return
                taken.append(batch.deleted_count)

        async with anyio.create_task_group() as tasks:
            for transport in (at.transport, other):
                tasks.start_soon(anyio.to_thread.run_sync, take_out, transport)
        assert at.ask("SELECT count(*), count(DISTINCT message_id) FROM record") == [(4 * BATCH, 4 * BATCH)]
        assert sum(taken) <= 4 * BATCH
        await other.close()


async def test_a_huge_backlog_of_expired_messages_does_not_hold_up_senders(path: Path) -> None:
    """A sender has its turn between two batches; it does not wait for the end of all."""
    async with place(path) as at:
        for part in range(20):
            await at.send(*[lasting(f"m-{part}-{n}") for n in range(BATCH)])
        await at.clock.advance(HALF_A_MINUTE * 2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, at.keep_house)
            await until(lambda: at.ask("SELECT count(*) FROM record") != [(0,)])
            await at.send(lasting("in between", None))
            assert at.ask("SELECT count(*) FROM queue_message")[0][0] > BATCH
        await until(lambda: at.ends() == {"in between": None})


async def test_a_locked_file_is_logged_once_and_tried_again(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "postdate.embedded")
    async with place(path) as at:
        await at.send(lasting("m"))
        monkeypatch.setattr("postdate.backends.sqlite.connection.LOCK_PATIENCE_SECONDS", 0.05)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await at.clock.advance(HALF_A_MINUTE * 2)
        at.keep_house()
        at.keep_house()
        other.execute("ROLLBACK")
        other.close()
        await until(lambda: at.queued() == [])
        at.keep_house()
        gone = "1 messages expired in their queues: 1 are gone, 0 are kept in postdate.dead-letters"
        await until(lambda: gone in [record.getMessage() for record in caplog.records])  # said after the commit
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if line.startswith("cannot remove expired messages from their queues")]) == 1


@contextmanager
def small_disk(folder: Path, mebibytes: int):
    """A file system with a size of its own, where one can be mounted; else ``None``."""
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    mounted = mount is not None and os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_is_logged_and_the_expired_leave_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "postdate.embedded")
    with small_disk(tmp_path / "disk", 4) as mounted:
        path = tmp_path / "disk" / "queues.db"
        async with place(path) as at:
            await at.send(*[lasting(f"m-{n}") for n in range(100)])
            fill(at, path, mounted=mounted)
            await at.clock.advance(HALF_A_MINUTE * 2)
            at.keep_house()
            assert len(at.queued()) == 100
            assert "the disk or the database is full" in caplog.text
            make_room(at, path, mounted=mounted)
            await until(lambda: at.queued() == [])
            assert len(at.ask("SELECT * FROM record")) == 100


def fill(at: Place, path: Path, *, mounted: bool) -> None:
    connection = at.transport.file.access._writing_connection()
    if not mounted:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return
    with (path.parent / "ballast").open("wb", buffering=0) as ballast:
        while shutil.disk_usage(path.parent).free:
            ballast.write(b"\0" * 4096)


def make_room(at: Place, path: Path, *, mounted: bool) -> None:
    if mounted:
        (path.parent / "ballast").unlink()
    else:
        at.transport.file.access._writing_connection().execute("PRAGMA max_page_count = 1000000")
