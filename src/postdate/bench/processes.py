"""Other processes of a benchmark, spoken to by lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from postdate.bench.deployment import Deployment
from postdate.bench.workload import Workload
from postdate.errors import PostdateError

_ENDS_WITHIN_SECONDS = 10.0


class Partner:
    """A module run as a process: told where and what, it says ``ready``; starts at a line, may stop at another.

    It is in a process group of its own, so that an interrupt from the keyboard reaches only us, who then end it.

    Args:
        module: to run with ``python -m``, or the path of a script.
        role: told to servers that show it beside the connection.
        deployment: where to work; told on standard input, for it may hold a password.
        arguments: what to do.
    """

    def __init__(self, module: str | Path, role: str, deployment: Deployment, *arguments: object) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, *([module] if isinstance(module, Path) else ["-m", module]), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self._say(deployment.seen_as(role).to_json())

    def __enter__(self) -> Self:
        try:
            self.hear()
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        try:
            self._process.communicate(timeout=_ENDS_WITHIN_SECONDS)  # closes its input, which ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    @property
    def pid(self) -> int:
        """The system's number of the process."""
        return self._process.pid

    def check(self) -> None:
        """Raise PostdateError if the process has failed."""
        if self._process.poll():
            self._ended()

    def start(self, load: Workload | None = None) -> None:
        """Let it begin, with these messages if it stores."""
        self._say("" if load is None else load.to_json())

    def hear(self) -> str:
        """Return the next line.

        Raises:
            PostdateError: the process ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._ended()
        return line.strip()

    def found(self) -> dict[str, Any]:
        """Wait for the end of its work and return the object it prints."""
        found: dict[str, Any] = json.loads(self.hear())
        return found

    def finish(self) -> dict[str, Any]:
        """Tell the process to stop and return the object it prints."""
        self._say("")
        return self.found()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._ended()

    def _ended(self) -> None:
        raise PostdateError(f"{self._module} ended with exit status {self._process.wait()}; see its message above")
