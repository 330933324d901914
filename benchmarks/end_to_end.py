"""From due to handled: delayed messages through `postdate run` and one endpoint, with the defaults.

    eval "$(scripts/services env --durable)"
    .venv/bin/python -m benchmarks.end_to_end --queues postgres --rounds 5 [--tree BEFORE] [--handler sends]

All messages are stored beforehand, by the application, and are due at one instant, at which both processes have been
running and idle for a while; with ``--rate`` they are due one after the other. The time ends when the last was handled
and the queue of the endpoint is empty. Each ``--backlog`` is a run of its own: what a message costs must not depend on
how many wait beside it. PostgreSQL's statistics are made while the tables are empty, as an idle service leaves them;
with ``--statistics none`` they are those of a new table, until autovacuum comes by.
With ``--tree`` another checkout of Postdate, with its own environment, takes turns with this one. With
``--queues rabbitmq`` the messages wait in a file of SQLite.

Prints a line a round, medians, and the rate at the largest backlog as a part of that at the smallest: messages a
second; processor time a message of service, endpoint and server in µs; how late the handler was called, in ms; and how
many messages were lost, handled twice, or early.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psycopg
import redis

from benchmarks.end_to_end_worker import HANDLERS
from benchmarks.shared_count import SharedCount
from benchmarks.system import cpu_seconds, family_cpu_seconds, listening_pid

HERE = Path(__file__).parents[1]
GIVES_UP_SECONDS = 600.0
BACKLOGS = [20_000, 200_000]
_IDLE_SECONDS = 3.0

Found = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a run keeps everything.

    Args:
        store: address.
        queues: address; empty: with the store.
        server: the process that serves them, its children included; ``None``: there is none.
        analyze: has the server make statistics of the tables.
    """

    store: str
    queues: str
    server: int | None
    analyze: Callable[[], None] = lambda: None


@contextmanager
def place(kind: str) -> Generator[Place]:
    """Make a place that is empty, and remove it afterwards."""
    if kind == "postgres":
        url = _server("POSTDATE_POSTGRES_URL")
        name = f"postdate_e2e_{secrets.token_hex(6)}"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
            try:
                port, address = urlsplit(url).port or 5432, urlsplit(url)._replace(path=f"/{name}").geturl()
                yield Place(address, "", listening_pid(port), partial(_analyze, address))
            finally:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        return
    if kind == "redis":
        url = _server("POSTDATE_REDIS_URL")
        prefix = f"postdate-e2e-{secrets.token_hex(6)}"
        try:
            yield Place(f"{url}?prefix={prefix}", "", listening_pid(urlsplit(url).port or 6379))
        finally:
            with redis.Redis.from_url(url) as connection:
                for key in connection.scan_iter(f"{prefix}*", count=1_000):
                    connection.unlink(key)
        return
    with tempfile.TemporaryDirectory(dir=HERE / "build") as folder:
        file = f"sqlite:///{folder}/messages.db"
        if kind == "sqlite":
            yield Place(file, "", None)
            return
        url = _server("POSTDATE_RABBITMQ_URL")
        yield Place(file, url, listening_pid(urlsplit(url).port or 5672))


def _analyze(address: str) -> None:
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("ANALYZE")


def _server(variable: str) -> str:
    url = os.environ.get(variable)
    if not url:
        raise SystemExit(f'{variable} names no server: eval "$(scripts/services env --durable)"')
    return url


