"""What an administrator runs by hand where services may not create tables."""

from __future__ import annotations

from postdate.config import Settings
from postdate.errors import ConfigurationError
from postdate.migrations import migrations
from postdate.ports import ScriptedStore, ScriptedTransport
from postdate.wiring.adapters import check_store, check_transport, open_store, open_transport
from postdate.wiring.plant import own_queues, store_settings, transport_settings


def setup_sql(settings: Settings) -> str:
    """Return the SQL that sets up the store and, where they are tables, the queues: one script; connects to nothing.

    Run again, or for another endpoint, it makes what is missing then.

    Raises:
        ConfigurationError: neither needs SQL, or an address is wrong, or a driver is missing.
    """
    store, transport = settings.store.address, settings.transport.address
    kind, queue_kind = check_store(store), check_transport(transport)
    if kind.scheme == "sqlite":
        return _sqlite_script()
    scripts: list[str] = []
    adapter = open_store(store, **store_settings(settings))
    if isinstance(adapter, ScriptedStore):
        scripts.append(adapter.setup_statements(settings.endpoint.name))
    if queue_kind.scheme != "local":
        queues = open_transport(transport, **transport_settings(settings))
        together = queues.capabilities.database is not None and (
            queues.capabilities.database == adapter.capabilities.database
        )
        if isinstance(queues, ScriptedTransport):
            if not together:
                scripts.append(queues.setup_statements())
            scripts.append(queues.queue_statements(own_queues(settings)))
    if not scripts:
        raise ConfigurationError(f"{store!r} needs no SQL")
    return "\n".join(f"{script.rstrip()}\n" for script in scripts)


def _sqlite_script() -> str:
    parts = ["CREATE TABLE IF NOT EXISTS postdate_migration (version INTEGER PRIMARY KEY, name TEXT NOT NULL);"]
    for each in migrations("sqlite"):
        mark = f"INSERT INTO postdate_migration VALUES ({each.version}, '{each.name}');"
        parts.append(f"-- {each.version:04d} {each.name}\n{each.sql.strip()}\n{mark}")
    return "\n\n".join(parts) + "\n"
