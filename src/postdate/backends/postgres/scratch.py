"""A place for ``postdate bench`` on PostgreSQL: a schema."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import psycopg

from postdate.backends.postgres.errors import translate
from postdate.backends.postgres.names import sql
from postdate.backends.postgres.sessions import address_of
from postdate.errors import ConfigurationError
from postdate.ports.backends import Scratch

_CONNECTS_WITHIN_SECONDS: Final = 5


@contextmanager
def scratch(address: str, run: str, queues: Sequence[str]) -> Generator[Scratch]:
    """Yield a schema of the run, in which store and queues have their tables; drop it afterwards."""
    del queues  # Queues need no preparation: they are rows of tables in the schema.
    schema = f"postdate_bench_{run}"
    _execute(address, f"CREATE SCHEMA {schema}")
    try:
        yield Scratch(address, {"schema": schema})
    finally:
        _execute(address, f"DROP SCHEMA {schema} CASCADE")


def _execute(address: str, statement: str) -> None:
    where = address_of(address).shown
    try:
        # A new connection for each statement, because the one that created the schema may have ended during the run.
        with psycopg.connect(address, autocommit=True, connect_timeout=_CONNECTS_WITHIN_SECONDS) as connection:
            connection.execute(sql(statement))
    except psycopg.OperationalError as error:
        raise translate(error, where) from error
    except psycopg.Error as error:  # Mostly the user has no right to create schemas.
        raise ConfigurationError(f"{where} refuses {statement}: {error}") from error
