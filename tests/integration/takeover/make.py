"""Make a database with rows of every kind, and print it as SQL: ``python make.py sqlite|postgres|mariadb``.

It runs with the code of a commit whose databases are taken over, and prints the dump that belongs to it: in a worktree
of that commit, ``PYTHONPATH=src python …/make.py sqlite > …/sqlite-468e06b.sql``. Servers are those of the tests'
environment. Public adapters and clients make the rows, SQL only damages some. This process holds claims meanwhile.
"""

import asyncio
import os
import platform
import re
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import postdate
from postdate import DelayedMessage, Endpoint, Envelope, Recoverability
from postdate.errors import DuplicateMessage
from postdate.ports import (
    Correlation,
    Outcome,
    SagaChange,
    SagaChangeKind,
    SagaRecord,
    TransactionMode,
)
from postdate.ports.timeouts import Timeout

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
THEN = NOW + timedelta(seconds=1)
HOUR = timedelta(hours=1)
CENTURY = timedelta(days=36_525)
SCHEMA, TABLE = "takeover", "service.timeouts"
HAS_QUARANTINE = not hasattr(postdate, "connect")
"""Whether unreadable rows were moved to a table of their own: as long as there were no clients, among others."""


@dataclass
class Boom:
    """A message that no handler can handle."""

    text: str


class SqlitePlace:
    def __init__(self):
        self.path = Path(tempfile.mkdtemp()) / "takeover.db"
        self.url, self.schema = f"sqlite:///{self.path}", None
        self.transport = postdate.LocalTransport(self.path)

    def store(self, table, **options):
        return postdate.SqliteStore(self.path, **options) if table == TABLE else None

    def sagas(self):
        return postdate.SqliteSagaStore(self.path)

    def outbox(self):
        return postdate.SqliteOutbox(self.path)

    def timeouts(self):
        return postdate.SqliteTimeouts(self.path)

    def run(self, statement, *values):
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute(statement, values)

    def tear(self, message_id, _table):
        for rows in ("delayed_message", "queue_message"):
            which = f"seq IN (SELECT content FROM {rows} WHERE message_id = ?)"
            self.run(f"UPDATE content SET headers = '{{torn' WHERE {which}", message_id)

    def lose_content(self, message_id):
        which = "seq IN (SELECT content FROM delayed_message WHERE message_id = ?)"
        self.run(f"DELETE FROM content WHERE {which}", message_id)

    def dump(self):
        with closing(sqlite3.connect(self.path)) as connection:
            return "\n".join(connection.iterdump())


