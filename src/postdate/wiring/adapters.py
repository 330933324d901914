"""Find the adapter of an address, and import it with its driver at first use. Adapters share databases (ADR 0021)."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

from postdate.backends.registry import backends, place_of, schemes
from postdate.config import SECTIONS, Address, SectionValues, Settings, check_server, definitions, resolved
from postdate.core.simple_store import claiming
from postdate.errors import ConfigurationError
from postdate.ports import ClaimingStore, FileFacts, Recording, Transport
from postdate.ports.backends import ROLES, Adapter, Addresses, Backend, LibraryFacts, Place, Role
from postdate.ports.settings import HowMuchIsRecorded, Wrong, setting


@dataclass(frozen=True, slots=True)
class AdapterRole:
    """The adapter for an address. ``scheme`` is the adapter's own scheme, which replaces an alias."""

    backend: Backend
    adapter: Adapter
    addresses: Addresses
    scheme: str

    @property
    def product(self) -> str:
        return self.addresses.product or self.backend.product

    @property
    def takes(self) -> frozenset[str]:
        """Names of the adapter's settings besides the address."""
        return self.adapter.takes

    @property
    def is_server(self) -> bool:
        return self.backend.place is Place.SERVER

    @property
    def example(self) -> str:
        return f"{self.scheme}:{self.addresses.example.partition(':')[2]}"


def kinds(role: Role) -> Mapping[str, AdapterRole]:
    """Return the adapters of a role by the schemes of their addresses, with aliases last."""
    return _kinds(role, backends())


@lru_cache(maxsize=2 * len(ROLES))
def _kinds(role: Role, all_of_them: tuple[Backend, ...]) -> Mapping[str, AdapterRole]:
    by_scheme, aliases = dict[str, AdapterRole](), dict[str, AdapterRole]()
    for backend in all_of_them:
        adapter: Adapter | None = getattr(backend, role)
        if adapter is not None:
            written = (role == "transport" and backend.queue_addresses) or backend.addresses
            by_scheme |= {scheme: AdapterRole(backend, adapter, written, scheme) for scheme in written.schemes}
            aliases |= dict.fromkeys(written.aliases, by_scheme[written.schemes[0]])
    return {**by_scheme, **{name: kind for name, kind in aliases.items() if name not in by_scheme}}


def example_of(role: Role, scheme: str) -> str:
    return kinds(role)[scheme].example


# --- which adapter -----------------------------------------------------------------------------------------------


def check_store(address: str) -> AdapterRole:
    """Return the adapter of a store. Raises `ConfigurationError` for another address, and suggests a similar one."""
    return kind_of(address, "store", "store")


def check_transport(address: str) -> AdapterRole:
    return kind_of(address, "transport", "transport")


def kind_of(address: str, what: str, role: Role) -> AdapterRole:
    """Return the adapter of a role for an address that is not a reference. ``what`` names the address in the error."""
    all_kinds = kinds(role)
    scheme = Address(address).scheme
    if (kind := all_kinds.get(scheme)) is None:
        close = difflib.get_close_matches(scheme, all_kinds, n=1)
        there = ", ".join(f"{each}:" for each, kind in all_kinds.items() if each == kind.scheme)
        hint = f"did you mean {all_kinds[close[0]].example}?" if close else f"there are {there}"
        raise ConfigurationError(f"no {what} has the address {_shown(address)}; {hint}")
    if kind.backend.place is Place.FILE:
        _path(address)
    elif kind.is_server and "://" not in address:
        raise ConfigurationError(f"{_shown(address)} names no server; write it as {kind.example}")
    check_server(address)
    return kind


def _path(address: str) -> Path:
    scheme, _, path = address.partition(":")
    if not path.startswith("///") or len(path) < 4:
        raise ConfigurationError(
            f"{_shown(address)} names no file; write three slashes and the path: {scheme}:///file.db"
        )
    return Path(path[3:])


def _shown(address: str) -> str:
    return repr(address if isinstance(address, Address) else Address(address))


def file_of(address: str) -> Path | None:
    """Return the file that an address names; ``None`` for an address without a file."""
    return _path(address) if place_of(Address(address).scheme) is Place.FILE else None


def looks_into(address: str) -> Callable[[Path, int], FileFacts] | None:
    """Return the function that reads facts of an address's file (:attr:`Backend.file_facts`); ``None`` without one."""
    place = Address(address)
    kind = next((each for each in kinds("file_facts").values() if place.scheme in schemes(each.backend)), None)
    return None if kind is None else cast("Callable[[Path, int], FileFacts]", loaded(kind))


def libraries() -> list[LibraryFacts]:
    """Return the facts of the libraries that serverless backends use in this process."""
    by_reference = {kind.adapter.reference: kind for kind in kinds("library").values()}
    return [cast("LibraryFacts", loaded(kind)()) for kind in by_reference.values()]


# --- opening -----------------------------------------------------------------------------------------------------


