"""An SQLite file that is replaced, deleted, damaged or locked under a running service."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from tests.conftest import as_another_process
from tests.waiting import patience

from postdate import DelayedMessage, Envelope, LocalTransport, SqliteOutbox, SqliteStore
from postdate.backends.sqlite.processes import Wakeups, claimants_folder
from postdate.errors import NotADatabase, PostdateError, StoreReplaced, StoreUnreachable
from postdate.ports import MessageFilter, Outcome
from postdate.runtime.threads import WakeUp

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


async def pending(store: SqliteStore) -> set[str]:
    return {each.message_id for each in await store.list_pending(MessageFilter(), 10_000)}


def look(path: Path) -> set[str]:
    """Return the ids that wait in a file that is whole, by SQLite alone."""
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return {id_ for (id_,) in file.execute("SELECT message_id FROM delayed_message")}


async def test_whoever_had_a_replaced_file_open_stops_and_each_file_has_what_was_committed_to_it(
    tmp_path: Path,
) -> None:
    """What is put back is not mixed with the log of the file before, and nothing that was in that log is lost."""
    path, away = tmp_path / "a.db", tmp_path / "away.db"
    store = SqliteStore(path)
    await store.store_many(messages("old", 2_000), NOW)
    held = await store.claim_due(LATER, 10)
    saved = await backup(tmp_path / "b.db", 500, ["q"])
    path.rename(away)
    saved.rename(path)

    new = as_another_process(lambda: SqliteStore(path))
    with pytest.raises(StoreReplaced, match="belongs to the previous file: stop every process"):
        await pending(new)
    for call in (
        store.store(DelayedMessage("lost", NOW, "q"), NOW),
        store.statistics(NOW),
        store.finish(held, Outcome.DELIVERED, NOW),
    ):
        with pytest.raises(StoreReplaced, match="start them again"):
            await call
    assert not store.is_in_force(held[0])
    await store.close()
    expected = {each.message_id for each in messages("backup", 500)}
    assert await pending(new) == expected
    await new.store(DelayedMessage("after", NOW, "q"), NOW)
    await new.close()
    assert look(path) == {*expected, "after"}
    assert look(away) == {each.message_id for each in messages("old", 2_000)}


async def test_a_process_that_has_not_noticed_yet_spoils_nothing(tmp_path: Path) -> None:
    """Another one that had the file open has stopped, and new ones begin, beside the index of the log before."""
    path, away = tmp_path / "a.db", tmp_path / "away.db"
    one, other = SqliteStore(path), as_another_process(lambda: SqliteStore(path))
    await one.store(DelayedMessage("old-0", NOW, "q"), NOW)
    await other.store(DelayedMessage("old-1", NOW, "q"), NOW)
    saved = await backup(tmp_path / "b.db", 1, ["q"])
    path.rename(away)
    saved.rename(path)
    with pytest.raises(StoreReplaced):
        await one.store(DelayedMessage("lost", NOW, "q"), NOW)
    await one.close()
    new = as_another_process(lambda: SqliteStore(path))
    await new.store(DelayedMessage("after", NOW, "q"), NOW)
    with pytest.raises(StoreReplaced):
        await other.store(DelayedMessage("lost", NOW, "q"), NOW)
    await other.close()
    await new.store(DelayedMessage("last", NOW, "q"), NOW)
    await new.close()
    assert look(path) == {"backup-0", "after", "last"}
    assert look(away) == {"old-0", "old-1"}


async def test_whoever_waited_for_its_turn_while_the_file_was_replaced_writes_nothing(tmp_path: Path) -> None:
    """As where a backup is put in place by one who locks the file meanwhile."""
    path, away = tmp_path / "a.db", tmp_path / "away.db"
    store = SqliteStore(path)
    await store.setup()
    saved = await backup(tmp_path / "b.db", 1, ["q"])
    with closing(sqlite3.connect(path, isolation_level=None)) as operator:
        operator.execute("BEGIN IMMEDIATE")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refused, store)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            path.rename(away)
            saved.rename(path)
            operator.execute("ROLLBACK")
    await store.close()
    assert (look(away), look(path)) == (set(), {"backup-0"})


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


async def test_an_idle_service_notices_by_itself_and_looks_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = SqliteStore(path)
    await store.setup()
    alarm = WakeUp()
    stop = await store.listen(alarm.wake)
    os.replace(await backup(tmp_path / "b.db", 5, ["q"]), path)  # noqa: PTH105 - as mv does
    with patience():
        await alarm.wait()
    with pytest.raises(StoreReplaced):
        await store.claim_due(LATER, 10)
    stop()
    await store.close()


async def test_a_receiver_is_told_and_takes_nothing_out_of_the_queue_of_its_name(tmp_path: Path) -> None:
    """In the other file the queue has another number, and its number is another queue."""
    path = tmp_path / "a.db"
    transport = LocalTransport(path)
    await transport.create_queues(["q", "other"])
    await transport.send([Envelope("q", "old")], NOW)
    receiver = transport.receiver("q")
    (old,) = await receiver.receive(10)
    os.replace(await backup(tmp_path / "b.db", 0, ["other", "q"]), path)  # noqa: PTH105 - as mv does
    with patience(), pytest.raises(StoreReplaced):
        await receiver.receive(10)
    with pytest.raises(StoreReplaced):
        await receiver.commit(old, NOW)
    await receiver.close()
    await transport.close()
    again = LocalTransport(path)
    assert await again.lengths_of(["other", "q"]) == {"other": 1, "q": 1}
    await again.close()


async def test_an_outbox_commits_nothing_into_the_file_before(tmp_path: Path) -> None:
    path, away, saved = (tmp_path / name for name in ("shop.db", "away.db", "saved.db"))
    other, outbox = SqliteOutbox(saved), SqliteOutbox(path)
    await other.setup()
    await other.close()
    await outbox.setup()
    assert await outbox.transaction("sales", "m-1").commit([], NOW)
    transaction = outbox.transaction("sales", "m-2")
    await transaction.begin()
    path.rename(away)
    saved.rename(path)
    for call in (transaction.commit([], NOW), outbox.find("sales", "m-1")):
        with pytest.raises(StoreReplaced, match="start them again"):
            await call
    with pytest.raises(StoreReplaced):  # an outage, whatever the handler made of it: no failure of its message
        await transaction.roll_back()
    with pytest.raises(StoreReplaced):
        await outbox.transaction("sales", "m-3").commit([], NOW)
    await outbox.close()
    for place, expected in ((away, [("m-1",)]), (path, [])):
        with closing(sqlite3.connect(place)) as file:
            assert file.execute("SELECT message_id FROM postdate_outbox").fetchall() == expected


async def test_a_file_that_was_removed_is_not_begun_anew_until_somebody_says_so(tmp_path: Path) -> None:
    """Nothing is stored in a file that nobody can find any more, and no empty one is made in its place."""
    path, away = tmp_path / "a.db", tmp_path / "away.db"
    store = SqliteStore(path)
    await store.store_many(messages("old", 100), NOW)
    path.rename(away)
    for call in (store.store(DelayedMessage("lost", NOW, "q"), NOW), store.statistics(NOW), store.claim_due(LATER, 1)):
        with pytest.raises(StoreReplaced, match="removed or moved away"):
            await call
    await store.close()
    again = SqliteStore(path)
    with pytest.raises(StoreReplaced, match=r"is gone.* remove a\.db-wal"):
        await again.setup()
    assert not path.exists()
    away.rename(path)
    assert len(await pending(again)) == 100
    await again.store(DelayedMessage("after", NOW, "q"), NOW)
    await again.close()


async def test_the_second_name_that_an_earlier_version_gave_the_file_goes_with_the_log(tmp_path: Path) -> None:
    """It was killed: nobody else would ever remove the name, and a file that is removed would keep its room."""
    path = await backup(tmp_path / "a.db", 1, ["q"])
    store = SqliteStore(path)
    await store.setup()
    pinned = claimants_folder(path) / "file-of-log"
    os.link(path, pinned)
    await store.close()
    assert not pinned.exists()


async def test_the_log_that_a_killed_process_left_is_of_its_file_only(tmp_path: Path) -> None:
    path, log = tmp_path / "a.db", tmp_path / "a.db-wal"
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
    before = log.read_bytes()
    os.replace(saved, path)  # noqa: PTH105 - as mv does
    store = SqliteStore(path)
    with pytest.raises(StoreReplaced, match="a process was killed"):
        await pending(store)
    assert log.read_bytes() == before
    log.unlink()
    assert await pending(store) == {"backup-0", "backup-1"}
    await store.close()


async def test_nothing_is_noted_of_a_file_that_was_closed_well(tmp_path: Path) -> None:
    """Else a good log might get the number that was noted."""
    path = tmp_path / "a.db"
    store, other = SqliteStore(path), as_another_process(lambda: SqliteStore(path))
    await store.store_many(messages("m", 2), NOW)
    await other.store_many(messages("n", 2), NOW)
    note = tmp_path / "a.db-claimants" / "log-of"
    await store.close()
    assert note.exists()
    await other.close()
    assert not note.exists()


async def test_a_copy_of_file_and_log_belongs_together(tmp_path: Path) -> None:
    """A folder that is copied while it is in use, as backups are made: the log is that of its file."""
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
    alarm = WakeUp()
    stop = await store.listen(alarm.wake)
    for due in (NOW + timedelta(minutes=2), NOW + timedelta(minutes=1)):
        alarm.reset()
        await other.store(DelayedMessage(f"due {due}", due, "q"), NOW)
        with patience():
            await alarm.wait()
    stop()
    await other.close()
    await store.close()


async def test_a_folder_that_cannot_be_looked_into_is_an_outage_and_no_file_that_is_gone(tmp_path: Path) -> None:
    folder, away = tmp_path / "data", tmp_path / "away"
    folder.mkdir()
    store = SqliteStore(folder / "a.db")
    await store.store_many(messages("m", 2), NOW)
    folder.rename(away)
    folder.symlink_to(folder)  # into itself: whoever looks is told so, and of no file
    with pytest.raises(StoreUnreachable, match=r"cannot inspect .*a\.db"):
        await store.store_many(messages("n", 1), NOW)
    folder.unlink()
    away.rename(folder)
    await store.store_many(messages("o", 1), NOW)
    assert await pending(store) == {"m-0", "m-1", "o-0"}
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
