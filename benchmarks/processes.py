"""Other processes of a benchmark, driven by lines on standard input and output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from benchmarks.deployment import Deployment, Workload, to_json
from postdate.errors import PostdateError

ROOT = Path(__file__).parents[1]
_ENDS_WITHIN_SECONDS = 10.0


class Partner:
    """A module run as a process: gets its deployment, says ``ready``, starts at a line, may stop at another.

    It has its own process group, so that an interrupt from the keyboard reaches only this process, which then ends it.
    The deployment goes over standard input, because it may hold a password; ``role`` is what servers show.
    """

    def __init__(self, module: str, role: str, deployment: Deployment, *arguments: object) -> None:
        self._module = module
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path},  # it may run in any folder
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self._process.kill()
        try:
            self._process.communicate(timeout=_ENDS_WITHIN_SECONDS)  # closes its input, which ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def check(self) -> None:
        """Raise PostdateError if the process has failed."""
        if self._process.poll():
            self._ended()

    def start(self, load: Workload | None = None) -> None:
        """Let the process begin; one that stores gets its messages."""
        self._say("" if load is None else to_json(load))

    def hear(self) -> str:
        """Return the next line; raise PostdateError if the process ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._ended()
        return line.strip()

    def found(self) -> dict[str, Any]:
        """Wait until the work is done and return the JSON object that the process prints."""
        found: dict[str, Any] = json.loads(self.hear())
        return found

    def finish(self) -> dict[str, Any]:
        """Tell the process to stop and return the JSON object that it prints."""
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
