"""The machine under the servers of the tests: its processes, ports, directories and packages. Linux only.

Nothing here needs more than the standard library: ``scripts/services`` runs it before anything is installed.
"""

import os
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"


class ServerError(Exception):
    """A server that cannot be installed, started or stopped. The message says why, and what to do."""


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return True as soon as ``condition`` holds, False after ``seconds``."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.02)
    return True


# --- processes --------------------------------------------------------------------------------------------------------


def boot() -> str:
    """Return what names this boot of the machine: process numbers of an earlier one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True)
class Daemon:
    """A process, told apart by its time of birth from a later one with the same number."""

    pid: int
    born_ticks: int

    @classmethod
    def of(cls, pid: int) -> "Daemon | None":
        """Return the process that has this number now; None where there is none, or only its remains."""
        fields = _fields_of(pid)
        return None if fields is None else cls(pid, int(fields[19]))

    @property
    def is_running(self) -> bool:
        return Daemon.of(self.pid) == self

    def descendants(self) -> "list[Daemon]":
        """Return its children, their children, and so on."""
        children: dict[int, list[int]] = {}
        for pid in _all_pids():
            if (fields := _fields_of(pid)) is not None:
                children.setdefault(int(fields[1]), []).append(pid)
        found: list[Daemon] = []
        pending = [self.pid] if self.is_running else []
        while pending:
            below = children.get(pending.pop(), [])
            pending += below
            found += [daemon for daemon in map(Daemon.of, below) if daemon is not None]
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process and no other; without effect on one that has ended."""
        with suppress(ProcessLookupError), self._handle() as handle:
            signal.pidfd_send_signal(handle, number)

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; it need not be a child of this process."""
        with suppress(ProcessLookupError), self._handle() as handle:
            return bool(select.select([handle], [], [], seconds)[0])
        return True

    @contextmanager
    def _handle(self) -> Generator[int]:
        handle = os.pidfd_open(self.pid)
        try:
            if not self.is_running:
                raise ProcessLookupError(self.pid)
            yield handle
        finally:
            os.close(handle)


def daemons_with(setting: str) -> list[Daemon]:
    """Return the processes that were started with this ``NAME=VALUE`` in their environment, as far as we may look."""
    found: list[Daemon] = []
    for pid in _all_pids():
        with suppress(OSError):
            if setting.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found += [daemon for daemon in [Daemon.of(pid)] if daemon is not None]
    return found


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _fields_of(pid: int) -> list[str] | None:
    """Return /proc/PID/stat from its third field on: state, parent, ... ; None for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


# --- places and ports -------------------------------------------------------------------------------------------------


def free_port() -> int:
    """Return a TCP port that nobody listens on, below those that the kernel gives to outgoing connections.

    A server that is killed and comes back must find its port again; one of the kernel's own range could by then be the
    near end of some client's connection. Not by :mod:`random`, whose seed is the same in every worker: side by side
    they would all find the same port free.
    """
    while not port_is_free(port := 20_000 + secrets.randbelow(12_000)):
        pass
    return port


def port_is_free(port: int) -> bool:
    with closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def place_for_servers() -> Path:
    """Return the directory for temporary files, or where other accounts cannot reach it, one that they can."""
    places = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]
    for place in places:
        if place.is_dir() and os.access(place, os.W_OK) and (os.geteuid() != 0 or _everyone_can_reach(place)):
            return place.resolve()
    tried = ", ".join(map(str, places))
    raise ServerError(
        f"no directory for servers: other accounts cannot reach any of {tried}; set TMPDIR to one they can"
    )


def _everyone_can_reach(place: Path) -> bool:
    place = place.resolve()
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (place, *place.parents))


@contextmanager
def folder_for_servers() -> Generator[Path]:
    """Make a directory that a server's account can reach (not so below pytest's ``tmp_path``); remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="postdate-servers-", dir=place_for_servers()))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# --- installation -----------------------------------------------------------------------------------------------------

_LISTS = Path("/var/lib/apt/lists")
_POLICY = Path("/usr/sbin/policy-rc.d")
_LISTS_ARE_FRESH_FOR_SECONDS = 86_400


def install(packages: Sequence[str]) -> None:
    """Install Debian packages, without starting what they bring.

    Raises:
        ServerError: They cannot be installed; the message has the command that would.
    """
    command = ["apt-get", "--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", "install", *packages]
    by_hand = f"run as root: apt-get update && apt-get install {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise ServerError(f"not installed: {', '.join(packages)}, and there is no apt-get; install them by hand")
    if os.geteuid() != 0:
        raise ServerError(f"not installed: {', '.join(packages)}; {by_hand}")
    with _no_daemons_started():
        fresh = _lists_are_fresh()
        ran = (fresh or _apt(["apt-get", "update"])) and _apt(command)
        if not ran and fresh:  # lists of this morning may name versions that are gone by now
            ran = _apt(["apt-get", "update"]) and _apt(command)
    if not ran:
        raise ServerError(f"apt-get could not install {', '.join(packages)}; {by_hand}")


def _lists_are_fresh() -> bool:
    # The age of the directory: that of a list is the age it had on the server that it came from.
    if not any(_LISTS.glob("*_Packages*")):
        return False
    changed = max(folder.stat().st_mtime for folder in (_LISTS, _LISTS / "partial") if folder.exists())
    age = time.time() - changed
    return age < _LISTS_ARE_FRESH_FOR_SECONDS


def _apt(command: Sequence[str]) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    ran = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if ran.returncode != 0:
        sys.stderr.write(f"{' '.join(command)}: {(ran.stdout + ran.stderr)[-2_000:]}\n")
    return ran.returncode == 0


@contextmanager
def _no_daemons_started() -> Generator[None]:
    """Keep Debian's packages from starting system servers, unless the machine has a rule of its own."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="ascii")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
