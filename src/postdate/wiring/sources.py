"""Open the record stream of a store, and the source of a migration, from an address (ADR 0015)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from postdate.backends.sql.timeouts_migration.dialect import Dialect
from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.config import resolve_address
from postdate.errors import ConfigurationError, NotSupported
from postdate.ports.scanning import RecordStreamStore
from postdate.wiring.adapters import adapters_of, check_store, find_adapter, open_adapter


def open_record_stream(address: str, **settings: Any) -> RecordStreamStore:
    """Return the stream of records of the store at ``address``. The stream connects at first use.

    ``settings`` that are ``None`` or that this store does not have are ignored. Raises `NotSupported` for a store whose
    records cannot be followed.
    """
    resolved_address = resolve_address(address, os.environ)
    store = check_store(resolved_address)
    if (kind := adapters_of("records").get(store.scheme)) is None:
        raise NotSupported(
            f"the records of {store.product} cannot be followed: their numbers are not in the order of commits, and "
            f"the server does not tell which transactions may still write lower ones; read what='records' "
            f"repeatedly instead, or keep the store in PostgreSQL or SQLite"
        )
    arguments = {each: value for each, value in settings.items() if each in kind.argument_names and value is not None}
    return cast("RecordStreamStore", open_adapter(kind, resolved_address, arguments))


def migration_source(
    address: str, *, schema: str | None = None, prefixes: Mapping[str, str] | None = None
) -> MigrationSource:
    """Return the tables of a timeout manager as a source. The source connects at first use.

    Args:
        address: ``sqlite:///file.db``, ``postgresql://user@host:port/database``, ``mariadb://…`` or ``mssql://…``; or
            ``env:NAME`` or ``file:PATH``, which refer to one.
        schema: of the tables, and of the migration's own tables; ``None``: the default of NServiceBus: ``public``,
            ``dbo``, or the database of a MariaDB address. SQLite has no schema.
        prefixes: prefixes of tables by endpoint, for tables that are not named after their endpoint.

    Raises:
        ConfigurationError: there is no such source, or its driver is not installed. The text contains no password.
    """
    resolved_address = resolve_address(address, os.environ)
    adapters = adapters_of("timeouts_source")
    if resolved_address.scheme not in adapters:
        *first, last = dict.fromkeys(f"{each.scheme}:" for each in adapters.values())
        raise ConfigurationError(
            f"no migration can be made from {resolved_address!r}; it can from {', '.join(first)} and {last} addresses"
        )
    kind = find_adapter(resolved_address, "source of a migration", "timeouts_source")
    if "schema" not in kind.argument_names and schema is not None:
        raise ConfigurationError(f"{kind.product} has no schemas: leave schema out")
    arguments = {"schema": schema} if "schema" in kind.argument_names else {}
    return MigrationSource(cast("Dialect", open_adapter(kind, resolved_address, arguments)), prefixes)
