"""How quick the operator's page is above millions of pending messages, and what delivery loses while somebody watches.

    eval "$(scripts/services env --durable)"
    .venv/bin/python -m benchmarks.page [--pending 5000000] [--queued 3000000] [--failed 1000]

A store on PostgreSQL has ``--pending`` messages that fall due from an hour on for a month; ten queues share
``--queued`` messages, and the error queue has ``--failed``. First `postdate dashboard` is asked for each page
``--asks`` times, one after the other, while it looks at the store as ever: a line a page, median and 95th percentile
in ms. Then one endpoint with the defaults delivers ``--drained`` messages that are due, above all others: in turns
without the page, and beside a browser that shows the first page and keeps it up to date as the page's script does,
while every five seconds somebody follows a bar of its chart and comes back.
Prints a line a round, messages a second, and last the medians with what is left of the rate.
"""

import argparse
import html
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from statistics import median, quantiles
from threading import Event, Thread
from typing import Any

import anyio
import httpx
import psycopg

from benchmarks.handle_peers import database
from postdate import DelayedDelivery, Endpoint, PostgresStore, PostgresTransport
from postdate.messages import Headers, encode_headers
from postdate.ports import TransactionMode

QUEUES = [f"q-{number}" for number in range(10)]
PAGES = [
    *("/", "/?due=day", "/?due=month", "/messages", "/messages?queue=q-3", "/messages?queue=nowhere"),
    *("/messages/m-1000", "/messages/gone", "/errors", "/errors?exception=builtins.ValueError", "/errors/f-1"),
    *("/queues", "/doctor"),
]


async def set_up(url: str) -> None:
    kept, transport = PostgresStore(url), PostgresTransport(url)
    await kept.initialize("bench", TransactionMode.RECEIVE_ONLY)
    await kept.setup()
    await transport.create_queues(["error", "bench.timeouts", *QUEUES])
    await transport.close()
    await kept.close()


def store(connection: psycopg.Connection[Any], prefix: str, count: int, due: str) -> None:
    """Store messages as a store does; ``due`` is SQL."""
    connection.execute(
        f"""WITH fresh AS (
            INSERT INTO postdate.record (at, due, store_id, kind, message_id, destination)
            SELECT now(), {due}, (SELECT min(store_id) FROM postdate.store), 1, '{prefix}-' || n, 'q-' || n % 10
            FROM generate_series(1, {count}) AS n RETURNING number, due, message_id, destination),
        kept AS (INSERT INTO postdate.content SELECT number, '{{}}', 'body' FROM fresh)
        INSERT INTO postdate."bench.timeouts" (number, due, attempt_at, message_id, destination)
        SELECT number, due, due, message_id, destination FROM fresh""".encode()
    )


