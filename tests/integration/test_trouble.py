"""Full disks, read-only files, files of others: a clear error, nothing lost, and all is well again after mending."""

import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import anyio
import pytest

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    Envelope,
    LocalTransport,
    SqliteStore,
    SystemClock,
    errors,
)
from postdate.backends.sqlite.connection import connect, create_schema, steps
from postdate.ports import Outcome, RecordKind
from postdate.testing import VirtualClock

SECOND = timedelta(seconds=1)
NOW = SystemClock().now()
NOBODY = 65_534


@contextmanager
def opened(path: Path, **settings) -> Generator[SqliteStore]:
    store = SqliteStore(path, **settings)
    try:
        yield store
    finally:
        store.file.close()


def message(id_: str, size: int = 10) -> DelayedMessage:
    return DelayedMessage(id_, NOW, "queue", {}, os.urandom(size))


async def ids(store: SqliteStore) -> list[str]:
    """Claim everything, give nothing back: the store is closed afterwards."""
    return sorted(claim.message.message_id for claim in await store.claim_due(NOW + 3600 * SECOND, 10_000))


# --- full -------------------------------------------------------------------------------------------------------------


@dataclass
class SmallDisk:
    """A place that is full after a few megabytes, until it is given more room."""

    path: Path
    mend: Callable[[SqliteStore], None]
    limit: Callable[[SqliteStore], None]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system of two megabytes where one can be mounted; elsewhere SQLite's own limit of pages."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mounted = os.geteuid() == 0 and _run("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount_point))
    if not mounted:
        yield SmallDisk(
            mount_point / "store.db", lambda store: _pages(store, 1_000_000), lambda store: _pages(store, 300)
        )
        return
    try:
        yield SmallDisk(
            mount_point / "store.db",
            lambda _: _must_run("mount", "-o", "remount,size=64m", str(mount_point)),
            lambda _: None,
        )
    finally:
        _must_run("umount", str(mount_point))


def _run(*command: str) -> bool:
    program = shutil.which(command[0])
    if program is None:
        return False
    return subprocess.run([program, *command[1:]], check=False, capture_output=True).returncode == 0


def _must_run(*command: str) -> None:
    assert _run(*command), command


def _pages(store: SqliteStore, count: int) -> None:
    store.file.access._writing_connection().execute(f"PRAGMA max_page_count = {count}")


async def fill(store: SqliteStore) -> list[str]:
    """Store until it is full; return the ids of what was acknowledged."""
    stored: list[str] = []

    async def store_all() -> None:
        for number in range(10_000):
            await store.store(message(f"m-{number:04d}", 20_000), NOW)
            stored.append(f"m-{number:04d}")

    with pytest.raises(errors.StoreFull) as full:
        await store_all()
    assert full.value.transient
    assert str(store.file.path) in str(full.value)
    assert len(stored) > 10
    return stored


async def test_a_full_disk_refuses_clearly_loses_nothing_and_works_again_with_room(small_disk: SmallDisk) -> None:
    with opened(small_disk.path) as store:
        await store.setup()
        small_disk.limit(store)
        stored = await fill(store)
        with pytest.raises(errors.StoreFull):
            await store.store_many([message("small"), message("large", 200_000)], NOW)
        assert await store.get("small") is None
        small_disk.mend(store)
        await store.store(message("after"), NOW)
    with opened(small_disk.path) as store:
        assert await ids(store) == ["after", *stored]


async def test_a_store_that_is_full_when_it_is_closed_keeps_everything(small_disk: SmallDisk) -> None:
    with opened(small_disk.path) as store:
        await store.setup()
        small_disk.limit(store)
        stored = await fill(store)
    with opened(small_disk.path) as store:
        small_disk.mend(store)
        assert await ids(store) == stored


