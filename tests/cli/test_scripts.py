"""The scripts for administrators, as they are used: run by one who may, for services that may not."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

import psycopg
import pytest
from psycopg import sql

from postdate import DelayedMessage, PostgresStore
from postdate.errors import StoreNotSetUp
from postdate.migrations import setup_command

ODD = 'odd"; name\n-- $postdate$ '


@dataclass(frozen=True)
class Place:
    """A schema that is not there yet, and a role that may not create one."""

    admin: str
    role: str
    schema: str

    @property
    def url(self) -> str:
        where = urlsplit(self.admin)
        return f"postgresql://{quote(self.role, safe='')}@{where.hostname}:{where.port}{where.path}"

    def run(self, script: str) -> None:
        with psycopg.connect(self.admin, autocommit=True) as connection:
            connection.execute(script.encode())

    def grant(self, script: str) -> None:
        """Run the statements that the script has as comments, for the role."""
        grants = [line.removeprefix("-- ") for line in script.splitlines() if line.startswith("-- GRANT")]
        assert len(grants) == 3
        self.run("\n".join(grants).replace("the_role", f'"{self.role}"'))


@pytest.fixture
def place(postgres_url) -> Iterator[Place]:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        yield Place(postgres_url, name, name)
        for schema in (name, name + ODD):
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
        connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture
def as_role(place, monkeypatch) -> None:
    monkeypatch.setenv("POSTDATE_STORE__ADDRESS", place.url)
    monkeypatch.setenv("POSTDATE_STORE__SCHEMA", place.schema)
    monkeypatch.setenv("POSTDATE_QUEUES__CREATE", "orders")


@pytest.mark.usefixtures("as_role")
def test_a_role_without_the_right_to_create_works_with_what_the_script_made(
    cli, place, monkeypatch, service, eventually
):
    """The script is run twice, and for a second endpoint, whose queue and table come on top."""
    assert cli("setup").status == 3
    script = cli.ok("setup", "--print-sql").out
    place.run(script)
    place.run(script)
    place.grant(script)
    monkeypatch.setenv("POSTDATE_ENDPOINT__NAME", "shop")
    second = cli.ok("setup", "--print-sql").out
    place.run(second)
    place.grant(second)
    service("--no-setup")
    assert cli("doctor").status in {0, 1}
    cli.ok("send", "orders", "x", "--delay", "100ms", "--id", "m1")
    eventually(lambda: cli.ok("messages", "stats", "--json").json["queues"]["orders"] == 1, "delivered")
    cli.ok("send", "orders", "x", "--delay", "1h", "--id", "m2")
    cli.ok("messages", "reschedule", "m2", "--delay", "2h")
    cli.ok("messages", "cancel", "m2")
    cli.ok("messages", "explain", "m1")
    cli.ok("setup")  # nothing is missing, so nothing has to be created


@pytest.mark.usefixtures("as_role")
def test_names_may_have_anything_in_them(cli, place, monkeypatch):
    monkeypatch.setenv("POSTDATE_STORE__SCHEMA", place.schema + ODD)
    monkeypatch.setenv("POSTDATE_STORE__TABLE", ODD)
    script = cli.ok("setup", "--print-sql").out
    place.run(script)
    place.run(script)
    with psycopg.connect(place.admin) as connection:
        row = connection.execute("SELECT count(*) FROM pg_tables WHERE tablename = %s", (ODD,)).fetchone()
    assert row is not None
    assert row[0] >= 1


def test_a_table_that_is_missing_is_made_for_the_endpoint_it_belongs_to(place):
    store = PostgresStore(place.admin, schema=place.schema, table="web shop.timeouts")
    message = DelayedMessage("m1", datetime(2126, 1, 1, tzinfo=UTC), "orders", {}, b"x")
    try:
        for prepare in (tuple, store.database.setup_blocking):  # without the schema, and with it
            prepare()
            with psycopg.connect(place.admin) as connection, pytest.raises(StoreNotSetUp) as caught:
                store.enqueue_blocking(connection, [message], message.due)
            assert "no table 'web shop.timeouts'; run `POSTDATE_ENDPOINT__NAME='web shop' postdate setup`" in str(
                caught.value
            )
    finally:
        store.database.close_blocking()


def test_the_usual_endpoint_is_not_named():
    assert setup_command("postdate.timeouts") == setup_command("later") == "run `postdate setup`"