def run(tree: Path, kind: str, backlog: int, given: argparse.Namespace) -> Found:
    """Run once with the Postdate of a tree."""
    with place(kind) as where, ExitStack() as running, tempfile.TemporaryDirectory() as folder:
        tally = running.enter_context(SharedCount(Path(folder) / "handled"))
        environment = {**os.environ, "POSTDATE_STORE__ADDRESS": where.store, "PYTHONPATH": str(HERE)}
        environment |= {"POSTDATE_TRANSPORT__ADDRESS": where.queues} if where.queues else {}
        python = tree / ".venv" / "bin" / "python"
        job = {"store": where.store, "queues": where.queues, "n": backlog, "handler": given.handler}
        job |= {"tally": str(tally.path), "concurrency": given.concurrency}

        def start(*command: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [str(each) for each in command],
                cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=(Path(folder) / "log").open("a"),
            )  # fmt: skip
            running.callback(process.wait)
            running.callback(process.kill)
            return process

        def worker(what: str, **more: Any) -> subprocess.Popen[str]:
            script = HERE / "benchmarks" / "end_to_end_worker.py"
            process = start(python, script, what, json.dumps({**job, **more}))
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"{what} failed:\n{(Path(folder) / 'log').read_text()}")
            return process

        endpoint = worker("handle")
        service = start(python, "-m", "postdate.cli", "run", "--log-level", "warning")
        begins = time.time() + 2.0 + backlog / 8_000 + _IDLE_SECONDS
        storing = worker("store", due=begins, rate=given.rate)
        if given.statistics == "empty":
            where.analyze()
        storing.communicate("store\n")
        if time.time() > begins - 1.0:
            raise SystemExit("storing took so long that the messages were due before the processes were idle")
        pids = {"service": service.pid, "endpoint": endpoint.pid}
        time.sleep(max(begins - time.time() - 0.05, 0))
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        server = 0.0 if where.server is None else family_cpu_seconds(where.server)
        ended = _wait(tally, backlog, endpoint)
        after = {name: cpu_seconds(pid) for name, pid in pids.items()}
        server_used = 0.0 if where.server is None else family_cpu_seconds(where.server) - server
        service.send_signal(signal.SIGTERM)
        service.wait()
        told, _ = endpoint.communicate("stop\n")
        found: Found = json.loads(told)
        used = {name: after[name] - before[name] for name in pids} | {"server": server_used}
        return {
            "rate": backlog / (ended - begins),
            **{f"{name}_us": seconds / backlog * 1e6 for name, seconds in used.items()},
            **found,
        }


def _wait(tally: SharedCount, n: int, endpoint: subprocess.Popen[str]) -> float:
    since = time.time()
    while tally.value < n:
        time.sleep(0.001)
        if endpoint.poll() is not None or time.time() - since > GIVES_UP_SECONDS:
            raise SystemExit(f"only {tally.value:,} of {n:,} messages were handled")
    return time.time()


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queues", choices=["postgres", "sqlite", "redis", "rabbitmq"], default="postgres")
    parser.add_argument("--handler", choices=sorted(HANDLERS), default="empty")
    parser.add_argument(
        "--backlog", type=int, nargs="+", default=BACKLOGS, metavar="N", help="messages that are due; each is a run"
    )
    parser.add_argument("--rate", type=float, default=0.0, help="messages a second; 0: all are due at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=0, help="of the endpoint; 0: its default")
    parser.add_argument("--tree", type=Path, help="another checkout, with an environment of its own")
    parser.add_argument(
        "--statistics",
        choices=["empty", "none"],
        default="empty",
        help="what PostgreSQL knows of the tables: made while they are empty, or none until autovacuum comes by",
    )
    given = parser.parse_args()
    trees = [HERE, *([given.tree] if given.tree else [])]
    runs: dict[tuple[Path, int], list[Found]] = {(tree, each): [] for tree in trees for each in given.backlog}
    for number in range(given.rounds):
        for tree, backlog in runs if number % 2 else reversed(runs):
            found = run(tree, given.queues, backlog, given)
            runs[tree, backlog].append(found)
            print(f"{tree.name:10} {backlog:9,} {_shown(found)}", flush=True)
    medians = {place: {key: median(each[key] for each in found) for key in found[0]} for place, found in runs.items()}
    for (tree, backlog), found in medians.items():
        print(f"median of {tree.name:10} {backlog:9,} {_shown(found)}")
    for tree in trees if len(given.backlog) > 1 else ():
        small, large = (medians[tree, which(given.backlog)]["rate"] for which in (min, max))
        print(f"{tree.name:10} {max(given.backlog):,} : {min(given.backlog):,} = {large / small:.2f}")
    faults = [each[name] for found in runs.values() for each in found for name in ("lost", "doubled", "early")]
    return int(any(faults))


def _shown(found: Found) -> str:
    return "  ".join(f"{key} {value:,.1f}" for key, value in found.items())


if __name__ == "__main__":
    sys.exit(main())
