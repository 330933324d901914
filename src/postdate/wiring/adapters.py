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

from postdate import config
from postdate.backends.registry import backends, place_of, schemes
from postdate.core.simple_store import claiming_store
from postdate.errors import ConfigurationError
from postdate.ports import ClaimingStore, FileFacts, Recording, Transport
from postdate.ports.backends import ROLES, Adapter, Addresses, Backend, LibraryFacts, Place, Role
from postdate.ports.settings import HowMuchIsRecorded, InvalidValue, setting


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
    def argument_names(self) -> frozenset[str]:
        """Names of the adapter's settings besides the address."""
        return self.adapter.argument_names

    @property
    def is_server(self) -> bool:
        return self.backend.place is Place.SERVER

    @property
    def example(self) -> str:
        return f"{self.scheme}:{self.addresses.example.partition(':')[2]}"


def adapters_of(role: Role) -> Mapping[str, AdapterRole]:
    """Return the adapters of a role by the schemes of their addresses, with aliases last."""
    return _adapters_of(role, backends())


@lru_cache(maxsize=2 * len(ROLES))
def _adapters_of(role: Role, all_backends: tuple[Backend, ...]) -> Mapping[str, AdapterRole]:
    by_scheme, aliases = dict[str, AdapterRole](), dict[str, AdapterRole]()
    for backend in all_backends:
        adapter: Adapter | None = getattr(backend, role)
        if adapter is not None:
            addresses = (role == "transport" and backend.queue_addresses) or backend.addresses
            by_scheme |= {scheme: AdapterRole(backend, adapter, addresses, scheme) for scheme in addresses.schemes}
            aliases |= dict.fromkeys(addresses.aliases, by_scheme[addresses.schemes[0]])
    return {**by_scheme, **{name: kind for name, kind in aliases.items() if name not in by_scheme}}


def example_of(role: Role, scheme: str) -> str:
    return adapters_of(role)[scheme].example


# --- which adapter -----------------------------------------------------------------------------------------------


def check_store(address: str) -> AdapterRole:
    """Return the adapter of a store. Raises `ConfigurationError` for another address, and suggests a similar one."""
    return find_adapter(address, "store", "store")


def check_transport(address: str) -> AdapterRole:
    return find_adapter(address, "transport", "transport")


def find_adapter(address: str, purpose: str, role: Role) -> AdapterRole:
    """Return the adapter of a role for an address that is not a reference.

    ``purpose`` names the address in the error.
    """
    adapters = adapters_of(role)
    scheme = config.Address(address).scheme
    if (kind := adapters.get(scheme)) is None:
        # SQLAlchemy's addresses name a driver, too: mysql+pymysql://.
        matches = difflib.get_close_matches(scheme.partition("+")[0], adapters, n=1)
        schemes_text = ", ".join(f"{each}:" for each, kind in adapters.items() if each == kind.scheme)
        hint = f"did you mean {adapters[matches[0]].example}?" if matches else f"there are {schemes_text}"
        raise ConfigurationError(f"no {purpose} has the address {_format_address(address)}; {hint}")
    if kind.backend.place is Place.FILE:
        _parse_path(address)
    elif kind.is_server and "://" not in address:
        raise ConfigurationError(f"{_format_address(address)} names no server; write it as {kind.example}")
    config.check_server(address)
    return kind


def _parse_path(address: str) -> Path:
    scheme, _, path = address.partition(":")
    if not path.startswith("///") or len(path) < 4:
        raise ConfigurationError(
            f"{_format_address(address)} names no file; write three slashes and the path: {scheme}:///file.db"
        )
    if path[3:] == ":memory:":
        raise ConfigurationError(
            f"{_format_address(address)} is a file of that name here, not a database in memory; write memory: for a "
            f"store and queues that end with the process"
        )
    return Path(path[3:])


def _format_address(address: str) -> str:
    return repr(address if isinstance(address, config.Address) else config.Address(address))


