"""Common parts of the pipeline commands. Spark is imported when it is needed."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar

from postdate.cli.command import Use, create_group, handle_signals, option, usage_error

if TYPE_CHECKING:
    from postdate.pipeline.session import SparkSession
    from postdate.pipeline.stores import StoreSpec

T = TypeVar("T")

log = logging.getLogger("postdate.pipeline")

app = create_group("pipeline", "Bulk jobs on Spark, in this process or on a cluster.")


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """Where Spark runs: options of every job."""

    cores: Annotated[int | None, option("--cores", "Threads of Spark; default: all cores.", min=1)] = None
    master: Annotated[str | None, option("--master", "A Spark cluster; default: this process.", metavar="URL")] = None
    conf: Annotated[list[str] | None, option("--conf", "A setting of Spark; repeatable.", metavar="KEY=VALUE")] = None
    py_files: Annotated[
        str | None, option("--py-files", "Python packages for executors, with commas between them.", metavar="FILES")
    ] = None

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> dict[str, str]:
        """Return the settings of Spark that the options name. A wrong one is an error of usage."""
        settings = dict[str, str]()
        for text in self.conf or ():
            key, separator, value = text.partition("=")
            if not separator or not key.strip():
                raise usage_error(f"--conf takes a name and a value with = between them, not {text!r}")
            settings[key.strip()] = value
        if self.py_files is not None:
            settings["spark.submit.pyFiles"] = self.py_files
        return settings

    def first_spark_option(self, partitions: int | None) -> str | None:
        """Return the first option in use that only Spark has, except ``--cores``, which does not name a place."""
        options = {
            "--master": self.master,
            "--conf": self.conf,
            "--py-files": self.py_files,
            "--partitions": partitions,
        }
        return next((name for name, value in options.items() if value), None)


DEFAULT_PARTITIONS: Final = 4

Engine = Literal["auto", "local", "spark"]
EngineOption = Annotated[
    Engine,
    option("--engine", "What does the work: this process, or Spark; auto: this process if the work is small enough."),
]

Partitions = Annotated[
    int | None,
    option("--partitions", f"Tasks that the work is divided into; default: {DEFAULT_PARTITIONS}.", min=1, metavar="N"),
]


def check_page(path: Path | None, subject: str) -> None:
    """Refuse a page for the browser that is not a file in a folder of this machine."""
    if path is None:
        return
    if ":/" in str(path):  # A Path has removed the second slash of a URI.
        raise usage_error(f"--html writes a file of this machine, not {path}; copy the page afterwards")
    if not path.absolute().parent.is_dir():
        raise usage_error(f"there is no folder {path.absolute().parent} for the {subject}")
    _check_package("matplotlib", "postdate[pipeline]")


def store_of(use: Use) -> StoreSpec:
    from postdate.pipeline.stores import StoreSpec

    return StoreSpec.of(use.settings())


def run_on_spark(
    job: Callable[[SparkSession], T],
    cluster: SparkOptions,
    conf: Mapping[str, str] | None = None,
    *,
    long: bool = False,
) -> T:
    """Start Spark, run the job, and stop Spark. An error of Spark becomes one line."""
    from rich.console import Console

    from postdate.pipeline.failures import shorten_errors
    from postdate.pipeline.session import FOR_LONG_JOBS, spark_session

    settings = {**(FOR_LONG_JOBS if long else {}), **(conf or {}), **cluster.settings()}
    with (
        Console(stderr=True).status("Spark is working …"),
        shorten_errors("the job has failed"),
        spark_session(cores=cluster.cores, master=cluster.master, conf=settings) as session,
    ):
        return job(session)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine a command runs on.

    Args:
        engine: as the user chose.
        needs_spark: why the work needs Spark, without a full stop; ``None``: it may run in this process.
        is_large: whether ``auto`` leaves the work to Spark because of its size.
    """

    engine: Engine
    needs_spark: str | None = None
    is_large: bool = False

    @property
    def most_messages(self) -> int | None:
        """From how many messages or records on Spark does a job that reads a store; ``None``: never."""
        from postdate.pipeline.engines import LARGEST_LOCAL_MESSAGES, is_spark_installed

        return LARGEST_LOCAL_MESSAGES if self.engine == "auto" and is_spark_installed() else None

    def run(
        self,
        local: Callable[[], T],
        on_spark: Callable[[SparkSession], T],
        cluster: SparkOptions,
        *,
        long: bool = False,
    ) -> T:
        """Run the job on one engine. If ``auto`` meets what only Spark does, nothing was changed, and Spark does it."""
        from postdate.pipeline.engines import NeedsSpark, is_spark_installed, refuse_locally

        if self.engine != "spark":
            try:
                return self._run_locally(local)
            except NeedsSpark as error:
                if self.engine == "local" or not is_spark_installed():
                    raise refuse_locally(error) from error
                log.debug("on Spark: %s", error)
        return run_on_spark(on_spark, cluster, long=long)

    def _run_locally(self, local: Callable[[], T]) -> T:
        from postdate.pipeline.engines import NeedsSpark, is_spark_installed

        if self.needs_spark is not None:
            raise NeedsSpark(self.needs_spark)
        if self.engine == "auto" and self.is_large and is_spark_installed():
            raise NeedsSpark("the input is large")
        return local()


def check_tables() -> None:
    """Refuse a command that needs tables if the package for them is missing."""
    _check_package("pyarrow", "postdate[tables]")


def _check_package(name: str, extra: str) -> None:
    import importlib.util

    from postdate.errors import ConfigurationError

    if importlib.util.find_spec(name) is None:
        raise ConfigurationError(f"{name} is missing: pip install '{extra}'")


@contextmanager
def stop_on_signal() -> Generator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set, so that a query can end in order."""
    stop = threading.Event()
    with handle_signals(lambda _number, _frame: stop.set(), signal.SIGINT, signal.SIGTERM):
        yield stop
