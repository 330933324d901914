"""Fixtures for tests that need real servers: the ones that ``make services-up`` starts, and room for private ones."""

import json
import os
import socket
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from .machine import folder_for_servers  # noqa: TID252 - as in servers.py

URLS = Path(__file__).resolve().parent.parent / ".services" / "urls.json"


@pytest.fixture(scope="session")
def postgres_url() -> Generator[str]:
    """Make a database on POSTDATE_POSTGRES_URL, or on the server of ``make services-up``; return its address.

    Workers have one each: tests look at the sessions and locks of their database, and end some of them.
    """
    server, name = _url("postgres", "POSTDATE_POSTGRES_URL"), f"tests_{os.getpid()}"
    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(drop)  # of a process that had this number and was killed
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    yield urlsplit(server)._replace(path=f"/{name}").geturl()
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(drop)


@pytest.fixture(scope="session")
def pgbouncer_url(postgres_url: str) -> str:
    """Return the address of the same database through a pooler: POSTDATE_PGBOUNCER_URL, or ``make services-up``'s."""
    pooler = _url("pgbouncer", "POSTDATE_PGBOUNCER_URL")
    return urlsplit(pooler)._replace(path=urlsplit(postgres_url).path).geturl()


@pytest.fixture(scope="session")
def mariadb_url() -> str:
    """Return where MariaDB is: POSTDATE_MARIADB_URL, or the server of ``make services-up``."""
    return _url("mariadb", "POSTDATE_MARIADB_URL")


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """Return where RabbitMQ is: POSTDATE_RABBITMQ_URL, or the server of ``make services-up``."""
    return _url("rabbitmq", "POSTDATE_RABBITMQ_URL")


@pytest.fixture(scope="session")
def redis_url() -> str:
    """Return where Redis is: POSTDATE_REDIS_URL, or the server of ``make services-up``."""
    return _url("redis", "POSTDATE_REDIS_URL")


@pytest.fixture(scope="session")
def azurite_connection() -> str:
    """Return the connection string of POSTDATE_AZURITE_CONNECTION, or of the Azurite of ``make services-up``."""
    variable = "POSTDATE_AZURITE_CONNECTION"
    connection = os.environ.get(variable) or _started("azurite", variable)
    settings = dict(part.split("=", 1) for part in connection.strip(";").split(";"))
    _expect_an_answer(settings["QueueEndpoint"])
    return connection


@pytest.fixture
def server_folder() -> Generator[Path]:
    """Make a directory for private servers; their accounts cannot reach ``tmp_path``."""
    with folder_for_servers() as folder:
        yield folder


def _url(key: str, variable: str) -> str:
    url = os.environ.get(variable) or _started(key, variable)
    _expect_an_answer(url)
    return url


def _expect_an_answer(url: str) -> None:
    where = urlsplit(url)
    try:
        socket.create_connection((where.hostname or "", where.port or 0), timeout=5).close()
    except OSError as error:
        pytest.fail(f"nobody answers at {where.hostname}:{where.port} ({error}): run `make services-up`", pytrace=False)


def _started(key: str, variable: str) -> str:
    try:
        return json.loads(URLS.read_text(encoding="utf-8"))["plain"][key]
    except (OSError, ValueError, KeyError):
        pytest.fail(f"this test needs {key}: run `make services-up`, or set {variable}", pytrace=False)
