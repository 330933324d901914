"""The scripts for administrators, as they are used: run by one who may, for services that may not."""

import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlsplit

import psycopg
import pytest
from psycopg import sql

from postdate import (
    DelayedMessage,
    Endpoint,
    HandlerContext,
    Outbox,
    PostgresStore,
    Saga,
    ScaledClock,
    SystemClock,
    handles_timeout,
    started_by,
    wiring,
)
from postdate.backends.sql.migrations import setup_command
from postdate.config import load_settings
from postdate.errors import StoreNotSetUp
from postdate.operations import check_setup, set_up
from postdate.ports import Completion

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

    def grant(self, script: str, statements: int = 3) -> None:
        """Run the statements that the script has as comments, for the role."""
        grants = [line.removeprefix("-- ") for line in script.splitlines() if line.startswith("-- GRANT")]
        assert len(grants) == statements
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


# --- an endpoint with all it can have ----------------------------------------------------------------------------


@dataclass
class PlaceOrder:
    order_id: str


@dataclass
class PaymentDue:
    pass


@dataclass
class OrderState:
    order_id: str


class OrderSaga(Saga[OrderState], correlated_by="order_id"):
    @started_by(PlaceOrder)
    async def place(self, message: PlaceOrder, context: HandlerContext) -> None:
        await context.transaction()
        await self.request_timeout(PaymentDue, within=timedelta(minutes=1))

    @handles_timeout(PaymentDue)
    async def not_paid(self, timeout: PaymentDue, context: HandlerContext) -> None:
        await context.send(b"{}", destination="customers")
        self.complete()


async def runs_in_full(variables: dict[str, str]) -> None:
    """Run an endpoint that creates nothing: a saga, whose timeout is kept by a timeout manager, with an outbox."""
    settings = load_settings(None, variables)
    sagas, outbox, clock = (
        wiring.open_saga_store(settings),
        wiring.open_outbox(settings),
        ScaledClock(SystemClock().now(), speed=100),
    )
    async with wiring.open_deployment(settings, initialize=False) as deployment:
        await check_setup(deployment)
        await set_up(deployment, sagas=True, outbox=True)  # nothing is missing, so nothing has to be created
        endpoint = Endpoint(
            settings.endpoint.name,
            transport=deployment.transport,
            timeout_manager=wiring.timeout_manager(settings, settings.endpoint.name, deployment.timeouts),
            sagas=sagas,
            outbox=Outbox(outbox),
            transaction_mode="receive_only",
            create_queues=False,
            clock=clock,
        )
        endpoint.saga(OrderSaga)
        receiver = deployment.transport.receiver("customers")
        try:
            async with endpoint:
                await endpoint.send(PlaceOrder("1"), destination=endpoint.name)
                (told,) = await receiver.receive(1)
                await receiver.commit(told, clock.now(), Completion(record=None))
        finally:
            await receiver.close()
            await sagas.close()
            await outbox.close()


QUEUES = {"POSTDATE_QUEUES__CREATE": "shop,customers", "POSTDATE_ENDPOINT__NAME": "shop"}


async def test_a_role_without_the_right_to_create_runs_sagas_outbox_and_timeout_manager(place):
    """The timeouts are where a .NET endpoint would have them, in another schema than all else."""
    prefix = f"{place.schema}_"
    variables = {
        **QUEUES,
        "POSTDATE_STORE__ADDRESS": place.url,
        "POSTDATE_STORE__SCHEMA": place.schema,
        "POSTDATE_TIMEOUT_MANAGER__ADDRESS": place.url,
        "POSTDATE_TIMEOUT_MANAGER__TABLE_PREFIX": prefix,
    }
    script = wiring.setup_sql(load_settings(None, variables), sagas=True, outbox=True)
    try:
        for _ in range(2):
            place.run(script)
        place.grant(script, 3 + 3 + 3 + 2)
        await runs_in_full(variables)
    finally:
        place.run(f'DROP TABLE IF EXISTS public."{prefix}TimeoutData"')


async def test_what_is_printed_for_sqlite_makes_all_tables(own_folder):
    """Timeouts in the file of the queues; sagas in that of the outbox, as an endpoint with both needs them."""
    variables = {
        **QUEUES,
        "POSTDATE_TIMEOUT_MANAGER__ADDRESS": "sqlite:///all.db",
        "POSTDATE_OUTBOX__ADDRESS": "sqlite:///shop.db",
        "POSTDATE_SAGAS__ADDRESS": "sqlite:///shop.db",
    }
    settings = load_settings(None, variables)
    script = wiring.setup_sql(settings)
    assert list(own_folder.iterdir()) == []
    everything, of_shop = script.split("-- In sqlite:///shop.db:")
    for name, text in (("all.db", everything), ("shop.db", of_shop)):
        with closing(sqlite3.connect(own_folder / name)) as connection:
            connection.executescript(text)
    queues = wiring.open_transport(settings.transport.address)
    await queues.create_queues(wiring.own_queues(settings, queues.capabilities))  # which are rows, not tables
    await queues.close()
    await runs_in_full(variables)


