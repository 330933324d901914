"""Postdate stores that messages are moved out of and into: each in a file, a schema or a database of its own."""

import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import quote

import anyio
import pytest
from tests import mariadb_subjects, postgres_subjects
from tests.azure_store_subjects import drop_table, fresh_table
from tests.redis_subjects import Prefix

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import quote_name
from postdate.clock import SystemClock
from postdate.config import Settings, load_settings
from postdate.messages import OF_THE_STORE, DelayedMessage
from postdate.operations.store_move import StoreMove, StoreMoveResult, move_store
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import MessageFilter, Outcome, Record, TransactionMode

T = TypeVar("T")

FAR = timedelta(days=400)
"""Later than all that a test stores."""


@dataclass(frozen=True)
class StorePlace:
    """A store that is set up.

    Args:
        spec: which.
    """

    spec: StoreSpec

    @property
    def settings(self) -> Settings:
        spec = self.spec
        options = {
            "endpoint.name": spec.endpoint,
            "store.address": spec.address,
            "store.schema": spec.schema,
            "store.table": spec.table,
        }
        if spec.largest_message_bytes is not None:
            options["store.largest_message_bytes"] = str(spec.largest_message_bytes)
        return load_settings(None, os.environ, options)

    @property
    def table(self) -> str | None:
        """The name of its table, where a store has one."""
        return None if self.spec.address.startswith("sqlite") else self.spec.table or f"{self.spec.endpoint}.timeouts"

    def plan_to(self, new: "StorePlace", **options: Any) -> StoreMove:
        stopped = options.pop("services_stopped", True)
        return StoreMove(self.spec.address, new.settings, self.spec.schema, self.table, stopped, **options)

    def move_to(self, new: "StorePlace", **options: Any) -> StoreMoveResult:
        """Move what waits here into another store. No service runs here."""
        return anyio.run(move_store, self.plan_to(new, **options))

    def ask(self, question: Callable[[Any], Awaitable[T]]) -> T:
        """Open the store, as a service of its own would, for one question."""

        async def asked() -> T:
            store = self.spec.open(create=False)
            await store.initialize(self.spec.endpoint, TransactionMode.RECEIVE_ONLY)
            try:
                return await question(store)
            finally:
                await store.close()

        return anyio.run(asked)

    def add(self, messages: Sequence[DelayedMessage]) -> None:
        with open_spec(self.spec) as store:
            store.store_many(messages, SystemClock().now())

    def waiting(self) -> list[DelayedMessage]:
        """Return what waits, but for the store's own messages."""
        found = self.ask(lambda store: store.list_pending(MessageFilter(), 1_000_000))
        return [message for message in found if message.destination not in OF_THE_STORE]

    def pending(self) -> int:
        return self.ask(lambda store: store.statistics(SystemClock().now())).pending

    def history(self, message_id: str) -> list[Record]:
        return list(self.ask(lambda store: store.history(message_id)))

    def deliver(self, until: datetime | None = None) -> list[str]:
        """Deliver what is due then; return the ids."""

        async def delivered(store: Any) -> list[str]:
            at = until or SystemClock().now() + FAR
            claims = await store.claim_due(at, 1_000_000)
            assert await store.finish(claims, Outcome.DELIVERED, at) == len(claims)
            return [claim.message.message_id for claim in claims]

        return self.ask(delivered)


@contextmanager
def place_in(kind: str, request: pytest.FixtureRequest, endpoint: str = "billing") -> Generator[StorePlace]:
    """Make a store of a kind, named with what has to be quoted, and drop it in the end."""
    if kind == "sqlite":
        folder = request.getfixturevalue("tmp_path")
        spec = StoreSpec(f"sqlite:///{folder / f'{endpoint}.db'}", synchronous="normal", endpoint=endpoint)
        with open_spec(spec, create=True) as store:
            store.setup()
        yield StorePlace(spec)
        return
    if kind == "redis":
        prefix = Prefix(request.getfixturevalue("redis_url"))
        yield StorePlace(
            StoreSpec(f"{request.getfixturevalue('redis_url')}?prefix={quote(prefix.name)}", endpoint=endpoint)
        )
        prefix.drop()
        return
    if kind == "azure":
        connection, table = request.getfixturevalue("azurite_connection"), fresh_table()
        request.getfixturevalue("monkeypatch").setenv("AZURITE_OF_THIS_TEST", connection)
        spec = StoreSpec("azure-table://?connection=env:AZURITE_OF_THIS_TEST", table=table, endpoint=endpoint)
        with open_spec(spec, create=True) as store:
            store.setup()
        yield StorePlace(spec)
        drop_table(connection, table)
        return
    subjects = postgres_subjects if kind == "postgres" else mariadb_subjects
    url, schema = request.getfixturevalue(f"{kind}_url"), subjects.fresh_schema()
    if kind == "mariadb":
        session = MariaDbServer(url).connect()
        session.change(f"CREATE DATABASE IF NOT EXISTS {quote_name(schema)}")
        session.close()
    spec = StoreSpec(url, schema=schema, endpoint=endpoint)
    try:
        with open_spec(spec, create=True) as store:
            store.setup()
        yield StorePlace(spec)
    finally:
        subjects.drop_schema(url, schema)
