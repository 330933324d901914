"""The description of a backend: the value ``BACKEND`` of its package; and the base class of its database object.

Source: ADR 0020, 0021.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Self, TypeVar, get_args

from postdate.errors import ConfigurationError
from postdate.ports.endpoint import OutboxStore, SagaStore
from postdate.ports.settings import Setting, settings_of
from postdate.ports.stores import ClaimingStore
from postdate.ports.timeouts import TimeoutPersister
from postdate.ports.transports import Transport
from postdate.runtime import forks

log = logging.getLogger("postdate.backends")

_warning_lock: Final = forks.lock()
_warned_products: Final = set[str]()
"""Products whose backends were opened in this process."""

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_REFERENCE: Final = re.compile(r"[\w.]+:\w+")
_REFERENCES: Final = frozenset({"env", "file"})
"""Prefixes of addresses that refer to a variable or a file; a scheme must not have these names."""


class Place(enum.Enum):
    """The kind of thing that an address of a backend names."""

    FILE = enum.auto()
    """A path after three slashes; adapters get it as a :class:`pathlib.Path`."""

    SERVER = enum.auto()
    """A server after two slashes, with user and password where it needs them; adapters get the whole address."""

    MACHINE = enum.auto()
    """This machine, or another after two slashes; adapters get the whole address."""

    MEMORY = enum.auto()
    """The memory of this process, which no other process can see; adapters get settings only."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The form of addresses.

    Args:
        schemes: an address begins with one of them, in lower case; adapters get only addresses with these.
        example: an address with the first scheme.
        aliases: other names of the first scheme.
        product: usual name of the product at the address; empty: the name of the backend.
        bench_address: address that ``bench`` measures when only the kind is named; it refers to an environment
            variable.

    Raises:
        ConfigurationError: the schemes are no tuple of schemes.
    """

    schemes: tuple[str, ...]
    example: str
    aliases: tuple[str, ...] = ()
    product: str = ""
    bench_address: str = ""

    def __post_init__(self) -> None:
        for each in (self.schemes, self.aliases):
            if not isinstance(each, tuple):  # pyright: ignore[reportUnnecessaryIsInstance] - of another package
                raise ConfigurationError(f"schemes and aliases are tuples of schemes, not {each!r}")
        if not self.schemes:
            raise ConfigurationError(f"there is no scheme in {self!r}")
        for each in (*self.schemes, *self.aliases):
            if not _SCHEME.fullmatch(each) or each in _REFERENCES:
                raise ConfigurationError(
                    f"{each!r} is not a scheme: lower-case letters, digits, + . -; env and file are references"
                )


@dataclass(frozen=True, slots=True)
class Adapter:
    """The class or function for one role of a backend.

    Args:
        reference: ``module:name`` of a class or function. It is imported at first use, because it may need the driver.
            It is called with the part of the address that :class:`Place` describes, and with settings by name.
        settings: a dataclass of the settings besides the address (:mod:`postdate.ports.settings`). They are settings of
            its section in the file, and arguments of ``reference``. Settings that are ``None`` are not passed.
        from_store: names of settings of the section ``store`` that it accepts, too. This is for adapters in the
            database of the store.
        arguments: names of arguments that only programs pass, such as ``create``.

    Raises:
        ConfigurationError: the reference is malformed, or ``settings`` is no dataclass of settings.
    """

    reference: str
    settings: type[Any] | None = None
    from_store: frozenset[str] = frozenset()
    arguments: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not _REFERENCE.fullmatch(self.reference):
            raise ConfigurationError(f"{self.reference!r} refers to nothing; write it as package.module:name")
        try:
            own_settings = self.own_settings
        except (TypeError, NameError) as error:
            raise ConfigurationError(
                f"{self.settings!r} is not a dataclass of settings, see postdate.ports.settings: {error}"
            ) from error
        if "address" in own_settings:
            raise ConfigurationError(f"{self.settings!r} has a setting 'address', which every section has by itself")

    @property
    def own_settings(self) -> Mapping[str, Setting]:
        """The settings of the adapter's own section in the file, by name."""
        return {} if self.settings is None else settings_of(self.settings)

    @property
    def argument_names(self) -> frozenset[str]:
        """Names of all arguments that the adapter accepts; others are refused."""
        return frozenset(self.own_settings) | self.from_store | self.arguments


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """A backend that is a library, as installed in this process.

    Args:
        name: name of the library, in lower case.
        version: version of the library.
        schema: newest version of the tables that this version of Postdate makes there.
    """

    name: str
    version: tuple[int, ...]
    schema: int


