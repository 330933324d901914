"""From where delayed messages move: timeout managers' storage, and Postdate's own stores, as sources of a migration.

Source: specification 4.12; ADR 0015.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from postdate.config import Address, check_server, resolved
from postdate.errors import ConfigurationError
from postdate.migrating.tables import TimeoutTables
from postdate.ports.migrating import MigrationSource

if TYPE_CHECKING:
    from postdate.migrating.dialect import Dialect
    from postdate.migrating.store_dialect import StoreDialect
    from postdate.migrating.store_tables import StoreTables

__all__ = ["TimeoutTables", "migration_source", "store_source"]

_SCHEMES = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mariadb": "mariadb",
    "mysql": "mariadb",
    "mssql": "mssql",
    "sqlserver": "mssql",
    "sqlite": "sqlite",
}
_EXTRAS = {"postgresql": "postgres", "mariadb": "mariadb", "mssql": "sqlserver"}


def migration_source(
    address: str, *, schema: str | None = None, prefixes: Mapping[str, str] | None = None
) -> MigrationSource:
    """Return the tables of a timeout manager as a source; it connects at first use.

    Args:
        address: ``sqlite:///file.db``, ``postgresql://user@host:port/database``, ``mariadb://…`` or ``mssql://…``; or
            ``env:NAME`` or ``file:PATH``, where one of these stands.
        schema: of the tables, which a migration's own are made in, too; ``None``: what upstream takes: ``public``,
            ``dbo``, or the database of a MariaDB address. SQLite has none.
        prefixes: by endpoint, the prefix of those tables that are not named after their endpoint: the others are found
            by themselves (:func:`postdate.timeouts.layout.table_name`).

    Raises:
        ConfigurationError: there is no such source, or its driver is not installed. Texts have no passwords.
    """
    place = resolved(address, os.environ)
    scheme = _SCHEMES.get(place.scheme)
    if scheme is None:
        raise ConfigurationError(
            f"no migration can be made from {place!r}; it can from sqlite:, postgresql:, mariadb: and mssql: addresses"
        )
    return TimeoutTables(_sqlite(place, schema) if scheme == "sqlite" else _server(scheme, place, schema), prefixes)


def store_source(address: str, *, schema: str | None = None) -> StoreTables:
    """Return the Postdate stores of a database as a source; it connects at first use.

    Args:
        address: ``sqlite:///file.db``, ``postgresql://user@host:port/database`` or ``mariadb://…``; or ``env:NAME`` or
            ``file:PATH``, where one of these stands.
        schema: of the stores, which a migration's own tables are made in, too; ``None``: ``postdate``, or the database
            of a MariaDB address. SQLite has none.

    Raises:
        ConfigurationError: messages cannot be moved out of such a store, or its driver is not installed. Texts have no
            passwords.
    """
    from postdate.migrating.store_tables import StoreTables

    place = resolved(address, os.environ)
    scheme = _SCHEMES.get(place.scheme)
    if scheme is None or scheme == "mssql":
        raise ConfigurationError(
            f"no migration can be made from the store {place!r}; it can from stores in sqlite:, postgresql: and "
            f"mariadb: addresses"
        )
    dialect = _sqlite_store(place, schema) if scheme == "sqlite" else _server_store(scheme, place, schema)
    return StoreTables(dialect)


def _sqlite(place: Address, schema: str | None) -> Dialect:
    from postdate.migrating.sqlite import SqliteDialect

    return SqliteDialect(_file(place, schema))


def _sqlite_store(place: Address, schema: str | None) -> StoreDialect:
    from postdate.migrating.store_sqlite import SqliteStoreDialect

    return SqliteStoreDialect(_file(place, schema))


def _file(place: Address, schema: str | None) -> Path:
    _, _, rest = place.partition(":")
    if not rest.startswith("///") or len(rest) < 4:
        raise ConfigurationError(f"{place!r} names no file; write three slashes and the path: sqlite:///file.db")
    if schema is not None:
        raise ConfigurationError("SQLite has no schemas: leave schema out")
    return Path(rest[3:])


def _server(scheme: str, place: Address, schema: str | None) -> Dialect:
    url = _url(scheme, place)
    with _driver_installed(scheme):
        match scheme:
            case "postgresql":
                from postdate.migrating.postgres import PostgresDialect

                return PostgresDialect(url, schema)
            case "mariadb":
                from postdate.migrating.mariadb import MariaDbDialect

                return MariaDbDialect(url, schema)
            case _:
                from postdate.migrating.sqlserver import SqlServerDialect

                return SqlServerDialect(url, schema)


def _server_store(scheme: str, place: Address, schema: str | None) -> StoreDialect:
    url = _url(scheme, place)
    with _driver_installed(scheme):
        if scheme == "postgresql":
            from postdate.migrating.store_postgres import PostgresStoreDialect

            return PostgresStoreDialect(url, schema)
        from postdate.migrating.store_mariadb import MariaDbStoreDialect

        return MariaDbStoreDialect(url, schema)


def _url(scheme: str, place: Address) -> str:
    if "://" not in place:
        raise ConfigurationError(f"{place!r} names no server; write it as {scheme}://user@host/database")
    check_server(place)
    return f"{scheme}:{place.partition(':')[2]}"


@contextmanager
def _driver_installed(scheme: str) -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{scheme}: needs the driver {error.name!r}, which is not installed: "
            f"pip install 'postdate[{_EXTRAS[scheme]}]'"
        ) from error
