"""A client whose store is named by a function: tests of an application store into their own database, not into that
of development."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg
import pytest

import postdate
from postdate.client.django import _url_of
from postdate.errors import ConfigurationError


def stored(file: Path) -> list[str]:
    if not file.exists():
        return []
    with closing(sqlite3.connect(file)) as connection:
        return [id_ for (id_,) in connection.execute("SELECT message_id FROM delayed_message ORDER BY message_id")]


async def test_the_address_is_asked_for_at_each_use(tmp_path: Path) -> None:
    files = [tmp_path / "development.db", tmp_path / "test.db"]
    used = files[0]
    client = postdate.connect(lambda: f"sqlite:///{used}", endpoint="mails")
    await client.send(b"", destination="mails", message_id="m-0")
    used = files[1]
    await client.send(b"", destination="mails", message_id="m-1")
    client.blocking.send(b"", destination="mails", message_id="m-2")
    assert (await client.explain("m-0")).state.value == "unknown"
    used = files[0]
    assert [each.message_id for each in client.blocking.list()] == ["m-0"]
    await client.close()
    assert [stored(file) for file in files] == [["m-0"], ["m-1", "m-2"]]


async def test_an_address_that_cannot_be_is_told_at_its_use(tmp_path: Path) -> None:
    client = postdate.connect(lambda: "postgres+psycopg://nobody@127.0.0.1/none")
    with pytest.raises(ConfigurationError, match="an argument of connect"):
        await client.send(b"", destination="mails")


DJANGO = """
import os, sys
import django
from django.conf import settings

settings.configure(DATABASES={"default": eval(os.environ["DATABASE"])})
import postdate
from postdate.client.django import database_url

reminders = postdate.connect(database_url(), endpoint="mails").blocking  # as a module does it when it is imported
django.setup()
from django.db import connection, transaction
from django.test.utils import setup_databases, teardown_databases

if sys.argv[1] == "test":
    created = setup_databases(verbosity=0, interactive=False)
with transaction.atomic():
    joined = {} if connection.vendor == "sqlite" else {"transaction": connection}
    if joined:
        reminders.send(b"", destination="mails", message_id="in-a-transaction", transaction=connection)
reminders.send(b"", destination="mails", message_id=sys.argv[1])
print(*sorted(each.message_id for each in reminders.list()))
reminders.close()
if sys.argv[1] == "test":
    connection.close()
    teardown_databases(created, verbosity=0)
"""


def run_django(mode: str, database: Mapping[str, object]) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", DJANGO, mode],
        env={**os.environ, "DATABASE": repr(database)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_test_of_django_stores_nothing_in_the_database_of_development(tmp_path: Path) -> None:
    files = [tmp_path / "development.sqlite3", tmp_path / "test.sqlite3"]
    database = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(files[0]),
        "TEST": {"NAME": str(files[1])},
    }
    assert run_django("test", database) == "test\n"
    assert stored(files[0]) == []
    assert run_django("development", database) == "development\n"
    assert stored(files[0]) == ["development"]


def test_a_test_of_django_stores_nothing_in_the_database_of_development_on_a_server(postgres_url: str) -> None:
    where, name = urlsplit(postgres_url), f"django_{os.getpid()}"
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": unquote(where.username or ""),
        "PASSWORD": unquote(where.password or ""),
        "HOST": where.hostname,
        "PORT": where.port,
    }
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
        try:
            assert run_django("test", database) == "in-a-transaction test\n"
            with psycopg.connect(where._replace(path=f"/{name}").geturl()) as development:
                assert development.execute("SELECT to_regnamespace('postdate')").fetchone() == (None,)
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


@pytest.mark.parametrize(
    ("database", "url"),
    [
        ({"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}, "postgresql:///shop"),
        (
            {"ENGINE": "django.contrib.gis.db.backends.postgis", "NAME": "a b", "USER": "ü@", "PASSWORD": "p/:"},
            "postgresql://%C3%BC%40:p%2F%3A@/a%20b",
        ),
        (
            {"ENGINE": "django.db.backends.mysql", "NAME": "shop", "USER": "me", "HOST": "db", "PORT": 3307},
            "mariadb://me@db:3307/shop",
        ),
        (
            {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", "HOST": "/run/postgresql", "PORT": ""},
            "postgresql:///shop?host=%2Frun%2Fpostgresql",
        ),
        (
            {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": "shop",
                "HOST": "::1",
                "PORT": 5433,
                "OPTIONS": {
                    "sslmode": "verify-full",
                    "sslrootcert": "/etc/a b.crt",
                    "pool": True,
                    "isolation_level": 2,
                },
            },
            "postgresql://[::1]:5433/shop?sslmode=verify-full&sslrootcert=%2Fetc%2Fa%20b.crt",
        ),
        (
            {"ENGINE": "django.db.backends.postgresql", "NAME": None, "OPTIONS": {"service": "shop"}},
            "postgresql:///?service=shop",
        ),
        (
            {
                "ENGINE": "django.db.backends.mysql",
                "NAME": "shop",
                "HOST": "db",
                "OPTIONS": {"charset": "utf8mb4", "ssl": {"ca": "/etc/ca.pem"}},
            },
            "mariadb://db/shop?ssl=true&ssl_ca=%2Fetc%2Fca.pem",
        ),
        (
            {"ENGINE": "django.db.backends.mysql", "NAME": "shop", "HOST": "db", "OPTIONS": {"ssl_mode": "REQUIRED"}},
            "mariadb://db/shop?ssl=true",
        ),
    ],
)
def test_the_settings_of_a_database_become_its_address(database: dict[str, object], url: str) -> None:
    assert _url_of("default", database) == url


@pytest.mark.parametrize(
    ("database", "text"),
    [
        ({"ENGINE": "django.db.backends.oracle", "NAME": "shop"}, "has the engine django.db.backends.oracle"),
        ({"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}, "is in memory"),
        ({"ENGINE": "django.db.backends.mysql", "NAME": "shop", "HOST": "/run/mysqld.sock"}, "HOST is a socket"),
        (
            {"ENGINE": "django.db.backends.mysql", "NAME": "shop", "OPTIONS": {"read_default_file": "/etc/my.cnf"}},
            "OPTIONS has 'read_default_file'",
        ),
        (
            {"ENGINE": "django.db.backends.mysql", "NAME": "shop", "OPTIONS": {"ssl": {"ca": "a", "cipher": "b"}}},
            "OPTIONS\\['ssl'\\] has 'cipher'",
        ),
        ({"ENGINE": "django.db.backends.sqlite3", "NAME": "file:memorydb_default?mode=memory&cache=shared"}, "TEST"),
    ],
)
def test_a_database_without_a_store_is_refused(database: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        _url_of("default", database)
