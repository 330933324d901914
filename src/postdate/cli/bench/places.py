"""The place of one run: store and queues that are created for the run, and removed after it in every case.

A run must not touch messages of the user, so its place is a new file, or the :class:`postdate.ports.backends.Scratch`
of a server. Source: ADR 22.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, cast

import anyio
import typer

from postdate.cli.command import handle_signals, option
from postdate.config import Address, resolve_address
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.errors import ConfigurationError
from postdate.ports import AdministrableStore, ClaimingStore, TransactionMode, Transport
from postdate.ports.backends import Place, Scratch
from postdate.wiring import adapters


@dataclass(frozen=True, slots=True)
class Common:
    """The options that every benchmark has."""

    store: Annotated[
        str, option("--store", "A kind of store, as sqlite, postgres, mariadb, or the address of one.")
    ] = "sqlite"
    transport: Annotated[
        str | None, option("--transport", "A kind of queues, as local, rabbitmq, or an address. Default: the store's.")
    ] = None
    queue_type: Annotated[str, option("--queue-type", "Kind of RabbitMQ queue: quorum or classic.")] = "quorum"
    folder: Annotated[
        Path | None, option("--folder", "Where to measure files: a folder on the disk in question. Default: temporary.")
    ] = None
    synchronous: Annotated[
        str, option("--synchronous", "Of files. full: survives loss of power; normal: survives the end of the process.")
    ] = "full"
    recording: Annotated[str, option("--recording", "How much is recorded for audits: all, outcomes.")] = "all"
    as_json: Annotated[bool, option("--json", "Print one JSON object and nothing else.")] = False

    def __post_init__(self) -> None:
        for name, value, values in (
            ("--synchronous", self.synchronous, ("full", "normal")),
            ("--recording", self.recording, ("all", "outcomes")),
            ("--queue-type", self.queue_type, ("quorum", "classic")),
        ):
            if value not in values:
                raise ConfigurationError(f"{name} must be one of {', '.join(values)}, not {value!r}")

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of adapters. Each adapter gets the settings that it has."""
        return {"synchronous": self.synchronous, "recording": self.recording, "queue_type": self.queue_type}

    @contextmanager
    def working_folder(self) -> Generator[Path]:
        """Yield an empty folder on the disk to be measured. It is removed afterwards, also after SIGINT and SIGTERM."""
        folder = self.folder
        if folder is None and ":" in self.store and (file := adapters.file_of(self.store)) is not None:
            folder = file.parent
        if folder is not None and not folder.is_dir():
            raise ConfigurationError(f"there is no folder {folder}")
        with (
            handle_signals(lambda _number, _frame: signal.raise_signal(signal.SIGINT), signal.SIGTERM),
            tempfile.TemporaryDirectory(prefix="postdate-bench-", dir=folder) as temporary,
        ):
            yield Path(temporary).absolute()


