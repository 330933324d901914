"""Real processes on one file, and a way to end them in every way there is."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.locking_places import LockingPlace, locking_place, locking_places
from tests.redis_subjects import Prefix
from tests.servers import Redis, started
from tests.waiting import PATIENCE_SECONDS, freeze_processes

SCRIPT = Path(__file__).with_name("processes.py")


class Process:
    """A process of ``processes.py``; what it says is kept line by line."""

    def __init__(self, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._said: queue.Queue[str] = queue.Queue()
        self._errors = ""
        self._readers = [threading.Thread(target=read) for read in (self._read_lines, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line.rstrip("\n"))
        self._said.put("(end)")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors = self._process.stderr.read()

    def says(self, word: str) -> str:
        """Wait until the process says a line that begins with ``word``; return the line."""
        while True:
            line = self._said.get(timeout=PATIENCE_SECONDS)
            if line.startswith(word):
                return line
            assert line != "(end)", f"ended without saying {word!r}: {self._errors}"

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        """Let it do nothing, and end nothing either, until it is thawed or killed."""
        freeze_processes(self._process.pid)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        code = self._process.wait(PATIENCE_SECONDS)
        self._close()
        assert code == 0 or "Traceback" not in self._errors, self._errors
        return code

    def stop(self) -> None:
        """Terminate it and wait for its end, which must be a good one."""
        self.terminate()
        assert self.end() == 0, self._errors

    def kill(self) -> None:
        """End it as a power cut would; without effect on one that has ended."""
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)
        self._close()

    def kill_after(self, seconds: float) -> None:
        """Kill it at some moment, if it has not ended before."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()

    def _close(self) -> None:
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Return what starts a process; those that still run at the end of the test are killed."""
    started: list[Process] = []

    def start(*arguments: object, environment: Mapping[str, str] | None = None) -> Process:
        process = Process(*arguments, environment=environment)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


# --- stores on row locks ----------------------------------------------------------------------------------------------


@pytest.fixture(params=locking_places())
def place(request: pytest.FixtureRequest, mariadb_url: str, expected_logs: list[str]) -> Iterator[LockingPlace]:
    """A schema of its own on each server of a store on row locks; what is logged there is expected, or a fault."""
    opened = locking_place(request.param, mariadb_url)
    yield opened
    opened.drop()


@pytest.fixture
def session(place: LockingPlace) -> Iterator[Any]:
    """A connection that looks at the store from outside."""
    opened = place.connect()
    yield opened
    opened.close()


@pytest.fixture
def prefix(redis_url: str) -> Iterator[Prefix]:
    """Return room of a test on the server of Redis."""
    made = Prefix(redis_url)
    yield made
    made.drop()


@pytest.fixture
def redis_server(server_folder: Path) -> Iterator[Redis]:
    """A server of Redis of the test's own, which it may stop, fill and kill."""
    with started(Redis(server_folder / "redis")) as server:
        yield server
