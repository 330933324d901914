"""The checks that every storage of timeouts must pass; see :func:`timeout_checks`."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import anyio

from postdate.errors import InvalidMessage, NotSupported, StoreNotSetUp, TimeoutConcurrentlyProcessed
from postdate.messages import Envelope
from postdate.ports import Transport
from postdate.ports.timeouts import DueChunk, DueTimeout, Timeout, TimeoutPersister
from postdate.testing.conformance import Check, Topic, expect, expect_equal, expect_error, expect_in_time
from postdate.testing.transport_suite.subject import closing, ids, receiver_of

ENDPOINT = "Sales.Conformance"
QUEUE = "conformance"
NOW = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)
SAGA = "5a9a0000-0000-4000-8000-00000000000a"


class TimeoutSubject(ABC):
    """How the suite opens the storage under test. Make a new subject, on empty storage, for every check.

    Attributes:
        durable: whether timeouts survive after their persister is closed, and several processes may share the storage.
        precision: how much later than its due time a timeout may be stored.
    """

    durable: bool = True
    precision: timedelta = MICROSECOND

    @abstractmethod
    def open(self) -> TimeoutPersister:
        """Return a persister on the storage. After it was closed, the next call opens the same storage again."""

    def open_elsewhere(self) -> TimeoutPersister:
        """Return a persister such as another process would have. Only called for storage that is ``durable``."""
        return self.open()

    def remove_elsewhere(self, timeout_id: str) -> AbstractContextManager[None]:
        """Remove a timeout in another transaction, which is open inside the block and rolled back at its end.

        Only called for storage that is ``durable``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define remove_elsewhere(): its storage is shared")

    def transport(self) -> Transport:
        """Return queues in the same database. Only called for storage that names a database."""
        raise NotImplementedError(f"{type(self).__name__} must define transport(): its storage names a database")


@asynccontextmanager
async def use_persister(persister: TimeoutPersister, endpoint: str = ENDPOINT) -> AsyncGenerator[TimeoutPersister]:
    """Prepare a persister as a timeout manager does, and close it at the end."""
    async with closing(persister):
        await persister.initialize(endpoint)
        await persister.setup()
        yield persister


def open_storage(subject: TimeoutSubject) -> AbstractAsyncContextManager[TimeoutPersister]:
    """Prepare a persister for a check."""
    return use_persister(subject.open())


def timeout_id(number: int) -> str:
    """Return an id; ids have the order of their numbers."""
    return str(uuid.UUID(int=number))


def timeout(
    number: int = 1,
    due: datetime = NOW,
    *,
    saga_id: str | None = None,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"body",
) -> Timeout:
    """Return a timeout of the suite's endpoint."""
    return Timeout(timeout_id(number), due, QUEUE, saga_id, ENDPOINT, headers or {"kind": "check"}, body)


# --- timeouts come back unchanged, once, and are removed by one caller ------------------------------------------------


timeouts: Topic[TimeoutSubject] = Topic("timeouts")

_TASKS = 8


@timeouts.with_fixture(open_storage)
async def a_timeout_is_unchanged(persister: TimeoutPersister) -> None:
    """Id, due time, destination, saga, owner, headers in any script and all bytes come back as they were (4.6)."""
    headers = {"kind": "отправка-🕰️", "empty": "", "quote": "'\"\\%s\n"}
    stored = replace(timeout(saga_id=SAGA, headers=headers, body=bytes(range(256))), destination="очередь'%s\\")
    expect(await persister.add(stored), "a new timeout is kept")
    expect_equal(await persister.peek(stored.timeout_id), stored, "the timeout that was kept")


@timeouts.with_fixture(open_storage)
async def what_is_left_out_stays_out(persister: TimeoutPersister) -> None:
    """No saga, no headers and no body are none when they come back; the empty UUID is no saga either."""
    stored = replace(timeout(), headers={}, body=b"")
    await persister.add(stored)
    await persister.add(replace(timeout(2), saga_id=timeout_id(0)))
    expect_equal(await persister.peek(stored.timeout_id), stored, "a timeout with nothing in it")
    read = await persister.peek(timeout_id(2))
    expect(read is not None and read.saga_id is None, "the empty UUID is no saga")


