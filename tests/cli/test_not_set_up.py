"""A database without the tables of Postdate: every door answers with `StoreNotSetUp` and the command, none with the
error of the driver.
"""

import re
from collections.abc import Awaitable, Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests import mariadb_subjects, postgres_subjects
from tests.cli.conftest import CommandLine
from tests.integration.test_postgres_enqueue import KINDS

import postdate
from postdate import Client, DelayedDelivery, Endpoint, LocalTransport, Pending, Postgres, errors
from postdate.backends.mariadb.store import MariaDbStore
from postdate.errors import StoreNotSetUp

HOUR = timedelta(hours=1)
COMMAND = re.compile("postdate setup")
DRIVER = re.compile("UndefinedTable|no such table|1146|Traceback")

CALLS: dict[str, Callable[[Client], Awaitable[object]]] = {
    "send": lambda client: client.send(b"", destination="q", delay=HOUR),
    "send in a zone": lambda client: client.send(
        b"", destination="q", deliver_at="2031-01-01 09:00", zone="Europe/Paris"
    ),
    "send_many": lambda client: client.send_many([(b"", postdate.SendOptions("q", HOUR))]),
    "cancel": lambda client: client.cancel("m"),
    "reschedule": lambda client: client.reschedule("m", delay=HOUR),
    "replace": lambda client: client.replace(b"", key="k", destination="q", delay=HOUR),
    "get": lambda client: client.get("m"),
    "list": lambda client: client.list(),
    "cancel_where": lambda client: client.cancel_where(Pending("q")),
    "pause": lambda client: client.pause("q"),
    "limits": lambda client: client.limits(),
}

PLACES = ["postgres", "mariadb", "sqlite without a file", "sqlite with an empty file"]


