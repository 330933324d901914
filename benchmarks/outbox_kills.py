"""Two endpoints with outboxes, everything sent twice on purpose, workers killed: are all effects there exactly once?

    eval "$(scripts/services env)"
    .venv/bin/python benchmarks/outbox_kills.py [--messages 100000] [--kills 20] [--place postgres+rabbitmq]

Message by message, ``first`` writes a row and sends to ``second``, every other time with a delay; ``second`` writes a
row. Every send of theirs goes out twice, and so do the messages that begin it all. Workers, each with both endpoints,
are ended by SIGKILL, evenly over the run, and started again. Places: ``postgres+rabbitmq``, ``postgres+postgres``,
``mariadb+rabbitmq`` (outbox and queues in a schema of its own, dropped afterwards) and ``file+file`` (in two files).
Prints one JSON object; exit status 1 if an effect is missing or there twice, or if anything is left in a queue.
"""

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pika
import psycopg

from postdate import (
    DelayedDelivery,
    Endpoint,
    Envelope,
    HandlerContext,
    Headers,
    LocalTransport,
    MariaDbStore,
    Outbox,
    PostgresOutbox,
    PostgresStore,
    PostgresTransport,
    RabbitMqTransport,
    SqliteOutbox,
    SqliteStore,
    SystemClock,
)
from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import MariaDbOutbox
from postdate.errors import PostdateError
from postdate.ports import Receiver, TransportCapabilities, Work

PLACES = ("postgres+rabbitmq", "postgres+postgres", "mariadb+rabbitmq", "file+file")
_BATCH = 1_000


@dataclass(frozen=True)
class Place:
    """Where everything is; written to workers as JSON.

    Args:
        database: address of PostgreSQL or MariaDB, or folder of the files.
        queues: address of RabbitMQ, or empty: where the database is.
        name: of the schema, and the beginning of the names of queues.
    """

    database: str
    queues: str
    name: str

    @property
    def first(self) -> str:
        return f"{self.name}.first"

    @property
    def second(self) -> str:
        return f"{self.name}.second"

    @property
    def all_queues(self) -> list[str]:
        return [self.first, self.second, f"{self.first}.timeouts", f"{self.second}.timeouts", f"{self.name}.error"]

    @property
    def in_files(self) -> bool:
        return not self.database.startswith(("postgres", "mariadb"))

    @property
    def in_mariadb(self) -> bool:
        return self.database.startswith("mariadb")

    def store(self) -> PostgresStore | MariaDbStore | SqliteStore:
        if self.in_files:
            return SqliteStore(Path(self.database) / "queues.db", synchronous="normal")
        return (MariaDbStore if self.in_mariadb else PostgresStore)(self.database, schema=self.name)

    def transport(self) -> LocalTransport | PostgresTransport | RabbitMqTransport:
        if self.in_files:
            return LocalTransport(Path(self.database) / "queues.db", synchronous="normal")
        return RabbitMqTransport(self.queues) if self.queues else PostgresTransport(self.database, schema=self.name)

    def outbox(self) -> PostgresOutbox | MariaDbOutbox | SqliteOutbox:
        if self.in_files:
            return SqliteOutbox(Path(self.database) / "shop.db", synchronous="normal")
        kind = MariaDbOutbox if self.in_mariadb else PostgresOutbox
        return kind(self.database, schema=self.name, connections=8)  # a server has 100, and kills leave some

    def query(self, statement: str) -> list[Any]:
        """Execute a statement on the table ``effect``, which is in the database of the outbox."""
        if self.in_files:
            connection = sqlite3.connect(Path(self.database) / "shop.db", isolation_level=None, timeout=60)
            try:
                return connection.execute(statement).fetchall()
            finally:
                connection.close()
        if self.in_mariadb:
            session = MariaDbServer(self.database).connect()
            try:
                if not statement.startswith(("CREATE DATABASE", "DROP DATABASE")):
                    session.change(f"USE {self.name}")
                return list(session.rows(statement))
            finally:
                session.close()
        with psycopg.connect(self.database, autocommit=True, options=f"-c search_path={self.name}") as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


@dataclass
class Number:
    """What is handled."""

    number: int