@timeouts
async def a_due_time_is_never_earlier(subject: TimeoutSubject) -> None:
    """A due time is kept as it is, or later by no more than the storage's precision: nothing fires early."""
    stored = list[datetime]()
    async with use_persister(subject.open()) as persister:
        for number, microsecond in enumerate((1, 999, 3_334, 123_457, 999_999), 1):
            due = NOW.replace(microsecond=microsecond)
            await persister.add(timeout(number, due))
            read = await persister.peek(timeout_id(number))
            as_stored = due - MICROSECOND if read is None else read.due
            expect(due <= as_stored < due + subject.precision, f"{due} is kept, not {read}")
            stored.append(as_stored)
            early = await persister.next_chunk(NOW, due - MICROSECOND, 10)
            expect_equal(len(early.due), sum(stored_due < due for stored_due in stored), f"timeouts due before {due}")


@timeouts.with_fixture(open_storage)
async def adding_again_changes_nothing(persister: TimeoutPersister) -> None:
    """An id is stored once: a message received twice is one timeout, and the first one stays (4.5)."""
    first = timeout()
    await persister.add(first)
    expect(not await persister.add(replace(first, due=NOW + SECOND, body=b"other")), "an id is stored once")
    expect_equal(await persister.peek(first.timeout_id), first, "the first timeout under an id")


@timeouts.with_fixture(open_storage)
async def an_id_is_known_however_it_is_written(persister: TimeoutPersister) -> None:
    """Upper case and braces name the same timeout and the same saga; what is no UUID, or no destination, is refused."""
    stored = timeout(0xABC, saga_id=SAGA)
    shouted = f"{{{stored.timeout_id.upper()}}}"
    await persister.add(replace(stored, timeout_id=shouted))
    expect(not await persister.add(stored), "the same id is stored once, however it is written")
    expect_equal(await persister.peek(shouted), stored, "the timeout under its other name")
    expect_equal(await persister.remove_by_saga(SAGA.upper()), 1, "timeouts of the saga under its other name")
    await persister.add(stored)
    expect(await persister.try_remove(shouted), "it is removed under its other name")
    with expect_error(InvalidMessage, "an id that is no UUID"):
        await persister.add(replace(stored, timeout_id="no uuid"))
    with expect_error(InvalidMessage, "a saga that is no UUID"):
        await persister.add(replace(stored, saga_id="no uuid"))
    for destination in ("", " ", "q" * 201):
        with expect_error(InvalidMessage, "a destination that is blank or too long"):
            await persister.add(replace(timeout(2), destination=destination))
    expect_equal(await persister.peek("no uuid"), None, "a timeout whose id is no UUID")
    expect(not await persister.try_remove("no uuid"), "there is nothing to remove")


@timeouts.with_fixture(open_storage)
async def what_is_removed_is_gone(persister: TimeoutPersister) -> None:
    """The first removal says that it removed; after it there is nothing to see, to find or to remove (4.6)."""
    await persister.add(timeout())
    await persister.add(timeout(2))
    expect(await persister.try_remove(timeout_id(1)), "the first removal removes")
    expect(not await persister.try_remove(timeout_id(1)), "the second has nothing to remove")
    expect_equal(await persister.peek(timeout_id(1)), None, "a timeout that was removed")
    chunk = await persister.next_chunk(NOW - SECOND, NOW, 10)
    expect_equal([each.timeout_id for each in chunk.due], [timeout_id(2)], "what is left")
    expect(await persister.add(timeout()), "an id that was removed may be stored again")


@timeouts.with_fixture(open_storage)
async def a_saga_takes_all_its_timeouts_along(persister: TimeoutPersister) -> None:
    """All timeouts of one saga are removed and counted; those of others, and of none, stay (4.5)."""
    for number, saga in enumerate((SAGA, None, timeout_id(77), SAGA), 1):
        await persister.add(timeout(number, saga_id=saga))
    expect_equal(await persister.remove_by_saga(timeout_id(0)), 0, "timeouts of no saga, by the empty UUID")
    expect_equal(await persister.remove_by_saga(SAGA), 2, "timeouts of the saga")
    expect_equal(await persister.remove_by_saga(SAGA), 0, "timeouts of the saga, again")
    chunk = await persister.next_chunk(NOW - SECOND, NOW, 10)
    expect_equal([each.timeout_id for each in chunk.due], [timeout_id(2), timeout_id(3)], "what is left")


Action = Callable[[TimeoutPersister], Awaitable[bool]]


