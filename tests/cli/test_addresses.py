"""Addresses: which adapter they mean, where they stand, and what is said when they cannot be."""

import logging
import pickle
import subprocess
import sys

import pytest

from postdate import Sqlite, SqliteOutbox, SqliteStore
from postdate.cli.command import log_to_stderr
from postdate.config import Address, load_settings, redact_secrets
from postdate.errors import ConfigurationError
from postdate.pipeline.stores import StoreSpec
from postdate.ports import Recording
from postdate.wiring import check_store, check_transport, open_store, open_transport, setup_sql

POSTGRES = "postgresql://me:s3cret@host/db"


def secret_in(text: str) -> bool:
    return "s3cret" in text


# --- references -----------------------------------------------------------------------------------------------------


def test_an_address_may_stand_in_a_variable_of_its_own(own_folder):
    (own_folder / "postdate.toml").write_text('[store]\naddress = "env:DATABASE"\n')
    settings = load_settings(None, {"DATABASE": POSTGRES})
    address = settings.store.address
    assert (address, address.reference) == (POSTGRES, "env:DATABASE")
    assert settings.origins["store.address"] == "env:DATABASE, postdate.toml:2"
    assert not secret_in(repr(settings))
    assert not any(secret_in(str(row)) for row in settings.rows())


def test_an_address_may_stand_in_the_first_line_of_a_file(own_folder):
    (own_folder / "secret").write_text(f"{POSTGRES}\n")
    settings = load_settings(None, {"POSTDATE_STORE__ADDRESS": "file:secret"})
    assert settings.store.address == POSTGRES
    assert settings.origins["store.address"] == "file:secret, environment POSTDATE_STORE__ADDRESS"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("env:NOWHERE", "the environment variable 'NOWHERE', which is not set"),
        ("env:EMPTY", "the environment variable 'EMPTY', which is not set"),
        ("env:CIRCLE", "refers to another reference"),
        ("file:nowhere", "file:nowhere cannot be read: No such file"),
        ("file:empty", "names a file that is empty"),
        ("file:binary", "it is not UTF-8 text"),
    ],
)
def test_a_reference_that_leads_nowhere_is_an_error_that_says_so(own_folder, reference, said):
    (own_folder / "empty").write_text("")
    (own_folder / "binary").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError) as caught:
        load_settings(None, {"EMPTY": " ", "CIRCLE": "env:CIRCLE"}, {"store.address": reference})
    assert said in str(caught.value)
    assert "store.address (option --store)" in str(caught.value)


# --- one database ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "store", "transport"),
    [
        ({"store.address": POSTGRES}, POSTGRES, POSTGRES),
        ({"transport.address": POSTGRES}, POSTGRES, POSTGRES),
        ({"transport.address": "amqp://host"}, "sqlite:///postdate.db", "amqp://host"),
        ({"store.address": POSTGRES, "transport.address": "amqp://host"}, POSTGRES, "amqp://host"),
        ({"store.address": "env:DATABASE"}, POSTGRES, POSTGRES),
    ],
)
def test_store_and_queues_share_a_database_unless_told_otherwise(given, store, transport):
    settings = load_settings(None, {"DATABASE": POSTGRES}, given)
    assert (settings.store.address, settings.transport.address) == (store, transport)


def test_in_one_database_they_share_the_schema_too():
    settings = load_settings(None, {}, {"store.address": POSTGRES, "store.schema": "shop"})
    assert settings.transport.schema == "shop"
    assert settings.origins["transport.schema"] == "as store.schema, option --store"
    apart = load_settings(None, {}, {"store.address": POSTGRES, "store.schema": "shop", "transport.schema": "queues"})
    assert apart.transport.schema == "queues"


# --- which adapter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "product"),
    [
        ("sqlite:///a.db", "SQLite"),
        ("postgresql://host/db", "PostgreSQL"),
        ("postgres://host/db", "PostgreSQL"),
        ("PostgreSQL://host/db", "PostgreSQL"),
        ("mariadb://host/db", "MariaDB"),
        ("mysql://host/db", "MariaDB"),
        ("mssql://host/db", "SQL Server"),
        ("sqlserver://host/db", "SQL Server"),
        ("memory:", "memory"),
    ],
)
def test_the_scheme_says_which_store_is_meant(address, product):
    assert check_store(address).product == product


@pytest.mark.parametrize(
    ("address", "product"),
    [
        ("local:///a.db", "SQLite"),
        ("sqlite:///a.db", "SQLite"),
        ("postgres://host/db", "PostgreSQL"),
        ("amqp://host/vhost", "RabbitMQ"),
        ("amqps://host/vhost", "RabbitMQ"),
        ("memory:", "memory"),
    ],
)
def test_the_scheme_says_which_transport_is_meant(address, product):
    assert check_transport(address).product == product


