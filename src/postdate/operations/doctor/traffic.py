"""Checks of processes, of pending messages, and of the queues that the messages need."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from postdate.config import Settings
from postdate.core.upkeep.wall_times import list_markers
from postdate.core.zones import zone_files
from postdate.messages import OF_THE_STORE
from postdate.operations.doctor.checks import Probe, Verdict
from postdate.operations.plain import format_count, format_span, running_services
from postdate.operations.state import LOOK_AHEAD
from postdate.ports import AdministrableStore, MessageFilter, Observer, Process, StoreTraffic
from postdate.ports.scanning import StreamableStore, StreamPosition
from postdate.runtime.threads import run_in_thread

_EXCHANGES = ("exchange:", "exchange-or-queue:")
"""Prefixes of destinations on RabbitMQ that are not queues."""

_READ_AHEAD = 200
"""Number of messages to read from a store that cannot list destinations alone.

The number is small because these messages are read with their bodies.
"""


_FORGOTTEN_AFTER = timedelta(days=7)
"""A stream that has not reported for so long may be forgotten. The default retention is 30 days."""


@dataclass(frozen=True, slots=True)
class Queues:
    """The queues that exist, and the queues that a service needs.

    ``lengths`` also has other destinations that can be reached. ``listable``: messages can be listed without receiving
    them.
    """

    needed: Sequence[str]
    lengths: Mapping[str, int]
    listable: bool = True


async def read_store_traffic(store: AdministrableStore, view: Observer | None, now: datetime) -> StoreTraffic:
    counts = await store.statistics(now)
    processes = None if view is None else await view.processes()
    next_destinations = None if view is None else await view.next_destinations(LOOK_AHEAD)
    if next_destinations is None:
        pending = await store.list_pending(MessageFilter(), _READ_AHEAD)
        next_destinations = {message.destination: 1 for message in pending}
    zones = [each.headers for each in await list_markers(store)]
    positions = await run_in_thread(store.stream_positions) if isinstance(store, StreamableStore) else ()
    return StoreTraffic(
        counts.pending, counts.overdue, counts.next_due, processes, sorted(next_destinations), zones, positions
    )


# --- judging what was found ----------------------------------------------------------------------------------------


def diagnose_traffic(
    settings: Settings,
    queues: Queues | None,
    store_traffic: StoreTraffic | None,
    now: datetime,
    unreadable: int | None = None,
) -> Iterator[Probe]:
    """Yield the checks of processes, service, queues and unreadable rows. A ``None`` argument could not be read."""
    if store_traffic is not None:
        if store_traffic.processes is not None:
            yield _diagnose_processes(store_traffic.processes)
        yield _diagnose_service(store_traffic, now)
        yield from map(_diagnose_zone, store_traffic.zones)
        yield from (_diagnose_position(each, now) for each in store_traffic.positions)
    if queues is not None:
        yield _diagnose_queues(queues)
        yield _diagnose_error_queue(settings.endpoint.error_queue, queues)
        if store_traffic is not None:
            yield _diagnose_destinations(
                [each for each in store_traffic.destinations if each not in OF_THE_STORE], queues.lengths
            )
    if unreadable is not None:
        yield _diagnose_unreadable(unreadable)


def _diagnose_processes(processes: Sequence[Process]) -> Probe:
    alive = [process for process in processes if process.alive]
    dead = [process for process in processes if not process.alive]
    text = f"{len(alive)} alive" + (f" ({', '.join(str(process.pid) for process in alive)})" if alive else "")
    if not dead:
        return Probe("processes", Verdict.OK, text)
    pids = ", ".join(str(process.pid) for process in dead)
    mend = "if a service runs, do nothing: it releases their claims; otherwise start one: postdate run"
    return Probe("processes", Verdict.WARN, f"{text}; {len(dead)} died without stopping ({pids})", mend)


def _diagnose_service(store_traffic: StoreTraffic, now: datetime) -> Probe:
    overdue = f"{format_count(store_traffic.overdue, 'message')} overdue"
    if store_traffic.overdue and store_traffic.oldest is not None and store_traffic.oldest < now:
        overdue += f", the oldest for {format_span(now - store_traffic.oldest)}"
    if store_traffic.processes is None:
        text = f"this store does not show whether a service is running; {overdue}"
        return Probe("service", Verdict.WARN, text, "make sure that a service is running: postdate run")
    services = running_services(store_traffic.processes)
    if services:
        pids = ", ".join(str(process.pid) for process in services)
        return Probe("service", Verdict.OK, f"running (process {pids}); {overdue}")
    if store_traffic.overdue:
        return Probe("service", Verdict.FAIL, f"no service is running, and {overdue}", "start one: postdate run")
    return Probe("service", Verdict.WARN, "no service is running; no message is overdue", "start one: postdate run")


def _diagnose_zone(marker: Mapping[str, str]) -> Probe:
    zone, at, moved_count = (marker.get(name, "?") for name in ("zone", "at", "moved"))
    text = f"{zone}: messages follow the rules of the zone as of {at}, which moved {moved_count} of them"
    if "" < (local_version := zone_files()[0].version) < marker.get("version", ""):
        mend = "update the system's zone files, or the package tzdata"
        return Probe(
            "time zone",
            Verdict.WARN,
            f"{text}; these rules have version {marker['version']}, the rules of this "
            f"machine have version {local_version}",
            mend,
        )
    return Probe("time zone", Verdict.OK, text)


def _diagnose_position(position: StreamPosition, now: datetime) -> Probe:
    """Warn of a stream that has not reported for long: the records that it has not copied fill the disk."""
    text = f"{position.name} has the records below number {position.number}"
    if now - position.at < _FORGOTTEN_AFTER:
        return Probe("history", Verdict.OK, text)
    mend = (
        "run `postdate pipeline history` with its folder again; or remove its position: `postdate pipeline history "
        f"--forget {shlex.quote(position.name)}`"
    )
    silence = format_span(now - position.at)
    return Probe(
        "history",
        Verdict.WARN,
        f"{text}, and has not gone on for {silence}; retention removes no later record until it does",
        mend,
    )


def _diagnose_queues(queues: Queues) -> Probe:
    missing = [name for name in queues.needed if name not in queues.lengths]
    if missing:
        return Probe("queues", Verdict.FAIL, f"missing: {', '.join(missing)}", "run `postdate setup`")
    names = [name for name in queues.lengths if not name.startswith(_EXCHANGES)]
    return Probe("queues", Verdict.OK, f"{len(names)}: {', '.join(names)}")


def _diagnose_error_queue(name: str, queues: Queues) -> Probe:
    length = queues.lengths.get(name, 0)
    if not length:
        return Probe("error queue", Verdict.OK, f"{name!r} is empty")
    text = f"{format_count(length, 'message')} in {name!r}"
    if not queues.listable:
        mend = "inspect them with the tools of the broker; then run `postdate errors return --all`"
        return Probe("error queue", Verdict.WARN, text, mend)
    return Probe(
        "error queue",
        Verdict.WARN,
        text,
        "list them with `postdate errors list`; return them with `postdate errors return`",
    )


def _diagnose_unreadable(count: int) -> Probe:
    if not count:
        return Probe("unreadable", Verdict.OK, "none: every message can be read")
    text = f"{format_count(count, 'message')} cannot be read"
    mend = (
        "list them with `postdate messages list --unreadable`; repair them in the database, or run `postdate "
        "messages discard NAME`"
    )
    return Probe("unreadable", Verdict.WARN, text, mend)


def _diagnose_destinations(destinations: Sequence[str], lengths: Mapping[str, int]) -> Probe:
    missing = [name for name in destinations if name not in lengths]
    if not missing:
        return Probe("destinations", Verdict.OK, "every destination of pending messages exists")
    options = " ".join(f"--queue {name}" for name in missing)
    text = f"pending messages have destinations that do not exist: {', '.join(missing)}"
    return Probe("destinations", Verdict.WARN, text, f"create them: postdate setup {options}")
