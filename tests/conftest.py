"""What every test gets: one event loop kind, no dependence on the host's time zone, and a
check that nothing was left open.
"""

import gc
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TypeVar
from zipfile import ZipFile

import pytest
from tests import java
from tests.azure_store_subjects import AzureTableStoreSubject
from tests.azure_subjects import AzureStorageQueueTransportSubject
from tests.mariadb_subjects import MariaDbStoreSubject
from tests.postgres_subjects import PostgresStoreSubject, PostgresTransportSubject
from tests.rabbitmq_subjects import RabbitMqTransportSubject
from tests.redis_subjects import RedisStoreSubject, RedisTransportSubject
from tests.sqlserver_subjects import SqlServerStoreSubject, sqlserver_subjects
from tests.waiting import Eventually

from postdate import LocalTransport, MemoryStore, MemoryTransport, SqliteStore
from postdate.backends.sqlite.file import SqliteFile
from postdate.ports import DelayedMessageStore, MovingStore, Recording, Transport
from postdate.testing import Damage, StoreSubject, TransportSubject
from postdate.testing.damaged import Damages, damages_of

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As of a shell that runs us in the background. Processes that tests interrupt would inherit it, and never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)


java.use(os.environ)
# Some shells have it. Each process that a test starts would compile all that it imports, for more than a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

