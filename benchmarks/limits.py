"""Physical limits, measured in the same run as our own figures: the barest way to do the same work, timed alike.

A backend without a barer way to put messages into its queues is measured by sending through its transport alone;
the result's ``servers`` then says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Final

import anyio

from benchmarks.deployment import Deployment
from benchmarks.places import Measured, Targets
from benchmarks.result import LatenessInMilliseconds, lateness
from benchmarks.targets.target import BareRow
from postdate.cli.bench.messages import BODY, headers_of, id_of, receive_ids
from postdate.clock import SystemClock
from postdate.errors import ConfigurationError, PostdateError
from postdate.messages import Envelope, encode_headers

_RUN: Final = "0" * 12
_SENT_AT_ONCE: Final = 1_000
_BATCHES_AT_ONCE: Final = 4
_FILLED_A_SECOND_AT_LEAST: Final = 50_000


def _rows(dues: Iterable[int]) -> Generator[BareRow]:
    for number, due in enumerate(dues):
        message_id = id_of(number, _RUN)
        yield BareRow(message_id, due, encode_headers(headers_of(message_id)), BODY)


# --- rates --------------------------------------------------------------------------------------------------------


def move_limit(targets: Targets, n: int) -> float:
    """Return messages a second of the barest way to put ``n`` due messages into a queue."""
    target = targets.queues.target
    found = target.moved_per_second(n)
    if found is None:
        rates = [_moved_per_second(targets.queues, n, at_once) for at_once in target.moved_at_once]
        found = max(filter(None, rates), default=None)
    if found is not None:
        return found
    targets.queues.facts["limit"] = "sending through the transport alone"
    return anyio.run(_send_limit, targets.deployment, n)


def _moved_per_second(queues: Measured, n: int, at_once: int) -> float | None:
    """Return the rate of moving rows between two bare tables; ``None`` where the backend cannot."""
    now = time.time_ns() // 1_000
    moving = queues.target.mover(_rows(range(now - (n + 1) * 1_000, now - 1_000, 1_000)), at_once)
    if moving is None:
        return None
    with moving as move:
        started, moved = time.perf_counter(), 0
        while moved < n:
            batch = move(now)
            if not batch:
                raise PostdateError(f"the limit moved {moved:,} rows, not {n:,}: somebody else is in its tables")
            moved += batch
        return n / (time.perf_counter() - started)


async def _send_limit(deployment: Deployment, n: int) -> float:
    transport, clock, queue = deployment.open_transport(), SystemClock(), deployment.names.limit
    ids = [id_of(number, _RUN) for number in range(min(n, _SENT_AT_ONCE))]
    envelopes = [Envelope(queue, each, headers_of(each), BODY, due=clock.now()) for each in ids]
    batches = iter([envelopes[: n - first] for first in range(0, n, _SENT_AT_ONCE)])

    async def send() -> None:
        for batch in batches:
            for error in await transport.send(batch, clock.now()):
                if error is not None:
                    raise error

    try:
        await transport.create_queues([queue])
        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(_BATCHES_AT_ONCE):
                tasks.start_soon(send)
        return n / (time.perf_counter() - started)
    finally:
        await transport.close()


def insert_limit(targets: Targets, n: int, batch: int) -> float | None:
    """Return bare rows inserted a second, ``batch`` a commit; ``None`` where the backend has no barer way to store."""
    inserting = targets.store.target.inserter()
    if inserting is None:
        return None
    seconds, due = 0.0, time.time_ns() // 1_000 + 3_600_000_000
    with inserting as prepared:
        rows = _rows(range(due, due + n))
        while made := list(islice(rows, batch)):
            insert = prepared(made)
            started = time.perf_counter()
            insert()
            seconds += time.perf_counter() - started
    return n / seconds


def receive_limit(targets: Targets, queue: str, n: int) -> float:
    """Return messages a second of the barest way to take ``n`` messages off a queue and read headers and body."""
    taking = targets.queues.target.taker(queue)
    if taking is None:
        raise ConfigurationError(
            f"the limit of receiving is not known for {targets.queues.name}: choose queues of another kind with "
            f"--transport, such as local"
        )
    with taking as take:
        started, taken = time.perf_counter(), 0
        while batch := take():
            taken += batch
        seconds = time.perf_counter() - started
    if taken != n:
        raise PostdateError(f"the limit took {taken:,} messages off the queue, not {n:,}: somebody else is in it")
    return n / seconds


# --- lateness -----------------------------------------------------------------------------------------------------


def floor(targets: Targets, rate: int, seconds: float) -> tuple[LatenessInMilliseconds, LatenessInMilliseconds | None]:
    """Return the lateness of the barest loop, and of a sleeping thread where that loop only sleeps.

    A server's loop sleeps until each due time and moves due rows. For files, and for servers without a barer way to
    move, it is an event loop that only sleeps, like the one of a service.
    """
    dues = due_times(rate, seconds, ahead=1 + int(rate * seconds) / _FILLED_A_SECOND_AT_LEAST)
    target = targets.queues.target
    moving = target.mover(_rows(int(due * 1e6) for due in dues), target.moved_at_once[0])
    if moving is None or not targets.queues.is_server:
        loop = anyio.run(event_loop_floor, rate, seconds)
        return loop, moving_floor(due_times(rate, seconds), lambda _now: 1)  # only sleeps: the best the system can do
    with moving as move:
        return moving_floor(dues, lambda now: move(int(now * 1e6))), None


def due_times(rate: int, seconds: float, ahead: float = 0.1) -> list[float]:
    """Return ``rate`` instants a second for ``seconds``, starting ``ahead`` seconds from now, in seconds since 1970."""
    first = time.time() + ahead
    return [first + number / rate for number in range(int(rate * seconds))]


async def event_loop_floor(rate: int, seconds: float) -> LatenessInMilliseconds:
    """Return the lateness of an event loop that only sleeps: the best that an asynchronous service can do."""
    late: list[float] = []
    for due in due_times(rate, seconds):
        await anyio.sleep(max(due - time.time(), 0))
        late.append(time.time() - due)
    return lateness(late)


def moving_floor(dues: list[float], move: Callable[[float], int]) -> LatenessInMilliseconds:
    """Return the lateness of a loop that sleeps until each due time (in seconds, ascending) and moves due rows."""
    late: list[float] = []
    while len(late) < len(dues):
        time.sleep(max(dues[len(late)] - time.time(), 0))
        moved = move(time.time())
        at = time.time()
        late += [at - due for due in dues[len(late) : len(late) + moved]]
    return lateness(late)


# --- what arrived -------------------------------------------------------------------------------------------------


def arrived(targets: Targets, n: int) -> Iterator[str]:
    """Yield the id of every message in the destination queue, of which ``n`` are expected; may empty the queue."""
    message_ids = targets.queues.target.arrived(targets.deployment.names.arrived)
    yield from anyio.run(_received, targets.deployment, n) if message_ids is None else message_ids


async def _received(deployment: Deployment, n: int) -> list[str]:
    transport = deployment.open_transport()
    try:
        return await receive_ids(transport, deployment.names.arrived, n)
    finally:
        await transport.close()