@pytest.mark.parametrize(
    ("check", "address", "said"),
    [
        (check_store, "postgre://host/db", "did you mean postgresql://user@host/database?"),
        (check_store, "mysq://host/db", "did you mean mariadb://user@host/database?"),
        (
            check_store,
            "oracle:x",
            "there are sqlite:, postgresql:, mariadb:, mssql:, azure-table:, redis:, rediss:, memory:",
        ),
        (check_store, "mariadb:db", "names no server; write it as mariadb://user@host/database"),
        (check_store, "sqlite:a.db", "write three slashes and the path: sqlite:///file.db"),
        (check_transport, "amqpp://host", "did you mean amqp"),
        (check_transport, "mariadb://host/db", "no transport has the address 'mariadb://host/db'"),
    ],
)
def test_an_address_of_nothing_is_an_error_that_says_what_may_have_been_meant(check, address, said):
    with pytest.raises(ConfigurationError) as caught:
        check(address)
    assert said in str(caught.value)


def test_a_setting_that_a_store_does_not_have_is_refused(cli, own_folder):
    (own_folder / "postdate.toml").write_text('[store]\nschema = "shop"\n')
    ran = cli("messages", "list")
    assert ran.status == 2
    assert "store.schema (postdate.toml:2) is not for SQLite, which takes store.synchronous, store.rec" in ran.err
    with pytest.raises(
        ConfigurationError,
        match=r"SQLite takes no schema; it takes create, holds_at_most, largest_message_bytes",
    ):
        open_store("sqlite:///a.db", schema="shop")
    with pytest.raises(ConfigurationError, match=r"recording must be one of all, outcomes, not 'none'"):
        open_store("sqlite:///a.db", recording="none")
    with pytest.raises(ConfigurationError, match="memory takes no queue_type"):
        open_transport("memory:", queue_type="quorum")


def without_drivers(script: str, *drivers: str) -> subprocess.CompletedProcess[str]:
    """Run it where the drivers are not installed: in a process of its own, since who loads modules again leaves tests
    that come later with two of each."""
    missing = f"import sys; sys.modules.update(dict.fromkeys({drivers!r})); "
    return subprocess.run([sys.executable, "-c", missing + script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("address", "driver", "extra"), [(POSTGRES, "psycopg", "postgres"), ("mariadb://me@host/db", "pymysql", "mariadb")]
)
def test_a_driver_that_is_not_installed_is_named_with_the_way_to_install_it(address, driver, extra):
    ended = without_drivers(f"from postdate.wiring import open_store; open_store({address!r})", driver)
    assert "ConfigurationError" in ended.stderr
    assert f"'{driver}', which is not installed: pip install 'postdate[{extra}]'" in ended.stderr


def test_opening_a_file_loads_no_driver_of_a_server(own_folder):
    script = "from postdate.cli.entry import run; sys.exit(run(['setup']))"
    ended = without_drivers(script, "psycopg", "pymysql", "pytds", "pika")
    assert ended.returncode == 0, ended.stderr


# --- secrets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"connection to {POSTGRES} failed",
        f"could not reach '{POSTGRES}', giving up",
        "cannot log in: host=a password=s3cret user=b",
        "amqp://me:x@y/s3cret@host:1/",
    ],
)
def test_the_words_of_a_driver_lose_their_secrets(text):
    assert not secret_in(redact_secrets(text))


def test_what_is_no_secret_stays():
    for text in ("at 12:30 me@host said a://b", "amqp://host:5672/", "queue 'a:b@c'"):
        assert redact_secrets(text) == text


def test_errors_and_tracebacks_show_no_password(cli, monkeypatch):
    def fault(*_: object) -> None:
        raise ValueError(f"bad address {POSTGRES}")

    monkeypatch.setattr("postdate.operations.statistics", fault)
    cli.ok("setup")
    ran = cli("messages", "stats")
    assert ran.status == 70
    assert not secret_in(ran.err)
    assert "postgresql://me:***@host/db" in ran.err


def test_logs_show_no_password_and_logging_is_afterwards_as_it_was(capsys):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    with log_to_stderr("INFO"):
        logging.getLogger("driver").warning("no answer from %s", POSTGRES)
    assert "postgresql://me:***@host/db" in capsys.readouterr().err
    assert (root.handlers, root.level) == (before, level)


def test_drivers_are_heard_of_when_they_warn_and_not_before(capsys):
    """One logs every statement at INFO: 2,746 of the 2,748 lines of a service were its own."""
    with log_to_stderr("INFO"):
        logging.getLogger("pytds").info("Sending RPC")
        logging.getLogger("pytds").warning("something is wrong")
        logging.getLogger("postdate.stores").info("messages are free again")
    said = capsys.readouterr().err
    assert "Sending RPC" not in said
    assert "something is wrong" in said
    assert "messages are free again" in said
    with log_to_stderr("DEBUG"):
        logging.getLogger("pytds").info("Sending RPC")
    assert "Sending RPC" in capsys.readouterr().err
    with log_to_stderr("ERROR"):
        logging.getLogger("pytds").warning("something is wrong")
        logging.getLogger("postdate.stores").warning("lost the connection")
    assert not capsys.readouterr().err