async def _race(subject: TimeoutSubject, persister: TimeoutPersister, action: Action) -> int:
    """Run ``action`` in several tasks at once, through two persisters if the storage is durable.

    Return the successes.
    """
    answers: list[bool] = []

    async def run(handle: TimeoutPersister) -> None:
        answers.append(await action(handle))

    other = subject.open_elsewhere() if subject.durable else persister
    async with use_persister(other), anyio.create_task_group() as tasks:
        for number in range(_TASKS):
            tasks.start_soon(run, other if number % 2 else persister)
    return sum(answers)


@timeouts
async def of_several_who_remove_one_is_told_so(subject: TimeoutSubject) -> None:
    """Among tasks and processes that remove one timeout at once, exactly one is told that it did (4.6)."""

    async def remove(handle: TimeoutPersister) -> bool:
        return await handle.try_remove(timeout_id(1))

    async with use_persister(subject.open()) as persister:
        for _ in range(3):
            await persister.add(timeout())
            expect_equal(await _race(subject, persister, remove), 1, "callers who removed the timeout")


@timeouts
async def of_several_who_add_one_is_told_so(subject: TimeoutSubject) -> None:
    """Among tasks and processes that store one id at once, exactly one is told that it is new."""

    async def add(handle: TimeoutPersister) -> bool:
        return await handle.add(timeout())

    async with use_persister(subject.open()) as persister:
        for _ in range(3):
            expect_equal(await _race(subject, persister, add), 1, "callers who stored the timeout")
            await persister.try_remove(timeout_id(1))


@timeouts
async def looking_waits_for_nobody(subject: TimeoutSubject) -> None:
    """While another transaction is removing a timeout, it can be peeked at and looked for at once (4.6)."""
    if not subject.durable:
        return
    async with use_persister(subject.open()) as persister:
        await persister.add(timeout())
        await persister.add(timeout(2))
        with subject.remove_elsewhere(timeout_id(1)):
            with expect_in_time("a look at a timeout that is being removed"):
                peeked = await persister.peek(timeout_id(1))
            expect(peeked is None or peeked == timeout(), "it is seen as it was, or not at all")
            with expect_in_time("a look for due timeouts while one is being removed"):
                chunk = await persister.next_chunk(NOW - SECOND, NOW, 10)
            expect(timeout_id(2) in {each.timeout_id for each in chunk.due}, "the others are found")
        expect(await persister.try_remove(timeout_id(1)), "a removal that was rolled back has not removed")


@timeouts
async def what_is_stored_survives_closing(subject: TimeoutSubject) -> None:
    """A timeout is there for the next handle if the storage is durable, and lost with its handle if not (row 104)."""
    async with use_persister(subject.open()) as persister:
        await persister.add(timeout())
    async with use_persister(subject.open()) as persister:
        peeked = await persister.peek(timeout_id(1))
        expect_equal(peeked, timeout() if subject.durable else None, "the timeout after a restart")


@timeouts
async def each_endpoint_has_its_own(subject: TimeoutSubject) -> None:
    """Two endpoints on one database do not see each other's timeouts; each owns what it reads."""
    async with use_persister(subject.open()) as one, use_persister(subject.open(), "Other % \"'`]") as other:
        await one.add(timeout())
        expect_equal(await other.peek(timeout_id(1)), None, "a timeout of another endpoint")
        expect(await other.add(replace(timeout(), owner="Other % \"'`]")), "one id may be used by both")
        peeked = await other.peek(timeout_id(1))
        expect(peeked is not None and peeked.owner == "Other % \"'`]", "it belongs to the endpoint whose table it is")


@timeouts
async def setting_up_may_be_done_at_once_and_again(subject: TimeoutSubject) -> None:
    """Several processes may set up at once, and later: nothing that is stored is lost by it."""
    handles = [subject.open(), *([subject.open_elsewhere() for _ in range(2)] if subject.durable else [])]
    try:
        async with anyio.create_task_group() as tasks:
            for handle in handles:
                await handle.initialize(ENDPOINT)
                tasks.start_soon(handle.setup)
        await handles[0].add(timeout())
        await handles[-1].setup()
        expect(await handles[0].peek(timeout_id(1)) is not None, "a timeout is still there after another set-up")
    finally:
        for handle in handles:
            await handle.close()


