"""What the tests of several pages need."""

import os
from collections.abc import Iterator

import psycopg
import pytest


@pytest.fixture
def empty_database(postgres_url: str) -> Iterator[str]:
    """Make a database in PostgreSQL that has nothing in it; return its address."""
    name = f"docs_{os.getpid()}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        yield postgres_url.rpartition("/")[0] + f"/{name}"
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