async def test_an_endpoint_on_a_full_disk_goes_on_when_there_is_room_again(small_disk: SmallDisk) -> None:
    """Messages that are due while the disk is full are delivered when it is not; none is lost, none doubled."""
    clock = VirtualClock(NOW)
    path = small_disk.path
    store, transport = SqliteStore(path), LocalTransport(path)
    handled: list[bytes] = []
    endpoint = Endpoint("sales", transport=transport, delayed_delivery=DelayedDelivery(store), clock=clock)

    @endpoint.handler(dict, name="Any")
    async def handle(content: dict, context) -> None:
        handled.append(content["number"])

    endpoint.route(dict, "sales", name="Any")
    async with endpoint:
        for number in range(20):
            await endpoint.send({"number": number}, delay=60 * SECOND)
        small_disk.limit(store)
        await fill_up(store)
        await clock.advance(90 * SECOND)
        small_disk.mend(store)
        await clock.advance(600 * SECOND)
    assert set(handled) == set(range(20))  # a handler whose commit finds no room is called again
    counts = await store.record_counts()
    assert counts[RecordKind.DELIVERED] == counts[RecordKind.HANDLED] == 20
    assert (await transport.queue_lengths())["sales"] == 0
    await store.close()
    await transport.close()


async def fill_up(store: SqliteStore) -> None:
    """Fill it with what is not due for long, down to the last page."""

    async def store_all(size: int) -> None:
        for number in range(1_000_000):
            body = os.urandom(size)
            await store.store(DelayedMessage(f"{size}-{number}", NOW + timedelta(days=99), "queue", {}, body), NOW)

    for size in (100_000, 10_000, 1_000, 1):
        with pytest.raises(errors.StoreFull):
            await store_all(size)


async def test_one_message_too_much_does_not_take_others_of_the_same_commit_with_it(small_disk: SmallDisk) -> None:
    """Stores that share a commit with the one that fills the disk fail with it or succeed; what succeeds is kept."""
    results: dict[str, bool] = {}
    with opened(small_disk.path) as store:
        await store.setup()
        small_disk.limit(store)

        async def put(number: int) -> None:
            try:
                await store.store(message(f"m-{number:03d}", 20_000), NOW)
            except errors.StoreFull:
                results[f"m-{number:03d}"] = False
            else:
                results[f"m-{number:03d}"] = True

        for batch in range(0, 300, 10):
            async with anyio.create_task_group() as tasks:
                for number in range(batch, batch + 10):
                    tasks.start_soon(put, number)
        small_disk.mend(store)
        assert set(results.values()) == {True, False}
        assert await ids(store) == sorted(id_ for id_, kept in results.items() if kept)


