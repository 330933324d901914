"""Store and queues of a test in a PostgreSQL schema of its own, which its processes share."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

import psycopg
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate import DelayedMessage, Headers, SystemClock, TransactionMode
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport

MILLISECOND = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)
TABLE = "service.timeouts"
CONTENT = {Headers.ENCLOSED_MESSAGE_TYPES: "Work", Headers.CONTENT_TYPE: "application/json"}


def now() -> datetime:
    return SystemClock().now()


class Place:
    """See the module."""

    def __init__(self, url: str, schema: str | None = None) -> None:
        self.url, self.schema = url, schema or fresh_schema()
        self.address = f"{url}#{quote(self.schema)}"
        self.store, self.transport = self.another_store(), self.another_transport()
        self._connection: psycopg.Connection[Any] | None = None

    def another_store(self, url: str | None = None) -> PostgresStore:
        return PostgresStore(url or self.url, schema=self.schema, table=TABLE)

    def another_transport(self, url: str | None = None) -> PostgresTransport:
        return PostgresTransport(url or self.url, schema=self.schema)

    async def create(self, *queues: str) -> None:
        await self.store.initialize("service", TransactionMode.TRANSACTION_SCOPE)
        await self.store.setup()
        names = ["consumer", "done", "error", "service.timeouts", "consumer.timeouts", *queues]
        await self.transport.create_queues(names)

    def connect(self, **settings: Any) -> psycopg.Connection[Any]:
        """Return a connection of the test's own, which finds the tables of the schema by their names."""
        connection = psycopg.connect(self.url, autocommit=True, **settings)
        connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", (self.schema,))
        return connection

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        if self._connection is not None:
            try:
                return self._connection.execute(sql.encode(), values).fetchall()
            except psycopg.OperationalError:  # the server has died since
                self._connection.close()
        self._connection = self.connect()
        return self._connection.execute(sql.encode(), values).fetchall()

    def run(self, sql: str) -> None:
        with self.connect() as connection:
            connection.execute(sql.encode())

    def work(self, number: int, due: datetime, destination: str = "consumer") -> DelayedMessage:
        return DelayedMessage(f"m-{number}", due, destination, CONTENT, json.dumps({"number": number}).encode())

    def length(self, queue: str) -> int:
        return self.rows("SELECT count(*) FROM queue_message JOIN queue USING (queue_id) WHERE name = %s", queue)[0][0]

    def in_queue(self, queue: str) -> list[tuple[str, dict[str, int]]]:
        sql = """
            SELECT message_id, body FROM queue_message AS m JOIN queue USING (queue_id)
            JOIN content AS c ON c.number = m.content WHERE name = %s"""
        return [(id_, json.loads(body)) for id_, body in self.rows(sql, queue)]

    def lateness(self) -> list[timedelta]:
        """Return how late each message was delivered."""
        return [at - due for at, due in self.rows("SELECT at, due FROM record WHERE kind = 2")]

    async def close(self, *, drop: bool = True) -> None:
        await self.store.close()
        await self.transport.close()
        if self._connection is not None:
            self._connection.close()
        if drop:
            drop_schema(self.url, self.schema)


@asynccontextmanager
async def placed(url: str, *queues: str) -> AsyncGenerator[Place]:
    """Lend a place that is set up; it is dropped afterwards."""
    place = Place(url)
    try:
        await place.create(*queues)
        yield place
    finally:
        await place.close()
