"""Checks of servers: whether they answer, whether their tables fit, and how durable they are.

Adapters report the facts of a server. This module judges the facts, in functions that need no server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import anyio

from postdate.backends.registry import backends
from postdate.clock import Clock
from postdate.config import Settings
from postdate.core.recoverability import IMMEDIATE_RETRIES
from postdate.core.upkeep.store_clock import LOGGED_DIFFERENCE
from postdate.errors import PostdateError, TransportError
from postdate.operations.doctor.checks import Probe, Verdict
from postdate.operations.plain import format_count, format_span, format_time
from postdate.ports import AdministrableStore, DelayExchange, ForeignIntake, OldSnapshot, ServerFacts, Transport
from postdate.ports.timeouts import TimeoutPersister
from postdate.ports.transports import foreign_bindings_text
from postdate.wiring import advice_for, file_of, open_timeouts

_PATIENCE_SECONDS: Final = 30.0
_CLOCK_TOLERANCE: Final = timedelta(milliseconds=100)
_BY_NTP: Final = "set the clocks of these machines by NTP"
_OR_BY_STORE: Final = f"{_BY_NTP}, or set delayed_delivery.use_store_clock = true"

_LIMITS: Final = "queue limits"
_ISOLATION: Final = ("isolation", "transaction_isolation", "tx_isolation")
"""Settings with the isolation of Postdate's own sessions, or else of the server. The name differs between versions."""

_TAKES_NO_WRITES: Final = re.compile("on|1|slave|read_only.*", re.IGNORECASE)
_WRITES: Final = ("in_recovery", "transaction_read_only", "read_only", "updateability", "role")
"""Settings by which a server reports that it accepts no writes."""


async def inspect_server(
    name: str, adapter: object, clock: Clock, *, is_judge: bool = False
) -> tuple[list[Probe], bool]:
    """Return the checks of the server that an adapter uses, and whether the server can answer more questions.

    ``is_judge``: services use the clock of the server to decide what is due.
    """
    no_facts = [Probe(name, Verdict.OK, "the server reports nothing about itself")]
    if not isinstance(adapter, AdministrableStore | Transport):
        return no_facts, True
    try:
        with anyio.fail_after(_PATIENCE_SECONDS):
            # This call connects, so the next answer, which is timed, does not include the time to connect.
            await adapter.server_facts()
            before = clock.now()
            facts = await adapter.server_facts()
            after = clock.now()
            snapshots = await adapter.old_snapshots() if isinstance(adapter, AdministrableStore) else None
    except TimeoutError:
        text = f"no answer within {_PATIENCE_SECONDS:g} s"
        return [Probe(name, Verdict.FAIL, text, "check that the server runs and can be reached from here")], False
    except PostdateError as error:
        mend = "check that the server runs, and check address, user and password: `postdate config show`"
        return [Probe(name, Verdict.FAIL, str(error), advice_for(error, mend))], False
    if facts is None:
        return no_facts, True
    checks = [diagnose_version(name, facts), *diagnose_server_settings(facts)]
    if facts.now is not None:
        checks.append(diagnose_server_clock(before, facts.now, after, is_judge=is_judge))
    if snapshots is not None:
        checks += [diagnose_old_snapshot(each, facts.product) for each in snapshots] or [
            Probe("old snapshots", Verdict.OK, "no old snapshot prevents the server from removing dead rows")
        ]
    return checks, facts.schema_version in {None, facts.newest_schema_version}


async def diagnose_queue_limits(transport: Transport, names: Sequence[str]) -> Sequence[Probe]:
    """Return a check for each limit at which queues drop messages without an error (ADR 0028)."""
    try:
        limits = await transport.limits_of(names)
    except TransportError as error:
        return [Probe(_LIMITS, Verdict.WARN, f"unknown: {error}")]
    new_queues = [queue for queue, queue_limits in (limits or {}).items() if queue_limits is None]
    probes = (
        [Probe(_LIMITS, Verdict.WARN, f"not known yet: {', '.join(new_queues)}; try again later")] if new_queues else []
    )
    for queue, queue_limits in (limits or {}).items():
        probes += [diagnose_queue_limit(queue, name, limit) for name, limit in (queue_limits or {}).items()]
    return probes or [Probe(_LIMITS, Verdict.OK, "no limit drops messages")] * (limits is not None)


