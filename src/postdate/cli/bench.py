"""``postdate bench``: how fast a store stores, how fast a service delivers from it, and how late.

The adapters do what they do in a service, on messages of the run, in a place that is made for the run and removed
after it: a file, or the :class:`postdate.ports.backends.Scratch` of a server. So no message of the user is touched.
Source: ADR 22.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import anyio
import typer

from postdate.cli.command import Exit, add_command, group, option, options_of, signals_handled
from postdate.cli.output import print_pairs
from postdate.clock import SystemClock, steady_seconds
from postdate.config import Address, resolved
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import ConfigurationError, PostdateError
from postdate.messages import DelayedMessage, Envelope, Headers
from postdate.ports import (
    AdministrableStore,
    Claim,
    ClaimingStore,
    End,
    Ending,
    MoveReport,
    MovingStore,
    TransactionMode,
    Transport,
    Work,
)
from postdate.ports.backends import Place, Scratch
from postdate.runtime.process import freeze_what_is_loaded
from postdate.wiring.adapters import AdapterRole, file_of, kind_of, kinds, loaded, open_store, open_transport

app = group(
    "bench",
    "Measure your own store and queues, in a place that is made for the run. Physical limits, several services, a "
    "writer beside them, herds, backlogs and handling: python -m benchmarks in the repository.",
)

Number = Annotated[int, option("--n", "Messages.", min=1)]


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
        """Settings of adapters; each adapter gets those that it takes."""
        return {"synchronous": self.synchronous, "recording": self.recording, "queue_type": self.queue_type}

    @contextmanager
    def working_folder(self) -> Generator[Path]:
        """Yield an empty folder on the disk to be measured; it is removed afterwards, also after SIGINT and SIGTERM."""
        folder = self.folder
        if folder is None and ":" in self.store and (file := file_of(self.store)) is not None:
            folder = file.parent
        if folder is not None and not folder.is_dir():
            raise ConfigurationError(f"there is no folder {folder}")
        with (
            signals_handled(lambda _number, _frame: signal.raise_signal(signal.SIGINT), signal.SIGTERM),
            tempfile.TemporaryDirectory(prefix="postdate-bench-", dir=folder) as temporary,
        ):
            yield Path(temporary).absolute()


# --- store and queues of a run ----------------------------------------------------------------------------------------

_NO_FACTS: Final = frozenset({"recording", "schema", "table", "sanitizer"})
"""Settings that affect neither durability nor speed of a server."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A store or queues to measure.

    Args:
        name: as the command line has it: a kind, or the scheme of an address.
        kind: the adapter.
        address: of the server; ``None``: a file, which is made for the run.
    """

    name: str
    kind: AdapterRole
    address: Address | None

    def opening(self, scratch: Scratch, settings: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """Return address and settings by which the adapter opens a place."""
        chosen = {**settings, **scratch.settings}
        address = f"{self.kind.scheme}:{scratch.address.partition(':')[2]}"
        return address, {name: value for name, value in chosen.items() if name in self.kind.takes}


@dataclass(frozen=True, slots=True)
class Trial:
    """One run, and the places made for it; ``at_store is at_queues`` when store and queues share a database.

    Args:
        run: twelve hexadecimal digits, unique.
        settings: of adapters; each gets those that it takes.
        report: gets lines of progress.
    """

    run: str
    settings: Mapping[str, str]
    store: Subject
    queues: Subject
    at_store: Scratch
    at_queues: Scratch
    report: Callable[[str], None] = lambda _text: None

    def open_store(self) -> ClaimingStore:
        """Open the store of the run."""
        address, settings = self.store.opening(self.at_store, self.settings)
        return open_store(address, **settings)

    def open_transport(self) -> Transport:
        """Open the queues of the run."""
        address, settings = self.queues.opening(self.at_queues, self.settings)
        return open_transport(address, **settings)

    async def set_up(self) -> dict[str, dict[str, str]]:
        """Create tables and queues; return version and settings of each server, by its name on the command line."""
        queues, facts = queue_names(self.run), dict[str, dict[str, str]]()
        async with opened(self) as (store, transport):
            await store.setup()
            await transport.create_queues([queues.arrived, queues.error])
            for subject, scratch, adapter in (
                (self.queues, self.at_queues, transport),
                (self.store, self.at_store, store),
            ):
                server = await adapter.server_facts() if isinstance(adapter, AdministrableStore | Transport) else None
                settings = subject.opening(scratch, self.settings)[1]
                facts[subject.name] = {
                    **facts.get(subject.name, {}),
                    **({} if server is None else {"version": server.version, **server.settings}),
                    **{name: str(value) for name, value in settings.items() if name not in _NO_FACTS},
                }
        return facts


class QueueNames(NamedTuple):
    """The queues of a run. ``endpoint`` is the name of the service; ``timeouts`` is a queue that the service makes."""

    endpoint: str
    timeouts: str
    arrived: str
    error: str


def queue_names(run: str) -> QueueNames:
    """Return the names of a run's queues."""
    endpoint = f"postdate-bench-{run}"
    return QueueNames(endpoint, timeouts_queue(endpoint), f"{endpoint}.arrived", f"{endpoint}.error")