@dataclass(frozen=True, slots=True)
class Scratch:
    """A place on a server that exists for one run of ``postdate bench``. It has no other content, and is removed.

    Args:
        address: of the place. The adapters of all roles open it, each by a scheme of its own.
        settings: make adapters work inside the place; each adapter gets the settings that it accepts.
    """

    address: str
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One technology. Its package exports one as ``BACKEND``, and is imported without the driver.

    Another package is found by an entry point of the group ``postdate.backends`` that refers to such a value.

    Args:
        product: usual name of the product, the same as :attr:`postdate.ports.ServerFacts.product`.
        place: the kind of thing that its addresses name.
        addresses: of databases, or of everything in this backend.
        queue_addresses: of queues, where they have another form.
        extra: extra of the installation of Postdate that installs the driver. Empty: no extra is needed, or another
            package installs the driver.
        oldest_version: oldest version of the server that can be used; empty: any version, or it is not known.
        awaits: for a backend that was tested against a stand-in only, the test that it still has to pass:
            ``its first production server``. Its adapters log this once in each process, when they first open
            (:meth:`warn_if_untested`).
        compares_loosely: filters of the server treat some different texts as equal, such as ``A`` and ``a``.
        database: one object for all of the following on one server, which its adapters accept instead of an address.
            It is made like an adapter, and has a method ``ensure_connections``, called with the number of messages
            that an endpoint handles at once.
        store: keeps delayed messages: :class:`postdate.ports.ClaimingStore`, or the six methods of
            :class:`postdate.ports.DelayedMessageStore`; with a method ``close``.
        transport: has queues: :class:`postdate.ports.Transport`.
        sagas: keeps saga instances: :class:`postdate.ports.SagaStore`.
        outbox: keeps outboxes: :class:`postdate.ports.OutboxStore`.
        timeouts: keeps a timeout manager's timeouts: :class:`postdate.ports.timeouts.TimeoutPersister`.
        records: yields the records of a store as they are written: :class:`postdate.ports.RecordStreamStore`.
        timeouts_source: the SQL with which a migration reads and hides timeouts:
            :class:`postdate.backends.sql.timeouts_migration.dialect.Dialect`, called with the place and ``schema``.
        scripts: for a backend of files, the SQL that makes the tables of a file: :class:`postdate.ports.FileScripts`,
            called without arguments. Adapters of servers have their SQL themselves, as
            :class:`postdate.ports.Scripted`.
        file_facts: for a backend of files, inspects a file without opening it for use. It is called with the path and
            the time in microseconds since 1970 UTC, blocks, changes nothing, and returns
            :class:`postdate.ports.FileFacts`.
        scratch: for a backend with servers, makes a place for one run of ``postdate bench`` and removes it with all its
            content. It is called with the address, the name of the run (twelve hexadecimal digits) and the names of its
            queues, and returns a context manager of :class:`Scratch`. ``None``: ``bench`` refuses to measure a store
            there, because it would deliver the messages that wait in it; and it does not remove the queues of its run.
        library: for a backend without a server, its version in this process: called without arguments, returns
            :class:`LibraryFacts`.
    """

    product: str
    place: Place
    addresses: Addresses
    queue_addresses: Addresses | None = None
    extra: str = ""
    oldest_version: tuple[int, ...] = ()
    awaits: str = ""
    compares_loosely: bool = False
    database: Adapter | None = None
    store: Adapter | None = None
    transport: Adapter | None = None
    sagas: Adapter | None = None
    outbox: Adapter | None = None
    timeouts: Adapter | None = None
    records: Adapter | None = None
    timeouts_source: Adapter | None = None
    scripts: Adapter | None = None
    file_facts: Adapter | None = None
    scratch: Adapter | None = None
    library: Adapter | None = None

    def __post_init__(self) -> None:
        """Refuse values of wrong types: other packages make them, possibly without a type checker."""
        wrong_names = [
            name
            for name, kind in (("place", Place), ("addresses", Addresses), ("queue_addresses", Addresses | None))
            if not isinstance(getattr(self, name), kind)
        ]
        wrong_names += [name for name in ROLES if not isinstance(getattr(self, name), Adapter | None)]
        if wrong_names:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in wrong_names)
            raise ConfigurationError(f"the backend {self.product!r} has {values}")

    def warn_if_untested(self) -> None:
        """Log a warning if the backend ``awaits`` something: once in a process, however often it is opened."""
        with _warning_lock:
            is_first = bool(self.awaits) and self.product not in _warned_products
            _warned_products.add(self.product)
        if is_first:
            log.warning(
                "the backend for %s awaits %s: it was tested against a stand-in only. Try it beside what you have "
                "before you rely on it, and report what you find",
                self.product,
                self.awaits,
            )


Role = Literal[
    "database",
    "store",
    "transport",
    "sagas",
    "outbox",
    "timeouts",
    "records",
    "timeouts_source",
    "scripts",
    "file_facts",
    "scratch",
    "library",
]
"""Roles of adapters; each is a field of :class:`Backend`."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)


# --- a database as one object, which makes an endpoint's adapters -----------------------------------------------------


DatabaseAdapter = ClaimingStore | Transport | SagaStore | OutboxStore | TimeoutPersister
"""The adapters that an endpoint gets from a database object. The object closes them."""

M = TypeVar("M", bound=DatabaseAdapter)


class DatabaseObject:
    """The adapters of one database. Close it, or use it as a context manager."""

    has_a_table_for_each_endpoint: ClassVar[bool] = False
    """Whether a store of this database serves one endpoint only, because each endpoint has a table of its own."""

    def __init__(self) -> None:
        self._adapters: list[DatabaseAdapter] = []
        self._store_endpoint: str | None = None

    def register_adapter(self, adapter: M) -> M:
        """Register an adapter, which is closed with this database; return the adapter."""
        self._adapters.append(adapter)
        return adapter

    def register_endpoint(self, endpoint: str, concurrency: int, *, uses_store: bool) -> None:
        """Register an endpoint that uses this database.

        Args:
            endpoint: its name.
            concurrency: number of messages that it handles at once.
            uses_store: whether its delayed messages wait in the store of this object.

        Raises:
            ConfigurationError: delayed messages of another endpoint wait in that store, and the store has a table for
                each endpoint.
        """
        if not uses_store or not self.has_a_table_for_each_endpoint:
            return
        if self._store_endpoint not in {None, endpoint}:
            name = type(self).__name__
            raise ConfigurationError(
                f"the delayed messages of endpoint {self._store_endpoint!r} wait in the store of this {name}, and "
                f"those "
                f"of {endpoint!r} have another table: give each endpoint a {name} of its own, or say where they wait "
                f"with delayed_delivery=DelayedDelivery(store)"
            )
        self._store_endpoint = endpoint

    async def close(self) -> None:
        """Close the adapters in reverse order; the last one closes the database. A second call has no effect."""
        adapters, self._adapters = self._adapters, []
        for adapter in reversed(adapters):
            await adapter.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