async def diagnose_intake_bindings(transport: Transport, exchange: DelayExchange | None) -> Sequence[Probe]:
    """Return a check of the bindings by applications to the exchange for messages of other programs (ADR 9)."""
    if exchange is None or not isinstance(transport, ForeignIntake):
        return []
    name = f"exchange {exchange.name}"
    try:
        bindings = await transport.foreign_bindings(exchange)
    except TransportError as error:
        return [Probe(name, Verdict.WARN, f"its bindings are unknown: {error}")]
    if not bindings:
        return [Probe(name, Verdict.OK, "no queue of an application is bound to it")]
    mend = f"bind to {exchange.name}.due instead, and unbind from {exchange.name}"
    return [Probe(name, Verdict.FAIL, foreign_bindings_text(exchange.name, bindings), mend)]


# --- judging what was found ----------------------------------------------------------------------------------------


def diagnose_version(name: str, facts: ServerFacts) -> Probe:
    """Judge whether the server is new enough. An unknown product or version passes."""
    text = f"{facts.product} {facts.version} answers"
    oldest = next((each.oldest_version for each in backends() if each.product == facts.product), ())
    digits = re.match(r"\d+(?:\.\d+)*", facts.version)
    if digits is not None and tuple(int(part) for part in digits[0].split(".")) < oldest:
        needed = ".".join(str(part) for part in oldest)
        return Probe(name, Verdict.FAIL, f"{text}, but is too old", f"upgrade it to {facts.product} {needed} or later")
    return Probe(name, Verdict.OK, text)


def diagnose_server_settings(facts: ServerFacts) -> Iterator[Probe]:
    if facts.schema_version is not None and facts.newest_schema_version is not None:
        yield diagnose_schema(facts.schema_version, facts.newest_schema_version, facts.missing_objects)
    if any(_TAKES_NO_WRITES.fullmatch(facts.settings.get(name, "")) for name in _WRITES):
        text = "the server is read-only, a standby, or in recovery: messages can neither be stored nor delivered"
        mend = "after a failover, change the address to the server that accepts writes; or make this server writable"
        yield Probe("writes", Verdict.FAIL, text, mend)
    diagnose_product = _PRODUCT_DIAGNOSES.get(facts.product)
    if diagnose_product is not None:
        yield from diagnose_product(facts.settings)


def diagnose_schema(current: int, newest: int, missing: Sequence[str] = ()) -> Probe:
    if current == 0:
        return Probe("schema", Verdict.FAIL, "there are no tables yet", "run `postdate setup`")
    if current < newest:
        text = f"version {current}, this Postdate needs {newest}"
        return Probe("schema", Verdict.FAIL, text, "run `postdate setup`, which updates the tables")
    if current > newest:
        text = f"version {current} was made by a newer Postdate; this one knows {newest}"
        return Probe("schema", Verdict.FAIL, text, "upgrade Postdate here")
    if missing:
        text = f"version {current} lacks {', '.join(missing)}"
        mend = (
            "run `postdate setup`, which creates indexes again; restore a missing table with its rows from the backup"
        )
        return Probe("schema", Verdict.FAIL, text, mend)
    return Probe("schema", Verdict.OK, f"version {current}")


def diagnose_server_clock(before: datetime, server: datetime, after: datetime, *, is_judge: bool = False) -> Probe:
    """Compare the clock of a server with ours. The server's was read between ``before`` and ``after`` on our clock.

    The time that the answer took is subtracted: the real difference is at least as large as the reported one.
    ``is_judge``: services use the clock of the server to decide what is due.
    """
    difference = server - after if server > after else min(server - before, timedelta(0))
    if abs(difference) <= _CLOCK_TOLERANCE:
        return Probe("server clock", Verdict.OK, f"within {format_span(_CLOCK_TOLERANCE)} of the clock of this machine")
    side = "ahead of" if difference > timedelta(0) else "behind"
    consequence = (
        "the server's clock decides what is due, and logs show the time of this machine"
        if is_judge
        else "a message that one machine schedules and another machine delivers is early or late by the difference "
        "of their clocks"
    )
    text = f"{format_span(difference)} {side} the clock of this machine: {consequence}"
    return Probe("server clock", Verdict.WARN, text, "set all clocks by NTP")


