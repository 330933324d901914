"""A server that takes no writes is an outage: nothing counts against a message, and another server is asked."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from tests.integration.postgres_place import SECOND, TABLE, Place, now, placed
from tests.waiting import until

from postdate import DelayedDelivery, DelayedMessage, Endpoint, LocalTransport
from postdate.backends.postgres.errors import translate
from postdate.backends.postgres.store import PostgresStore
from postdate.errors import StoreReadOnly
from postdate.operations.doctor.checks import Verdict
from postdate.operations.doctor.servers import diagnose_server_settings

pytestmark = pytest.mark.anyio


@pytest.fixture
async def place(postgres_url: str):
    async with placed(postgres_url) as place:
        yield place


@contextmanager
def read_only(url: str) -> Generator[None]:
    """Have every session that begins within be one that cannot write, for as long as it lives, and end all others."""
    with psycopg.connect(url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
        connection.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        try:
            yield
        finally:
            connection.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))


def in_days(message_id: str) -> DelayedMessage:
    return DelayedMessage(message_id, now() + timedelta(days=1), "done")


async def test_connections_that_answered_read_only_are_dropped(place: Place) -> None:
    """Those that were opened meanwhile never take a write: only with new ones anything is stored afterwards."""
    await place.store.store(in_days("before"), now())
    with read_only(place.url):
        with pytest.raises(StoreReadOnly, match=r"is read-only .* fail-over") as refused:
            await place.store.store(in_days("meanwhile"), now())
        assert "password" not in str(refused.value)
        (writes,) = [
            each for each in diagnose_server_settings(await place.store.server_facts()) if each.name == "writes"
        ]
        assert writes.result is Verdict.FAIL
        assert await place.store.get("before") is not None

    async def stored() -> bool:
        await place.store.store(in_days("afterwards"), now())
        return True

    await until(stored, despite=StoreReadOnly)  # those that have only read by now are dropped at the first try
    assert "writes" not in [each.name for each in diagnose_server_settings(await place.store.server_facts())]


async def test_delayed_messages_outlive_a_read_only_store_with_queues_elsewhere(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None goes to the error queue, with no retries configured, and all are stored once the store takes writes."""
    queues = LocalTransport(tmp_path / "queues.db", synchronous="normal")
    await queues.create_queues(["done", "error", "sales", "sales.timeouts"])
    store = PostgresStore(place.url, schema=place.schema, table=TABLE)
    endpoint = Endpoint("sales", transport=queues, delayed_delivery=DelayedDelivery(store), error_queue="error")

    async def arrived() -> bool:
        lengths = await queues.queue_lengths()
        return lengths["done"] + lengths["error"] == 10

    caplog.set_level(logging.DEBUG, "postdate.circuit_breaker")
    async with endpoint:
        with read_only(place.url):
            for number in range(10):
                await endpoint.send(b"", destination="done", delay=2 * SECOND, message_id=f"m-{number}")
            await until(lambda: "circuit breaker DelayedDeliveryStore sales armed" in caplog.text)
        await until(arrived)
    lengths = await queues.queue_lengths()
    assert (lengths["done"], lengths["error"]) == (10, 0)
    await store.close()
    await queues.close()


OF_ITSELF = [
    "42601",
    "0A000",
    "25006",
    "28P01",
    "42501",
    "42P01",
    "40001",
    "53100",
    "53200",
    "53300",
    "55006",
    "57P01",
    "58030",
    "XX001",
]
ABOUT_WHAT_WAS_ASKED = ["22P02", "23514", "25P02", "54000", "P0001"]


@pytest.mark.parametrize("state", [*OF_ITSELF, *ABOUT_WHAT_WAS_ASKED])
def test_what_the_server_says_of_itself_is_told_by_its_class(state: str) -> None:
    assert translate(psycopg.errors.lookup(state)("said"), "PostgreSQL").outage is (state in OF_ITSELF)
