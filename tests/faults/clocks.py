"""Wall clocks of processes, set by a test while they run: a library in C, compiled here and preloaded there."""

import shutil
import struct
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("clock.c")


class SetClock:
    """The wall clock of one process.

    Args:
        folder: for the file that says how far it is ahead, and for the library.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._library = _compiled(folder)
        self.set(timedelta(0))

    def set(self, ahead: timedelta) -> None:
        """Let the clock be ahead of the machine's from now on; negative: behind. It counts on from there."""
        data = struct.pack("=q", ahead // timedelta(microseconds=1))
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(data)  # in place: the process has the file mapped

    @property
    def environment(self) -> dict[str, str]:
        """What the process is to be started with."""
        return {"LD_PRELOAD": str(self._library), "POSTDATE_TEST_CLOCK": str(self._file)}


def _compiled(folder: Path) -> Path:
    library = folder / "clock.so"
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.fail("this test sets the clock of a process by a library in C, and there is no cc", pytrace=False)
    if not library.exists():
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE], check=True, timeout=60)
    return library
