"""How fast an endpoint handles what is in its queue, beside PgQueuer and graphile-worker on the same PostgreSQL server.

    eval "$(scripts/services env --durable)"; .venv/bin/python benchmarks/handle_peers.py --pgqueuer-python PATH
        [--graphile FOLDER] [--n 20000] [--concurrency 100] [--rounds 3]

PATH is a Python with ``pgqueuer[asyncpg]`` 1.6, FOLDER one with ``graphile-worker`` 0.17 in its ``node_modules``; each
peer is optional. Every round runs all of them, one after the other: ``python -m benchmarks handle``, PgQueuer with
batches of 100, 500 and 1,000, graphile-worker with a local queue and completions in batches. The same messages are in
the queue before the start, an empty handler notes what it sees, and the time ends when the last was handled and the
queue is empty. Peers have a database of their own, which is dropped afterwards. How durable a commit is, the server
decides, for all alike; no peer has tables that are not logged. Some connections of the peers are open before their time
begins; ours are not.

Prints one JSON object: medians, each rate, the best batch of PgQueuer, and our rate by that of each peer; exit status 1
if anybody lost or doubled a message.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psycopg

PEERS = Path(__file__).parent / "peers"
BATCH_SIZES = (100, 500, 1_000)
GIVES_UP_SECONDS = 600

Found = dict[str, Any]


def ours(n: int, concurrency: int) -> Found:
    """Run the benchmark of the product; it also prints what it found when a message was lost."""
    sizes = ["--n", str(n), "--concurrency", str(concurrency)]
    command = [sys.executable, "-m", "benchmarks", "handle", "--transport", "postgres", "--json", *sizes]
    root = PEERS.parents[1]
    ran = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=GIVES_UP_SECONDS, check=False)
    if not ran.stdout:
        raise SystemExit(f"benchmarks handle ended with exit status {ran.returncode}; see its message above")
    return json.loads(ran.stdout)


def peer(url: str, command: Sequence[str], n: int, *options: object) -> Found:
    """Let a peer fill a database of its own and handle what is in it."""
    with database(url) as own:

        def told(*arguments: object) -> str:
            return subprocess.run(
                [*command, *map(str, arguments)],
                env={**os.environ, "PEER_URL": own},
                stdout=subprocess.PIPE,
                text=True,
                timeout=GIVES_UP_SECONDS,
                check=True,
            ).stdout

        told("fill", n)
        with psycopg.connect(own, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")
        return json.loads(told("handle", n, *options))


@contextmanager
def database(url: str) -> Generator[str]:
    """Make a database on the server and drop it afterwards."""
    name = f"postdate_peer_{secrets.token_hex(6)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield urlsplit(url)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def summary(runs: Sequence[Found], *more: str) -> Found:
    """Return the median rate, all rates, faults together, and medians of further figures."""
    return {
        "rate": round(median(run["rate"] for run in runs), 1),
        "rates": [round(run["rate"], 1) for run in runs],
        "lost": sum(run["lost"] for run in runs),
        "duplicated": sum(run["duplicated"] for run in runs),
        **{name: round(median(run[name] for run in runs), 3) for name in ("cpu_s", *more)},
    }


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pgqueuer-python", metavar="PATH", help="a Python with pgqueuer[asyncpg]")
    parser.add_argument("--graphile", metavar="FOLDER", help="a folder with graphile-worker in its node_modules")
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=100, help="of the endpoint")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if not (given.pgqueuer_python or given.graphile):
        parser.error("name a peer: --pgqueuer-python PATH, --graphile FOLDER, or both")
    url = os.environ.get("POSTDATE_POSTGRES_URL")
    if not url:
        parser.error('POSTDATE_POSTGRES_URL names no server: eval "$(scripts/services env --durable)"')
    mine: list[Found] = []
    pgqueuer: dict[int, list[Found]] = {size: [] for size in BATCH_SIZES}
    graphile: list[Found] = []
    for _ in range(given.rounds):
        mine.append(ours(given.n, given.concurrency))
        if given.pgqueuer_python:
            for size, runs in pgqueuer.items():
                runs.append(peer(url, [given.pgqueuer_python, str(PEERS / "pgqueuer_peer.py")], given.n, size))
        if given.graphile:
            graphile.append(peer(url, ["node", str(PEERS / "graphile_peer.mjs"), given.graphile], given.n))
    found: Found = {"postdate": summary(mine, "limit", "ratio")}
    if given.pgqueuer_python:
        batches = {size: summary(runs) for size, runs in pgqueuer.items()}
        best = max(batches, key=lambda size: batches[size]["rate"])
        others = {str(size): each["rate"] for size, each in batches.items()}
        faults = {name: sum(each[name] for each in batches.values()) for name in ("lost", "duplicated")}
        found["pgqueuer"] = {**batches[best], **faults, "batch_size": best, "rate_of_batch_size": others}
    if given.graphile:
        found["graphile"] = summary(graphile)
    of_peers = {f"of_{name}": round(found["postdate"]["rate"] / found[name]["rate"], 3) for name in [*found][1:]}
    facts = {"n": given.n, "concurrency": given.concurrency, "rounds": given.rounds}
    print(json.dumps({**facts, **found, **of_peers, "servers": mine[-1]["servers"]}))
    return 1 if any(each["lost"] or each["duplicated"] for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
