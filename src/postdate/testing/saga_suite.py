"""The checks that every saga store must pass; see :func:`saga_checks`."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import anyio

from postdate import ports
from postdate.errors import SagaConflict
from postdate.messages import Envelope
from postdate.testing.conformance import Check, Topic, expect, expect_equal, expect_error
from postdate.testing.transport_suite.subject import closing

_NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
_QUEUE = "conformance.in"
_TASKS_PER_STORE = 8


class SagaStoreSubject(ABC):
    """How the suite opens the saga store under test. Make a new subject, on empty storage, for every check."""

    @abstractmethod
    def open(self) -> ports.SagaStore:
        """Return a store object on the storage. After it was closed, the next call opens the same storage again."""

    def open_elsewhere(self) -> ports.SagaStore:
        """Return a store object such as another process would have. Only called for stores that are shared."""
        raise NotImplementedError(f"{type(self).__name__} must define open_elsewhere(): its store is shared")

    def transport(self) -> ports.Transport | None:
        """Return queues in the same database, or ``None`` if it has no queues. Only called for stores that name one."""
        return None

    def outbox(self) -> ports.OutboxStore:
        """Return an outbox in the same database. Only called for stores that name a database."""
        raise NotImplementedError(f"{type(self).__name__} must define outbox(): its store names a database")


sagas: Topic[SagaStoreSubject] = Topic("sagas")


def saga_checks() -> tuple[Check[SagaStoreSubject], ...]:
    """Return every check of a saga store; see :func:`postdate.testing.store_checks`."""
    return tuple(sagas.checks)


@asynccontextmanager
async def _open_store(subject: SagaStoreSubject) -> AsyncGenerator[ports.SagaStore]:
    async with closing(subject.open()) as store:
        await store.setup()
        yield store


@asynccontextmanager
async def _open_handles(subject: SagaStoreSubject) -> AsyncGenerator[list[ports.SagaStore]]:
    """Open one store object, or two such as different processes have where the store is shared."""
    async with _open_store(subject) as store:
        if not store.capabilities.shared:
            yield [store]
            return
        async with closing(subject.open_elsewhere()) as other:
            yield [store, other]


def _record(value: str = "o-1", saga_type: str = "Order", state: str = '{"n":0}') -> ports.SagaRecord:
    return ports.SagaRecord(
        str(uuid.uuid4()), saga_type, ports.Correlation("order_id", value), state, '{"timeouts":{}}'
    )


def _creation_of(record: ports.SagaRecord) -> ports.SagaChange:
    return ports.SagaChange(ports.SagaChangeKind.CREATED, record)


async def _find_record(store: ports.SagaStore) -> ports.SagaRecord:
    record = await store.find("Order", ports.Correlation("order_id", "o-1"))
    expect(record is not None, "the instance o-1 is there")
    assert record is not None
    return record


# --- one after the other -------------------------------------------------------------------------------------------


@sagas.with_fixture(_open_store)
async def an_instance_is_found_by_type_property_and_value(store: ports.SagaStore) -> None:
    """An instance is found unchanged, in version 1, and by nothing but its own type, property and value."""
    record = _record("ünïcode 🎈 o'1", state='{"text":"\\u0000 \\" ünïcode 🎈"}')
    await store.apply([_creation_of(record), _creation_of(_record("o-2"))])
    instance = await store.find("Order", record.correlation)
    expect_equal(instance, replace(record, version=1), "the instance")
    for saga_type, place in (
        ("Invoice", record.correlation),
        ("Order", replace(record.correlation, property="other")),
        ("Order", replace(record.correlation, value="ÜNÏCODE 🎈 O'1")),
        ("Order", replace(record.correlation, value="ünïcode 🎈 o'1 ")),
    ):
        expect_equal(await store.find(saga_type, place), None, f"an instance of {saga_type} with {place}")


@sagas.with_fixture(_open_store)
async def an_instance_is_loaded_by_type_and_id(store: ports.SagaStore) -> None:
    """An id leads to its instance if that is of the type asked for."""
    record = _record()
    await store.apply([_creation_of(record)])
    expect_equal(await store.load("Order", record.saga_id), replace(record, version=1), "the instance")
    expect_equal(await store.load("Invoice", record.saga_id), None, "an instance of another type")
    expect_equal(await store.load("Order", str(uuid.uuid4())), None, "an instance with another id")


@sagas.with_fixture(_open_store)
async def instances_are_listed_page_by_page(store: ports.SagaStore) -> None:
    """Each instance is on one page, by type and id, as it is kept; a page begins after any type and id."""
    made = [_record(f"o-{n}", kind) for n in range(3) for kind in ("Order", "Invoice", "Ord", "order")]
    await store.apply(list(map(_creation_of, made)))
    expected = sorted((replace(each, version=1) for each in made), key=lambda each: (each.saga_type, each.saga_id))
    for size in (1, 5, 12, 13):
        listed, last = list[ports.SagaRecord](), ("", "")
        while page := await store.read_page(last, size):
            expect(len(page) <= size, f"no more than {size}")
            listed, last = [*listed, *page], (page[-1].saga_type, page[-1].saga_id)
        expect_equal(listed, expected, f"instances by {size}")
    expect_equal(list(await store.read_page(("Order", ""), 10)), expected[6:], "instances from a type on")


@sagas.with_fixture(_open_store)
async def every_update_makes_the_next_version(store: ports.SagaStore) -> None:
    """State and details are replaced, and the version grows by one."""
    await store.apply([_creation_of(_record())])
    for number in range(1, 4):
        record = replace(await _find_record(store), state=f'{{"n":{number}}}', details=f'{{"d":{number}}}')
        await store.apply([ports.SagaChange(ports.SagaChangeKind.UPDATED, record)])
        expect_equal(await _find_record(store), replace(record, version=number + 1), "the updated instance")


@sagas.with_fixture(_open_store)
async def a_completed_instance_is_gone_and_its_correlation_free(store: ports.SagaStore) -> None:
    """After its completion an instance is not found, and another may have its correlation: in one call, too."""
    await store.apply([_creation_of(_record())])
    first, second = await _find_record(store), _record()
    await store.apply([ports.SagaChange(ports.SagaChangeKind.COMPLETED, first), _creation_of(second)])
    expect_equal((await _find_record(store)).saga_id, second.saga_id, "the instance with that correlation")
    expect_equal(await store.load("Order", first.saga_id), None, "the completed instance")


@sagas.with_fixture(_open_store)
async def an_instance_that_is_set_aside_is_found_by_its_id_and_its_correlation_is_free(store: ports.SagaStore) -> None:
    """It keeps state and details; another may have its correlation: in one call, and again after that."""
    ids = list[str]()
    for number in range(3):
        if ids:
            before = await _find_record(store)
            changes = [ports.SagaChange(ports.SagaChangeKind.SET_ASIDE, before)]
            await store.apply([*changes, _creation_of(replace(_record(), state=f'{{"n":{number}}}'))])
            aside = await store.load("Order", before.saga_id)
            expected = replace(before, correlation=replace(before.correlation, property=before.saga_id), version=2)
            expect_equal(aside, expected, "the instance that was set aside")
            with expect_error(SagaConflict, "setting it aside again in the version of before"):
                await store.apply(changes)
        else:
            await store.apply([_creation_of(_record())])
        ids.append((await _find_record(store)).saga_id)
    expect_equal(len(set(ids)), 3, "instances that had the correlation")


@sagas.with_fixture(_open_store)
async def what_was_changed_meanwhile_is_not_changed_again(store: ports.SagaStore) -> None:
    """An update or completion of an older version, and of an instance that is gone, is a conflict."""
    await store.apply([_creation_of(_record())])
    old = await _find_record(store)
    await store.apply([ports.SagaChange(ports.SagaChangeKind.UPDATED, old)])
    for fate in (ports.SagaChangeKind.UPDATED, ports.SagaChangeKind.COMPLETED):
        with expect_error(SagaConflict, f"a change of an older version ({fate.value})"):
            await store.apply([ports.SagaChange(fate, old)])
    await store.apply([ports.SagaChange(ports.SagaChangeKind.COMPLETED, await _find_record(store))])
    for fate in (ports.SagaChangeKind.UPDATED, ports.SagaChangeKind.COMPLETED):
        with expect_error(SagaConflict, f"a change of an instance that is gone ({fate.value})"):
            await store.apply([ports.SagaChange(fate, replace(old, version=2))])


@sagas.with_fixture(_open_store)
async def a_correlation_has_one_instance_of_a_type(store: ports.SagaStore) -> None:
    """Creating a second instance with the same correlation is a conflict; other types and properties are others."""
    first = _record()
    await store.apply([_creation_of(first)])
    with expect_error(SagaConflict, "creating a second instance with the same correlation"):
        await store.apply([_creation_of(_record())])
    elsewhere = replace(_record(), correlation=replace(first.correlation, property="other"))
    await store.apply([_creation_of(_record(saga_type="Invoice")), _creation_of(elsewhere)])
    expect_equal((await _find_record(store)).saga_id, first.saga_id, "the first instance")


@sagas.with_fixture(_open_store)
async def changes_are_applied_together_or_not_at_all(store: ports.SagaStore) -> None:
    """One conflict among several changes undoes all of them."""
    await store.apply([_creation_of(_record("o-1"))])
    stored = await _find_record(store)
    with expect_error(SagaConflict, "changes one of which is a conflict"):
        wrong = ports.SagaChange(ports.SagaChangeKind.UPDATED, replace(stored, version=7))
        await store.apply(
            [_creation_of(_record("o-2")), ports.SagaChange(ports.SagaChangeKind.COMPLETED, stored), wrong]
        )
    expect_equal(await _find_record(store), stored, "the instance that was there")
    expect_equal(await store.find("Order", ports.Correlation("order_id", "o-2")), None, "the other instance")


@sagas
async def setting_up_again_keeps_what_is_there(subject: SagaStoreSubject) -> None:
    """Setting up is idempotent; instances survive it, and the handle where the store is durable."""
    async with _open_store(subject) as store:
        await store.setup()
        await store.apply([_creation_of(_record())])
        await store.setup()
        stored = await _find_record(store)
        durable = store.capabilities.durable
    if durable:
        async with _open_store(subject) as store:
            expect_equal(await _find_record(store), stored, "the instance after closing and opening")


# --- at the same time -----------------------------------------------------------------------------------------------


@sagas.with_fixture(_open_handles)
async def of_several_creators_all_but_one_are_told(handles: list[ports.SagaStore]) -> None:
    """Of instances with one correlation that are created at once, by two processes, one is kept."""
    won: list[str] = []

    async def create(store: ports.SagaStore) -> None:
        record = _record()
        try:
            await store.apply([_creation_of(record)])
        except SagaConflict:
            return
        won.append(record.saga_id)

    await _run_at_once(handles, create)
    expect_equal(len(won), 1, "creators that were not told of a conflict")
    expect_equal([(await _find_record(handles[0])).saga_id], won, "the instance that is there")


@sagas.with_fixture(_open_handles)
async def no_update_is_lost(handles: list[ports.SagaStore]) -> None:
    """When tasks of two processes count in one instance, each trying again after a conflict, every count is there."""
    await handles[0].apply([_creation_of(_record())])

    async def increment(store: ports.SagaStore) -> None:
        while True:
            record = await _find_record(store)
            number = int(record.state.strip('{"n:}')) + 1
            try:
                await store.apply(
                    [ports.SagaChange(ports.SagaChangeKind.UPDATED, replace(record, state=f'{{"n":{number}}}'))]
                )
            except SagaConflict:
                continue
            return

    await _run_at_once(handles, increment)
    expect_equal((await _find_record(handles[0])).state, f'{{"n":{_TASKS_PER_STORE * len(handles)}}}', "the state")


async def _run_at_once(
    handles: list[ports.SagaStore], task: Callable[[ports.SagaStore], Coroutine[Any, Any, None]]
) -> None:
    async with anyio.create_task_group() as tasks:
        for store in handles * _TASKS_PER_STORE:
            tasks.start_soon(task, store)


# --- in a transaction of the queues -----------------------------------------------------------------------------------


@sagas
async def applying_is_part_of_a_transaction_of_the_queues(subject: SagaStoreSubject) -> None:
    """With queues in the same database, changes and sends happen both or not at all."""
    async with _open_store(subject) as store:
        if store.capabilities.database is None:
            return
        transport = subject.transport()
        if transport is None:
            return
        async with closing(transport):
            expect_equal(transport.capabilities.database, store.capabilities.database, "the database of the queues")
            await transport.create_queues([_QUEUE])
            record = _record()
            work = [store.applying_work([_creation_of(record)])]
            await transport.send([Envelope(_QUEUE, "m-1")], _NOW, work=work)
            with expect_error(SagaConflict, "a send together with a conflict"):
                await transport.send([Envelope(_QUEUE, "m-2")], _NOW, work=work)
            receiver = transport.receiver(_QUEUE)
            received = await receiver.receive(2)
            expect_equal([each.envelope.message_id for each in received], ["m-1"], "messages sent")
            expect_equal((await _find_record(store)).saga_id, record.saga_id, "the instance")

            async def settle(works: Sequence[ports.Work]) -> Sequence[object]:
                await transport.send([Envelope(_QUEUE, f"n-{number}") for number in range(len(works))], _NOW)
                arrived = list[ports.Received]()
                while len(arrived) < len(works):
                    arrived += await receiver.receive(len(works) - len(arrived))
                ends = zip(arrived, works, strict=True)
                return await receiver.settle(
                    [ports.Settlement(each, _NOW, ports.Completion(work=[work])) for each, work in ends]
                )

            await _expect_separate_results(store, settle)


@sagas
async def applying_is_part_of_the_commit_of_an_outbox(subject: SagaStoreSubject) -> None:
    """With an outbox in the same database, changes and its record are kept both or not at all."""
    async with _open_store(subject) as store:
        if store.capabilities.database is None:
            return
        async with closing(subject.outbox()) as outbox:
            expect_equal(outbox.database, store.capabilities.database, "the database of the outbox")
            await outbox.setup()
            record = _record()
            work = [store.applying_work([_creation_of(record)])]
            for begins in (False, True):
                first, second = (outbox.transaction("sales", f"m-{number}-{begins}") for number in (1, 2))
                if begins:
                    await store.apply([ports.SagaChange(ports.SagaChangeKind.COMPLETED, await _find_record(store))])
                    await first.begin()
                expect(await first.commit([], _NOW, work), "the first commit")
                if begins:
                    await second.begin()
                with expect_error(SagaConflict, "a commit together with a conflict"):
                    await second.commit([], _NOW, work)
                await second.roll_back()
                expect_equal((await _find_record(store)).saga_id, record.saga_id, "the instance")
                expect_equal(await outbox.find("sales", f"m-2-{begins}"), None, "the record of the second")

            async def commit(works: Sequence[ports.Work]) -> Sequence[object]:
                results = list[object](works)

                async def commit_one(number: int) -> None:
                    transaction = outbox.transaction("sales", f"n-{number}")
                    try:
                        results[number] = await transaction.commit([], _NOW, [works[number]])
                    except SagaConflict as error:
                        await transaction.roll_back()
                        results[number] = error

                async with anyio.create_task_group() as tasks:
                    for number in range(len(works)):
                        tasks.start_soon(commit_one, number)
                return results

            await _expect_separate_results(store, commit)
            unused = store.applying_work([_creation_of(_record("o-5"))])
            expect(not await outbox.transaction("sales", "n-2").commit([], _NOW, [unused]), "it was handled before")
            expect_equal(
                await store.find("Order", ports.Correlation("order_id", "o-5")), None, "an instance of a duplicate"
            )


async def _expect_separate_results(
    store: ports.SagaStore, commit: Callable[[Sequence[ports.Work]], Awaitable[Sequence[object]]]
) -> None:
    """Settle several messages at once: each change must be stored, or its own message must get a conflict."""
    stored, records = await _find_record(store), [_record(f"o-{number}") for number in (2, 2, 3, 4)]
    updated = replace(stored, state='{"n":1}')
    changes = [
        *map(_creation_of, records),
        *(ports.SagaChange(ports.SagaChangeKind.UPDATED, each) for each in (replace(stored, version=7), updated)),
    ]
    conflicts = [
        isinstance(each, SagaConflict) for each in await commit([store.applying_work([each]) for each in changes])
    ]
    expect_equal(conflicts, [conflicts[0], not conflicts[0], False, False, True, False], "messages told of a conflict")
    for number, record in ((int(conflicts[0]), records[int(conflicts[0])]), (2, records[2]), (3, records[3])):
        instance = await store.find("Order", record.correlation)
        expect_equal(instance and instance.saga_id, record.saga_id, f"the instance that message {number} has made")
    expect_equal(await _find_record(store), replace(updated, version=stored.version + 1), "the updated instance")