def diagnose_service_clocks(ahead: Mapping[str, timedelta], *, is_judge: bool) -> Probe:
    """Name each process whose clock differs from the server's by more than a second.

    ``ahead``: how far the clock of a process is ahead of the server's, by ``machine:pid``.
    """
    differing = {who: span for who, span in sorted(ahead.items()) if abs(span) > LOGGED_DIFFERENCE}
    if not differing:
        text = f"{format_count(len(ahead), 'service')}, no clock differs by more than {format_span(LOGGED_DIFFERENCE)}"
        return Probe("service clocks", Verdict.OK, text)
    differences = ", ".join(
        f"{who} is {format_span(span)} {'ahead of' if span > timedelta(0) else 'behind'} the server"
        for who, span in differing.items()
    )
    if is_judge:
        return Probe("service clocks", Verdict.WARN, f"{differences}; the server's clock decides what is due", _BY_NTP)
    return Probe(
        "service clocks",
        Verdict.WARN,
        f"{differences}: the process delivers early or late by this difference",
        _OR_BY_STORE,
    )


def diagnose_old_snapshot(snapshot: OldSnapshot, product: str) -> Probe:
    """Name the session whose old snapshot stops the server from cleaning up, and say how to end the session."""
    user = f"user {snapshot.user}" if snapshot.user else ""
    description = ", ".join(part for part in (snapshot.application, user) if part)
    holder = f"session {snapshot.pid} ({description})" if snapshot.pid else description
    text = (
        f"{holder} has held a snapshot for {format_span(snapshot.age)} ({snapshot.state}): rows of delivered "
        f"messages cannot be removed, and queries for due messages become slower"
    )
    if snapshot.mend:
        return Probe("old snapshots", Verdict.WARN, text, f"if it is not needed any more: {snapshot.mend}")
    end = f"SELECT pg_terminate_backend({snapshot.pid})" if product == "PostgreSQL" else f"KILL {snapshot.pid}"
    return Probe("old snapshots", Verdict.WARN, text, f"end its transaction there, or the session itself: {end}")


def diagnose_queue_limit(queue: str, name: str, limit: int) -> Probe:
    """Judge a limit of a queue. ``name`` is its name in policies of RabbitMQ."""
    text, mend = f"{queue!r} has {name} {limit:,}", f"remove {name} from the queue, or from the policy that sets it"
    if name != "delivery-limit":
        return Probe(_LIMITS, Verdict.WARN, f"{text}: messages beyond this limit are dropped without an error", mend)
    text += (
        ": a message that was returned to the queue nearly this often goes to the error queue, even if it has "
        "retries left"
    )
    return Probe(_LIMITS, Verdict.OK, text) if limit > IMMEDIATE_RETRIES else Probe(_LIMITS, Verdict.WARN, text, mend)


def _diagnose_postgresql(settings: Mapping[str, str]) -> Iterator[Probe]:
    if settings.get("fsync", "on").lower() == "off":
        text = "fsync is off: a power loss or a crash of the machine can damage the whole database"
        yield Probe("fsync", Verdict.FAIL, text, "set fsync = on in postgresql.conf and reload")
    if settings.get("full_page_writes", "on").lower() == "off":
        text = "full_page_writes is off: a power loss can damage pages permanently"
        yield Probe("full page writes", Verdict.WARN, text, "set full_page_writes = on in postgresql.conf")
    commit = settings.get("synchronous_commit")
    if commit is not None:
        if commit.lower() == "off":
            text = "synchronous_commit is off: a crash of the server may lose the last commits, including messages"
            mend = "set synchronous_commit = on for Postdate's user, unless lost messages can be sent again"
            yield Probe("durability", Verdict.WARN, text, mend)
        else:
            text = f"synchronous_commit is {commit}: a commit survives a power loss"
            yield Probe("durability", Verdict.OK, text)


