"""SQL for an administrator to run by hand, where services may not create tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from postdate.backends.registry import schemes
from postdate.config import Address, Settings
from postdate.errors import ConfigurationError
from postdate.ports import FileScripts, Scripted
from postdate.wiring.adapters import file_of, kinds, loaded, open_store, open_transport
from postdate.wiring.deployment import (
    check_timeout_managers,
    is_enabled,
    managed_endpoints,
    open_outbox,
    open_saga_store,
    open_timeouts,
    own_queues,
    place_of,
    store_settings,
    transport_settings,
)


def setup_sql(settings: Settings, queues: Sequence[str] = (), *, sagas: bool = False, outbox: bool = False) -> str:
    """Return the SQL for all tables that an endpoint needs, without connecting to a server.

    These are the tables of the store, the queues, the timeouts of a timeout manager, sagas and the outbox, as far as
    the settings have them. A second run, or a run for another endpoint, creates missing tables. In SQLite the SQL is
    for a new file, and senders create ``queues``.
    """
    check_timeout_managers(settings)
    scripts = _Scripts()
    _add_store_and_queues(settings, queues, scripts)
    _add_timeouts(settings, scripts)
    if is_enabled(settings.sagas, sagas):
        _add_part(place_of(settings.sagas, settings), "sagas", settings, scripts)
    if is_enabled(settings.outbox, outbox):
        _add_part(place_of(settings.outbox, settings), "outbox", settings, scripts)
    if not scripts.parts:
        raise ConfigurationError(f"{settings.store.address!r} needs no SQL")
    return scripts.text()


@dataclass
class _Scripts:
    """Scripts in the order in which they must run, each with its database."""

    parts: list[tuple[Address, str]] = field(default_factory=list[tuple[Address, str]])
    _files: set[object] = field(default_factory=set[object])

    def add(self, place: Address, text: str, *, in_queue_file: bool = False) -> None:
        """Add a script. ``in_queue_file``: in SQLite, create the tables of the queues before it."""
        path = file_of(place)
        if in_queue_file and path is not None and path not in self._files:
            self._files.add(path)
            self.parts.append((place, _of_file(place).database()))
        if text:
            self.parts.append((place, text))

    def text(self) -> str:
        """Return all scripts, with the address above each if there are several databases."""
        places = {file_of(place) or place for place, _ in self.parts}
        lines: list[str] = []
        last: object = None
        for place, text in self.parts:
            if len(places) > 1 and (file_of(place) or place) != last:
                last = file_of(place) or place
                lines.append(f"-- In {place.shown}:\n")
            lines.append(f"{text.rstrip()}\n")
        return "\n".join(lines)


def _add_store_and_queues(settings: Settings, more: Sequence[str], scripts: _Scripts) -> None:
    store, transport = settings.store.address, settings.transport.address
    database: object = None
    if settings.delayed_delivery.enabled and file_of(store) is None:
        adapter = open_store(store, **store_settings(settings))
        database = adapter.capabilities.database
        if isinstance(adapter, Scripted):
            scripts.add(store, adapter.setup_statements(settings.endpoint.name))
    elif settings.delayed_delivery.enabled:
        scripts.add(store, "", in_queue_file=True)
    if file_of(transport) is not None:
        scripts.add(transport, "", in_queue_file=True)
        return
    queues = open_transport(transport, **transport_settings(settings))
    if isinstance(queues, Scripted):
        if database is None or queues.capabilities.database != database:
            scripts.add(transport, queues.setup_statements(settings.endpoint.name))
        names = list(dict.fromkeys([*own_queues(settings, queues.capabilities), *more]))
        scripts.add(transport, queues.queue_statements(names))


def _add_timeouts(settings: Settings, scripts: _Scripts) -> None:
    chosen = settings.timeout_manager
    if chosen.address is None:
        return
    if file_of(chosen.address) is not None:
        for endpoint in managed_endpoints(settings):
            text = _of_file(chosen.address).timeouts(endpoint, chosen.table_prefix)
            scripts.add(chosen.address, text, in_queue_file=True)
        return
    for endpoint, timeouts in open_timeouts(settings).items():
        if not isinstance(timeouts, Scripted):
            raise _no_sql(chosen.address)
        scripts.add(chosen.address, timeouts.setup_statements(endpoint))


def _add_part(place: Address, section: Literal["sagas", "outbox"], settings: Settings, scripts: _Scripts) -> None:
    if file_of(place) is not None:
        part_scripts = _of_file(place)
        scripts.add(
            place,
            part_scripts.sagas() if section == "sagas" else part_scripts.outbox(),
            in_queue_file=section == "sagas",
        )
        return
    part = open_saga_store(settings) if section == "sagas" else open_outbox(settings)
    if not isinstance(part, Scripted):
        raise _no_sql(place)
    scripts.add(place, part.setup_statements(settings.endpoint.name))


def _of_file(place: Address) -> FileScripts:
    kind = next((each for each in kinds("scripts").values() if place.scheme in schemes(each.backend)), None)
    if kind is None:
        raise _no_sql(place)
    return cast("FileScripts", loaded(kind)())


def _no_sql(place: Address) -> ConfigurationError:
    return ConfigurationError(f"there is no SQL for {place!r}: what is needed there is made by `postdate setup`")