@asynccontextmanager
async def opened(trial: Trial) -> AsyncGenerator[tuple[ClaimingStore, Transport]]:
    """Open store and queues of a run; the store is initialized."""
    store, transport = trial.open_store(), trial.open_transport()
    try:
        await store.initialize(queue_names(trial.run).endpoint, TransactionMode.RECEIVE_ONLY)
        yield store, transport
    finally:
        with anyio.CancelScope(shield=True):  # an interrupt ends the run, and the place is removed after these
            await store.close()
            await transport.close()


@contextmanager
def trial(
    common: Common,
    folder: Path,
    queues: Callable[[str], Sequence[str]],
    report: Callable[[str], None] = lambda _text: None,
) -> Generator[Trial]:
    """Make places for a run and remove them afterwards, whatever happens. ``queues`` names all queues of a run."""
    store = subject("store", common.store)
    transport = queues_of(store) if common.transport is None else subject("transport", common.transport)
    run = secrets.token_hex(6)
    with ExitStack() as stack:
        at_store = stack.enter_context(_place(store, "store", run, folder / run, queues(run)))
        is_shared = transport.kind.backend is store.kind.backend and (
            store.address is None or common.transport is None or _rest(store.address) == _rest(transport.address)
        )
        at_queues = at_store
        if not is_shared:
            at_queues = stack.enter_context(_place(transport, "transport", run, folder / f"{run}-queues", queues(run)))
        yield Trial(run, common.settings, store, transport, at_store, at_queues, report)


def _rest(address: Address | None) -> str:
    return "" if address is None else address.partition(":")[2]


def subject(role: Literal["store", "transport"], text: str) -> Subject:
    """Return the store or queues of a kind or an address; raise ConfigurationError if unknown or without a server."""
    if ":" in text:
        address = resolved(text, os.environ)
        kind = kind_of(address, role, role)
        if kind.backend.place is Place.MEMORY:
            raise ConfigurationError(f"--{role} {address.scheme}: keeps nothing from one step of a run to the next")
        return Subject(address.scheme, kind, None if kind.backend.place is Place.FILE else address)
    by_scheme = {name: kind for name, kind in kinds(role).items() if kind.backend.place is not Place.MEMORY}
    own = {name: kind for name, kind in by_scheme.items() if name == kind.addresses.schemes[0]}
    by_product = {kind.backend.product.lower(): kind for kind in own.values()}
    kind = {**by_product, **by_scheme}.get(text)
    if kind is None:
        raise ConfigurationError(f"--{role} must be one of {', '.join(own)}, or an address, not {text!r}")
    if kind.backend.place is not Place.SERVER:
        return Subject(text, kind, None if kind.backend.place is Place.FILE else Address(kind.example))
    reference = kind.addresses.found_by
    variable = reference.rpartition("env:")[2]
    if not os.environ.get(variable):
        hint = f"set {variable}, or " if variable else ""
        raise ConfigurationError(f"no {text} server to measure: {hint}name one with --{role} {kind.example}")
    return Subject(text, kind, resolved(reference, os.environ))


def queues_of(store: Subject) -> Subject:
    """Return the queues in the store's database; or for a store without queues, the first backend with queues alone."""
    backend = store.kind.backend
    if backend.transport is not None:
        written = backend.queue_addresses or backend.addresses
        return Subject(store.name, AdapterRole(backend, backend.transport, written, written.schemes[0]), store.address)
    alone = (each for each in kinds("transport").values() if each.backend.store is None and each.is_server)
    return subject("transport", next(alone).backend.product.lower())


def _place(
    what: Subject, role: Literal["store", "transport"], run: str, folder: Path, queues: Sequence[str]
) -> AbstractContextManager[Scratch]:
    kind = what.kind
    if what.address is None:
        folder.mkdir()
        return _lasting(Scratch(f"{kind.scheme}:///{folder / 'bench.db'}"))
    if kind.backend.scratch is not None:
        make = loaded(replace(kind, adapter=kind.backend.scratch))
        return cast("AbstractContextManager[Scratch]", make(str(what.address), run, queues))
    if role == "store":
        raise ConfigurationError(
            f"{kind.product} cannot be measured: its backend makes no place for a run (Backend.scratch), and a run "
            f"would deliver the messages that wait there"
        )
    return _lasting(Scratch(str(what.address)), queues)