def test_an_address_keeps_where_it_came_from_when_it_travels():
    address = pickle.loads(pickle.dumps(Address(POSTGRES, "env:DATABASE")))
    assert (address, address.reference) == (POSTGRES, "env:DATABASE")


# --- for Spark ------------------------------------------------------------------------------------------------------


def test_a_spec_carries_the_reference_and_not_the_secret(own_folder):
    (own_folder / "postdate.toml").write_text(
        '[endpoint]\nname = "billing"\n'
        '[store]\naddress = "env:DATABASE"\nschema = "shop"\ntable = "later"\nrecording = "outcomes"\n'
    )
    spec = StoreSpec.of(load_settings(None, {"DATABASE": POSTGRES}))
    assert not secret_in(repr(spec))
    assert b"s3cret" not in pickle.dumps(spec)
    assert (spec.address, spec.schema, spec.table, spec.endpoint) == ("env:DATABASE", "shop", "later", "billing")
    assert spec.recording == Recording.OUTCOMES.value
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_spec_follows_its_reference_where_it_is_opened(own_folder, monkeypatch):
    spec = StoreSpec("env:DATABASE")
    with pytest.raises(ConfigurationError, match="'DATABASE', which is not set here"):
        spec.open(create=False)
    monkeypatch.setenv("DATABASE", f"sqlite:///{own_folder}/a.db")
    store = spec.open(create=True)
    assert isinstance(store, SqliteStore)
    store.file.close()


def test_a_spec_hides_a_password_that_it_was_given():
    assert not secret_in(repr(StoreSpec(POSTGRES)))
    assert StoreSpec(POSTGRES).redacted_address == "postgresql://me:***@host/db"


# --- SQL for an administrator ---------------------------------------------------------------------------------------


def test_the_sql_of_a_file_is_printed_without_making_it(cli, own_folder):
    assert "CREATE TABLE delayed_message" in cli.ok("setup", "--print-sql").out
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize("scheme", ["postgresql", "mariadb", "mysql", "mssql", "sqlserver"])
def test_the_sql_of_a_server_is_printed_without_reaching_it(scheme):
    nobody = f"{scheme}://me:s3cret@nobody.invalid/db"
    settings = load_settings(None, {}, {"store.address": nobody, "transport.address": "amqp://nobody.invalid/"})
    script = setup_sql(settings)
    assert "CREATE TABLE" in script
    assert "postdate.timeouts" in script
    assert not secret_in(script)


def test_queues_in_the_store_s_schema_are_set_up_once_and_others_beside_it():
    nobody = "postgresql://nobody.invalid/db"
    together = setup_sql(load_settings(None, {}, {"store.address": nobody}))
    apart = setup_sql(load_settings(None, {}, {"store.address": nobody, "transport.schema": "queues"}))
    assert together.count(".queue (\n") == 1
    assert '"queues".queue (\n' in apart
    for script in (together, apart):
        assert "VALUES ('postdate.timeouts'), ('error') ON CONFLICT (name) DO NOTHING" in script
        assert "-- GRANT USAGE ON SCHEMA" in script


def test_where_no_sql_is_needed_that_is_said(cli):
    ran = cli("setup", "--print-sql", "--store", "memory:", "--transport", "memory:")
    assert ran.status == 2
    assert "'memory:' needs no SQL" in ran.err


# --- a pooler in between --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["setup"], ["run"], ["send", "q", "x", "--delay", "1h"]])
def test_a_pooler_is_refused_in_one_sentence_that_names_the_setting(cli, pgbouncer_url, command):
    refused = cli(*command, "--store", pgbouncer_url)
    assert refused.status == 2
    (said,) = [line for line in refused.err.splitlines() if "error [" in line]
    assert "a pooler such as pgbouncer answers there" in said
    assert "name host and port of PostgreSQL itself (store.address, option --store)" in said


def test_doctor_tells_a_pooler(cli, pgbouncer_url):
    ran = cli("doctor", "--store", pgbouncer_url)
    assert ran.status == 1
    assert "a pooler such as pgbouncer answers there" in ran.out


# --- databases that are none, and addresses of other libraries -------------------------------------------------------


@pytest.mark.parametrize("address", ["sqlite:///:memory:", "local:///:memory:"])
def test_a_database_in_memory_is_no_file_of_that_name(own_folder, address):
    check = check_store if address.startswith("sqlite") else check_transport
    with pytest.raises(ConfigurationError, match="not a database in memory; write memory: for a store and queues"):
        check(Address(address))
    for kind in (SqliteStore, Sqlite, SqliteOutbox):
        with pytest.raises(ConfigurationError, match="cannot be shared by connections: use Memory, MemoryStore"):
            kind(":memory:")
    assert list(own_folder.iterdir()) == []


def test_an_address_of_sqlalchemy_is_understood_well_enough_to_correct_it():
    with pytest.raises(ConfigurationError, match=r"did you mean mariadb://user@host/database\?"):
        check_store(Address("mysql+pymysql://user@host/database"))