@timeouts
async def without_its_table_it_says_so(subject: TimeoutSubject) -> None:
    """Before the set-up every call raises StoreNotSetUp."""
    if not subject.durable:
        return
    async with use_persister(subject.open()) as persister:  # creates the schema or file
        await persister.initialize("Never.Set.Up")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "add": lambda: persister.add(timeout()),
            "peek": lambda: persister.peek(timeout_id(1)),
            "try_remove": lambda: persister.try_remove(timeout_id(1)),
            "remove_by_saga": lambda: persister.remove_by_saga(SAGA),
            "next_chunk": lambda: persister.next_chunk(NOW, NOW, 10),
        }
        for name, call in calls.items():
            with expect_error(StoreNotSetUp, f"{name} without a table"):
                await call()


# --- due timeouts are found: all of them, in order, each once from chunk to chunk (row 95) ----------------------------


polling: Topic[TimeoutSubject] = Topic("due")

_LONG_AGO = datetime(1800, 1, 1, tzinfo=UTC)


def _chunk(next_query: datetime | None, *timeouts: tuple[int, datetime]) -> DueChunk:
    return DueChunk([DueTimeout(timeout_id(number), due) for number, due in timeouts], next_query)


@polling.with_fixture(open_storage)
async def the_start_is_exclusive_and_now_inclusive(persister: TimeoutPersister) -> None:
    """A timeout due at the start is not found, one due at ``now`` is: looks that follow each other meet (row 95)."""
    for number in range(3):
        await persister.add(timeout(number, NOW + number * SECOND))
    chunk = await persister.next_chunk(NOW, NOW + SECOND, 10)
    expect_equal(chunk, _chunk(NOW + 2 * SECOND, (1, NOW + SECOND)), "what is due after the start, until now")


@polling.with_fixture(open_storage)
async def the_next_query_is_the_earliest_to_come(persister: TimeoutPersister) -> None:
    """When all due timeouts were found, the next query is when the next one is due, or never without one (row 95)."""
    expect_equal(await persister.next_chunk(_LONG_AGO, NOW, 10), _chunk(None), "nothing at all")
    await persister.add(timeout(1, NOW))
    expect_equal(await persister.next_chunk(_LONG_AGO, NOW, 10), _chunk(None, (1, NOW)), "nothing to come")
    await persister.add(timeout(2, NOW + 9 * SECOND))
    await persister.add(timeout(3, NOW + 5 * SECOND))
    chunk = await persister.next_chunk(_LONG_AGO, NOW, 1)
    expect_equal(chunk, _chunk(NOW + 5 * SECOND, (1, NOW)), "a chunk that is full, with nothing more due")
    expect_equal(await persister.next_chunk(NOW, NOW, 1), _chunk(NOW + 5 * SECOND), "nothing due")


@polling.with_fixture(open_storage)
async def the_next_query_after_a_cut_chunk_is_now(persister: TimeoutPersister) -> None:
    """A chunk cut by the limit has the earliest timeouts, and ``next_query`` is ``now``.

    Source: docs/specification-rows.md, row 95.
    """
    for number in (3, 1, 2):
        await persister.add(timeout(number, NOW + number * SECOND))
    now = NOW + 5 * SECOND
    expected = _chunk(now, (1, NOW + SECOND), (2, NOW + 2 * SECOND))
    expect_equal(await persister.next_chunk(NOW, now, 2), expected, "the two that are due first")


@polling.with_fixture(open_storage)
async def a_chunk_does_not_end_between_equal_due_times(persister: TimeoutPersister) -> None:
    """All timeouts of the last due time are in the chunk, by id: the next one starts after that time (row 95)."""
    for number, due in {1: NOW, 5: NOW + SECOND, 3: NOW + SECOND, 4: NOW + SECOND, 2: NOW + 2 * SECOND}.items():
        await persister.add(timeout(number, due))
    now = NOW + 5 * SECOND
    tied = [(3, NOW + SECOND), (4, NOW + SECOND), (5, NOW + SECOND)]
    for limit in (2, 3, 4):
        answer = await persister.next_chunk(_LONG_AGO, now, limit)
        expect_equal(answer, _chunk(now, (1, NOW), *tied), f"a chunk of {limit}")
    expect_equal(await persister.next_chunk(NOW, now, 1), _chunk(now, *tied), "a chunk of equal times only")
    answer = await persister.next_chunk(NOW, NOW + SECOND, 2)
    expect_equal(answer, _chunk(NOW + 2 * SECOND, *tied), "equal times up to the end: nothing more is due")
    await persister.add(timeout(6, NOW + 2 * SECOND))
    chunk = await persister.next_chunk(NOW + SECOND, now, 1)
    last = _chunk(None, (2, NOW + 2 * SECOND), (6, NOW + 2 * SECOND))
    expect_equal(chunk, last, "equal times behind which there is nothing")


