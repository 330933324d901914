"""Processor time and memory of processes, from the operating system. None where it does not say (not Linux)."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_PROCESSES = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_KIB_IN_MIB = 1024
# Of /proc/PID/stat, counted from the state on: parent; user and system time, of itself and of children that ended.
_PARENT, _OWN, _WITH_ENDED = 1, slice(11, 13), slice(11, 15)


def peak_rss_mb() -> float:
    """Return the largest resident memory of this process, in MiB.

    Avoids ``getrusage`` where it can: a process inherits that figure from its parent.
    """
    with suppress(OSError):
        for line in (_PROCESSES / "self" / "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / _KIB_IN_MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _KIB_IN_MIB


def cpu_seconds(pid: int) -> float:
    """Return the processor time of one process so far; 0 if it is gone."""
    fields = _stat(pid)
    return 0.0 if fields is None else sum(map(int, fields[_OWN])) / _TICKS


def family_cpu_seconds(pid: int) -> float:
    """Return the processor time so far of a process and all its children, including ended ones."""
    total = 0
    for entry in _PROCESSES.iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdigit() else None
        if fields is not None and pid in {int(entry.name), int(fields[_PARENT])}:
            total += sum(map(int, fields[_WITH_ENDED]))
    return total / _TICKS


def parent_of(pid: int, name: str) -> int | None:
    """Return the parent of a process; ``None`` unless both are seen on this machine as processes called ``name``."""
    fields = _stat(pid)
    if fields is None or _name(pid) != name:
        return None
    parent = int(fields[_PARENT])
    return parent if _name(parent) == name else None


def listening_pid(port: int) -> int | None:
    """Return the process that listens on a TCP port of this machine; None if it cannot be seen."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    for entry in _PROCESSES.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                for descriptor in (entry / "fd").iterdir():
                    if str(descriptor.readlink()) in sockets:
                        return int(entry.name)
    return None


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROCESSES / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def _name(pid: int) -> str:
    with suppress(OSError):
        return (_PROCESSES / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _stat(pid: int) -> list[str] | None:
    with suppress(OSError):
        return (_PROCESSES / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return None
