"""Store and queues to be measured, of any backend, in databases, schemas or files made for one run."""

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
"""Settings that affect neither durability nor speed of a server."""


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """What a benchmark measures, as the command line has it.

    Args:
        store: its kind, or an address.
        transport: its kind, or an address; ``None``: the queues that go with the store.
        folder: an empty folder on the disk to be measured, for databases in files.
        targets: ``module:name`` of a :class:`BenchmarkTarget` that replaces a product's own, by product.
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
        return {"synchronous": self.synchronous, "recording": self.recording, "queue_type": self.queue_type}


@dataclass(frozen=True, slots=True)
class Named:
    """A store or queues as the command line names them; without an address they are in a file made for the run."""

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
    """A store or queues in the place that ``target`` made; ``facts`` are read in :meth:`Targets.set_up`."""

    named: Named
    target: BenchmarkTarget
    facts: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        return self.named.name

    @property
    def is_server(self) -> bool:
        return not self.named.is_file

    def opening(self, kind: AdapterRole) -> Opening:
        given = {**self.target.run.settings, **self.target.settings}
        taken = {name: value for name, value in given.items() if name in kind.takes}
        return Opening(self.target.address_of(kind.scheme), taken, self.target.name_parameter)

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
        """Return the processor time of the connections of each role of process, as far as they can be told apart."""
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
    """Store and queues of one run; the same object when they are in the same database."""

    deployment: Deployment
    store: Measured
    queues: Measured

    @property
    def all(self) -> tuple[Measured, ...]:
        return (self.store,) if self.store is self.queues else (self.store, self.queues)

    def facts(self) -> dict[str, Mapping[str, str]]:
        return {each.name: each.facts for each in self.all}

    def cpu_seconds(self) -> float | None:
        """Return the processor time of all servers so far; ``None`` without servers, or when one cannot be seen."""
        used = [each.cpu_seconds() for each in self.all if each.is_server]
        return None if not used or None in used else sum(filter(None, used))

    def cpu_seconds_by_role(self) -> dict[str, float]:
        return {role: used for each in self.all for role, used in each.cpu_seconds_by_role().items()}

    async def set_up(self) -> None:
        deployment = self.deployment
        store, transport = deployment.open_store(), deployment.open_transport()
        try:
            await store.initialize(deployment.names.endpoint, TransactionMode.RECEIVE_ONLY)
            await store.setup()
            await transport.create_queues([deployment.names.arrived, deployment.names.error])
            for measured, adapter in ((self.queues, transport), (self.store, store)):
                found = await adapter.server_facts() if isinstance(adapter, AdministrableStore | Transport) else None
                told = {} if found is None else {"version": found.version, **found.settings}
                measured.facts = {**told, **measured.target.facts()}
        finally:
            await store.close()
            await transport.close()
        for measured, opening in ((self.queues, deployment.transport), (self.store, deployment.store)):
            measured.facts |= {name: str(value) for name, value in opening.settings.items() if name not in _NO_FACTS}


def file_named(store: str) -> Path | None:
    """Return the file of an address given as ``--store``: its disk is measured, in a new file beside it."""
    return file_of(store) if ":" in store else None


@contextmanager
def opened(options: BenchmarkOptions) -> Generator[Targets]:
    """Make a place for a run and remove it afterwards, even after errors."""
    store = named("store", options.store)
    queues = _queues_of(store) if options.transport is None else named("transport", options.transport)
    run = secrets.token_hex(6)
    with ExitStack() as stack:
        first = stack.enter_context(_room(store, run, options))
        is_shared = queues.kind.backend is store.kind.backend and (
            store.is_file or not queues.is_given or _rest(store.address) == _rest(queues.address)
        )
        second = first if is_shared else stack.enter_context(_room(queues, run, options, has_store=False))
        yield Targets(Deployment(run, first.opening(store.kind), second.opening(queues.kind)), first, second)


def _rest(address: Address | None) -> str:
    return "" if address is None else address.partition(":")[2]


def named(role: Literal["store", "transport"], text: str) -> Named:
    """Return the store or queues of a kind or an address; raise ConfigurationError if unknown or without a server."""
    if ":" in text:
        address = resolved(text, os.environ)
        kind = kind_of(address, role, role)
        if kind.backend.place is Place.MEMORY:
            raise ConfigurationError(f"--{role} {address.scheme}: is in one process alone, and bench has several")
        return Named(address.scheme, kind, address, is_given=True)
    known = {name: kind for name, kind in kinds(role).items() if kind.backend.place is not Place.MEMORY}
    own = {name: kind for name, kind in known.items() if name == kind.addresses.schemes[0]}
    by_product = {kind.backend.product.lower(): kind for kind in own.values()}
    kind = {**by_product, **known}.get(text)
    if kind is None:
        raise ConfigurationError(f"--{role} must be one of {', '.join(own)}, or an address, not {text!r}")
    if kind.backend.place is not Place.SERVER:
        return Named(text, kind, None)
    found_by = kind.addresses.found_by
    variable = found_by.rpartition("env:")[2]
    if not os.environ.get(variable):
        hint = f"set {variable}, or " if variable else ""
        raise ConfigurationError(f"no {text} server to measure: {hint}name one with --{role} {kind.example}")
    return Named(text, kind, resolved(found_by, os.environ))


def _queues_of(store: Named) -> Named:
    """Return the queues in the store's database; or for a store without queues, the first backend with queues alone."""
    backend = store.kind.backend
    if backend.transport is not None:
        written = backend.queue_addresses or backend.addresses
        return Named(store.name, AdapterRole(backend, backend.transport, written, written.schemes[0]), store.address)
    alone = (each for each in kinds("transport").values() if each.backend.store is None and each.is_server)
    return named("transport", next(alone).backend.product.lower())


@contextmanager
def _room(what: Named, run: str, options: BenchmarkOptions, *, has_store: bool = True) -> Generator[Measured]:
    """Make the place for a run; one in a file has a folder of its own, which is removed as a whole."""
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
    make = BenchmarkTarget
    if adapter is not None:
        make = cast("type[BenchmarkTarget]", loaded(replace(what.kind, adapter=adapter)))
    with make(str(address), BenchmarkRun(run, tuple(names_of(run)), options.settings, has_store)) as target:
        yield Measured(what, target)