# --- read-only --------------------------------------------------------------------------------------------------------


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that others may enter; pytest's own may not be."""
    folder = Path(tempfile.mkdtemp(prefix="postdate-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@contextmanager
def without_privileges() -> Generator[None]:
    """File modes bind everybody but root: be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


async def write_one(path: Path) -> None:
    with opened(path, synchronous="normal") as store:
        await store.store(message("first"), NOW)


@pytest.mark.parametrize("what", ["file", "folder", "both"])
async def test_what_may_not_be_written_is_refused_clearly_and_works_again_after_mending(
    public_folder: Path, what: str
) -> None:
    path = public_folder / "store.db"
    await write_one(path)
    shutil.rmtree(path.with_name("store.db-claimants"))
    protected = {"file": [path], "folder": [public_folder], "both": [path, public_folder]}[what]
    if what == "folder":
        path.chmod(0o666)
    for each in protected:
        each.chmod(0o444 if each == path else 0o555)
    before = path.read_bytes()
    with opened(path, synchronous="normal") as store:
        with without_privileges(), pytest.raises(errors.StoreNotWritable, match=str(path)) as refused:
            await store.store(message("second"), NOW)
        assert not refused.value.transient
        assert path.read_bytes() == before
        for each in protected:
            each.chmod(0o755)
        await store.store(message("second"), NOW)
        assert await ids(store) == ["first", "second"]


async def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with opened(tmp_path / "missing" / "store.db") as store:
        with pytest.raises(errors.StoreNotWritable, match="missing"):
            await store.setup()
        (tmp_path / "missing").mkdir()
        await store.store(message("first"), NOW)


# --- files of others --------------------------------------------------------------------------------------------------


async def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await write_one(path)
    change(path, "INSERT INTO postdate_migration (version, name) VALUES (999, 'from the future')")
    before = path.read_bytes()
    with opened(path) as store:
        for _ in range(2):
            with pytest.raises(errors.StoreFromNewerVersion, match="upgrade Postdate"):
                await store.store(message("second"), NOW)
        assert path.read_bytes() == before
        change(path, "DELETE FROM postdate_migration WHERE version = 999")
        await store.store(message("second"), NOW)
        assert await ids(store) == ["first", "second"]


def change(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(sql)
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(truncate)")
    connection.close()


@pytest.mark.parametrize(
    "content", [b"This is a letter, not a database.\n" * 100, b"SQLite format 3\0" + b"\xff" * 5_000]
)
async def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "letter.txt"
    path.write_bytes(content)
    with opened(path) as store:
        with pytest.raises(errors.NotADatabase, match="it was not changed"):
            await store.store(message("first"), NOW)
        assert path.read_bytes() == content
        path.unlink()
        await store.store(message("first"), NOW)
        assert await ids(store) == ["first"]


async def test_an_empty_file_is_taken_for_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch()
    await write_one(path)
    with opened(path) as store:
        assert await ids(store) == ["first"]


async def test_somebody_elses_database_is_used_beside_his_tables(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    change(path, "CREATE TABLE customer (name)")
    change(path, "INSERT INTO customer VALUES ('Ada')")
    await write_one(path)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM customer").fetchall() == [("Ada",)]
    connection.close()


async def test_without_tables_a_store_that_may_not_create_them_says_so(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with opened(path, create=False) as store:
        with pytest.raises(errors.PostdateError) as refused:
            await store.store(message("first"), NOW)
        assert isinstance(refused.value, (errors.StoreNotSetUp, errors.StoreNotWritable))
        assert "postdate setup" in str(refused.value)


async def test_a_database_locked_for_long_is_unavailable_and_then_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.backends.sqlite.connection.LOCK_PATIENCE_SECONDS", 0.05)
    path = tmp_path / "store.db"
    await write_one(path)
    with opened(path, synchronous="normal") as store:
        claims = await store.claim_due(NOW + SECOND, 10)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(errors.StoreUnavailable) as locked:
            await store.store(message("second"), NOW)
        assert locked.value.transient
        other.execute("ROLLBACK")
        other.close()
        await store.store(message("second"), NOW)
        assert await store.finish(claims, Outcome.DELIVERED, NOW) == 1


async def test_setting_up_at_the_same_time_is_harmless_row_30(tmp_path: Path, start) -> None:
    """Four processes that find no file all create it, and one version of its tables comes out."""
    path = tmp_path / "store.db"
    services = [start("service", path) for _ in range(4)]
    for service in services:
        service.says("ready")
    for service in services:
        service.stop()
    connection = sqlite3.connect(path)
    versions = connection.execute("SELECT version FROM postdate_migration ORDER BY version").fetchall()
    connection.close()
    initial = next(each.version for each in steps("database") if each.is_initial)
    numbers = {each.version for each in steps("database") if each.version >= initial}
    assert versions == [(each,) for each in sorted(numbers)]


async def test_sending_to_a_full_disk_is_an_error_and_nothing_is_half_sent(small_disk: SmallDisk) -> None:
    with opened(small_disk.path) as store:
        transport = LocalTransport(small_disk.path)
        await transport.create_queues(["queue"])
        small_disk.limit(store)
        sent = 0

        async def send_all() -> None:
            nonlocal sent
            while sent < 1_000:
                await transport.send([Envelope("queue", f"a-{sent}", {}, os.urandom(20_000))], NOW)
                sent += 1

        with pytest.raises(errors.StoreFull):
            await send_all()
        small_disk.mend(store)
        assert (await transport.queue_lengths())["queue"] == sent
        await transport.close()


def test_setting_up_waits_while_nobody_may_read_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while another process, which sets up at the same time, puts the file into WAL mode."""
    path = tmp_path / "new.db"
    with closing(connect(path)) as ours, closing(sqlite3.connect(path, isolation_level=None)) as theirs:
        theirs.execute("PRAGMA locking_mode = exclusive")
        theirs.execute("BEGIN EXCLUSIVE")
        theirs.execute("CREATE TABLE other (x)")
        theirs.execute("COMMIT")  # which keeps the lock
        monkeypatch.setattr("postdate.backends.sqlite.connection.time.sleep", lambda _: theirs.close())
        create_schema(ours, path)
        assert ours.execute("SELECT count(*) FROM delayed_message").fetchone() == (0,)