def fill(url: str, pending: int, queued: int, failed: int) -> None:
    failure = {Headers.FAILED_QUEUE: "q-3", Headers.EXCEPTION_TYPE: "builtins.ValueError"}
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        store(connection, "m", pending, "now() + interval '1 hour' + random() * interval '30 days'")
        for queue, prefix, count, headers in (
            *((queue, queue, queued // len(QUEUES), {}) for queue in QUEUES),
            ("error", "f", failed, failure),
        ):
            connection.execute(
                b"""WITH kept AS (
                    INSERT INTO postdate.content SELECT nextval('postdate.number'), %s, 'body'
                    FROM generate_series(1, %s) RETURNING number)
                INSERT INTO postdate.queue_message (queue_id, content, message_id)
                SELECT (SELECT queue_id FROM postdate.queue WHERE name = %s), number,
                    %s || '-' || row_number() OVER () FROM kept""",
                (encode_headers(headers), count, queue, prefix),
            )
        connection.execute("VACUUM ANALYZE")


@contextmanager
def dashboard(url: str) -> Generator[httpx.Client]:
    """Serve the page in a process of its own, and yield a browser that has seen the first one."""
    command = [sys.executable, "-m", "postdate.cli", "dashboard", "--listen", "127.0.0.1:0", "--store", url]
    environment = {**os.environ, "POSTDATE_ENDPOINT__NAME": "bench"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as page:
        assert page.stderr is not None
        try:
            address = next(filter(None, (re.search(r"http://\S+:[0-9]+", line) for line in page.stderr)))[0]
            with httpx.Client(base_url=address, timeout=60) as browser:
                browser.get("/").raise_for_status()
                yield browser
        finally:
            page.terminate()


def bar_of(browser: httpx.Client) -> str:
    """Return where a bar of the first page leads."""
    return html.unescape(re.findall(r'"(/messages\?due_from[^"]*)"', browser.get("/?due=day").text)[5])


def measure(browser: httpx.Client, path: str, asks: int) -> dict[str, object]:
    took = list[float]()
    browser.get(path)
    for _ in range(asks):
        began = time.perf_counter()
        browser.get(path)
        took.append((time.perf_counter() - began) * 1_000)
    return {"page": path, "p50_ms": round(median(took), 1), "p95_ms": round(quantiles(took, n=20)[-1], 1)}


async def drain(url: str, count: int, prefix: str) -> float:
    """Return the rate at which so many due messages are delivered."""
    with psycopg.connect(url, autocommit=True) as connection:
        store(connection, prefix, count, "now() - n * interval '10 us'")
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")
    kept, transport, now = PostgresStore(url), PostgresTransport(url), datetime.now(UTC)
    await kept.initialize("bench", TransactionMode.RECEIVE_ONLY)
    delivery = DelayedDelivery(kept)
    endpoint = Endpoint("bench", transport=transport, delayed_delivery=delivery, error_queue="error", send_only=True)
    began = time.perf_counter()
    async with endpoint:
        while (next_due := await kept.next_due()) is not None and next_due <= now:  # noqa: ASYNC110 - it does not say
            await anyio.sleep(0.02)
        took = time.perf_counter() - began
    await transport.close()
    await kept.close()
    return count / took


@contextmanager
def watched(browser: httpx.Client) -> Generator[None]:
    over, bar = Event(), bar_of(browser)

    def keep_up_to_date() -> None:
        with browser.stream("GET", "/events") as news:
            for line in news.iter_lines():  # every 15 s at least
                if over.is_set():
                    break
                if line == "event: newer":
                    browser.get("/").raise_for_status()

    def look_around() -> None:
        while not over.wait(5.0):
            for path in (bar, "/"):
                browser.get(path).raise_for_status()

    threads = [Thread(target=each) for each in (keep_up_to_date, look_around)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in threads:
            each.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pending", type=int, default=5_000_000)
    parser.add_argument("--queued", type=int, default=0)
    parser.add_argument("--failed", type=int, default=1_000)
    parser.add_argument("--asks", type=int, default=60)
    parser.add_argument("--drained", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"alone": [], "watched": []}
    with database(os.environ["POSTDATE_POSTGRES_URL"]) as url:
        anyio.run(set_up, url)
        fill(url, options.pending, options.queued, options.failed)
        with dashboard(url) as browser:
            for path in (*PAGES, bar_of(browser)):
                print(json.dumps(measure(browser, path, options.asks)), flush=True)
        for number in range(options.rounds):
            for kind in ("alone", "watched")[:: -1 if number % 2 else 1]:
                with ExitStack() as beside:
                    if kind == "watched":
                        beside.enter_context(watched(beside.enter_context(dashboard(url))))
                    rates[kind].append(anyio.run(drain, url, options.drained, f"{kind}-{number}"))
            print(json.dumps({name: round(found[-1]) for name, found in rates.items()}), flush=True)
    middle = {name: median(found) for name, found in rates.items()}
    told = {f"{name}_per_s": round(rate) for name, rate in middle.items()}
    print(json.dumps({**told, "watched_of_alone": round(middle["watched"] / middle["alone"], 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