@polling.with_fixture(open_storage)
async def going_on_finds_each_one_once(persister: TimeoutPersister) -> None:
    """Looks that each start at the last due time of the one before find everything, in order, once."""
    for number in range(1, 41):  # due times that use all digits, some of them equal
        await persister.add(timeout(number, NOW + timedelta(microseconds=(number * 7 % 11) * 3_337)))
    timeouts, start, limits = list[DueTimeout](), _LONG_AGO, [1, 5, 2, 9] * 10
    for limit in limits:
        chunk = await persister.next_chunk(start, NOW + SECOND, limit)
        timeouts += chunk.due
        if not chunk.due:
            break
        start = chunk.due[-1].due
    expect_equal(len(timeouts), 40, "timeouts that were found")
    expect_equal({each.timeout_id for each in timeouts}, {timeout_id(number) for number in range(1, 41)}, "which")
    expect(timeouts == sorted(timeouts, key=lambda each: (each.due, each.timeout_id)), "they come in order")


@polling.with_fixture(open_storage)
async def any_start_will_do(persister: TimeoutPersister) -> None:
    """A look may start at the beginning of the calendar and go on to its end."""
    await persister.add(timeout())
    everything = await persister.next_chunk(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC), 5)
    expect_equal(everything, _chunk(None, (1, NOW)), "everything")


# --- a timeout can be claimed by one caller at a time, and no call waits for a claim ----------------------------------


claiming: Topic[TimeoutSubject] = Topic("claiming")


@asynccontextmanager
async def _open_two(subject: TimeoutSubject) -> AsyncGenerator[tuple[TimeoutPersister, TimeoutPersister]]:
    """Open storage with timeout 1: as two persisters, such as two processes have, where the storage is durable."""
    async with use_persister(subject.open()) as first:
        await first.add(timeout())
        if not subject.durable:
            yield first, first
            return
        async with use_persister(subject.open_elsewhere()) as second:
            yield first, second


@claiming.with_fixtures(_open_two)
async def of_several_who_claim_one_has_it(one: TimeoutPersister, other: TimeoutPersister) -> None:
    """A claim can remove its timeout; meanwhile, and afterwards, other callers get none, and do not wait for it."""
    claim = await one.claim(timeout_id(1).upper())
    expect(claim is not None and claim.timeout == timeout(), "the timeout is claimed as it is stored")
    assert claim is not None
    with expect_in_time("a claim of what somebody else has claimed"):
        expect_equal([await each.claim(timeout_id(1)) for each in (one, other)], [None, None], "further claims")
    expect(await claim.remove(), "who has claimed it removes it")
    await claim.release()  # no effect
    for each in (one, other):
        expect_equal(await each.peek(timeout_id(1)), None, "what was claimed and removed")
        expect_equal([await each.claim(id_) for id_ in (timeout_id(1), "no uuid")], [None, None], "what is gone")


@claiming.with_fixtures(_open_two)
async def what_was_let_go_is_as_it_was(one: TimeoutPersister, other: TimeoutPersister) -> None:
    """A timeout whose claim was released can be claimed again, unchanged, and removed."""
    for each in (one, other, one):
        claim = await each.claim(timeout_id(1))
        expect(claim is not None and claim.timeout == timeout(), "what was let go can be claimed, unchanged")
        assert claim is not None
        await claim.release()
    expect(await other.try_remove(timeout_id(1)), "what was let go can be removed")


@claiming.with_fixtures(_open_two)
async def looking_sees_what_is_claimed(one: TimeoutPersister, other: TimeoutPersister) -> None:
    """A claim hides nothing: its timeout is stored until it is removed, and others see it without waiting."""
    claim = await one.claim(timeout_id(1))
    assert claim is not None
    with expect_in_time("looks at a timeout that somebody has claimed"):
        expect_equal(await other.peek(timeout_id(1)), timeout(), "a claimed timeout, peeked at")
        chunk = await other.next_chunk(NOW - SECOND, NOW, 10)
    expect_equal([each.timeout_id for each in chunk.due], [timeout_id(1)], "what is due")
    await claim.release()


