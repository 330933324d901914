"""The command line as its users have it: in a folder of its own, without settings from outside."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.waiting import READY

from postdate.cli.entry import run


@dataclass(frozen=True)
class Ran:
    """What a command printed, and what it ended with."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        """What ``--json`` printed: one object and nothing else."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


class CommandLine:
    """Runs ``postdate`` in this process, through its entry point."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Ran:
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = run(arguments)
        printed = self._capsys.readouterr()
        return Ran(status, printed.out, printed.err)

    def ok(self, *arguments: str, stdin: bytes = b"") -> Ran:
        """Run a command that must succeed."""
        ran = self(*arguments, stdin=stdin)
        assert ran.status == 0, ran
        return ran


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, without settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith("POSTDATE_")]:
        monkeypatch.delenv(variable)
    return tmp_path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Return the command line."""
    return CommandLine(capsys, monkeypatch)


class Service:
    """A running ``postdate run``; what it logs goes to a file that the test reads."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._log, self._out = folder / "run.log", folder / "run.out"
        with self._log.open("wb") as log, self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "postdate.cli", "run", *options],
                cwd=folder,
                stdout=out,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        return READY in self.log or '"message":"ready"}\n' in self.log

    def end(self) -> int:
        """Return the exit code; nothing may have come to stdout."""
        status = self.process.wait(timeout=90)  # an idle service looks once a minute, whatever happens
        assert self._out.read_bytes() == b""
        return status


@pytest.fixture
def service(own_folder, eventually) -> Iterator:
    """Start services; those still running at the end are killed."""
    started: list[Service] = []

    def start(*options: str) -> Service:
        service = Service(own_folder, *options)
        started.append(service)
        eventually(service.is_ready, "the service is ready")
        return service

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