def file_of(address: str) -> Path | None:
    """Return the file that an address names; ``None`` for an address without a file."""
    return _parse_path(address) if place_of(config.Address(address).scheme) is Place.FILE else None


def absolute_address_of(address: str) -> str:
    """Return an address with an absolute path if it names a file: the working directory may change before its use."""
    scheme, _, path = address.partition(":///")
    if place_of(config.Address(address).scheme) is not Place.FILE or path in {"", ":memory:"}:
        return address  # also an address that is refused later
    reference = address.reference if isinstance(address, config.Address) else None
    return config.Address(f"{scheme}:///{Path(path).expanduser().resolve()}", reference)


def with_absolute_files(settings: config.Settings) -> config.Settings:
    """Return settings whose addresses of files do not depend on the working directory."""
    sections = dict[str, config.SectionValues]()
    for name in config.SECTIONS:
        section: config.SectionValues = getattr(settings, name)
        if (address := section.values.get("address")) is not None:
            sections[name] = config.SectionValues({**section.values, "address": absolute_address_of(address)})
    return replace(settings, **sections)


def find_file_inspector(address: str) -> Callable[[Path, int], FileFacts] | None:
    """Return the function that reads facts of an address's file (:attr:`Backend.file_facts`); ``None`` without one."""
    parsed_address = config.Address(address)
    kind = next(
        (each for each in adapters_of("file_facts").values() if parsed_address.scheme in schemes(each.backend)), None
    )
    return None if kind is None else cast("Callable[[Path, int], FileFacts]", load_factory(kind))


def load_library_facts() -> list[LibraryFacts]:
    """Return the facts of the libraries that serverless backends use in this process."""
    by_reference = {kind.adapter.reference: kind for kind in adapters_of("library").values()}
    return [cast("LibraryFacts", load_factory(kind)()) for kind in by_reference.values()]


# --- opening -----------------------------------------------------------------------------------------------------