# --- storage in the database of the queues changes in their transaction, or not at all --------------------------------


enlisting: Topic[TimeoutSubject] = Topic("enlisting")

_MESSAGE = Envelope(QUEUE, "m-1")


@asynccontextmanager
async def _open_with_queues(subject: TimeoutSubject) -> AsyncGenerator[tuple[TimeoutPersister, Transport] | None]:
    """Open storage and queues of one database; yield ``None`` when the storage names no database."""
    async with use_persister(subject.open()) as persister:
        if persister.database is None:
            with expect_error(NotSupported, "work in a transaction of storage that shares none"):
                persister.removing_work(timeout_id(1))
            yield None
            return
        async with closing(subject.transport()) as transport:
            await transport.create_queues([QUEUE])
            yield persister, transport


async def _receive_ids(transport: Transport) -> list[str]:
    """Receive and acknowledge the messages of the queue, at most ten, and return their ids."""
    async with receiver_of(transport, QUEUE) as receiver:
        received = await receiver.receive(10)
        for each in received:
            await receiver.commit(each, NOW)
    return ids(received)


@enlisting.with_fixtures(_open_with_queues)
async def it_names_the_database_of_the_queues(persister: TimeoutPersister, transport: Transport) -> None:
    """Storage and queues on one database say so, by an equal value: that is what a timeout manager compares."""
    expect_equal(persister.database, transport.capabilities.database, "the database")


@enlisting.with_fixtures(_open_with_queues)
async def a_timeout_is_added_with_the_transaction(persister: TimeoutPersister, transport: Transport) -> None:
    """A timeout added in a transaction of the queues is there after its commit, and not after its failure (row 100)."""
    with expect_error(TimeoutConcurrentlyProcessed, "a transaction that fails after a timeout was added in it"):
        await transport.send([], NOW, work=[persister.adding_work(timeout()), persister.removing_work(timeout_id(2))])
    expect_equal(await persister.peek(timeout_id(1)), None, "a timeout of a transaction that failed")
    for _ in range(2):  # storing it again changes nothing and is no failure
        await transport.send([], NOW, work=[persister.adding_work(timeout())])
    expect_equal(await persister.peek(timeout_id(1)), timeout(), "a timeout of a transaction")


@enlisting.with_fixtures(_open_with_queues)
async def a_timeout_is_removed_with_what_is_sent(persister: TimeoutPersister, transport: Transport) -> None:
    """Sending and removing are one: if the timeout is gone, nothing is sent (4.8, row 100)."""
    await persister.add(timeout())
    await transport.send([_MESSAGE], NOW, work=[persister.removing_work(timeout_id(1))])
    expect_equal(await persister.peek(timeout_id(1)), None, "a timeout that was sent")
    expect_equal(await _receive_ids(transport), ["m-1"], "what was sent")
    for removed in (timeout_id(1), "no uuid"):
        with expect_error(TimeoutConcurrentlyProcessed, f"removing {removed}, which is gone"):
            await transport.send([_MESSAGE], NOW, work=[persister.removing_work(removed)])
    await transport.send([Envelope(QUEUE, "m-2")], NOW)
    expect_equal(await _receive_ids(transport), ["m-2"], "what was sent beside a timeout that was gone: nothing")


@enlisting.with_fixtures(_open_with_queues)
async def a_saga_ends_with_the_transaction(persister: TimeoutPersister, transport: Transport) -> None:
    """All timeouts of a saga are removed in a transaction of the queues; none of no saga (4.5)."""
    for number, saga in enumerate((SAGA, SAGA, None), 1):
        await persister.add(timeout(number, saga_id=saga))
    await transport.send(
        [], NOW, work=[persister.removing_by_saga_work(SAGA), persister.removing_by_saga_work(timeout_id(0))]
    )
    remaining = [number for number in (1, 2, 3) if await persister.peek(timeout_id(number)) is not None]
    expect_equal(remaining, [3], "timeouts that are left")


_TOPICS = (timeouts, polling, claiming, enlisting)


def timeout_checks() -> tuple[Check[TimeoutSubject], ...]:
    """Return every check of a storage of timeouts. A check passes when it does not raise; each needs a new subject."""
    return tuple(check for topic in _TOPICS for check in topic.checks)