class SendingTwice:
    """Queues in which everything that is sent arrives twice."""

    def __init__(self, transport: LocalTransport | PostgresTransport | RabbitMqTransport) -> None:
        self.transport = transport

    @property
    def capabilities(self) -> TransportCapabilities:
        return self.transport.capabilities

    async def create_queues(self, names: Sequence[str]) -> None:
        await self.transport.create_queues(names)

    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        errors = await self.transport.send([*envelopes, *envelopes], now, work=work)
        return [one or other for one, other in zip(errors, errors[len(envelopes) :], strict=False)]

    def receiver(self, queue: str) -> Receiver:
        return self.transport.receiver(queue)

    async def close(self) -> None:
        await self.transport.close()


# --- a worker ---------------------------------------------------------------------------------------------------------


async def worker(place: Place) -> None:
    """Run both endpoints until SIGTERM."""
    async with AsyncExitStack() as stack:
        for name in (place.first, place.second):
            await stack.enter_async_context(await _endpoint(place, name, stack))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                return


async def _endpoint(place: Place, name: str, stack: AsyncExitStack) -> Endpoint:
    store, transport, outbox = place.store(), place.transport(), place.outbox()
    for each in (store, transport, outbox):
        stack.push_async_callback(each.close)
    endpoint = Endpoint(
        name,
        transport=SendingTwice(transport),  # pyright: ignore[reportArgumentType] - what it lacks is not used here
        delayed_delivery=DelayedDelivery(store, number_of_retries=100),
        transaction_mode="receive_only",
        error_queue=f"{place.name}.error",
        outbox=Outbox(outbox),
    )
    stage = name.rpartition(".")[2]
    marks = "?, ?, ?" if place.in_files else "%s, %s, %s"
    table = "effect" if place.in_files else f"{place.name}.effect"

    @endpoint.handler(Number, name="Number")
    async def handle(message: Number, context: HandlerContext) -> None:
        connection = await context.transaction()
        values = (stage, message.number, context.message_id)
        done = connection.execute(f"INSERT INTO {table} (stage, number, came_as) VALUES ({marks})", values)
        if not place.in_files:
            await done
        if stage == "first":
            delay = timedelta(milliseconds=200) if message.number % 2 else None
            await context.send(message, destination=place.second, delay=delay)

    return endpoint


# --- the run ----------------------------------------------------------------------------------------------------------


class Run:
    """Starts workers, ends some, and counts."""

    def __init__(self, place: Place, messages: int, kills: int, workers: int) -> None:
        self.place, self.messages, self.kills = place, messages, kills
        self.workers = [self._start() for _ in range(workers)]

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--worker", json.dumps(vars(self.place))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def effects(self) -> Mapping[str, int]:
        return dict(self.place.query("SELECT stage, count(*) FROM effect GROUP BY stage"))

    def handle_all(self, deadline: float) -> None:
        """Let the workers work, and kill one of them now and then, until everything is handled."""
        killed = 0
        for each in self.workers:
            _expect_ready(each)
        while True:
            done = sum(self.effects().values())
            if killed < self.kills and done >= 2 * self.messages * (killed + 1) / (self.kills + 1):
                number = killed % len(self.workers)
                self.workers[number].kill()
                self.workers[number].communicate()
                self.workers[number] = self._start()
                _expect_ready(self.workers[number])
                killed += 1
            elif killed == self.kills and done >= 2 * self.messages and not any(self.left().values()):
                return
            if time.monotonic() > deadline:
                return
            threading.Event().wait(0.01 if done < 2 * self.messages else 0.2)

    def end(self) -> None:
        """End the workers, which finish what they have in hand and give back what they only received ahead."""
        for each in self.workers:
            each.terminate()
        for each in self.workers:
            each.communicate()

    def kill(self) -> None:
        """End what runs still, without ceremony."""
        for each in self.workers:
            each.kill()
            each.wait()

    def end_with_empty_queues(self, deadline: float) -> None:
        """End the workers; as long as one of them gave anything back, let another one handle that."""
        self.end()
        while any(self.left().values()) and time.monotonic() < deadline:
            self.workers = [self._start()]
            _expect_ready(self.workers[0])
            while any(self.left().values()) and time.monotonic() < deadline:
                threading.Event().wait(0.2)
            self.end()

    def left(self) -> Mapping[str, int]:
        """Return what is in the queues and not in hand."""
        if self.place.queues:
            return _broker_counts(self.place)

        async def count() -> Mapping[str, int]:
            transport = self.place.transport()
            assert not isinstance(transport, RabbitMqTransport)
            try:
                return await transport.lengths_of(self.place.all_queues)
            finally:
                await transport.close()

        return anyio.run(count)


