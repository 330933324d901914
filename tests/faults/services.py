"""Real services: ``postdate run`` as processes of their own, killed, frozen, told a wrong time, measured."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.faults.clocks import SetClock
from tests.machine import until
from tests.waiting import PATIENCE_SECONDS, READY, freeze_processes

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Service:
    """One ``postdate run``, started again and again in one folder.

    Args:
        folder: of its own, for its log.
        configuration: the file with its settings.
    """

    def __init__(self, folder: Path, configuration: Path) -> None:
        folder.mkdir()
        self.log, self._configuration = folder / "log", configuration
        self.clock: SetClock | None = None
        self._folder = folder
        self._process: subprocess.Popen[Any] | None = None
        self._cpu_of_the_dead = 0.0

    def has_a_clock_of_its_own(self, ahead: timedelta) -> None:
        """Start it, from now on, with a wall clock that can be set."""
        self.clock = SetClock(self._folder)
        self.clock.set(ahead)

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start it; see :meth:`wait_until_ready`."""
        self._said_before = len(self.said())
        shifted = {} if self.clock is None else self.clock.environment
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [Path(sys.executable).with_name("postdate"), "run", "--config", self._configuration],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **shifted, **(environment or {})},
            )

    def wait_until_ready(self) -> None:
        """Return when it says that it is ready."""
        until(lambda: self.says(READY) or not self.is_running, PATIENCE_SECONDS)
        assert self.says(READY), f"the service does not come up:\n{self.said()[-3_000:]}"

    def said(self) -> str:
        """Return its log, of all its lives."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def says(self, words: str) -> bool:
        """Tell whether it has said something since it was started last."""
        return words in self.said()[self._said_before :]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does."""
        assert self._process is not None
        freeze_processes(self._process.pid)

    def thaw(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a power cut would; without effect on one that has ended."""
        if self._process is not None:
            self._cpu_of_the_dead += self._cpu_of_the_living()
            self._process.kill()
            self._process.wait(60)
            self._process = None

    def stop(self) -> float | None:
        """Tell it to stop; return how many seconds it took, or None and kill it where it took too long or failed."""
        if not self.is_running:
            return None
        assert self._process is not None
        began = time.monotonic()
        self.signal(signal.SIGTERM)
        try:
            code = self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        return time.monotonic() - began if code == 0 else None

    def cpu_seconds(self) -> float:
        """Return what it has used of the processor, in all its lives that were killed and in this one."""
        return self._cpu_of_the_dead + self._cpu_of_the_living()

    def _cpu_of_the_living(self) -> float:
        if not self.is_running:
            return 0.0
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
