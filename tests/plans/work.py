"""What a service, its endpoints and applications do with a database all day, through the doors of the ports."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import anyio
from tests.plans.meters import Meter

from postdate import DelayedMessage, SystemClock
from postdate.messages import Envelope
from postdate.ports import Completion, Outcome, Settlement
from postdate.ports.endpoint import Correlation, SagaChange, SagaChangeKind, SagaRecord
from postdate.ports.timeouts import Timeout

ENDPOINT = "service"
QUEUES = ("consumer", "done", "error", "idle")
BATCH = 20
HOUR = timedelta(hours=1)


async def set_up(database: Any) -> None:
    """Make the tables of all adapters of a database object."""
    await database.store.initialize(ENDPOINT, next(iter(database.store.capabilities.transaction_modes)))
    await database.store.setup()
    if hasattr(database, "queues"):
        await database.queues.create_queues(QUEUES)
    await database.sagas.setup()
    await database.outbox.setup()
    await database.timeouts.initialize(ENDPOINT)
    await database.timeouts.setup()


async def work(database: Any, meter: Meter, turn: str, application: Any) -> None:
    """Do each kind of work once, with ids that begin with ``turn``; a step is measured as one.

    ``application`` is an application's own connection, if its transactions may have messages in them.
    """
    now = SystemClock().now()
    await _store(database.store, meter, turn, now)
    if hasattr(database, "queues"):
        await _queues(database, meter, turn, now)
    await _sagas(database.sagas, meter, turn)
    await _outbox(database, meter, turn, now)
    await _timeouts(database.timeouts, meter, turn, now)
    await _prune(database.store, meter, now)
    if application is not None:
        await anyio.to_thread.run_sync(_join, database.store, meter, turn, now, application)


def _message(id_: str, due: datetime) -> DelayedMessage:
    return DelayedMessage(id_, due, "consumer", {"Kind": "Work"}, b"{}")


async def _store(store: Any, meter: Meter, turn: str, now: datetime) -> None:
    early = now - 3 * HOUR  # before all that waits
    with meter.step("store one"):
        await store.store(_message(f"{turn}-one", now + HOUR), now)
    with meter.step("store many"):
        await store.store_many([_message(f"{turn}-{each}", early) for each in range(BATCH)], now)
    with meter.step("change by id"):
        await store.get(f"{turn}-one")
        await store.reschedule(f"{turn}-one", now + 2 * HOUR, now)
        await store.increment_failure_count(f"{turn}-one", now)
        await store.cancel(f"{turn}-one", now)
        await store.remove(f"{turn}-0", now)
    for _ in range(2):
        with meter.step("replace"):
            await store.replace(f"{turn}-key", partial(_keyed, now), now)
    for _ in range(2):
        with meter.step("next attempt"):
            await store.next_attempt()
    with meter.step("claim"):
        claims = list(await store.claim_due(now, BATCH))
    with meter.step("retry later"):
        await store.retry_later(claims.pop(), now + HOUR, now, "refused")
    with meter.step("finish"):
        await store.finish([claims.pop() for _ in range(5)], Outcome.DELIVERED, now)
    with meter.step("put off"):
        await store.release([claims.pop() for _ in range(5)], now + HOUR)
    with meter.step("mark unreadable"):
        await store.mark_unreadable(claims.pop(), "unreadable", now)
    with meter.step("release"):
        await store.release(claims, None)
    with meter.step("fetch one"):
        fetched = await store.fetch_next_due(now)
    with meter.step("remove one"):
        await store.remove(fetched.message_id, now)
    with meter.step("limits"):
        await store.store_limits(f"limited-{turn}", "1/s", now)
    kept = next(each for each in await store.load_limits() if each.destination == f"limited-{turn}")
    with meter.step("take a turn"):
        await store.reserve_slots(kept, now + HOUR)
    with meter.step("claim what is limited"):
        await store.release(await store.claim_lane(kept, now, BATCH), None)


async def _queues(database: Any, meter: Meter, turn: str, now: datetime) -> None:
    store, queues = database.store, database.queues
    for _ in range(2):  # the first full batch is followed by another statement
        with meter.step("move what is due"):
            await store.move_due(now, BATCH)
    with meter.step("send one"):
        await queues.send([Envelope("done", f"{turn}-s")], now)
    with meter.step("send many"):
        await queues.send([Envelope("done", f"{turn}-s{each}") for each in range(BATCH)], now)
    with meter.step("send what expires"):
        expired = [Envelope("idle", f"{turn}-x{each}", expires_at=now - HOUR) for each in range(BATCH)]
        await queues.send(expired, now)
    idle = queues.receiver("idle")
    with meter.step("discard what has expired"):
        await idle.receive(BATCH, wait=False)
    await idle.close()
    receiver = queues.receiver("consumer")
    with meter.step("receive"):
        received = list(await receiver.receive(BATCH, wait=False))
    with meter.step("roll back"):
        await receiver.roll_back(received.pop(), failed=True)
    with meter.step("commit one"):
        delayed = store.storing_work([_message(f"{turn}-w", now + HOUR)], now)
        await receiver.commit(received.pop(), now, Completion(outgoing=[Envelope("done", f"{turn}-o")], work=[delayed]))
    with meter.step("settle"):
        errors = await receiver.settle([Settlement(each, now, Completion()) for each in received])
    assert errors == [None] * len(received)
    with meter.step("receive again"):
        await receiver.receive(BATCH, wait=False)
    with meter.step("give back what was received"):
        await receiver.close()
    with meter.step("claim and finish with a send"):
        claims = await store.claim_due(now, BATCH)
        finishing = store.finishing_work(claims, Outcome.DELIVERED, now)
    await queues.send([Envelope("done", f"{turn}-f")], now, work=[finishing])


async def _sagas(sagas: Any, meter: Meter, turn: str) -> None:
    places = [Correlation("number", f"{turn}-{each}") for each in range(BATCH)]
    records = [SagaRecord(str(uuid.uuid4()), "Order", place, "{}") for place in places]

    async def change(fate: SagaChangeKind, version: int) -> None:
        rows = [SagaRecord(each.saga_id, "Order", each.correlation, "{}", version=version) for each in records]
        await sagas.apply([SagaChange(fate, each) for each in rows])

    with meter.step("create sagas"):
        await change(SagaChangeKind.CREATED, 0)
    with meter.step("find a saga"):
        await sagas.find("Order", places[0])
    with meter.step("load a saga"):
        await sagas.load("Order", records[0].saga_id)
    with meter.step("find sagas"):
        await sagas.find_all("Order", places)
    with meter.step("update sagas"):
        await change(SagaChangeKind.UPDATED, 1)
    with meter.step("list sagas"):
        await sagas.read_page(("Order", ""), BATCH)
    with meter.step("complete sagas"):
        await change(SagaChangeKind.COMPLETED, 2)


async def _outbox(database: Any, meter: Meter, turn: str, now: datetime) -> None:
    outbox, sagas = database.outbox, database.sagas
    ids = [f"{turn}-{each}" for each in range(BATCH)]

    async def add(id_: str) -> None:
        await outbox.transaction(ENDPOINT, id_).commit([Envelope("done", id_)], now)

    async def add_by_handler(id_: str) -> None:
        """Commit what a handler does in its transaction: with sagas, too, where that is one database."""
        transaction = outbox.transaction(ENDPOINT, id_)
        await transaction.begin()
        changes = [
            SagaChange(SagaChangeKind.CREATED, SagaRecord(str(uuid.uuid4()), "Order", Correlation("id", id_), "{}"))
        ]
        with_sagas = outbox.database == sagas.capabilities.database
        await transaction.commit([], now, [sagas.applying_work(changes)] if with_sagas else [])
        found: Any = await sagas.find("Order", Correlation("id", id_)) if with_sagas else None
        for fate in (SagaChangeKind.UPDATED, SagaChangeKind.COMPLETED) if found else ():
            transaction = outbox.transaction(ENDPOINT, f"{id_}-{fate.value}")
            await transaction.begin()
            await transaction.commit([], now, [sagas.applying_work([SagaChange(fate, found)])])
            found = replace(found, version=found.version + 1)

    async def mark(id_: str) -> None:
        await outbox.mark_dispatched(ENDPOINT, id_, now)

    for name, do in (("add to the outbox", add), ("mark as dispatched", mark)):
        with meter.step(name):
            async with anyio.create_task_group() as group:
                for each in ids:
                    group.start_soon(do, each)
    with meter.step("commit of a handler"):
        await add_by_handler(f"{turn}-h")
    with meter.step("look into the outbox"):
        await outbox.find(ENDPOINT, ids[0])
    with meter.step("look for many in the outbox"):
        await outbox.find_all(ENDPOINT, ids)
    with meter.step("forget what was dispatched"):
        await outbox.remove_dispatched(ENDPOINT, now - HOUR, BATCH)


async def _timeouts(timeouts: Any, meter: Meter, turn: str, now: datetime) -> None:
    saga = str(uuid.uuid4())
    added = [Timeout(str(uuid.uuid4()), now - 3 * HOUR, "consumer", saga, ENDPOINT, {}, b"x") for _ in range(4)]
    for each in added:
        with meter.step("add a timeout"):
            await timeouts.add(each)
    with meter.step("read a timeout"):
        await timeouts.peek(added[0].timeout_id)
    for each in added[:2]:
        with meter.step("claim a timeout"):
            claim = await timeouts.claim(each.timeout_id)
            if claim is not None:  # a file has none
                await (claim.release() if each is added[0] else claim.remove())
    with meter.step("remove a timeout"):
        await timeouts.try_remove(added[2].timeout_id)
    with meter.step("timeouts that are due"):
        await timeouts.next_chunk(now - 4 * HOUR, now, BATCH)
    with meter.step("remove the timeouts of a saga"):
        await timeouts.remove_by_saga(saga)


def _join(store: Any, meter: Meter, turn: str, now: datetime, application: Any) -> None:
    """Change messages in transactions of an application, often enough that its driver would prepare statements."""
    for each in range(8):
        id_ = f"{turn}-joined-{each}"
        with application.transaction(), meter.step("in a transaction of an application"):
            store.join_blocking(application, store.storing_steps([_message(id_, now + HOUR)], now))
            store.join_blocking(application, store.getting_steps(id_))
            store.join_blocking(application, store.rescheduling_steps(id_, now + 2 * HOUR, now))
            store.join_blocking(application, store.replacing_steps(f"{id_}-key", partial(_keyed, now), now))
            store.join_blocking(application, store.cancelling_steps(id_, now))


def _keyed(now: datetime, id_: str, _: datetime | None) -> DelayedMessage:
    return _message(id_, now + HOUR)


async def _prune(store: Any, meter: Meter, now: datetime) -> None:
    parts = store.scan_parts("records", 30_000)  # each has some numbers, or is a page of a table
    with meter.step("prune records"):
        await anyio.to_thread.run_sync(store.prune_before, parts[max(len(parts) - 100, 0)], now - 5 * HOUR, now)
