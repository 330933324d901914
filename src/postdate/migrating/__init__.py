"""From where delayed messages move: storage of timeout managers as sources of a migration.

Source: specification 4.12; ADR 0015.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from postdate.config import Address, check_server, resolved
from postdate.errors import ConfigurationError
from postdate.migrating.tables import TimeoutTables
from postdate.ports.migrating import MigrationSource

if TYPE_CHECKING:
    from postdate.migrating.dialect import Dialect

__all__ = ["TimeoutTables", "migration_source"]

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


def _sqlite(place: Address, schema: str | None) -> Dialect:
    from postdate.migrating.sqlite import SqliteDialect

    _, _, rest = place.partition(":")
    if not rest.startswith("///") or len(rest) < 4:
        raise ConfigurationError(f"{place!r} names no file; write three slashes and the path: sqlite:///file.db")
    if schema is not None:
        raise ConfigurationError("SQLite has no schemas: leave schema out")
    return SqliteDialect(Path(rest[3:]))


def _server(scheme: str, place: Address, schema: str | None) -> Dialect:
    if "://" not in place:
        raise ConfigurationError(f"{place!r} names no server; write it as {scheme}://user@host/database")
    check_server(place)
    url = f"{scheme}:{place.partition(':')[2]}"
    try:
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
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{scheme}: needs the driver {error.name!r}, which is not installed: "
            f"pip install 'postdate[{_EXTRAS[scheme]}]'"
        ) from error
