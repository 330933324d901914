"""An SQLite file that is replaced, deleted, damaged or locked under a running service."""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from tests.conftest import as_another_process
from tests.waiting import patience

from postdate import DelayedMessage, Envelope, LocalTransport, SqliteStore
from postdate.backends.sqlite.connection import connect
from postdate.backends.sqlite.wakeup import Wakeups
from postdate.errors import NotADatabase, PostdateError, StoreNotSetUp, StoreUnreachable
from postdate.ports import MessageFilter, Outcome
from postdate.runtime.wakeup import Alarm

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)


def messages(prefix: str, count: int) -> list[DelayedMessage]:
    return [DelayedMessage(f"{prefix}-{number}", NOW, "q") for number in range(count)]


async def backup(path: Path, count: int, queues: list[str]) -> Path:
    """Make a file that was closed well, with messages of its own."""
    store, transport = SqliteStore(path), LocalTransport(path)
    await transport.create_queues(queues)
    await store.store_many(messages("backup", count), NOW)
    await transport.send([Envelope(queue, f"in-{queue}") for queue in queues], NOW)
    await store.close()
    await transport.close()
    return path


def put_aside(folder: Path) -> list[Path]:
    return list(folder.glob("a.db-log-of-replaced-*"))


async def pending(store: SqliteStore) -> set[str]:
    return {each.message_id for each in await store.list_pending(MessageFilter(), 10_000)}


async def test_a_file_that_was_replaced_is_gone_on_with_and_new_processes_open_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is put back is not mixed with the log of the file before, whoever opens it first."""
    path = tmp_path / "a.db"
    store = SqliteStore(path)
    await store.store_many(messages("old", 2_000), NOW)
    held = await store.claim_due(LATER, 10)
    os.replace(await backup(tmp_path / "b.db", 500, ["q"]), path)  # noqa: PTH105 - as mv does

    new = as_another_process(lambda: SqliteStore(path))
    expected = {each.message_id for each in messages("backup", 500)}
    assert await pending(new) == expected
    await store.store(DelayedMessage("after", NOW, "q"), NOW)
    assert await store.finish(held, Outcome.DELIVERED, NOW) == 0
    assert await pending(store) == await pending(new) == {*expected, "after"}
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert any("was replaced" in line and "goes on" in line for line in said), said
    assert any("a.db-log-of-replaced-" in line for line in said)
    await new.close()
    await store.close()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_a_file_that_was_only_looked_at_until_now_is_the_same_one(
    tmp_path: Path, expected_logs: list[str]
) -> None:
    """As the file of the queues is where the store is elsewhere: each start said that it had been replaced."""
    path = await backup(tmp_path / "a.db", 1, ["q"])
    transport = LocalTransport(path)
    assert await transport.lengths_of(["q"]) == {"q": 1}
    await transport.send([Envelope("q", "m-1")], NOW)
    assert await transport.lengths_of(["q"]) == {"q": 2}
    await transport.close()
    assert expected_logs == []


async def test_nobody_reads_the_new_file_with_the_index_of_the_log_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections of a process share an index, so one that is opened too early would spoil the file for all."""
    path, replace, index = tmp_path / "a.db", Path.replace, list[bool]()
    store = SqliteStore(path)
    await store.store_many(messages("old", 10), NOW)
    os.replace(await backup(tmp_path / "b.db", 5, ["q"]), path)  # noqa: PTH105 - as mv does

    def replace_watched(self: Path, target: Path) -> Path:
        with pytest.raises(StoreUnreachable, match="belongs to the file before"):
            connect(path, read_only=True)
        index.append(path.with_name("a.db-shm").exists())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_watched)
    new = as_another_process(lambda: SqliteStore(path))
    assert len(await pending(new)) == 5
    assert index == [False]
    await new.close()
    await store.close()


async def test_an_idle_service_notices_by_itself_and_looks_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = SqliteStore(path)
    await store.setup()
    alarm = Alarm()
    stop = await store.listen(alarm.ring)
    os.replace(await backup(tmp_path / "b.db", 5, ["q"]), path)  # noqa: PTH105 - as mv does
    with patience():
        await alarm.wait()
    assert len(await store.claim_due(LATER, 10)) == 5
    # It is heard under its number in the new file, too.
    other = as_another_process(lambda: SqliteStore(path))
    alarm.reset()
    await other.store(DelayedMessage("first", NOW - timedelta(days=1), "q"), NOW)
    with patience():
        await alarm.wait()
    stop()
    await other.close()
    await store.close()


