"""Other processes of a benchmark, spoken to by lines."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from postdate.errors import PostdateError


class Partner:
    """A Python module run as a process: it says ``ready``, starts at our first line, and may stop at our second.

    Args:
        module: to run with ``python -m``.
        arguments: of it.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        self.hear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def say(self) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """Return the next line.

        Raises:
            PostdateError: the process ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PostdateError(f"{self._module} ended with exit status {self._process.wait()}; see its message above")
        return line.strip()

    def finish(self) -> dict[str, Any]:
        """Tell the process to stop and return the object it prints."""
        self.say()
        found: dict[str, Any] = json.loads(self.hear())
        return found
