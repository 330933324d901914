"""Kills at random what runs a Spark job, while it runs."""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .spark_cluster import SparkCluster  # noqa: TID252 - as in servers.py
from .spark_drivers import RestartedDriver  # noqa: TID252

EVERYTHING = frozenset({"executor", "python", "driver"})


def kill_rounds() -> int:
    """Return how many jobs are run under kills: POSTDATE_KILL_ROUNDS, else 1."""
    return int(os.environ.get("POSTDATE_KILL_ROUNDS", "1"))


@dataclass
class Kills:
    """What was killed so far, by kind."""

    counts: Counter[str] = field(default_factory=Counter[str])
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def total(self) -> int:
        return self.counts.total()


@contextmanager
def killing(
    cluster: SparkCluster,
    seed: int,
    interval: float,
    what: Collection[str] = EVERYTHING,
    *,
    driver: RestartedDriver | None = None,
    ready: Callable[[], bool] = lambda: True,
    at_most: int | None = None,
) -> Generator[Kills]:
    """Kill with -9, at random, for as long as the block runs.

    Args:
        cluster: whose executors and Python workers are killed.
        seed: of what is random: which kind, which one, when.
        interval: seconds between two kills, on average; they are between 0 and twice as much.
        what: kinds to kill: ``executor``, ``python`` (a Python worker), ``driver``.
        driver: needed for ``driver``; it starts again by itself.
        ready: asked before each kill until it is true, for example whether the job has begun to work.
        at_most: so many kills and no more; without it choose an interval that leaves the job time to get on.

    Yields:
        What was killed; it grows. Only what ran is counted: a round in which nothing was there to kill is none.
    """
    if not what or not EVERYTHING.issuperset(what) or ("driver" in what and driver is None):
        raise ValueError(f"cannot kill {sorted(what)}: choose of {sorted(EVERYTHING)}, and name the driver to kill")
    kills = Kills()
    failures: list[BaseException] = []
    chance = random.Random(seed)

    def kill(kind: str) -> bool:
        number = chance.randrange(1_000)
        if kind == "executor":
            return cluster.kill_executor(number)
        if kind == "python":
            return cluster.kill_python_worker(number)
        assert driver is not None
        return driver.kill()

    def kill_again_and_again() -> None:
        while not kills._ended.is_set() and (at_most is None or kills.total < at_most):
            if kills.total and kills._ended.wait(chance.random() * 2 * interval):
                return
            kind = chance.choice(sorted(what))
            while not (ready() and kill(kind)):
                if kills._ended.wait(0.02):
                    return
            kills.counts[kind] += 1

    def watched() -> None:
        try:
            kill_again_and_again()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of the test
            failures.append(error)

    killer = threading.Thread(target=watched, name="killer")
    killer.start()
    try:
        yield kills
    finally:
        kills._ended.set()
        killer.join()
    if failures:
        raise failures[0]