async def test_a_receiver_goes_on_with_the_queue_of_its_name(tmp_path: Path) -> None:
    """In the other file the queue has another number, and its number is another queue."""
    path = tmp_path / "a.db"
    transport = LocalTransport(path)
    await transport.create_queues(["q", "other"])
    await transport.send([Envelope("q", "old")], NOW)
    receiver = transport.receiver("q")
    (old,) = await receiver.receive(10)
    os.replace(await backup(tmp_path / "b.db", 0, ["other", "q"]), path)  # noqa: PTH105 - as mv does
    with patience():
        (received,) = await receiver.receive(10)
    assert received.envelope.message_id == "in-q"
    with pytest.raises(PostdateError, match="no longer held"):
        await receiver.commit(old, NOW)
    await receiver.commit(received, NOW)
    await receiver.close()
    await transport.close()


async def test_a_file_that_was_deleted_is_an_outage_until_it_is_put_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, eventually: Callable[..., None]
) -> None:
    """Nothing is stored in a file that nobody can find any more, and no empty one is made in its place."""
    path, away = tmp_path / "a.db", tmp_path / "away.db"
    store = SqliteStore(path)
    await store.store_many(messages("old", 100), NOW)
    path.rename(away)
    for call in (store.store(DelayedMessage("lost", NOW, "q"), NOW), store.statistics(NOW), store.claim_due(LATER, 1)):
        with pytest.raises(StoreUnreachable, match="deleted or moved away"):
            await call
    assert not path.exists()
    await anyio.to_thread.run_sync(
        lambda: eventually(lambda: "cannot go on with the file" in caplog.text, "the outage in the log")
    )
    away.rename(path)
    assert len(await pending(store)) == 100
    await store.store(DelayedMessage("after", NOW, "q"), NOW)
    await store.close()


