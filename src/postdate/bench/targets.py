"""What is measured: store and queues of any backend, in room that is made for one run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, cast
from urllib.parse import urlsplit

from postdate.bench.deployment import Deployment, Opening, application_name, names_of
from postdate.bench.system import LOOPBACK, cpu_seconds, family_cpu_seconds, listening_pid, parent_of
from postdate.config import Address, resolved
from postdate.errors import ConfigurationError
from postdate.ports import AdministrableStore, TransactionMode, Transport
from postdate.ports.backends import Adapter, Place
from postdate.ports.benchmarks import BenchmarkRun, BenchmarkTarget
from postdate.wiring.adapters import AdapterRole, file_of, kind_of, kinds, loaded

_NO_FACTS: Final = frozenset({"recording", "schema", "table", "sanitizer"})
"""Settings of adapters that decide neither how durable nor how fast a server is."""


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """What a benchmark measures, as the command line has it.

    Args:
        store: its kind, or an address.
        transport: likewise; ``None``: the queues that go with the store.
        folder: empty; on the disk to be measured, for what lives in files.
        synchronous: durability of files.
        recording: how much the store records.
        queue_type: of RabbitMQ: ``quorum`` or ``classic``.
        targets: ``module:name`` of a :class:`BenchmarkTarget` that stands for that of a product.
    """

    store: str
    transport: str | None
    folder: Path
    synchronous: str = "full"
    recording: str = "all"
    queue_type: str = "quorum"
    targets: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--synchronous", self.synchronous, ("full", "normal")),
            ("--recording", self.recording, ("all", "outcomes")),
            ("--queue-type", self.queue_type, ("quorum", "classic")),
        ):
            if value not in known:
                raise ConfigurationError(f"{option} must be one of {', '.join(known)}, not {value!r}")

    @property
    def settings(self) -> dict[str, str]:
        """What adapters are opened with if they have it."""
        return {"synchronous": self.synchronous, "recording": self.recording, "queue_type": self.queue_type}


@dataclass(frozen=True, slots=True)
class Named:
    """A store or queues as the command line names them.

    Args:
        name: the kind as it was named.
        kind: the adapter.
        address: of the server, or of a file; ``None``: of a file for the run alone.
        is_given: whether the address was given, not found in the environment.
    """

    name: str
    kind: AdapterRole
    address: Address | None
    is_given: bool = False

    @property
    def is_file(self) -> bool:
        """Whether a file is made for the run, and removed with its folder."""
        return self.kind.backend.place is Place.FILE


@dataclass(slots=True)
class Measured:
    """A store or queues in the room that was made for them.

    Args:
        named: what is measured.
        target: that made the room.
        facts: version and settings, which are asked when everything is set up.
    """

    named: Named
    target: BenchmarkTarget
    facts: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """The kind as it was named."""
        return self.named.name

    @property
    def is_server(self) -> bool:
        """Whether it is not in a file."""
        return not self.named.is_file

    def settings_of(self, kind: AdapterRole) -> dict[str, str]:
        """Return the settings by which an adapter works in the room of the run."""
        given = {**self.target.run.settings, **self.target.settings}
        return {name: value for name, value in given.items() if name in kind.takes}

    def opening(self, kind: AdapterRole) -> Opening:
        """Return how to open one of the backend's adapters."""
        address = self.target.address_of(kind.scheme)
        return Opening(address, self.settings_of(kind), name_parameter=self.target.name_parameter)

    def cpu_seconds(self) -> float | None:
        """Return the processor time that the server used so far; ``None`` when it cannot be seen from here."""
        if self.target.server_process:
            parent = parent_of(self.target.connections()[0][0], self.target.server_process)
            return None if parent is None else family_cpu_seconds(parent)
        parts = urlsplit(self.target.address)
        is_near = self.is_server and parts.hostname in LOOPBACK and parts.port is not None
        pid = listening_pid(parts.port) if is_near and parts.port else None
        return None if pid is None else cpu_seconds(pid)

    def cpu_seconds_by_role(self) -> Mapping[str, float]:
        """Return the same of the connections of each role of process, as far as they can be told apart."""
        found: dict[str, float] = {}
        if self.cpu_seconds() is not None:
            for pid, name in self.target.connections():
                said = name.partition(" postdate ")[0]  # behind it, adapters say which process they are of
                role = said.removeprefix(application_name(""))
                if role != said:
                    found[role] = found.get(role, 0.0) + cpu_seconds(pid)
        return found


@dataclass(frozen=True, slots=True)
class Targets:
    """Store and queues of one run.

    Args:
        deployment: what other processes need to know.
        store: where messages wait.
        queues: where they go; the same object when they are in the same database.
    """

    deployment: Deployment
    store: Measured
    queues: Measured

    @property
    def all(self) -> tuple[Measured, ...]:
        """Each once."""
        return (self.store,) if self.store is self.queues else (self.store, self.queues)

    def facts(self) -> dict[str, Mapping[str, str]]:
        """Return version and settings of each."""
        return {each.name: each.facts for each in self.all}

    def cpu_seconds(self) -> float | None:
        """Return the processor time of all servers so far; ``None`` without any, or when one cannot be seen."""
        used = [each.cpu_seconds() for each in self.all if each.is_server]
        return None if not used or None in used else sum(filter(None, used))

    def cpu_seconds_by_role(self) -> dict[str, float]:
        """Return the processor time of the servers' connections by role of process."""
        return {role: used for each in self.all for role, used in each.cpu_seconds_by_role().items()}

    async def set_up(self) -> None:
        """Make tables and queues, and ask the servers about themselves."""
        deployment = self.deployment
        store, transport = deployment.open_store(), deployment.open_transport()
        try:
            await store.initialize(deployment.endpoint, TransactionMode.RECEIVE_ONLY)
            await store.setup()
            await transport.create_queues([deployment.queue, deployment.error_queue])
            for measured, adapter in ((self.queues, transport), (self.store, store)):
                measured.facts = {**(await _facts(adapter)), **measured.target.facts()}
        finally:
            await store.close()
            await transport.close()
        for measured, opening in ((self.queues, deployment.transport), (self.store, deployment.store)):
            chosen = {name: str(value) for name, value in opening.settings.items() if name not in _NO_FACTS}
            measured.facts |= chosen


