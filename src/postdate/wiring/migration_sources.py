"""From an address to the source of a migration. Source: specification 4.12; ADR 0015."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, cast

from postdate.config import Address, resolved
from postdate.errors import ConfigurationError
from postdate.migrating.dialect import Dialect, HiddenColumns
from postdate.migrating.store_dialect import StoreDialect
from postdate.migrating.store_tables import StoreTables
from postdate.migrating.tables import MigrationSource
from postdate.wiring.adapters import kind_of, kinds, loaded, open_adapter


def migration_source(
    address: str, *, schema: str | None = None, prefixes: Mapping[str, str] | None = None
) -> MigrationSource:
    """Return the tables of a timeout manager as a source; it connects at first use.

    Args:
        address: ``sqlite:///file.db``, ``postgresql://user@host:port/database``, ``mariadb://…`` or ``mssql://…``; or
            ``env:NAME`` or ``file:PATH``, which refer to one.
        schema: of the tables, and of a migration's own; ``None``: upstream's default: ``public``, ``dbo``, or the
            database of a MariaDB address. SQLite has none.
        prefixes: by endpoint, for tables that are not named after their endpoint.

    Raises:
        ConfigurationError: there is no such source, or its driver is not installed. Texts have no passwords.
    """
    return MigrationSource(cast("Dialect", _opened(address, schema, "timeouts_source", "made from")), prefixes)


def hidden_columns(address: str, source: MigrationSource) -> HiddenColumns | None:
    """Return what gives hidden timeouts as Arrow columns; it connects at first use. ``None``: nothing does there.

    Args:
        address: as of :func:`migration_source`.
        source: that was made from it.

    Raises:
        ConfigurationError: its driver is not installed.
    """
    place = resolved(address, os.environ)
    kind = kinds("timeouts_columns").get(place.scheme)
    return None if kind is None else cast("HiddenColumns", loaded(kind)(place, source))


def is_store_source(address: str) -> bool:
    """Return whether messages can be moved out of the store at an address, which is no reference."""
    return Address(address).scheme in kinds("store_source")


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
    return StoreTables(cast("StoreDialect", _opened(address, schema, "store_source", "made from the store")))


def _opened(address: str, schema: str | None, role: Literal["timeouts_source", "store_source"], what: str) -> object:
    place = resolved(address, os.environ)
    known = kinds(role)
    if place.scheme not in known:
        *first, last = dict.fromkeys(f"{each.scheme}:" for each in known.values())
        raise ConfigurationError(
            f"no migration can be {what} {place!r}; it can from {', '.join(first)} and {last} addresses"
        )
    kind = kind_of(place, "source of a migration", role)
    if "schema" not in kind.takes and schema is not None:
        raise ConfigurationError(f"{kind.product} has no schemas: leave schema out")
    return open_adapter(kind, place, {"schema": schema} if "schema" in kind.takes else {})