@contextmanager
def _lasting(scratch: Scratch, queues: Sequence[str] = ()) -> Generator[Scratch]:
    """Yield a place that is not removed here: a file goes with its folder, and some backends cannot remove queues."""
    try:
        yield scratch
    finally:
        if queues:
            typer.echo(f"queues of the run stay, as their backend has no scratch: {', '.join(queues)}", err=True)


# --- messages of a run ------------------------------------------------------------------------------------------------
# About 200 bytes of headers and 300 of body. An id holds the number of its message, which tells its due time; the ids
# of one run ascend, like those that we make (UUID v7).

BODY: Final = b"x" * 300
BATCH: Final = 5_000


def id_of(number: int, run: str) -> str:
    """Return the id of a message: shaped as a UUID, ordered by number; ``run`` is twelve hexadecimal digits."""
    digits = f"{number:012x}"
    return f"{digits[:8]}-{digits[8:]}-7000-8000-{run}"


def headers_of(message_id: str) -> dict[str, str]:
    """Return the headers of a message."""
    return {Headers.MESSAGE_ID: message_id, "Bench.Filler": "y" * 140}


def message_of(number: int, run: str, queue: str, due: datetime) -> DelayedMessage:
    """Return a message."""
    message_id = id_of(number, run)
    return DelayedMessage(message_id, due, queue, headers_of(message_id), BODY)


def messages_of(
    trial: Trial, n: int, first_due: datetime, spacing: timedelta, batch: int
) -> Iterator[list[DelayedMessage]]:
    """Yield ``n`` messages of a run in batches, due one after the other."""
    queue = queue_names(trial.run).arrived
    for first in range(0, n, batch):
        numbers = range(first, min(first + batch, n))
        yield [message_of(number, trial.run, queue, first_due + number * spacing) for number in numbers]


_QUIET_SECONDS: Final = 0.3
_PATIENCE_SECONDS: Final = 10.0
_RECEIVED_AT_ONCE: Final = 1_000


async def received_ids(transport: Transport, queue: str, n: int) -> list[str]:
    """Take all messages off a queue, of which ``n`` are expected, and return their ids."""
    clock, receiver, message_ids = SystemClock(), transport.receiver(queue), list[str]()
    try:
        while True:
            batch = None
            with anyio.move_on_after(_QUIET_SECONDS if len(message_ids) >= n else _PATIENCE_SECONDS):
                batch = await receiver.receive(_RECEIVED_AT_ONCE)
            if batch is None:
                return message_ids
            message_ids += [each.envelope.message_id for each in batch]
            for error in await receiver.settle([Ending(each, clock.now(), End(record=None)) for each in batch]):
                if error is not None:
                    raise error
    finally:
        await receiver.close()


# --- deliveries of a service ------------------------------------------------------------------------------------------

STUCK_SECONDS: Final = 120.0
_AT_ONCE: Final = 16


class Deliveries:
    """Notes the deliveries of a service, and lets it look for due messages only once ``gate`` is open.

    Args:
        expected: how many messages are to be delivered.
    """

    def __init__(self, expected: int = 0) -> None:
        # Machine time at which each batch was durably in its queue, and its size.
        self.marks: list[tuple[float, int]] = []
        self.gate = anyio.Event()
        self._expected = expected
        self._count = 0
        self._complete = anyio.Event()

    def delivered(self, count: int) -> None:
        """Note that ``count`` messages are durably in their queue now."""
        if count:
            self.marks.append((time.time(), count))
            self._count += count
            if self._count >= self._expected:
                self._complete.set()

    async def complete(self) -> None:
        """Wait until all are delivered; raise PostdateError when nothing is delivered for two minutes."""
        while not self._complete.is_set():
            before = self._count
            with anyio.move_on_after(STUCK_SECONDS):
                await self._complete.wait()
            if not self._complete.is_set() and self._count == before:
                raise PostdateError(f"nothing was delivered for {STUCK_SECONDS:.0f} s after {before:,} messages")