def _diagnose_mariadb(settings: Mapping[str, str]) -> Iterator[Probe]:
    flush = settings.get("innodb_flush_log_at_trx_commit")
    if flush == "1":
        yield Probe("durability", Verdict.OK, "innodb_flush_log_at_trx_commit is 1: a commit survives a power loss")
    elif flush is not None:
        cause = "a power loss" if flush == "2" else "a crash of the server"
        text = f"innodb_flush_log_at_trx_commit is {flush}: {cause} may lose the commits of the last second"
        mend = "set innodb_flush_log_at_trx_commit = 1, unless lost messages can be sent again"
        yield Probe("durability", Verdict.WARN, text, mend)
    isolation = next((settings[name] for name in _ISOLATION if name in settings), None)
    if isolation is not None:
        level = isolation.upper().replace(" ", "-")
        if level == "READ-COMMITTED":
            yield Probe("isolation", Verdict.OK, level)
        else:
            text = f"{level} locks the gaps between rows: writers wait for each other, and deadlocks are more frequent"
            yield Probe("isolation", Verdict.WARN, text, "set transaction_isolation = READ-COMMITTED")


def _diagnose_sql_server(settings: Mapping[str, str]) -> Iterator[Probe]:
    durability = settings.get("delayed_durability")
    if durability is None:
        return
    if durability.lower() in {"disabled", "0"}:
        yield Probe("durability", Verdict.OK, "delayed durability is disabled: a commit survives a power loss")
    else:
        text = f"delayed durability is {durability.lower()}: a crash of the server may lose the last commits"
        yield Probe("durability", Verdict.WARN, text, "ALTER DATABASE CURRENT SET DELAYED_DURABILITY = DISABLED")


def _diagnose_rabbitmq(settings: Mapping[str, str]) -> Iterator[Probe]:
    block_reason = settings.get("blocked")
    if block_reason:
        mend = (
            "free memory or disk space on the broker: until then it accepts no messages, and due messages stay in "
            "the store"
        )
        yield Probe("broker alarm", Verdict.FAIL, f"the broker blocks publishers: {block_reason}", mend)
    elif block_reason is not None:
        yield Probe("broker alarm", Verdict.OK, "none: the broker accepts messages")


def _diagnose_redis(settings: Mapping[str, str]) -> Iterator[Probe]:
    if settings.get("maxmemory_policy", "").startswith("allkeys") and settings.get("maxmemory", "0") != "0":
        text = f"{settings['maxmemory_policy']}: the server removes messages when its memory is full"
        yield Probe("eviction", Verdict.FAIL, text, "set maxmemory-policy noeviction")


_PRODUCT_DIAGNOSES: Final[Mapping[str, Callable[[Mapping[str, str]], Iterator[Probe]]]] = {
    "PostgreSQL": _diagnose_postgresql,
    "MariaDB": _diagnose_mariadb,
    "SQL Server": _diagnose_sql_server,
    "RabbitMQ": _diagnose_rabbitmq,
    "Redis": _diagnose_redis,
}


# --- timeout managers: whether their storage answers, and whether due timeouts are dispatched -------------------------


_OLDEST: Final = timedelta(days=3652)
_LATE: Final = timedelta(minutes=1)


async def diagnose_timeouts(settings: Settings, now: datetime) -> list[Probe]:
    """Return a check for each endpoint whose timeout manager runs here."""
    address = settings.timeout_manager.address
    path = None if address is None else file_of(address)
    if path is not None and not path.expanduser().exists():  # To open a missing file would create it.
        return [Probe("timeouts", Verdict.FAIL, f"there is no file {path}", "run `postdate setup`")]
    try:
        persisters = open_timeouts(settings, create=False)
    except PostdateError as error:
        return [Probe("timeouts", Verdict.FAIL, str(error), "see `postdate config show`")]
    try:
        return [await _diagnose_persister(endpoint, persister, now) for endpoint, persister in persisters.items()]
    finally:
        for persister in persisters.values():
            await persister.close()


async def _diagnose_persister(endpoint: str, persister: TimeoutPersister, now: datetime) -> Probe:
    try:
        await persister.initialize(endpoint)
        due = (await persister.next_chunk(now - _OLDEST, now, 1)).due
    except PostdateError as error:
        mend = "check the settings with `postdate config show`; `postdate setup` creates a missing table"
        return Probe("timeouts", Verdict.FAIL, f"of {endpoint!r}: {error}", advice_for(error, mend))
    if due and due[0].due < now - _LATE:
        text = f"of {endpoint!r}: the earliest has been due since {format_time(due[0].due)}"
        mend = "start the service with `postdate run`, or return its control messages from the error queue"
        return Probe("timeouts", Verdict.WARN, text, mend)
    return Probe("timeouts", Verdict.OK, f"of {endpoint!r}: the storage answers, and no timeout is overdue")
