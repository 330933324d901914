"""Checks of SQLite files: whether they exist, are intact, are on a local disk, and are durable."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from postdate.clock import to_microseconds
from postdate.config import Settings
from postdate.errors import PostdateError, StoreFromNewerVersion, StoreNotSetUp
from postdate.operations.doctor.checks import Probe, Verdict
from postdate.operations.plain import format_count, format_span, format_time
from postdate.ports import FileFacts, Process

_GIB: Final = 1024**3
_CLOCK_TOLERANCE: Final = timedelta(minutes=1)
_POSTDATE_BEGAN: Final = datetime(2025, 1, 1, tzinfo=UTC)
_MOUNTS: Final = Path("/proc/self/mountinfo")
# Servers and clients of network file systems both lose locks. Two processes then write at once and damage the file.
_NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.sshfs", "gfs2", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}
)


FileInspector = Callable[[Path, int], FileFacts]
"""See :attr:`postdate.ports.backends.Backend.file_facts`."""


def inspect_files(
    files: Mapping[Path, FileInspector | None], now: datetime
) -> tuple[list[Probe], dict[Path, FileFacts]]:
    """Return the checks of all files, and the facts of the readable ones.

    A ``None`` look means that no backend can read the file.
    """
    checks: list[Probe] = []
    facts: dict[Path, FileFacts] = {}
    for path, inspect in files.items():
        checks += [_diagnose_disk_space(path), diagnose_file_system(path, _MOUNTS)]
        check, file_facts = _diagnose_file(path, inspect, now)
        checks.append(check)
        if file_facts is not None:
            facts[path] = file_facts
            checks += [_diagnose_write_ahead_log(file_facts), _diagnose_clock(path, file_facts.processes or (), now)]
    return checks, facts


def diagnose_synchronous(settings: Settings) -> Probe:
    if settings.store.synchronous == "full":
        return Probe("synchronous", Verdict.OK, "full: a commit survives a power loss")
    return Probe(
        "synchronous",
        Verdict.WARN,
        "normal: a power loss may lose the last commits; a crash of the process loses nothing",
        'set store.synchronous = "full", unless lost messages can be sent again',
    )


def _diagnose_disk_space(path: Path) -> Probe:
    folder = next((each for each in path.parents if each.exists()), Path("/"))
    free = shutil.disk_usage(folder).free
    text = f"{free / _GIB:.1f} GiB free for {path}"
    if free < _GIB // 16:
        return Probe(
            "disk space",
            Verdict.FAIL,
            text,
            "free some space: with a full disk, messages can neither be stored nor delivered",
        )
    if free < _GIB:
        return Probe("disk space", Verdict.WARN, text, "free some space soon")
    return Probe("disk space", Verdict.OK, text)


def diagnose_file_system(path: Path, mounts: Path) -> Probe:
    """Check that the absolute ``path`` is on a local disk.

    ``mounts`` is the list of mounts of Linux; other systems have none.
    """
    kind = "a network share"
    if not str(path).startswith(("\\\\", "//")):
        try:
            kind = _file_system_type(path, mounts.read_text(encoding="utf-8"))
        except OSError:
            return Probe("file system", Verdict.OK, f"unknown on {sys.platform}; it must be a local disk")
        if kind not in _NETWORK_FILE_SYSTEMS:
            return Probe("file system", Verdict.OK, f"{kind}, local")
    mend = "move the file to a disk of this machine: locks on a network file system are not reliable"
    return Probe("file system", Verdict.FAIL, f"{path} is on {kind}", mend)


def _file_system_type(path: Path, mounts: str) -> str:
    """Return the type of the innermost file system that contains ``path``.

    Of several at one mount point, the last one counts.
    """
    most_parts, kind = -1, "unknown"
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        if path.is_relative_to(mount) and len(mount.parts) >= most_parts:
            most_parts, kind = len(mount.parts), after.split()[0]
    return kind


def _find_obstacle(path: Path) -> Probe | None:
    if not path.exists():
        setup = "create it with `postdate setup`, or name another with --store"
        return Probe("database", Verdict.FAIL, f"there is no file {path}", setup)
    for use, target, access in (("read", path, os.R_OK), ("written", path, os.W_OK), ("written", path.parent, os.W_OK)):
        if not os.access(target, access):
            mend = (
                "check owner and mode; the folder must be writable, because the log and lock files are beside the "
                "database"
            )
            return Probe("database", Verdict.FAIL, f"{target} cannot be {use}", mend)
    return None


def _diagnose_file(path: Path, inspect: FileInspector | None, now: datetime) -> tuple[Probe, FileFacts | None]:
    obstacle = _find_obstacle(path)
    if obstacle is not None or inspect is None:
        return obstacle or Probe("database", Verdict.OK, f"{path} exists"), None
    try:
        facts = inspect(path, to_microseconds(now))
    except StoreNotSetUp as error:
        return Probe("database", Verdict.FAIL, str(error), "run `postdate setup`"), None
    except StoreFromNewerVersion as error:
        return Probe("database", Verdict.FAIL, str(error), "upgrade Postdate here"), None
    except PostdateError as error:
        return Probe("database", Verdict.FAIL, str(error), "restore it from a backup, or name another file"), None
    pending = format_count(facts.pending, "message")
    return Probe("database", Verdict.OK, f"{path}, schema version {facts.schema_version}, {pending} waiting"), facts


def _diagnose_write_ahead_log(facts: FileFacts) -> Probe:
    if facts.journal_mode == "wal":
        return Probe("write-ahead log", Verdict.OK, "wal")
    mend = "another program changed it; the next start of Postdate sets it to wal again"
    return Probe("write-ahead log", Verdict.WARN, f"journal mode is {facts.journal_mode!r}", mend)


def _diagnose_clock(path: Path, processes: Sequence[Process], now: datetime) -> Probe:
    """Warn of a clock behind the times in the file.

    The clock was set back, and due messages wait until it catches up.
    """
    latest = max([datetime.fromtimestamp(path.stat().st_mtime, tz=UTC), *(process.started_at for process in processes)])
    mend = "set the clock, if possible by NTP: this clock decides when messages are delivered"
    if now < _POSTDATE_BEGAN:
        return Probe("clock", Verdict.FAIL, f"it shows {format_time(now)}", mend)
    if latest - now > _CLOCK_TOLERANCE:
        return Probe("clock", Verdict.WARN, f"it is {format_span(latest - now)} behind the latest time in {path}", mend)
    return Probe("clock", Verdict.OK, format_time(now.replace(microsecond=0)))