def settings_of_store(address: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``settings`` that the store at ``address`` knows and that have a value."""
    names = check_store(address).argument_names
    return {name: value for name, value in settings.items() if name in names and value is not None}


def adapter_arguments(
    section: str, kind: AdapterRole, settings: config.Settings, /, **arguments: Any
) -> dict[str, Any]:
    """Return the arguments of an adapter: the settings of its section, overridden by ``arguments``.

    Raises `ConfigurationError` if a setting was given that this adapter does not have.
    """
    section_settings: config.SectionValues = getattr(settings, section)
    role = config.SECTIONS[section].role
    own_names = (
        set[str]()
        if role is None
        else {name for each in adapters_of(role).values() for name in each.adapter.own_settings}
    )
    candidate_names = [name for name in config.definitions(section) if name in own_names]
    for name in candidate_names:
        key = f"{section}.{name}"
        if name not in kind.argument_names and settings.origin(key) != "default":
            accepted_keys = ", ".join(f"{section}.{each}" for each in candidate_names if each in kind.argument_names)
            which = f", which takes {accepted_keys}" if accepted_keys else ""
            raise ConfigurationError(f"{key} ({settings.origins[key]}) is not for {kind.product}{which}; remove it")
    store_values = {name: settings.store.values.get(name) for name in kind.adapter.from_store}
    own_values = {name: section_settings.values[name] for name in kind.adapter.own_settings}
    return {
        name: value
        for name, value in {**store_values, **own_values, **arguments}.items()
        if name in kind.argument_names and value is not None
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
    resolved_address = config.resolve_address(address, os.environ)
    return claiming_store(open_adapter(check_store(resolved_address), resolved_address, settings, databases))


def open_transport(address: str, databases: Databases | None = None, /, **settings: Any) -> Transport:
    """Return the transport at ``address``; see :func:`open_store`."""
    resolved_address = config.resolve_address(address, os.environ)
    return cast("Transport", open_adapter(check_transport(resolved_address), resolved_address, settings, databases))


def open_adapter(
    kind: AdapterRole, address: config.Address, settings: Mapping[str, Any], databases: Databases | None = None
) -> object:
    """Return the adapter at an address. Raises the errors of :func:`open_store`."""
    if unknown := sorted(settings.keys() - kind.argument_names):
        possible = ", ".join(sorted(kind.argument_names)) or "no settings"
        raise ConfigurationError(f"{kind.product} takes no {', '.join(unknown)}; it takes {possible}")
    adapter = load_factory(kind)
    arguments = dict(settings)
    if "recording" in arguments:
        arguments["recording"] = _parse_recording(arguments["recording"])
    match kind.backend.place:
        case Place.MEMORY:
            return adapter(**arguments)
        case Place.FILE:
            return adapter(_parse_path(address), **arguments)
        case Place.SERVER | Place.MACHINE:
            adapter_address = f"{kind.scheme}:{address.partition(':')[2]}"
            if databases is None or kind.backend.database is None:
                return adapter(adapter_address, **arguments)
            create_database = cast(
                "Callable[..., SharedDatabase]", load_factory(replace(kind, adapter=kind.backend.database))
            )
            return adapter(
                databases.get_or_create(kind.backend, kind.adapter, adapter_address, arguments, create_database),
                **arguments,
            )


def _parse_recording(value: object) -> Recording:
    choices = setting("recording", HowMuchIsRecorded)
    assert choices is not None
    try:
        return choices.convert(value)
    except InvalidValue as error:
        raise ConfigurationError(f"recording {error}, not {value!r}") from None


def load_factory(kind: AdapterRole) -> Callable[..., object]:
    """Import and return the factory of an adapter. Raises `ConfigurationError` if its driver is not installed."""
    reference = kind.adapter.reference
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise ConfigurationError(f"{kind.product} cannot be used: there is no module {error.name!r}") from error
        extra = kind.backend.extra
        install_hint = f": pip install 'postdate[{extra}]'" if extra else ""
        raise ConfigurationError(
            f"{kind.product} needs the driver {error.name!r}, which is not installed{install_hint}"
        ) from error
    except AttributeError as error:
        raise ConfigurationError(f"{kind.product} cannot be used: {reference} refers to nothing") from error


# --- databases that several adapters of one process share: one object for equal addresses -----------------------------


class SharedDatabase(Protocol):
    """A database object, as this module uses it."""

    def ensure_connections(self, concurrency: int) -> None:
        """Open enough connections for an endpoint that handles ``concurrency`` messages at once."""
        ...


class Databases:
    """The database objects of adapters that are opened together. Each is closed with the last adapter that uses it."""

    def __init__(self) -> None:
        self._entries: list[tuple[Backend, str, Mapping[str, Any], SharedDatabase]] = []

    def get_or_create(
        self,
        backend: Backend,
        adapter: Adapter,
        address: str,
        settings: Mapping[str, Any],
        create_database: Callable[..., SharedDatabase],
    ) -> SharedDatabase:
        """Return the database object for an adapter; ``create_database`` creates it from an address and settings.

        Adapters share one object if they have the same address and the same settings of the database itself.
        """
        shared_names = (
            adapter.argument_names
            if backend.database is None
            else backend.database.argument_names & adapter.argument_names
        )
        # This schema is the one of NServiceBus' tables. It is not a setting of the shared database object.
        if adapter is backend.timeouts:
            shared_names -= {"schema"}
        for other, place, other_settings, database in self._entries:
            if (other, place) == (backend, address) and all(
                other_settings.get(each) == settings.get(each) for each in shared_names
            ):
                return database
        own_settings = {name: value for name, value in settings.items() if name in shared_names}
        database = create_database(address, **own_settings)
        self._entries.append((backend, address, own_settings, database))
        return database

    def ensure_connections(self, concurrency: int) -> None:
        for *_, database in self._entries:
            database.ensure_connections(concurrency)