@pytest.fixture(params=PLACES)
def empty_place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the address, and the schema, of a database without tables."""
    if request.param == "postgres":
        return {"url": request.getfixturevalue("postgres_url"), "schema": postgres_subjects.fresh_schema()}
    if request.param == "mariadb":
        return {"url": request.getfixturevalue("mariadb_url"), "schema": mariadb_subjects.fresh_schema()}
    path = request.getfixturevalue("tmp_path") / "shop.db"
    if request.param == "sqlite with an empty file":
        path.touch()
    return {"url": f"sqlite:///{path}"}


async def test_a_client_names_the_command(empty_place: dict[str, Any]) -> None:
    async with postdate.connect(**empty_place, create=False) as client:
        for call in CALLS.values():
            with pytest.raises(StoreNotSetUp, match=COMMAND):
                await call(client)


@pytest.fixture
def dropped(postgres_url: str) -> Generator[tuple[Client, Callable[[], None]]]:
    """Return a client that has used its tables, and a function that drops them."""
    schema = postgres_subjects.fresh_schema()

    def drop() -> None:
        postgres_subjects.drop_schema(postgres_url, schema)

    client = postdate.connect(postgres_url, schema=schema)
    yield client, drop
    client.blocking.close()
    drop()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_transaction_of_the_application_meets_no_error_of_the_driver(
    kind: str, postgres_url: str, dropped: tuple[Client, Callable[[], None]]
) -> None:
    """The tables are dropped while the client is open: it looks for them no more."""
    client, drop = dropped
    async with KINDS[kind](postgres_url) as application:
        await client.send(b"", destination="q", delay=HOUR, transaction=application.connection)
        await application.commit()
    drop()
    async with KINDS[kind](postgres_url) as application:
        with pytest.raises(StoreNotSetUp, match=COMMAND) as caught:
            await client.send(b"", destination="q", delay=HOUR, transaction=application.connection)
        assert caught.value.__cause__ is not None
        await application.roll_back()


def test_a_blocking_client_meets_none_either(postgres_url: str, dropped: tuple[Client, Callable[[], None]]) -> None:
    client, drop = dropped
    with psycopg.connect(postgres_url) as connection:
        client.blocking.send(b"", destination="q", delay=HOUR, transaction=connection)
    drop()
    with psycopg.connect(postgres_url) as connection, pytest.raises(StoreNotSetUp, match=COMMAND):
        client.blocking.send(b"", destination="q", delay=HOUR, transaction=connection)


async def test_other_errors_of_the_driver_stay_what_they_are(
    postgres_url: str, dropped: tuple[Client, Callable[[], None]]
) -> None:
    client, _ = dropped
    with psycopg.connect(postgres_url) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            await client.send(b"", destination="q", delay=HOUR, transaction=connection)


# --- endpoints --------------------------------------------------------------------------------------------------------


async def test_an_endpoint_that_creates_nothing_does_not_start(postgres_url: str) -> None:
    schema = postgres_subjects.fresh_schema()
    async with Postgres(postgres_url, schema=schema) as database:
        with pytest.raises(StoreNotSetUp, match="POSTDATE_ENDPOINT__NAME=mails postdate setup"):
            await Endpoint("mails", database, create_queues=False).__aenter__()
        async with Endpoint("mails", database):
            pass
        async with Endpoint("mails", database, create_queues=False):
            pass
    postgres_subjects.drop_schema(postgres_url, schema)


async def test_an_endpoint_on_a_store_of_mariadb_does_not_start(mariadb_url: str, tmp_path: Path) -> None:
    queues, store = LocalTransport(tmp_path / "q.db"), MariaDbStore(mariadb_url, schema=mariadb_subjects.fresh_schema())
    endpoint = Endpoint("mails", transport=queues, delayed_delivery=DelayedDelivery(store), create_queues=False)
    with pytest.raises(StoreNotSetUp, match=COMMAND):
        await endpoint.__aenter__()
    await store.close()
    await queues.close()


async def test_a_server_that_is_away_is_waited_for_at_the_start(expected_logs: list[str]) -> None:
    """It may be on its way up: only tables that are missing end the start."""
    expected_logs += ["127.0.0.1"]
    async with Postgres("postgresql://127.0.0.1:1/none") as database:
        async with Endpoint("mails", database, create_queues=False):
            pass
        with pytest.raises(errors.StoreUnreachable):
            await database.store.next_attempt()


# --- commands ---------------------------------------------------------------------------------------------------------

ABOUT_THE_STORE = [
    ["run", "--no-setup"],
    ["send", "q", "text", "--delay", "1h"],
    ["messages", "list"],
    ["messages", "show", "m"],
    ["messages", "explain", "m"],
    ["messages", "cancel", "m"],
    ["messages", "reschedule", "m", "--delay", "1h"],
    ["messages", "stats"],
    ["destinations", "list"],
]
ABOUT_QUEUES = [
    ["send", "q", "text"],
    ["errors", "list"],
    ["errors", "groups"],
    ["errors", "return", "--all"],
    ["queues", "peek", "q"],
    ["queues", "receive", "q"],
    ["destinations", "pause", "q"],
]


def test_commands_name_the_command(
    empty_place: dict[str, Any], cli: CommandLine, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    commands = [*ABOUT_THE_STORE, *ABOUT_QUEUES]
    if empty_place["url"].startswith("mariadb"):  # MariaDB has no queues: they are in a file beside it
        cli.ok("--store", "sqlite:///queues.db", "setup")
        monkeypatch.setenv("POSTDATE_TRANSPORT__ADDRESS", "sqlite:///queues.db")
        commands = [each for each in ABOUT_THE_STORE if each[0] != "send"]  # it sends to a queue, which a service reads
    monkeypatch.setenv("POSTDATE_STORE__ADDRESS", empty_place["url"])
    if "schema" in empty_place:
        monkeypatch.setenv("POSTDATE_STORE__SCHEMA", empty_place["schema"])
    for arguments in commands:
        with subtests.test(" ".join(arguments)):
            ran = cli(*arguments)
            assert ran.status == 3, ran
            assert "[store_not_set_up]" in ran.err
            assert COMMAND.search(ran.err)
            assert not DRIVER.search(ran.err)
