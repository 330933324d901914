"""Check everything that an installation needs in order to work, without changing anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from postdate.backends.registry import place_of
from postdate.backends.sqlite.observation import sqlite_version
from postdate.clock import Clock
from postdate.config import Settings
from postdate.errors import PostdateError
from postdate.operations.doctor.checks import (
    Diagnosis,
    Probe,
    Verdict,
    loopback,
    pipeline,
    python,
    settings_read,
    sqlite,
    time_zones,
)
from postdate.operations.doctor.files import Look, file_system, look_at_files, synchronous
from postdate.operations.doctor.servers import (
    intake_bindings,
    limits_on_server,
    look_at_server,
    service_clocks,
    timeouts,
)
from postdate.operations.doctor.traffic import Queues, stored_on_server, traffic
from postdate.operations.needs import sources
from postdate.ports import AdministrableStore, StoreTraffic, TransactionMode, TransportCapabilities, UnreadableRows
from postdate.ports.backends import Place
from postdate.wiring import (
    advice_for,
    check_addresses,
    delay_exchange,
    file_of,
    looks_into,
    naming,
    open_store,
    open_transport,
    own_queues,
    store_observer,
    store_settings,
    transport_settings,
)

_NAMES_IN_FILES = TransportCapabilities(durable=True, transaction_modes=frozenset())
"""The rules for names of queues in a file, for code that does not open the file."""

__all__ = ["Diagnosis", "Probe", "Verdict", "diagnose", "file_system", "loopback"]


async def diagnose(settings: Settings, environment: Mapping[str, str], clock: Clock) -> Diagnosis:
    """Check this installation. Reading files blocks the thread briefly; ``environment`` says where Java is."""
    checks = [python(), sqlite(sqlite_version()), time_zones(), settings_read(settings)]
    checks += await _store_and_queues(settings, clock)
    return Diagnosis([*checks, pipeline(environment)])


async def _store_and_queues(settings: Settings, clock: Clock) -> list[Probe]:
    if all(
        place_of(address.scheme) is Place.MEMORY for address in (settings.store.address, settings.transport.address)
    ):
        mend = "use a file, such as sqlite:///postdate.db, or a server, if other processes are to see it"
        return [Probe("addresses", Verdict.WARN, "memory: lives in one process only; nothing to check", mend)]
    try:
        check_addresses(settings)
    except PostdateError as error:
        return [Probe("addresses", Verdict.FAIL, str(error), "see `postdate config show`")]
    looking = _Looking(settings, clock)
    looking.at_files()
    await looking.at_store()
    await looking.at_transport()
    looking.checks += await timeouts(settings, clock.now())
    queues = None if looking.lengths is None else Queues(looking.needed, looking.lengths, looking.listable)
    return [*looking.checks, *traffic(settings, queues, looking.stored, clock.now(), looking.unreadable)]


@dataclass
class _Looking:
    """The checks of one run of the doctor; each step adds some."""

    settings: Settings
    clock: Clock
    checks: list[Probe] = field(default_factory=list[Probe])
    needed: Sequence[str] = ()
    stored: StoreTraffic | None = None
    lengths: Mapping[str, int] | None = None
    listable: bool = True
    unreadable: int | None = None
    _store_answers: bool = False

    def at_files(self) -> None:
        settings = self.settings
        store = self._file(settings.store.address) if settings.delayed_delivery.enabled else None
        transport = self._file(settings.transport.address)
        files = dict(file for file in (store, transport) if file is not None)
        if any(files.values()):
            self.checks += [loopback(), synchronous(self.settings)]
        checks, facts = look_at_files(files, self.clock.now())
        self.checks += checks
        for each in facts.values():
            self._note_unreadable(each.unreadable)
        if store is not None and store[0] in facts:
            self.stored = facts[store[0]]
        if transport is not None and transport[0] in facts:
            self.lengths = facts[transport[0]].queues

    @staticmethod
    def _file(address: str) -> tuple[Path, Look | None] | None:
        path = file_of(address)
        return None if path is None else (path.expanduser().resolve(), looks_into(address))

    def _is_done_with(self, address: str) -> bool:
        """Return whether :meth:`at_files` covers the address: its file has a `Look`, or the file does not exist."""
        file = self._file(address)
        return file is not None and (file[1] is not None or not file[0].exists())

    def _note_unreadable(self, count: int) -> None:
        self.unreadable = count + (self.unreadable or 0)

    async def at_store(self) -> None:
        """Check the store, if it is on a server."""
        address = self.settings.store.address
        if not self.settings.delayed_delivery.enabled or self._is_done_with(address):
            return
        try:
            async with AsyncExitStack() as stack:
                arguments = store_settings(self.settings)
                with naming("store.address", address, self.settings):
                    store = open_store(address, **arguments)
                stack.push_async_callback(store.close)
                await store.initialize(self.settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
                judges = self.settings.delayed_delivery.use_store_clock and store.capabilities.has_clock
                checks, self._store_answers = await look_at_server("store server", store, self.clock, judges=judges)
                self.checks += checks
                if self._store_answers and store.capabilities.has_clock:
                    reported = await store.reported_clocks()
                    self.checks += [service_clocks(reported, judges=judges)] if reported else []
                if self._store_answers and isinstance(store, UnreadableRows):
                    self._note_unreadable(await store.count_unreadable())
                if self._store_answers and isinstance(store, AdministrableStore):
                    self.stored = await stored_on_server(store, store_observer(store), self.clock.now())
        except PostdateError as error:
            self._cannot_be_read("store", error)

    async def at_transport(self) -> None:
        """Check the queues, if they are on a server. A server that also has the store is checked only once."""
        address = self.settings.transport.address
        if self._is_done_with(address):
            self.needed = own_queues(self.settings, _NAMES_IN_FILES)
            return
        try:
            async with AsyncExitStack() as stack:
                arguments = transport_settings(self.settings)
                with naming("transport.address", address, self.settings):
                    transport = open_transport(address, **arguments)
                stack.push_async_callback(transport.close)
                self.needed = own_queues(self.settings, transport.capabilities)
                answers = self._store_answers
                if address != self.settings.store.address or not self.settings.delayed_delivery.enabled:
                    checks, answers = await look_at_server("queue server", transport, self.clock)
                    self.checks += checks
                if answers and isinstance(transport, UnreadableRows):
                    self._note_unreadable(await transport.count_unreadable())
                if answers:
                    self.needed = list(dict.fromkeys([*self.needed, *sources(self.settings, transport)]))
                    destinations = () if self.stored is None else self.stored.destinations
                    names = list(dict.fromkeys([*self.needed, *destinations]))
                    view = transport.observer()
                    self.listable = view is not None
                    self.lengths = await (transport.lengths_of(names) if view is None else view.queue_lengths())
                    self.checks += await limits_on_server(transport, list(self.lengths or ()))
                    self.checks += await intake_bindings(transport, delay_exchange(self.settings, transport))
        except PostdateError as error:
            self._cannot_be_read("transport", error)

    def _cannot_be_read(self, what: str, error: PostdateError) -> None:
        mend = "see `postdate config show`; tables and queues that are missing are created by `postdate setup`"
        self.checks.append(Probe(what, Verdict.FAIL, str(error), advice_for(error, mend)))