async def test_what_is_put_in_its_place_must_be_a_file_of_postdate(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = SqliteStore(path)
    await store.setup()
    (tmp_path / "text").write_text("This is no database. " * 100)
    os.replace(tmp_path / "text", path)  # noqa: PTH105 - as mv does
    with pytest.raises(NotADatabase, match="put a backup in"):
        await store.store(DelayedMessage("m", NOW, "q"), NOW)
    with closing(sqlite3.connect(tmp_path / "foreign.db")) as foreign:
        foreign.execute("CREATE TABLE theirs (a)")
    os.replace(tmp_path / "foreign.db", path)  # noqa: PTH105 - as mv does
    with pytest.raises(StoreNotSetUp):
        await store.store(DelayedMessage("m", NOW, "q"), NOW)
    os.replace(await backup(tmp_path / "b.db", 3, ["q"]), path)  # noqa: PTH105 - as mv does
    assert len(await pending(store)) == 3
    await store.close()


async def test_a_file_that_was_removed_and_made_anew_is_another_one(tmp_path: Path) -> None:
    """File systems give the number of a file that is gone to the next one: before, it got the log of the other."""
    path, before = tmp_path / "a.db", tmp_path / "before"
    saved = await backup(tmp_path / "b.db", 2, ["q"])
    code = (
        "import asyncio, os, sys\n"
        "from datetime import UTC, datetime\n"
        "from pathlib import Path\n"
        "from postdate import DelayedMessage, SqliteStore\n"
        "now = datetime.now(UTC)\n"
        "messages = [DelayedMessage(f'later-{n}', now, 'q', {}, os.urandom(3000)) for n in range(12)]\n"
        "asyncio.run(SqliteStore(Path(sys.argv[1])).store_many(messages, now))\n"
        "os._exit(9)"  # as after kill -9 the log is left
    )
    await anyio.run_process([sys.executable, "-c", code, str(path)], check=False)
    before.write_bytes(path.with_name("a.db-wal").read_bytes())
    path.unlink()
    path.write_bytes(saved.read_bytes())
    store = SqliteStore(path)
    assert await pending(store) == {"backup-0", "backup-1"}
    (kept,) = put_aside(tmp_path)
    assert kept.read_bytes() == before.read_bytes()
    await store.close()


async def test_nothing_is_noted_of_a_file_that_was_closed_well(tmp_path: Path) -> None:
    """Else a good log might get the number that was noted, and a file that is removed would keep its room."""
    path = tmp_path / "a.db"
    store, other = SqliteStore(path), as_another_process(lambda: SqliteStore(path))
    await store.store_many(messages("m", 2), NOW)
    await other.store_many(messages("n", 2), NOW)
    folder = tmp_path / "a.db-claimants"
    await store.close()
    assert {"log-of", "file-of-log"} <= {each.name for each in folder.iterdir()}
    assert (folder / "file-of-log").samefile(path)
    await other.close()
    assert [each.name for each in folder.iterdir() if "log" in each.name] == []


async def test_a_copy_of_file_and_log_belongs_together(tmp_path: Path) -> None:
    """A folder that is copied while it is in use, as backups are made: what is in the log is not put aside."""
    path, copy = tmp_path / "a.db", tmp_path / "copy"
    store = SqliteStore(path)
    await store.store_many(messages("old", 100), NOW)
    copy.mkdir()
    for name in ("a.db", "a.db-wal"):
        (copy / name).write_bytes((tmp_path / name).read_bytes())
    (copy / "a.db-claimants").mkdir()
    note = tmp_path / "a.db-claimants" / "log-of"
    (copy / "a.db-claimants" / "log-of").write_bytes(note.read_bytes())
    copied = SqliteStore(copy / "a.db")
    assert len(await pending(copied)) == 100
    await copied.close()
    await store.close()


@pytest.mark.parametrize("damage", ["cut short", "a page overwritten"])
async def test_a_damaged_file_is_told_when_it_is_opened(damage: str, tmp_path: Path) -> None:
    path = await backup(tmp_path / "a.db", 500, ["q"])
    whole = path.read_bytes()
    if damage == "cut short":
        path.write_bytes(whole[: len(whole) // 2])
    else:
        path.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[8192 + 4096 :])
    left = path.read_bytes()
    store = SqliteStore(path)
    with pytest.raises(NotADatabase, match=r"damaged \(.*recover"):
        await store.setup()
    await store.close()
    assert path.read_bytes() == left


async def test_a_lost_wake_up_costs_about_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poller sleeps for up to a minute; what another process stores wakes it although no datagram comes."""
    store = SqliteStore(tmp_path / "a.db")
    await store.store(DelayedMessage("far", LATER, "q"), NOW)
    other = as_another_process(lambda: SqliteStore(tmp_path / "a.db"))
    await other.setup()
    monkeypatch.setattr(Wakeups, "_send", lambda *_: None)
    alarm = Alarm()
    stop = await store.listen(alarm.ring)
    for due in (NOW + timedelta(minutes=2), NOW + timedelta(minutes=1)):
        alarm.reset()
        await other.store(DelayedMessage(f"due {due}", due, "q"), NOW)
        with patience():
            await alarm.wait()
    stop()
    await other.close()
    await store.close()


async def test_whoever_waits_for_a_locked_file_is_told_and_closing_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is frozen while it writes keeps the lock, and SQLite has no means to break it: an outage."""
    store = SqliteStore(tmp_path / "a.db")
    await store.store(DelayedMessage("m", NOW, "q"), NOW)
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as frozen:
        frozen.execute("BEGIN IMMEDIATE")
        with monkeypatch.context() as impatient:
            impatient.setattr("postdate.backends.sqlite.connection.LOCK_PATIENCE_SECONDS", 0.1)
            with pytest.raises(StoreUnreachable, match="frozen while it writes"):
                await store.store(DelayedMessage("n", NOW, "q"), NOW)
        assert len(await pending(store)) == 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refused, store)
            await anyio.lowlevel.checkpoint()
            with patience():
                await store.close()
        frozen.execute("ROLLBACK")


async def _refused(store: SqliteStore) -> None:
    with pytest.raises(PostdateError):
        await store.store(DelayedMessage("n", NOW, "q"), NOW)
