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
    diagnose_loopback,
    diagnose_pipeline,
    diagnose_python,
    diagnose_settings,
    diagnose_sqlite,
    diagnose_time_zones,
)
from postdate.operations.doctor.files import FileInspector, diagnose_file_system, diagnose_synchronous, inspect_files
from postdate.operations.doctor.servers import (
    diagnose_intake_bindings,
    diagnose_queue_limits,
    diagnose_service_clocks,
    diagnose_timeouts,
    inspect_server,
)
from postdate.operations.doctor.traffic import Queues, diagnose_traffic, read_store_traffic
from postdate.operations.needs import all_intake_queues
from postdate.ports import AdministrableStore, StoreTraffic, TransactionMode, TransportCapabilities, UnreadableRows
from postdate.ports.backends import Place
from postdate.wiring import (
    advice_for,
    check_addresses,
    delay_exchange,
    file_of,
    find_file_inspector,
    name_setting_in_errors,
    open_store,
    open_transport,
    own_queues,
    store_observer,
    store_settings,
    transport_settings,
)

_NAMES_IN_FILES = TransportCapabilities(durable=True, transaction_modes=frozenset())
"""The rules for names of queues in a file, for code that does not open the file."""

__all__ = ["Diagnosis", "Probe", "Verdict", "diagnose", "diagnose_file_system", "diagnose_loopback"]


async def diagnose(settings: Settings, environment: Mapping[str, str], clock: Clock) -> Diagnosis:
    """Check this installation. Reading files blocks the thread briefly; ``environment`` says where Java is."""
    checks = [diagnose_python(), diagnose_sqlite(sqlite_version()), diagnose_time_zones(), diagnose_settings(settings)]
    checks += await _diagnose_store_and_queues(settings, clock)
    return Diagnosis([*checks, diagnose_pipeline(environment)])


async def _diagnose_store_and_queues(settings: Settings, clock: Clock) -> list[Probe]:
    if all(
        place_of(address.scheme) is Place.MEMORY for address in (settings.store.address, settings.transport.address)
    ):
        mend = "use a file, such as sqlite:///postdate.db, or a server, so that other processes can see the messages"
        return [Probe("addresses", Verdict.WARN, "memory exists in one process only; there is nothing to check", mend)]
    try:
        check_addresses(settings)
        if settings.delayed_delivery.enabled:
            store_settings(settings)
        transport_settings(settings)
    except PostdateError as error:
        return [Probe("addresses", Verdict.FAIL, str(error), "see `postdate config show`")]
    run = _DiagnosisRun(settings, clock)
    run.diagnose_files()
    await run.diagnose_store()
    await run.diagnose_transport()
    run.checks += await diagnose_timeouts(settings, clock.now())
    queues = None if run.lengths is None else Queues(run.needed_queues, run.lengths, run.listable)
    return [*run.checks, *diagnose_traffic(settings, queues, run.store_traffic, clock.now(), run.unreadable)]


@dataclass
class _DiagnosisRun:
    """The checks of one run of the doctor; each step adds some."""

    settings: Settings
    clock: Clock
    checks: list[Probe] = field(default_factory=list[Probe])
    needed_queues: Sequence[str] = ()
    store_traffic: StoreTraffic | None = None
    lengths: Mapping[str, int] | None = None
    listable: bool = True
    unreadable: int | None = None
    _store_answers: bool = False

    def diagnose_files(self) -> None:
        settings = self.settings
        store = self._file_of(settings.store.address) if settings.delayed_delivery.enabled else None
        transport = self._file_of(settings.transport.address)
        files = dict(file for file in (store, transport) if file is not None)
        if any(files.values()):
            self.checks += [diagnose_loopback(), diagnose_synchronous(self.settings)]
        checks, facts = inspect_files(files, self.clock.now())
        self.checks += checks
        for each in facts.values():
            self._add_unreadable(each.unreadable)
        if store is not None and store[0] in facts:
            self.store_traffic = facts[store[0]]
        if transport is not None and transport[0] in facts:
            self.lengths = facts[transport[0]].queues

    @staticmethod
    def _file_of(address: str) -> tuple[Path, FileInspector | None] | None:
        path = file_of(address)
        return None if path is None else (path.expanduser().resolve(), find_file_inspector(address))

    def _is_diagnosed(self, address: str) -> bool:
        """Return whether :meth:`diagnose_files` covers the address: its file was read, or does not exist."""
        file = self._file_of(address)
        return file is not None and (file[1] is not None or not file[0].exists())

    def _add_unreadable(self, count: int) -> None:
        self.unreadable = count + (self.unreadable or 0)

    async def diagnose_store(self) -> None:
        """Check the store, if it is on a server."""
        address = self.settings.store.address
        if not self.settings.delayed_delivery.enabled or self._is_diagnosed(address):
            return
        try:
            async with AsyncExitStack() as stack:
                arguments = store_settings(self.settings)
                with name_setting_in_errors("store.address", address, self.settings):
                    store = open_store(address, **arguments)
                stack.push_async_callback(store.close)
                await store.initialize(self.settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
                is_judge = self.settings.delayed_delivery.use_store_clock and store.capabilities.has_clock
                checks, self._store_answers = await inspect_server("store server", store, self.clock, is_judge=is_judge)
                self.checks += checks
                if self._store_answers and store.capabilities.has_clock:
                    reported = await store.reported_clocks()
                    self.checks += [diagnose_service_clocks(reported, is_judge=is_judge)] if reported else []
                if self._store_answers and isinstance(store, UnreadableRows):
                    self._add_unreadable(await store.count_unreadable())
                if self._store_answers and isinstance(store, AdministrableStore):
                    self.store_traffic = await read_store_traffic(store, store_observer(store), self.clock.now())
        except PostdateError as error:
            self._add_failure("store", error)

    async def diagnose_transport(self) -> None:
        """Check the queues, if they are on a server. A server that also has the store is checked only once."""
        address = self.settings.transport.address
        if self._is_diagnosed(address):
            self.needed_queues = own_queues(self.settings, _NAMES_IN_FILES)
            return
        try:
            async with AsyncExitStack() as stack:
                arguments = transport_settings(self.settings)
                with name_setting_in_errors("transport.address", address, self.settings):
                    transport = open_transport(address, **arguments)
                stack.push_async_callback(transport.close)
                self.needed_queues = own_queues(self.settings, transport.capabilities)
                can_answer = self._store_answers
                if address != self.settings.store.address or not self.settings.delayed_delivery.enabled:
                    checks, can_answer = await inspect_server("queue server", transport, self.clock)
                    self.checks += checks
                if can_answer and isinstance(transport, UnreadableRows):
                    self._add_unreadable(await transport.count_unreadable())
                if can_answer:
                    self.needed_queues = list(
                        dict.fromkeys([*self.needed_queues, *all_intake_queues(self.settings, transport)])
                    )
                    destinations = () if self.store_traffic is None else self.store_traffic.destinations
                    names = list(dict.fromkeys([*self.needed_queues, *destinations]))
                    view = transport.observer()
                    self.listable = view is not None
                    self.lengths = await (transport.lengths_of(names) if view is None else view.queue_lengths())
                    self.checks += await diagnose_queue_limits(transport, list(self.lengths or ()))
                    self.checks += await diagnose_intake_bindings(transport, delay_exchange(self.settings, transport))
        except PostdateError as error:
            self._add_failure("transport", error)

    def _add_failure(self, role: str, error: PostdateError) -> None:
        mend = "check the settings with `postdate config show`; `postdate setup` creates missing tables and queues"
        self.checks.append(Probe(role, Verdict.FAIL, str(error), advice_for(error, mend)))