_NO_FACTS: Final = frozenset({"recording", "schema", "table", "sanitizer"})
"""Settings that affect neither durability nor speed of a server."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A store or queues to measure.

    Args:
        name: the name on the command line: a kind, or the scheme of an address.
        kind: the adapter.
        address: address of the server; ``None``: a file, which is created for the run.
    """

    name: str
    kind: adapters.AdapterRole
    address: Address | None

    def opening_arguments(self, scratch: Scratch, settings: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """Return the address and settings with which the adapter opens a place."""
        setting_values = {**settings, **scratch.settings}
        address = f"{self.kind.scheme}:{scratch.address.partition(':')[2]}"
        return address, {name: value for name, value in setting_values.items() if name in self.kind.argument_names}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run, and the places created for it. ``at_store is at_queues`` if store and queues share a database.

    Args:
        run: twelve hexadecimal digits, unique.
        settings: settings of adapters; each adapter gets the settings that it has.
        report: receives lines of progress.
    """

    run: str
    settings: Mapping[str, str]
    store: Subject
    queues: Subject
    store_scratch: Scratch
    queues_scratch: Scratch
    report: Callable[[str], None] = lambda _text: None

    def open_store(self) -> ClaimingStore:
        """Open the store of the run."""
        address, settings = self.store.opening_arguments(self.store_scratch, self.settings)
        return adapters.open_store(address, **settings)

    def open_transport(self) -> Transport:
        """Open the queues of the run."""
        address, settings = self.queues.opening_arguments(self.queues_scratch, self.settings)
        return adapters.open_transport(address, **settings)

    async def set_up(self) -> dict[str, dict[str, str]]:
        """Create tables and queues. Return version and settings of each server, by its name on the command line."""
        queues, facts = queue_names(self.run), dict[str, dict[str, str]]()
        async with open_trial(self) as (store, transport):
            await store.setup()
            await transport.create_queues([queues.arrived, queues.error])
            for subject, scratch, adapter in (
                (self.queues, self.queues_scratch, transport),
                (self.store, self.store_scratch, store),
            ):
                server = await adapter.server_facts() if isinstance(adapter, AdministrableStore | Transport) else None
                settings = subject.opening_arguments(scratch, self.settings)[1]
                facts[subject.name] = {
                    **facts.get(subject.name, {}),
                    **({} if server is None else {"version": server.version, **server.settings}),
                    **{name: str(value) for name, value in settings.items() if name not in _NO_FACTS},
                }
        return facts


class QueueNames(NamedTuple):
    """The queues of a run.

    ``endpoint`` is the name of the service; ``timeouts`` is a queue that the service creates.
    """

    endpoint: str
    timeouts: str
    arrived: str
    error: str


def queue_names(run: str) -> QueueNames:
    """Return the names of a run's queues."""
    endpoint = f"postdate-bench-{run}"
    return QueueNames(endpoint, timeouts_queue(endpoint), f"{endpoint}.arrived", f"{endpoint}.error")


@asynccontextmanager
async def open_trial(trial: Trial) -> AsyncGenerator[tuple[ClaimingStore, Transport]]:
    """Open store and queues of a run. The store is initialized."""
    store, transport = trial.open_store(), trial.open_transport()
    try:
        await store.initialize(queue_names(trial.run).endpoint, TransactionMode.RECEIVE_ONLY)
        yield store, transport
    finally:
        # An interrupt ends the run, but the place can be removed only after both are closed.
        with anyio.CancelScope(shield=True):
            await store.close()
            await transport.close()


@contextmanager
def create_trial(
    common: Common,
    folder: Path,
    queues: Callable[[str], Sequence[str]],
    report: Callable[[str], None] = lambda _text: None,
) -> Generator[Trial]:
    """Create places for a run and remove them afterwards in every case.

    ``queues`` returns the names of all its queues.
    """
    store = find_subject("store", common.store)
    transport = queues_of(store) if common.transport is None else find_subject("transport", common.transport)
    run = secrets.token_hex(6)
    with ExitStack() as stack:
        store_scratch = stack.enter_context(_create_place(store, "store", run, folder / run, queues(run)))
        is_shared = transport.kind.backend is store.kind.backend and (
            store.address is None
            or common.transport is None
            or _location_of(store.address) == _location_of(transport.address)
        )
        queues_scratch = store_scratch
        if not is_shared:
            queues_scratch = stack.enter_context(
                _create_place(transport, "transport", run, folder / f"{run}-queues", queues(run))
            )
        yield Trial(run, common.settings, store, transport, store_scratch, queues_scratch, report)


def _location_of(address: Address | None) -> str:
    return "" if address is None else address.partition(":")[2]


def find_subject(role: Literal["store", "transport"], text: str) -> Subject:
    """Return the store or queues of a kind or an address. Raise ConfigurationError if unknown or without a server."""
    if ":" in text:
        address = resolve_address(text, os.environ)
        kind = adapters.find_adapter(address, role, role)
        if kind.backend.place is Place.MEMORY:
            raise ConfigurationError(f"--{role} {address.scheme}: keeps nothing from one step of a run to the next")
        return Subject(address.scheme, kind, None if kind.backend.place is Place.FILE else address)
    by_scheme = {
        name: kind for name, kind in adapters.adapters_of(role).items() if kind.backend.place is not Place.MEMORY
    }
    main_schemes = {name: kind for name, kind in by_scheme.items() if name == kind.addresses.schemes[0]}
    by_product = {kind.backend.product.lower(): kind for kind in main_schemes.values()}
    kind = {**by_product, **by_scheme}.get(text)
    if kind is None:
        raise ConfigurationError(f"--{role} must be one of {', '.join(main_schemes)}, or an address, not {text!r}")
    if kind.backend.place is not Place.SERVER:
        return Subject(text, kind, None if kind.backend.place is Place.FILE else Address(kind.example))
    reference = kind.addresses.bench_address
    variable = reference.rpartition("env:")[2]
    if not os.environ.get(variable):
        hint = f"set {variable}, or " if variable else ""
        raise ConfigurationError(f"no {text} server to measure: {hint}name one with --{role} {kind.example}")
    return Subject(text, kind, resolve_address(reference, os.environ))


def queues_of(store: Subject) -> Subject:
    """Return the queues in the store's database.

    For a store without queues, return the first backend with queues alone.
    """
    backend = store.kind.backend
    if backend.transport is not None:
        addresses = backend.queue_addresses or backend.addresses
        return Subject(
            store.name, adapters.AdapterRole(backend, backend.transport, addresses, addresses.schemes[0]), store.address
        )
    queue_adapters = (
        each for each in adapters.adapters_of("transport").values() if each.backend.store is None and each.is_server
    )
    return find_subject("transport", next(queue_adapters).backend.product.lower())


def _create_place(
    subject: Subject, role: Literal["store", "transport"], run: str, folder: Path, queues: Sequence[str]
) -> AbstractContextManager[Scratch]:
    kind = subject.kind
    if subject.address is None:
        folder.mkdir()
        return _yield_unremoved(Scratch(f"{kind.scheme}:///{folder / 'bench.db'}"))
    if kind.backend.scratch is not None:
        create = adapters.load_factory(replace(kind, adapter=kind.backend.scratch))
        return cast("AbstractContextManager[Scratch]", create(str(subject.address), run, queues))
    if role == "store":
        raise ConfigurationError(
            f"{kind.product} cannot be measured: its backend makes no place for a run (Backend.scratch), and a run "
            f"would deliver the messages that wait there"
        )
    return _yield_unremoved(Scratch(str(subject.address)), queues)


@contextmanager
def _yield_unremoved(scratch: Scratch, queues: Sequence[str] = ()) -> Generator[Scratch]:
    """Yield a place that is not removed here: a file goes with its folder, and some backends cannot remove queues."""
    try:
        yield scratch
    finally:
        if queues:
            typer.echo(f"queues of the run stay, as their backend has no scratch: {', '.join(queues)}", err=True)