def settings_of_store(address: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``settings`` that the store at ``address`` knows and that have a value."""
    names = check_store(address).takes
    return {name: value for name, value in settings.items() if name in names and value is not None}


def chosen_for(section: str, kind: AdapterRole, settings: Settings, /, **arguments: Any) -> dict[str, Any]:
    """Return the arguments of an adapter: the settings of its section, overridden by ``arguments``.

    Raises `ConfigurationError` if a setting was given that this adapter does not have.
    """
    chosen: SectionValues = getattr(settings, section)
    role = SECTIONS[section].role
    own_names = set[str]() if role is None else {name for each in kinds(role).values() for name in each.adapter.own}
    possible = [name for name in definitions(section) if name in own_names]
    for name in possible:
        key = f"{section}.{name}"
        if name not in kind.takes and settings.origin(key) != "default":
            takes = ", ".join(f"{section}.{each}" for each in possible if each in kind.takes)
            which = f", which takes {takes}" if takes else ""
            raise ConfigurationError(f"{key} ({settings.origins[key]}) is not for {kind.product}{which}; remove it")
    of_store = {name: settings.store.values.get(name) for name in kind.adapter.from_store}
    own = {name: chosen.values[name] for name in kind.adapter.own}
    return {
        name: value
        for name, value in {**of_store, **own, **arguments}.items()
        if name in kind.takes and value is not None
    }


def open_store(address: str, databases: Databases | None = None, /, **settings: Any) -> ClaimingStore:
    """Return the store at ``address``. The store connects at first use.

    Args:
        address: such as ``sqlite:///relative.db`` or ``postgresql://user@host:port/database`` (docs/cli/addresses.md),
            or a reference to one: ``env:NAME``, ``file:PATH``.
        databases: the databases that the store may share with other adapters.
        settings: of the adapter: ``schema``, ``table``, ``synchronous``, ``recording`` (a name or :class:`Recording`) …

    Raises:
        ConfigurationError: no store has such an address or such settings, or its driver is not installed.
    """
    place = resolved(address, os.environ)
    return claiming(open_adapter(check_store(place), place, settings, databases))


def open_transport(address: str, databases: Databases | None = None, /, **settings: Any) -> Transport:
    """Return the transport at ``address``; see :func:`open_store`."""
    place = resolved(address, os.environ)
    return cast("Transport", open_adapter(check_transport(place), place, settings, databases))


def open_adapter(
    kind: AdapterRole, address: Address, settings: Mapping[str, Any], databases: Databases | None = None
) -> object:
    """Return the adapter at an address. Raises the errors of :func:`open_store`."""
    if unknown := sorted(settings.keys() - kind.takes):
        possible = ", ".join(sorted(kind.takes)) or "no settings"
        raise ConfigurationError(f"{kind.product} takes no {', '.join(unknown)}; it takes {possible}")
    adapter = loaded(kind)
    chosen = dict(settings)
    if "recording" in chosen:
        chosen["recording"] = _recording(chosen["recording"])
    match kind.backend.place:
        case Place.MEMORY:
            return adapter(**chosen)
        case Place.FILE:
            return adapter(_path(address), **chosen)
        case Place.SERVER | Place.MACHINE:
            place = f"{kind.scheme}:{address.partition(':')[2]}"
            if databases is None or kind.backend.database is None:
                return adapter(place, **chosen)
            opened = cast("Callable[..., SharedDatabase]", loaded(replace(kind, adapter=kind.backend.database)))
            return adapter(databases.of(kind.backend, kind.adapter, place, chosen, opened), **chosen)


def _recording(value: object) -> Recording:
    choices = setting("recording", HowMuchIsRecorded)
    assert choices is not None
    try:
        return choices.checked(value)
    except Wrong as error:
        raise ConfigurationError(f"recording {error}, not {value!r}") from None


def loaded(kind: AdapterRole) -> Callable[..., object]:
    """Import and return the factory of an adapter. Raises `ConfigurationError` if its driver is not installed."""
    reference = kind.adapter.reference
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise ConfigurationError(f"{kind.product} cannot be used: there is no module {error.name!r}") from error
        extra = kind.backend.extra
        how = f": pip install 'postdate[{extra}]'" if extra else ""
        raise ConfigurationError(
            f"{kind.product} needs the driver {error.name!r}, which is not installed{how}"
        ) from error
    except AttributeError as error:
        raise ConfigurationError(f"{kind.product} cannot be used: {reference} refers to nothing") from error


# --- databases that several adapters of one process share: one object for equal addresses -----------------------------


class SharedDatabase(Protocol):
    """A database object, as this module uses it."""

    def expect(self, concurrency: int) -> None:
        """Open enough connections for an endpoint that handles ``concurrency`` messages at once."""
        ...


class Databases:
    """The database objects of adapters that are opened together. Each is closed with the last adapter that uses it."""

    def __init__(self) -> None:
        self._opened: list[tuple[Backend, str, Mapping[str, Any], SharedDatabase]] = []

    def of(
        self,
        backend: Backend,
        adapter: Adapter,
        address: str,
        settings: Mapping[str, Any],
        opened: Callable[..., SharedDatabase],
    ) -> SharedDatabase:
        """Return the database object for an adapter; ``opened`` creates it from an address and settings.

        Adapters share one object if they have the same address and the same settings of the database itself.
        """
        own = adapter.takes if backend.database is None else backend.database.takes & adapter.takes
        # This schema is the one of NServiceBus' tables. It is not a setting of the shared database object.
        if adapter is backend.timeouts:
            own -= {"schema"}
        for other, place, other_settings, database in self._opened:
            if (other, place) == (backend, address) and all(
                other_settings.get(each) == settings.get(each) for each in own
            ):
                return database
        own_settings = {name: value for name, value in settings.items() if name in own}
        database = opened(address, **own_settings)
        self._opened.append((backend, address, own_settings, database))
        return database

    def expect(self, concurrency: int) -> None:
        for *_, database in self._opened:
            database.expect(concurrency)