class PostgresPlace:
    def __init__(self):
        self.url, self.schema = os.environ["POSTDATE_POSTGRES_URL"], SCHEMA
        self.run(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
        self.transport = postdate.PostgresTransport(self.url, schema=SCHEMA)

    def store(self, table, **options):
        return postdate.PostgresStore(self.url, schema=SCHEMA, table=table, **options)

    def sagas(self):
        return postdate.PostgresSagaStore(self.url, schema=SCHEMA)

    def outbox(self):
        return postdate.PostgresOutbox(self.url, schema=SCHEMA)

    def timeouts(self):
        return postdate.PostgresTimeouts(self.url, schema=SCHEMA)

    def run(self, statement, *values):
        import psycopg

        with psycopg.connect(self.url) as connection:
            connection.execute(statement, values)

    def tear(self, message_id, table):
        for numbers in (f'SELECT number FROM {SCHEMA}."{table}"', f"SELECT content FROM {SCHEMA}.queue_message"):
            which = f"number IN ({numbers} WHERE message_id = %s)"
            self.run(f"UPDATE {SCHEMA}.content SET headers = '{{torn' WHERE {which}", message_id)

    def lose_content(self, message_id):
        numbers = f'SELECT number FROM {SCHEMA}."{TABLE}" WHERE message_id = %s'
        self.run(f"DELETE FROM {SCHEMA}.content WHERE number IN ({numbers})", message_id)

    def dump(self):
        command = ["pg_dump", "--inserts", "--no-owner", "--no-privileges", f"--schema={SCHEMA}", self.url]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return re.sub(r"^(--|SET |SELECT pg_catalog.set_config|\\).*$", "", text, flags=re.MULTILINE)


class MariaDbPlace:
    transport = None

    def __init__(self):
        self.url, self.schema = os.environ["POSTDATE_MARIADB_URL"], SCHEMA
        self._client("mariadb", f"--execute=DROP DATABASE IF EXISTS {SCHEMA}")

    def _client(self, program, *arguments):
        url = urlsplit(self.url)
        login = [f"--host={url.hostname}", f"--port={url.port}", f"--user={url.username}", f"--password={url.password}"]
        command = [program, "--no-defaults", *login, "--default-character-set=utf8mb4", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def store(self, table, **options):
        return postdate.MariaDbStore(self.url, schema=SCHEMA, table=table, **options)

    def sagas(self):
        return self._of_backend("MariaDbSagaStore")

    def outbox(self):
        return self._of_backend("MariaDbOutbox")

    def _of_backend(self, name):
        from postdate.backends.mariadb import schema

        kind = getattr(schema, name, None)
        return None if kind is None else kind(self.url, schema=SCHEMA)

    def timeouts(self):
        return postdate.MariaDbTimeouts(self.url, schema=SCHEMA)

    def tear(self, message_id, table):
        update = f"UPDATE {SCHEMA}.`{table}` SET headers = '{{torn' WHERE message_id = '{message_id}'"
        self._client("mariadb", f"--execute={update}")

    def lose_content(self, message_id):
        """Leave it torn: here the content stands in the row of the message."""

    def dump(self):
        text = self._client("mariadb-dump", "--compact", "--hex-blob", "--skip-opt", "--create-options", SCHEMA)
        return re.sub(r"^/\*!.*$", "", text, flags=re.MULTILINE)


def waiting(message_id, due=HOUR, destination="orders", **more):
    return DelayedMessage(message_id, NOW + due, destination, {"kind": message_id}, message_id.encode(), **more)


async def make_unreadable(store, place, table):
    """Tear rows and have a claim meet them; with a quarantine, ids are stored anew beside the rows that are there."""
    rows = ["torn"] if table == "other" else ["torn", "stored-anew", "delivered-anew", "no-content"]
    await store.store_many([waiting(each, timedelta(0)) for each in rows], NOW)
    for each in rows:
        place.tear(each, table)
    if "no-content" in rows:
        place.lose_content("no-content")
    assert await store.claim_due(THEN, 10) == []
    for each in rows[1:3]:
        again = replace(waiting(each, timedelta(0)), body=b"second")
        try:
            await store.store(again, NOW)
        except DuplicateMessage:
            assert not HAS_QUARANTINE
        else:
            assert HAS_QUARANTINE
    if HAS_QUARANTINE and rows[1:]:
        claims = {claim.message.message_id: claim for claim in await store.claim_due(THEN, 10)}
        await store.finish([claims["delivered-anew"]], Outcome.DELIVERED, THEN)
        await store.release([claims["stored-anew"]], None)
        await store.reschedule("stored-anew", NOW + HOUR, NOW)


async def claim(store, message_id):
    """Store a message that is due, and claim it."""
    await store.store(waiting(message_id, timedelta(0)), NOW)
    (one,) = await store.claim_due(THEN, 10)
    return one


async def fill_store(store, place):
    """Leave messages that wait in every way, and records of everything that can become of one."""
    large = b"".join(bytes(range(first, 256)) for first in range(32))
    await store.store_many(
        [
            waiting("plain"),
            replace(waiting("with-headers"), headers={"kind": "é 🕰", "quote": 'it\'s "so"\\', "line": "a\nb"}),
            waiting("expiring", expires_at=NOW + CENTURY),
            replace(waiting('ü 🕰 it\'s "id"'), body=bytes(range(256))),
            replace(waiting("large"), body=large),
            waiting("key~00000001"),
            waiting("rescheduled"),
            waiting("cancelled"),
        ],
        NOW,
    )
    assert await store.reschedule("rescheduled", NOW + 2 * HOUR, NOW)
    assert await store.cancel("cancelled", NOW)
    for outcome in (Outcome.DELIVERED, Outcome.EXPIRED, Outcome.FAILED):
        assert await store.finish([await claim(store, outcome.value)], outcome, THEN, "as it went") == 1
    if HAS_QUARANTINE:  # which is as old as checksums behind the headers
        sealed = place.store(TABLE, checksum=True)
        await sealed.initialize("service", TransactionMode.RECEIVE_ONLY)
        await sealed.store(waiting("sealed"), NOW)
    retried = await claim(store, "retried")
    assert await store.retry_later(retried, NOW + 3 * HOUR, THEN, "no route")


async def fill_queues(store, transport, place):
    """Leave messages in queues: sent and moved there, handled, received at this moment, failed, and torn."""
    await transport.create_queues(["orders", "paused", "service", "error"])
    endpoint = Endpoint(
        "service", transport=transport, recoverability=Recoverability(immediate_retries=0, delayed_retries=0)
    )

    @endpoint.handler(Boom)
    async def fail(message: Boom, _context: object) -> None:
        raise ValueError(message.text)

    async with endpoint:
        await endpoint.send(Boom("it's broken"), destination="service", message_id="error-copy")
        errors = transport.receiver("error")
        (copy,) = await errors.receive(1)
        await errors.roll_back(copy, failed=False)
        await errors.close()
    await store.store_many([waiting(each, timedelta(0)) for each in ("handled", "moved")], NOW)
    assert (await store.move_due(THEN, 10)).delivered == 2
    receiver = transport.receiver("orders")
    handled, moved = sorted(await receiver.receive(10), key=lambda each: each.envelope.message_id)
    await receiver.commit(handled, THEN)
    await receiver.roll_back(moved)
    torn = ("moved-torn", "sent-torn")
    await store.store(waiting(torn[0], timedelta(0)), NOW)
    assert (await store.move_due(THEN, 10)).delivered == 1
    await transport.send([Envelope("orders", torn[1], {}, b"sent-torn")], NOW)
    for each in torn:
        place.tear(each, TABLE)
    (moved,) = await receiver.receive(10)  # which meets the torn ones
    await receiver.roll_back(moved, failed=False)
    await transport.send(
        [
            Envelope("orders", "sent", {"kind": "sent"}, b"sent", time_to_be_received=CENTURY),
            Envelope("paused", "in-hand", {}, b"in-hand"),
        ],
        NOW,
    )
    (_in_hand,) = await transport.receiver("paused").receive(1)  # until the dump is made


async def fill_client(store, place):
    """Leave what clients do since there are any: a key, a wall time, limits, a pause, and a message that it holds."""
    client = postdate.connect(place.url, endpoint="service", schema=place.schema)
    for body in (b"first", b"second"):
        await client.replace(
            body, key="k", destination="mails", deliver_at="2099-03-28 09:00", zone="Europe/Paris", headers={"n": "1"}
        )
    await client.pause("paused")
    await client.limit("mails", per_second=2, windows=["mon-fri 09:00-17:00 Europe/Paris"])
    await client.limit("orders", per_second=5)
    await client.limit("orders")
    await client.close()
    await store.store(waiting("held", timedelta(0), "paused"), NOW)
    (held,) = await store.claim_due(THEN, 10)
    (limits,) = await store.load_limits(["paused"])
    await store.release([held], limits.attempt_time(held.message.due))


async def fill_sagas(sagas):
    await sagas.setup()
    one = SagaRecord("id-1", "Order", Correlation("order_id", "o-1 é"), '{"n":1}', '{"timeouts":{}}')
    two = replace(one, saga_id="id-2", correlation=Correlation("order_id", "o-2"))
    await sagas.apply([SagaChange(SagaChangeKind.CREATED, one), SagaChange(SagaChangeKind.CREATED, two)])
    one = await sagas.load("Order", "id-1")
    await sagas.apply([SagaChange(SagaChangeKind.UPDATED, replace(one, state='{"n":2}'))])
    await sagas.apply([SagaChange(SagaChangeKind.COMPLETED, await sagas.load("Order", "id-2"))])


async def fill_outbox(outbox):
    await outbox.setup()
    for message_id in ("dispatched", "undispatched"):
        operations = [Envelope("orders", f"{message_id}-1", {"kind": "é"}, b"\0now"), waiting(f"{message_id}-2")]
        transaction = outbox.transaction("service", message_id)
        await transaction.begin()
        assert await transaction.commit(operations, NOW)
    await outbox.mark_dispatched("service", "dispatched", NOW)


async def fill_timeouts(timeouts):
    await timeouts.initialize("service")
    await timeouts.setup()
    saga = "00000000-0000-4000-8000-00000000000a"
    for number, (due, saga_id) in enumerate([(timedelta(0), None), (24 * HOUR, saga)], 1):
        timeout_id = f"00000000-0000-4000-8000-{number:012}"
        headers, body = {"kind": "é"}, f"timeout {number}".encode()
        assert await timeouts.add(Timeout(timeout_id, NOW + due, "orders", saga_id, "service", headers, body))


async def main(backend):
    place = {"sqlite": SqlitePlace, "postgres": PostgresPlace, "mariadb": MariaDbPlace}[backend]()
    store, other = (place.store(table) for table in (TABLE, "other"))
    for each, endpoint in ((store, "service"), (other, "other")):
        if each is not None:
            await each.initialize(endpoint, TransactionMode.RECEIVE_ONLY)
            await each.setup()
            await make_unreadable(each, place, "other" if each is other else TABLE)
    if place.transport is not None:
        await fill_queues(store, place.transport, place)
    if not HAS_QUARANTINE:
        await fill_client(store, place)
    if (sagas := place.sagas()) is not None:
        await fill_sagas(sagas)
    if (outbox := place.outbox()) is not None:
        await fill_outbox(outbox)
    await fill_timeouts(place.timeouts())
    await fill_store(store, place)
    await claim(store, "claimed")  # until the dump is made
    dump = place.dump().replace(platform.node(), "machine")
    sys.stdout.write("".join(f"{line}\n" for line in dump.splitlines() if line.strip()))
    sys.stdout.flush()
    os._exit(0)  # as a killed process does, which gives nothing back


asyncio.run(main(sys.argv[1]))
