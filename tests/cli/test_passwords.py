"""Passwords that are not escaped: refused before a driver takes them apart, and shown nowhere."""

import pytest

from postdate.config import Address, check_server, load_settings
from postdate.errors import ConfigurationError
from postdate.wiring import check_store, check_transport

SCHEMES = ["postgresql", "postgres", "PostgreSQL", "mariadb", "mysql", "mssql", "sqlserver", "amqp", "amqps"]
AMBIGUOUS = [
    "postdate:p/s3cret@h/db",
    "postdate:p@s3cret@h/db",
    "postdate:p#s3cret@h/db",
    "postdate:s3cret#p@h/db",
    "postdate:p?s3cret@h/db",
    "postdate:p%s3cret@h/db",
    "postdate:p s3cret@h/db",
    "postdate:s3cret/db",
    "postdate@h:s3cret/db",
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rest", AMBIGUOUS)
def test_an_address_that_can_be_taken_apart_in_two_ways_is_refused_and_not_shown(cli, scheme, rest):
    address = f"{scheme}://{rest}"
    assert "s3cret" not in Address(address).redacted_text
    with pytest.raises(ConfigurationError, match="/ as %2F, @ as %40, # as %23") as caught:
        check_server(address)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--store", "postgresql://postdate:p/s3cret@h/db"),
        ("--store", "mariadb://postdate:p/s3cret@h/db", "--transport", "amqp://h/"),
        ("--store", "mssql://postdate:p#s3cret@h/db", "--transport", "amqp://h/"),
        ("--store", "sqlite:///a.db", "--transport", "amqp://postdate:p/s3cret@h/"),
        ("--store", "postdate:s3cret@h/db"),
        ("--store", "file:first"),
        ("--store", "file:second"),
        ("--store", "file:third"),
    ],
)
@pytest.mark.parametrize("command", [("messages", "list"), ("doctor",), ("setup",), ("setup", "--print-sql")])
def test_no_command_prints_a_piece_of_a_password(cli, own_folder, command, arguments):
    (own_folder / "first").write_text("s3cret")
    (own_folder / "second").write_text("s3cret:s3cret")
    (own_folder / "third").write_text("oracle://me:pass/s3cret")
    ran = cli(*command, *arguments)
    assert ran.status in {1, 2}, ran
    assert "s3cret" not in ran.out + ran.err
    assert [path.name for path in own_folder.iterdir() if path.suffix == ".db"] == []


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:p%2F%40%23@host:5432/db?sslmode=require",
        "postgresql://me@one:1,two:2/db",
        "postgresql:///db?host=/run/postgresql",
        "postgresql://me:a:b@[::1]:5432/db",
        "mariadb://me@host/db?ssl_ca=/etc/ca.pem",
        "amqp://me@host/%2F",
        "sqlite:////tmp/a@b#c.db",
    ],
)
def test_what_can_be_taken_apart_in_one_way_passes(address):
    check_server(address)


def test_a_scheme_is_read_in_any_case():
    settings = load_settings(None, {}, {"store.address": "PostgreSQL://host/db"})
    assert settings.transport.address == "postgresql://host/db"
    assert check_store("MariaDB://host/db").product == "MariaDB"
    assert check_transport("AMQP://host/").product == "RabbitMQ"


def test_where_one_is_a_server_the_other_is_never_a_file_that_nobody_named(cli, own_folder):
    for option, said in (
        (("--store", "MSSQL://host/db"), "say where they are with transport.address"),
        (("--transport", "AMQP://host/"), "say where they wait with store.address"),
    ):
        ran = cli("setup", *option)
        assert (ran.status, ran.out) == (2, "")
        assert said in ran.err
    assert list(own_folder.iterdir()) == []


def test_drivers_tell_no_password_that_they_were_given(cli, mariadb_url, rabbitmq_url):
    """With characters that had to be escaped."""
    for option, url, other in (
        ("--store", mariadb_url, ("--transport", rabbitmq_url)),
        ("--transport", rabbitmq_url, ("--store", "sqlite:///a.db")),
    ):
        scheme, place = url.partition("://")[0], url.rpartition("@")[2]
        ran = cli("setup", option, f"{scheme}://nobody:s3%2Fcr%40et%23%25@{place}", *other)
        assert ran.status == 3, ran
        for piece in ("s3/cr", "s3%2F", "cr@et", "et#"):
            assert piece not in ran.out + ran.err