async def _facts(adapter: object) -> dict[str, str]:
    found = await adapter.server_facts() if isinstance(adapter, AdministrableStore | Transport) else None
    return {} if found is None else {"version": found.version, **found.settings}


def file_named(store: str) -> Path | None:
    """Return the file that ``--store`` names by its address: its disk is to be measured, in a file beside it."""
    return file_of(store) if ":" in store else None


@contextmanager
def opened(options: BenchmarkOptions) -> Generator[Targets]:
    """Make room for a run, and take it away afterwards, whatever happened.

    Raises:
        ConfigurationError: there is no such kind, no address of its server, or no driver.
        StoreUnavailable, TransportUnavailable: the server does not answer.
    """
    store = named("store", options.store)
    queues = _queues_of(store) if options.transport is None else named("transport", options.transport)
    run = secrets.token_hex(6)
    with ExitStack() as stack:
        first = stack.enter_context(_room(store, run, options))
        is_shared = queues.kind.backend is store.kind.backend and _are_together(store, queues)
        second = first if is_shared else stack.enter_context(_room(queues, run, options, has_store=False))
        yield Targets(Deployment(run, first.opening(store.kind), second.opening(queues.kind)), first, second)


def _are_together(store: Named, queues: Named) -> bool:
    """Return whether store and queues of one backend are in one database."""
    return store.is_file or not queues.is_given or _rest(store.address) == _rest(queues.address)


def _rest(address: Address | None) -> str:
    return "" if address is None else address.partition(":")[2]


def named(role: Literal["store", "transport"], text: str) -> Named:
    """Return the store or queues that ``--store`` or ``--transport`` names: a kind, or an address.

    Raises:
        ConfigurationError: there are none, or nothing says where the server is.
    """
    if ":" in text:
        address = resolved(text, os.environ)
        kind = kind_of(address, role, role)
        return _checked(role, Named(address.scheme, kind, address, is_given=True))
    known = {name: kind for name, kind in kinds(role).items() if kind.backend.place is not Place.MEMORY}
    by_product = {kind.backend.product.lower(): kind for kind in known.values() if kind.scheme == _first(kind)}
    kind = {**by_product, **known}.get(text)
    if kind is None:
        names = ", ".join(name for name, kind in known.items() if name == _first(kind))
        raise ConfigurationError(f"--{role} must be one of {names}, or an address, not {text!r}")
    if kind.backend.place is not Place.SERVER:
        return Named(text, kind, None)
    found_by = kind.addresses.found_by
    variable = found_by.rpartition("env:")[2]
    if not os.environ.get(variable):
        hint = f"set {variable}, or " if variable else ""
        raise ConfigurationError(f"no {text} server to measure: {hint}name one with --{role} {kind.example}")
    return Named(text, kind, resolved(found_by, os.environ))


def _first(kind: AdapterRole) -> str:
    return kind.addresses.schemes[0]


def _checked(role: str, found: Named) -> Named:
    if found.kind.backend.place is Place.MEMORY:
        raise ConfigurationError(f"--{role} {found.name}: is in one process alone, and bench has several")
    return found


def _queues_of(store: Named) -> Named:
    """Return queues in the database of a store; the first server of queues alone for a store without any."""
    backend = store.kind.backend
    if backend.transport is not None:
        written = backend.queue_addresses or backend.addresses
        kind = AdapterRole(backend, backend.transport, written, written.schemes[0])
        return Named(store.name, kind, store.address)
    alone = (each for each in kinds("transport").values() if each.backend.store is None and each.is_server)
    return named("transport", next(alone).backend.product.lower())


@contextmanager
def _room(what: Named, run: str, options: BenchmarkOptions, *, has_store: bool = True) -> Generator[Measured]:
    """Make room for a run where it was named; a file is in a folder of its own, which goes as a whole."""
    backend = what.kind.backend
    reference = options.targets.get(backend.product)
    adapter = backend.benchmark if reference is None else Adapter(reference)
    address = what.address
    if what.is_file:
        folder = options.folder / (run if has_store else f"{run}-queues")
        folder.mkdir()
        address = Address(f"{what.kind.scheme}:///{folder / 'bench.db'}")
    elif address is None:
        address = Address(what.kind.example)
    make = (
        BenchmarkTarget
        if adapter is None
        else cast("type[BenchmarkTarget]", loaded(replace(what.kind, adapter=adapter)))
    )
    with make(str(address), BenchmarkRun(run, tuple(names_of(run)), options.settings, has_store)) as target:
        yield Measured(what, target)