def watch(store: ClaimingStore, transport: Transport, deliveries: Deliveries) -> None:
    """Hold back claims until the gate opens, and note deliveries.

    Patches the two objects, not their classes, so that the endpoint sees their capabilities unchanged.
    """
    claim_due, send = store.claim_due, transport.send

    async def gated_claim_due(now: datetime, limit: int) -> Sequence[Claim]:
        await deliveries.gate.wait()
        return await claim_due(now, limit)

    async def noted_send(
        envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        errors = await send(envelopes, now, work=work)
        deliveries.delivered(sum(error is None for error in errors))
        return errors

    vars(store)["claim_due"] = gated_claim_due
    vars(transport)["send"] = noted_send
    if isinstance(store, MovingStore):
        move_due = store.move_due

        async def noted_move_due(now: datetime, limit: int, **options: Any) -> MoveReport:
            await deliveries.gate.wait()
            report = await move_due(now, limit, **options)
            deliveries.delivered(report.delivered)
            return report

        vars(store)["move_due"] = noted_move_due


async def paced(store: ClaimingStore, messages: Iterable[DelayedMessage], lead_seconds: float) -> int:
    """Store each message so long before it is due, one commit each, several at the same time.

    Returns how many messages were already due when they were stored: their lateness is unknown.
    """
    clock, stored_when_due, limiter = SystemClock(), 0, anyio.CapacityLimiter(_AT_ONCE)

    async def store_one(message: DelayedMessage) -> None:
        nonlocal stored_when_due
        async with limiter:
            await store.store(message, clock.now())
            stored_when_due += clock.now() >= message.due

    async with anyio.create_task_group() as tasks:
        for message in messages:
            await anyio.sleep(max(message.due.timestamp() - lead_seconds - time.time(), 0))
            tasks.start_soon(store_one, message)
    return stored_when_due


def lateness_of(dues: Iterable[float], marks: Iterable[tuple[float, int]]) -> list[float]:
    """Return each message's seconds from due to delivered, assuming that batches go in order of due time."""
    commits = (at for at, count in marks for _ in range(count))
    return [at - due for due, at in zip(sorted(dues), commits, strict=False)]


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return percentiles of lateness given in seconds, in milliseconds; all are 0 without values."""
    ordered = sorted(seconds) or [0.0]

    def at(share: float) -> float:
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1_000

    return {"p50_ms": at(0.5), "p95_ms": at(0.95), "p99_ms": at(0.99), "max_ms": ordered[-1] * 1_000}


@asynccontextmanager
async def service(trial: Trial, n: int) -> AsyncGenerator[tuple[ClaimingStore, Deliveries]]:
    """Run a service with its default settings, which is to deliver ``n`` messages from the store."""
    queues, deliveries = queue_names(trial.run), Deliveries(n)
    async with opened(trial) as (store, transport):
        watch(store, transport, deliveries)
        endpoint = Endpoint(
            queues.endpoint,
            transport=transport,
            delayed_delivery=DelayedDelivery(store),
            error_queue=queues.error,
            send_only=True,
        )
        async with endpoint:
            freeze_what_is_loaded()  # as `postdate run` does
            yield store, deliveries


# --- the benchmarks ---------------------------------------------------------------------------------------------------

_LEAD_SECONDS: Final = 1.0
_AHEAD_SECONDS: Final = 0.2

Figures = dict[str, object]
Benchmark = Callable[..., Awaitable[Figures]]


def _command(benchmark: Benchmark) -> Benchmark:
    """Register a benchmark as a command with its own options, which stand behind its trial, and the common ones."""

    def run(context: typer.Context, **values: Any) -> None:
        del context
        common = Common(**{each.name: values.pop(each.name) for each in fields(Common)})
        _run(benchmark, common, values)

    add_command(app, benchmark.__name__, benchmark, run, options_of(Common))
    return benchmark


@_command
async def schedule(
    trial: Trial,
    n: Number = 200_000,
    batch: Annotated[int, option("--batch", "Messages in one commit.", min=1)] = BATCH,
) -> Figures:
    """Store messages in bulk. Making them is not counted."""
    clock, seconds, cpu_s, stored = SystemClock(), 0.0, 0.0, 0
    due = clock.now() + timedelta(hours=1)
    trial.report(f"storing {n:,} messages, {batch:,} at a time")
    async with opened(trial) as (store, _):
        for messages in messages_of(trial, n, due, timedelta(milliseconds=1), batch):
            started, cpu_before = time.perf_counter(), time.process_time()
            stored += (await store.store_many(messages, clock.now())).stored
            seconds += time.perf_counter() - started
            cpu_s += time.process_time() - cpu_before
        if isinstance(store, AdministrableStore):
            stored = (await store.statistics(clock.now())).pending
    return {"n": n, "rate": n / seconds, "lost": n - stored, "duplicated": 0, **_cpu(cpu_s, n)}


@_command
async def drain(trial: Trial, n: Number = 200_000) -> Figures:
    """Deliver messages that are due. The rate is from the first look to the last delivery."""
    clock, began = SystemClock(), steady_seconds()
    due = clock.now() - timedelta(days=1)
    trial.report(f"storing {n:,} messages")
    async with opened(trial) as (store, _):
        for messages in messages_of(trial, n, due, timedelta(microseconds=100), BATCH):
            await store.store_many(messages, clock.now())
    fill_s = steady_seconds() - began
    trial.report(f"delivering {n:,} messages")
    async with service(trial, n) as (_, deliveries):
        started, cpu_before = time.time(), time.process_time()
        deliveries.gate.set()
        await deliveries.complete()
        cpu_s = time.process_time() - cpu_before
    seconds = deliveries.marks[-1][0] - started
    return {"n": n, "rate": n / seconds, **await _promise(trial, n), **_cpu(cpu_s, n), "fill_s": fill_s}


@_command
async def lateness(
    trial: Trial,
    rate: Annotated[int, option("--rate", "Messages a second.", min=1)] = 200,
    seconds: Annotated[float, option("--seconds", "For how long.", min=1)] = 30,
) -> Figures:
    """Deliver at an even rate. The same service stores each message a second before it is due."""
    n, spacing = int(rate * seconds), timedelta(seconds=1) / rate
    # So that storing one message does not coincide with delivering another each time.
    lead_seconds = _LEAD_SECONDS + 0.37 / rate
    trial.report(f"delivering {rate:,} messages a second")
    async with service(trial, n) as (store, deliveries):
        first_due = SystemClock().now() + timedelta(seconds=lead_seconds + _AHEAD_SECONDS)
        messages = chain.from_iterable(messages_of(trial, n, first_due, spacing, batch=1))
        cpu_before = time.process_time()
        deliveries.gate.set()
        stored_when_due = await paced(store, messages, lead_seconds)
        await deliveries.complete()
        cpu_s = time.process_time() - cpu_before
    late = lateness_of([(first_due + number * spacing).timestamp() for number in range(n)], deliveries.marks)
    promise = await _promise(trial, n, early=sum(value < 0 for value in late))
    return {"n": n, **promise, **_cpu(cpu_s, n), **percentiles(late), "stored_when_due": stored_when_due}


def _cpu(cpu_s: float, n: int) -> Figures:
    """Return the processor time of this process, which is that of the service, in all and for each message."""
    return {"cpu_s": cpu_s, "cpu_us_per_message": cpu_s / n * 1_000_000}


async def _promise(trial: Trial, n: int, early: int = 0) -> Figures:
    """Take all messages off their queue and return how many are lost, duplicated, and early or not to be there."""
    trial.report(f"counting {n:,} messages")
    async with opened(trial) as (_, transport):
        times = Counter(await received_ids(transport, queue_names(trial.run).arrived, n))
    expected = {id_of(number, trial.run) for number in range(n)}
    return {
        "lost": len(expected - times.keys()),
        "duplicated": sum(count > 1 for count in times.values()),
        "early": early + len(times.keys() - expected),
    }


# --- output -----------------------------------------------------------------------------------------------------------


def _run(benchmark: Benchmark, common: Common, values: Mapping[str, Any]) -> None:
    results = list[Figures]()

    async def measure(run: Trial) -> None:
        servers = await run.set_up()
        figures = await benchmark(run, **values)
        rounded = {name: _rounded(name, value) for name, value in figures.items()}
        results.append({"benchmark": benchmark.__name__, **rounded, "servers": servers})

    async def interruptible(run: Trial) -> None:
        # SIGINT cancels the first task by asyncio's own means, which do not wait for a thread: one that was making
        # tables went on, and made the schema of the run once more after it had been dropped. A scope waits.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(measure, run)

    def report(text: str) -> None:
        if not common.as_json or sys.stderr.isatty():
            typer.echo(f"{text} …", err=True)

    with common.working_folder() as folder, trial(common, folder, queue_names, report) as made:
        anyio.run(interruptible, made)
    (figures,) = results
    if common.as_json:
        typer.echo(json.dumps(figures))
    else:
        servers = cast("dict[str, dict[str, str]]", figures.pop("servers"))
        lines = {name: ", ".join(map(" ".join, facts.items())) for name, facts in servers.items()}
        print_pairs({**figures, **lines})
    if any(figures.get(name) for name in ("lost", "duplicated", "early")):
        raise typer.Exit(Exit.NOT_KEPT)


def _rounded(name: str, value: object) -> object:
    return round(value, 1 if name == "rate" else 3) if isinstance(value, float) else value
