"""SQL for an administrator to run by hand, where services may not create tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from postdate.backends.registry import schemes
from postdate.config import Address, Settings
from postdate.errors import ConfigurationError
from postdate.ports import FileScripts, Scripted
from postdate.wiring import deployment as wiring_deployment
from postdate.wiring.adapters import adapters_of, file_of, load_factory, open_store, open_transport

_TRANSACTION_LINES = frozenset({"BEGIN;", "COMMIT;", "BEGIN TRANSACTION;", "COMMIT TRANSACTION;"})
"""Lines of a script that begin or end its transaction. Inside of blocks and functions no line is equal to one."""


def setup_sql(
    settings: Settings,
    queues: Sequence[str] = (),
    *,
    sagas: bool = False,
    outbox: bool = False,
    in_transaction: bool = True,
) -> str:
    """Return the SQL for all tables that an endpoint needs, without connecting to a server.

    These are the tables of the store, the queues, the timeouts of a timeout manager, sagas and the outbox, as far as
    the settings have them. A second run, or a run for another endpoint, creates missing tables. In SQLite the SQL is
    for a new file, and senders create ``queues``. Without ``in_transaction`` the SQL neither begins nor ends a
    transaction, so that a migration of Django or Alembic can run it in its own.
    """
    wiring_deployment.check_timeout_managers(settings)
    scripts = _Scripts()
    _add_store_and_queues(settings, queues, scripts)
    _add_timeouts(settings, scripts)
    if wiring_deployment.is_enabled(settings.sagas, sagas):
        _add_part(wiring_deployment.address_of_section(settings.sagas, settings), "sagas", settings, scripts)
    if wiring_deployment.is_enabled(settings.outbox, outbox):
        _add_part(wiring_deployment.address_of_section(settings.outbox, settings), "outbox", settings, scripts)
    if not scripts.parts:
        raise ConfigurationError(f"{settings.store.address!r} needs no SQL")
    text = scripts.text()
    if in_transaction:
        return text
    return "".join(line for line in text.splitlines(keepends=True) if line.strip() not in _TRANSACTION_LINES)


@dataclass
class _Scripts:
    """Scripts in the order in which they must run, each with its database."""

    parts: list[tuple[Address, str]] = field(default_factory=list[tuple[Address, str]])
    _queue_files: set[object] = field(default_factory=set[object])

    def add(self, address: Address, text: str, *, in_queue_file: bool = False) -> None:
        """Add a script. ``in_queue_file``: in SQLite, create the tables of the queues before it."""
        path = file_of(address)
        if in_queue_file and path is not None and path not in self._queue_files:
            self._queue_files.add(path)
            self.parts.append((address, _file_scripts(address).database()))
        if text:
            self.parts.append((address, text))

    def text(self) -> str:
        """Return all scripts, with the address above each if there are several databases."""
        databases = {file_of(place) or place for place, _ in self.parts}
        lines: list[str] = []
        last_database: object = None
        for address, text in self.parts:
            if len(databases) > 1 and (file_of(address) or address) != last_database:
                last_database = file_of(address) or address
                lines.append(f"-- In {address.redacted_text}:\n")
            lines.append(f"{text.rstrip()}\n")
        return "\n".join(lines)


def _add_store_and_queues(settings: Settings, extra_queues: Sequence[str], scripts: _Scripts) -> None:
    store, transport = settings.store.address, settings.transport.address
    database: object = None
    if settings.delayed_delivery.enabled and file_of(store) is None:
        adapter = open_store(store, **wiring_deployment.store_settings(settings))
        database = adapter.capabilities.database
        if isinstance(adapter, Scripted):
            scripts.add(store, adapter.setup_statements(settings.endpoint.name))
    elif settings.delayed_delivery.enabled:
        scripts.add(store, "", in_queue_file=True)
    if file_of(transport) is not None:
        scripts.add(transport, "", in_queue_file=True)
        return
    queues = open_transport(transport, **wiring_deployment.transport_settings(settings))
    if isinstance(queues, Scripted):
        if database is None or queues.capabilities.database != database:
            scripts.add(transport, queues.setup_statements(settings.endpoint.name))
        names = list(dict.fromkeys([*wiring_deployment.own_queues(settings, queues.capabilities), *extra_queues]))
        scripts.add(transport, queues.queue_statements(names))


def _add_timeouts(settings: Settings, scripts: _Scripts) -> None:
    manager_settings = settings.timeout_manager
    if manager_settings.address is None:
        return
    if file_of(manager_settings.address) is not None:
        for endpoint in wiring_deployment.managed_endpoints(settings):
            text = _file_scripts(manager_settings.address).timeouts(endpoint, manager_settings.table_prefix)
            scripts.add(manager_settings.address, text, in_queue_file=True)
        return
    for endpoint, timeouts in wiring_deployment.open_timeouts(settings).items():
        if not isinstance(timeouts, Scripted):
            raise _no_sql_error(manager_settings.address)
        scripts.add(manager_settings.address, timeouts.setup_statements(endpoint))


def _add_part(address: Address, section: Literal["sagas", "outbox"], settings: Settings, scripts: _Scripts) -> None:
    if file_of(address) is not None:
        part_scripts = _file_scripts(address)
        scripts.add(
            address,
            part_scripts.sagas() if section == "sagas" else part_scripts.outbox(),
            in_queue_file=section == "sagas",
        )
        return
    part = (
        wiring_deployment.open_saga_store(settings) if section == "sagas" else wiring_deployment.open_outbox(settings)
    )
    if not isinstance(part, Scripted):
        raise _no_sql_error(address)
    scripts.add(address, part.setup_statements(settings.endpoint.name))


def _file_scripts(address: Address) -> FileScripts:
    kind = next((each for each in adapters_of("scripts").values() if address.scheme in schemes(each.backend)), None)
    if kind is None:
        raise _no_sql_error(address)
    return cast("FileScripts", load_factory(kind)())


def _no_sql_error(address: Address) -> ConfigurationError:
    return ConfigurationError(f"there is no SQL for {address!r}: `postdate setup` creates what is needed there")