@pytest.mark.parametrize("server", [None, "place"], ids=["sqlite", "postgres"])
async def test_a_table_that_came_with_a_later_version_is_missed_before_a_service_starts(server, request, own_folder):
    place = None if server is None else request.getfixturevalue(server)
    variables = {}
    if place is not None:
        variables = {"POSTDATE_STORE__ADDRESS": place.admin, "POSTDATE_STORE__SCHEMA": place.schema}
    settings = load_settings(None, variables)
    async with wiring.open_deployment(settings, create=True) as deployment:
        await set_up(deployment)
        await check_setup(deployment)
    if place is not None:
        place.run(f'DROP TABLE "{place.schema}".destination_limit')
    else:
        with closing(sqlite3.connect(own_folder / "postdate.db")) as connection, connection:
            connection.execute("DROP TABLE destination_limit")
    with pytest.raises(StoreNotSetUp, match="postdate setup"):
        async with wiring.open_deployment(settings) as deployment:
            await check_setup(deployment)


def test_setup_makes_what_the_settings_name_and_what_is_asked_for(cli, own_folder):
    (own_folder / "postdate.toml").write_text('[outbox]\naddress = "sqlite:///shop.db"\n')
    done = cli.ok("setup", "--sagas", "--json").json
    assert (done["sagas"], done["outbox"], done["timeouts"]) == ("sqlite:///postdate.db", "sqlite:///shop.db", None)
    for name, table in (("postdate.db", "saga"), ("shop.db", "postdate_outbox")):
        with closing(sqlite3.connect(own_folder / name)) as connection:
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


def test_a_database_that_keeps_no_sagas_is_refused_by_name(cli):
    ran = cli("setup", "--print-sql", "--sagas", "--store", "redis://h/0", "--transport", "amqp://h/")
    assert ran.status == 2
    assert "sagas are kept in SQLite or PostgreSQL or MariaDB or SQL Server; store.address is 'redis://h/0'" in ran.err


def test_a_role_that_may_not_create_the_table_of_timeouts_is_told_which_setting_leads_there(
    cli, place, monkeypatch, rabbitmq_url
):
    monkeypatch.setenv("POSTDATE_ENDPOINT__NAME", place.schema)
    monkeypatch.setenv("POSTDATE_DELAYED_DELIVERY__ENABLED", "false")
    monkeypatch.setenv("POSTDATE_TRANSPORT__ADDRESS", rabbitmq_url)
    monkeypatch.setenv("POSTDATE_TIMEOUT_MANAGER__ADDRESS", place.url)
    monkeypatch.setenv("POSTDATE_TIMEOUT_MANAGER__SCHEMA", place.schema)
    for command in ("setup", "run"):
        ran = cli(command)
        assert ran.status != 0
        assert "(timeout_manager.address, environment POSTDATE_TIMEOUT_MANAGER__ADDRESS): the server runs" in ran.err
        assert "postdate setup --print-sql" in ran.err


def test_a_migration_runs_the_script_in_a_transaction_of_its_own(postgres_url: str) -> None:
    """That of Django or Alembic: what it rolls back is gone, and what it commits is complete."""
    schema = f"script_{uuid.uuid4().hex[:8]}"
    options = {"store.address": postgres_url, "store.schema": schema, "timeout_manager.address": postgres_url}
    settings = load_settings(None, {}, {**options, "timeout_manager.schema": schema})
    script = wiring.setup_sql(settings, ["orders"], sagas=True, outbox=True, in_transaction=False)
    with psycopg.connect(postgres_url) as connection:
        connection.execute(script.encode())
        connection.rollback()
        assert connection.execute("SELECT to_regnamespace(%s)", (schema,)).fetchone() == (None,)
        connection.execute(script.encode())
        assert connection.info.transaction_status is psycopg.pq.TransactionStatus.INTRANS
        connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
        connection.commit()


def test_only_a_script_can_be_without_a_transaction(cli) -> None:
    refused = cli("setup", "--no-transaction")
    assert refused.status == 2
    assert "--no-transaction changes the text of --print-sql: give both, or none" in refused.err
