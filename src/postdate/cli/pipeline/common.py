"""Common parts of the pipeline commands. Spark is imported when it is needed."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from postdate.cli.command import Use, create_group, handle_signals, option

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

    settings = {**(FOR_LONG_JOBS if long else {}), **(conf or {})}
    with (
        Console(stderr=True).status("Spark is working …"),
        shorten_errors("the job has failed"),
        spark_session(cores=cluster.cores, master=cluster.master, conf=settings) as session,
    ):
        return job(session)


@contextmanager
def stop_on_signal() -> Generator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set, so that a query can end in order."""
    stop = threading.Event()
    with handle_signals(lambda _number, _frame: stop.set(), signal.SIGINT, signal.SIGTERM):
        yield stop