def _expect_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit("a worker did not start")


def _broker_counts(place: Place) -> Mapping[str, int]:
    with pika.BlockingConnection(pika.URLParameters(place.queues)) as connection:
        channel = connection.channel()
        return {name: channel.queue_declare(name, passive=True).method.message_count for name in place.all_queues}


async def _prepare(place: Place, messages: int) -> None:
    """Create everything, and send the messages that begin it, twice each."""
    transport, store, outbox = SendingTwice(place.transport()), place.store(), place.outbox()
    await outbox.setup()
    place.query("CREATE TABLE effect (stage text, number integer, came_as text)")
    await transport.create_queues(place.all_queues)
    for start in range(0, messages, _BATCH):
        batch = [_begins(place, number) for number in range(start, min(start + _BATCH, messages))]
        for error in await transport.send(batch, SystemClock().now()):
            if error is not None:
                raise error
    for each in (transport, store, outbox):
        await each.close()


def _begins(place: Place, number: int) -> Envelope:
    headers = {Headers.MESSAGE_ID: f"begin-{number}", Headers.ENCLOSED_MESSAGE_TYPES: "Number"}
    return Envelope(place.first, f"begin-{number}", headers, json.dumps({"number": number}).encode())


def _clean_up(place: Place) -> None:
    if place.in_files:
        return
    place.query(f"DROP DATABASE {place.name}" if place.in_mariadb else f"DROP SCHEMA {place.name} CASCADE")
    if place.queues:
        with pika.BlockingConnection(pika.URLParameters(place.queues)) as connection:
            channel = connection.channel()
            for name in place.all_queues:
                channel.queue_delete(name)


def outbox_kills(place: Place, messages: int, kills: int, workers: int, minutes: float) -> dict[str, Any]:
    """Do it all; return what was found."""
    anyio.run(_prepare, place, messages)
    started = time.monotonic()
    run = Run(place, messages, kills, workers)
    deadline = started + minutes * 60
    try:
        run.handle_all(deadline)
        run.end_with_empty_queues(deadline)
    finally:
        run.kill()
    found = place.query("SELECT stage, count(*), count(DISTINCT number) FROM effect GROUP BY stage")
    effects = {stage: {"effects": count, "messages": numbers} for stage, count, numbers in found}
    left = {name: count for name, count in run.left().items() if count}
    once = {"effects": messages, "messages": messages}
    return {
        "messages": messages,
        "kills": kills,
        "effects": effects,
        "left in queues": left,
        "seconds": round(time.monotonic() - started, 1),
        "exactly once": effects == {"first": once, "second": once} and not left,
    }


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60, help="gives up after this")
    parser.add_argument("--place", choices=PLACES, default=PLACES[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        anyio.run(worker, Place(**json.loads(given.worker)))
        return 0
    name = f"outbox_{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        if given.place == "file+file":
            place = Place(folder, "", name)
        else:
            queues = os.environ["POSTDATE_RABBITMQ_URL"] if given.place.endswith("rabbitmq") else ""
            database = given.place.partition("+")[0].upper()
            place = Place(os.environ[f"POSTDATE_{database}_URL"], queues, name)
            place.query(f"CREATE DATABASE {name}" if place.in_mariadb else f"CREATE SCHEMA {name}")
        try:
            found = outbox_kills(place, given.messages, given.kills, given.workers, given.minutes)
        finally:
            _clean_up(place)
    print(json.dumps({"place": given.place, **found}, indent=2))
    return 0 if found["exactly once"] else 1


if __name__ == "__main__":
    sys.exit(main())