pytest_plugins = ["tests.servers_fixtures", "tests.side_by_side", "tests.soak", "tests.flake"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Real adapters run on asyncio, so the tests do too."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def hostile_time_zone() -> Iterator[None]:
    """Run every test far from UTC, at a half-hour offset, so that a naive local time shows itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Australia/Lord_Howe")
        _apply_time_zone()
        yield
    _apply_time_zone()


def _apply_time_zone() -> None:
    if sys.platform != "win32":
        time.tzset()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: next to all of it stays, and to look through it is a fifth of the work."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what is loaded out of all collections: tests that ask for one would walk over thousands of tests each."""
    gc.collect()
    gc.freeze()


# --- nothing left open ------------------------------------------------------------------------------------------------

_THREADS_END_WITHIN_SECONDS = 60.0


@pytest.fixture(autouse=True)
def nothing_is_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a database file open or a thread running."""
    before = set(threading.enumerate())
    yield
    left = [str(path) for _, path in SqliteFile._handles]
    SqliteFile._handles.clear()  # the fault is this test's, not the next one's
    assert not left, f"left open: {left}"
    if "pipeline" in request.path.parts:  # Spark keeps threads of its own for the whole session
        return
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon or thread.name.startswith("postdate"):
            thread.join(_THREADS_END_WITHIN_SECONDS)
            assert not thread.is_alive(), f"left running: {thread}"


# --- nothing said unheard ---------------------------------------------------------------------------------------------

_TROUBLE = logging.WARNING


@pytest.fixture
def expected_logs(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Fail a test in which Postdate warns of what the test does not name: a defect stood in the log of passing tests.

    What is expected is appended to the list, as a part of its text.
    """
    expected = list[str]()
    yield expected
    said = [
        record.getMessage()
        for when in ("setup", "call")
        for record in caplog.get_records(when)
        if record.levelno >= _TROUBLE and record.name.startswith("postdate")
    ]
    unexpected = [text for text in said if not any(part in text for part in expected)]
    assert not unexpected, f"logged, and not expected: {unexpected}"


# --- waiting for what happens outside this process --------------------------------------------------------------------


@pytest.fixture(scope="session")
def eventually() -> Eventually:
    """Return the one way to wait for another process."""
    return Eventually()


# --- a project with the wheel -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel, and unpack it as an installer does; return the folder, for the PYTHONPATH of a project."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder / "built")]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True, capture_output=True)
    (wheel,) = (folder / "built").glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


# --- adapters under test ----------------------------------------------------------------------------------------------


class MemoryStoreSubject(StoreSubject):
    """The store in memory: every handle is a new one."""

    def open(self, **settings) -> MemoryStore:
        return MemoryStore(**settings)


class SqliteStoreSubject(StoreSubject):
    """The store in an SQLite file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "store.db"
        self._recording = Recording.ALL

    def open(self, *, recording: Recording = Recording.ALL, **settings) -> SqliteStore:
        self._recording = recording
        return SqliteStore(self.path, synchronous="normal", recording=recording, **settings)

    def open_elsewhere(self) -> DelayedMessageStore:
        return as_another_process(lambda: SqliteStore(self.path, synchronous="normal"))

    def transport(self) -> Transport:
        return LocalTransport(self.path, synchronous="normal", recording=self._recording)

    def damages(self) -> Damages:
        return damages_of(self.damage)

    def damage(self, message_id: str, damage: Damage) -> bytes:
        return damage_row(self.path, "delayed_message", message_id, damage)

    def refusals(self, store: DelayedMessageStore) -> Mapping[str, AbstractContextManager[object]]:
        assert isinstance(store, SqliteStore)
        return {
            "read-only": _set(store, ("query_only = 1", "query_only = 0")),
            "full": _set(store, ("max_page_count = 1", "max_page_count = 1000000000")),
        }


@contextmanager
def _set(store: SqliteStore, pragmas: tuple[str, str]) -> Generator[None]:
    """Give the connection that writes a setting, and after the block another."""
    before, after = pragmas
    store.file.access._writing_connection().execute(f"PRAGMA {before}")
    yield
    store.file.access._writing_connection().execute(f"PRAGMA {after}")


class MemoryTransportSubject(TransportSubject):
    """The queues in memory: every handle is a new one."""

    def open(self, **settings) -> MemoryTransport:
        return MemoryTransport(**settings)


class LocalTransportSubject(TransportSubject):
    """The queues in an SQLite file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "queues.db"

    def open(self, **settings) -> LocalTransport:
        return LocalTransport(self.path, synchronous="normal", **settings)

    def open_elsewhere(self) -> Transport:
        return as_another_process(lambda: LocalTransport(self.path, synchronous="normal"))

    def store(self) -> MovingStore:
        return SqliteStore(self.path, synchronous="normal")

    def damages(self) -> Damages:
        return damages_of(self.damage, [each for each in Damage if each is not Damage.DESTINATION])

    def damage(self, message_id: str, damage: Damage) -> bytes:
        return damage_row(self.path, "queue_message", message_id, damage)


_DAMAGED_HEADERS = b'{"a": "b'
_BEFORE_THE_CALENDAR = -(10**18)


def damage_row(path: Path, table: str, message_id: str, damage: Damage) -> bytes:
    """Damage one message in an SQLite file by hand; return what stands there now."""
    with closing(sqlite3.connect(path)) as file, file:
        (content,) = file.execute(f"SELECT content FROM {table} WHERE message_id = ?", (message_id,)).fetchone()
        if damage is Damage.HEADERS:
            file.execute("UPDATE content SET headers = ? WHERE seq = ?", (_DAMAGED_HEADERS.decode(), content))
            return _DAMAGED_HEADERS
        if damage is Damage.CONTENT:
            file.execute("DELETE FROM content WHERE seq = ?", (content,))
            return b""
        if damage is Damage.DESTINATION:
            file.execute(f"UPDATE {table} SET destination = ' ' WHERE message_id = ?", (message_id,))
            return b" "
        file.execute(f"UPDATE {table} SET due = ? WHERE message_id = ?", (_BEFORE_THE_CALENDAR, message_id))
        if table == "delayed_message":
            file.execute("UPDATE delayed_message SET attempt_at = due WHERE message_id = ?", (message_id,))
        return str(_BEFORE_THE_CALENDAR).encode()


A = TypeVar("A")


def as_another_process(open_adapter: Callable[[], A]) -> A:
    """Open an adapter that shares nothing in memory with those open already: claims, locks and sockets of its own."""
    here = dict(SqliteFile._handles)
    SqliteFile._handles.clear()
    try:
        return open_adapter()
    finally:
        SqliteFile._handles.clear()
        SqliteFile._handles.update(here)


STORE_SUBJECTS: dict[str, Callable[[pytest.FixtureRequest], StoreSubject]] = {
    "MemoryStore": lambda _request: MemoryStoreSubject(),
    "SqliteStore": lambda request: SqliteStoreSubject(request.getfixturevalue("tmp_path")),
    "PostgresStore": lambda request: PostgresStoreSubject(request.getfixturevalue("postgres_url")),
    "MariaDbStore": lambda request: MariaDbStoreSubject(request.getfixturevalue("mariadb_url")),
    "RedisStore": lambda request: RedisStoreSubject(request.getfixturevalue("redis_url")),
    "AzureTableStore": lambda request: AzureTableStoreSubject(request.getfixturevalue("azurite_connection")),
    **{name: lambda _request, url=url: SqlServerStoreSubject(url) for name, url in sqlserver_subjects().items()},
}
TRANSPORT_SUBJECTS: dict[str, Callable[[pytest.FixtureRequest], TransportSubject]] = {
    "MemoryTransport": lambda _request: MemoryTransportSubject(),
    "LocalTransport": lambda request: LocalTransportSubject(request.getfixturevalue("tmp_path")),
    "PostgresTransport": lambda request: PostgresTransportSubject(request.getfixturevalue("postgres_url")),
    "RabbitMqTransport-quorum": lambda request: RabbitMqTransportSubject(
        request.getfixturevalue("rabbitmq_url"), "quorum"
    ),
    "RabbitMqTransport-classic": lambda request: RabbitMqTransportSubject(
        request.getfixturevalue("rabbitmq_url"), "classic"
    ),
    "RedisTransport": lambda request: RedisTransportSubject(request.getfixturevalue("redis_url")),
    "AzureStorageQueueTransport": lambda request: AzureStorageQueueTransportSubject(
        request.getfixturevalue("azurite_connection")
    ),
}


@pytest.fixture(params=STORE_SUBJECTS)
def store_subject(request: pytest.FixtureRequest) -> Iterator[StoreSubject]:
    """Each store, on empty storage."""
    subject = STORE_SUBJECTS[request.param](request)
    if request.param in {"MariaDbStore", "SqlServerStore"}:
        request.getfixturevalue("expected_logs").append("cannot be read, and marked so")
    yield subject
    _drop(subject)


@pytest.fixture(params=TRANSPORT_SUBJECTS)
def transport_subject(request: pytest.FixtureRequest) -> Iterator[TransportSubject]:
    """Each transport, without queues."""
    subject = TRANSPORT_SUBJECTS[request.param](request)
    yield subject
    _drop(subject)


def _drop(subject: object) -> None:
    """Drop what a subject made on a server."""
    drop = getattr(subject, "drop", None)
    if drop is not None:
        drop()
