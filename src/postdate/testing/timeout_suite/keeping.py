"""Timeouts come back unchanged, once, and are removed by one caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime

import anyio

from postdate.errors import InvalidMessage, StoreNotSetUp
from postdate.ports.timeouts import TimeoutPersister
from postdate.testing.conformance import Topic, expect, expect_equal, expect_error, in_time
from postdate.testing.timeout_suite.subject import (
    ENDPOINT,
    MICROSECOND,
    NOW,
    SAGA,
    SECOND,
    TimeoutSubject,
    named,
    prepared,
    storage,
    timeout,
    timeout_id,
)

keeping: Topic[TimeoutSubject] = Topic("timeouts")

_AT_ONCE = 8


@keeping.given(storage)
async def a_timeout_is_unchanged(persister: TimeoutPersister) -> None:
    """Id, due time, destination, saga, owner, headers in any script and all bytes come back as they were (4.6)."""
    headers = {"kind": "отправка-🕰️", "empty": "", "quote": "'\"\\%s\n"}
    kept = replace(timeout(saga_id=SAGA, headers=headers, body=bytes(range(256))), destination="очередь'%s\\")
    expect(await persister.add(kept), "a new timeout is kept")
    expect_equal(await persister.peek(kept.timeout_id), kept, "the timeout that was kept")


@keeping.given(storage)
async def what_is_left_out_stays_out(persister: TimeoutPersister) -> None:
    """No saga, no headers and no body are none when they come back; the empty UUID is no saga either."""
    kept = replace(timeout(), headers={}, body=b"")
    await persister.add(kept)
    await persister.add(replace(timeout(2), saga_id=timeout_id(0)))
    expect_equal(await persister.peek(kept.timeout_id), kept, "a timeout with nothing in it")
    found = await persister.peek(timeout_id(2))
    expect(found is not None and found.saga_id is None, "the empty UUID is no saga")


@keeping
async def a_due_time_is_never_earlier(subject: TimeoutSubject) -> None:
    """A due time is kept as it is, or later by no more than the storage's precision: nothing fires early."""
    stored = list[datetime]()
    async with prepared(subject.open()) as persister:
        for number, microsecond in enumerate((1, 999, 3_334, 123_457, 999_999), 1):
            due = NOW.replace(microsecond=microsecond)
            await persister.add(timeout(number, due))
            found = await persister.peek(timeout_id(number))
            as_stored = due - MICROSECOND if found is None else found.due
            expect(due <= as_stored < due + subject.precision, f"{due} is kept, not {found}")
            stored.append(as_stored)
            early = await persister.next_chunk(NOW, due - MICROSECOND, 10)
            expect_equal(len(early.due), sum(kept < due for kept in stored), f"timeouts due before {due}")


@keeping.given(storage)
async def adding_again_changes_nothing(persister: TimeoutPersister) -> None:
    """An id is stored once: a message received twice is one timeout, and the first one stays (4.5)."""
    kept = timeout()
    await persister.add(kept)
    expect(not await persister.add(replace(kept, due=NOW + SECOND, body=b"other")), "an id is stored once")
    expect_equal(await persister.peek(kept.timeout_id), kept, "the first timeout under an id")


@keeping.given(storage)
async def an_id_is_known_however_it_is_written(persister: TimeoutPersister) -> None:
    """Upper case and braces name the same timeout and the same saga; an id that is no UUID is refused, or not found."""
    kept = timeout(0xABC, saga_id=SAGA)
    shouted = f"{{{kept.timeout_id.upper()}}}"
    await persister.add(named(shouted, kept))
    expect(not await persister.add(kept), "the same id is stored once, however it is written")
    expect_equal(await persister.peek(shouted), kept, "the timeout under its other name")
    expect_equal(await persister.remove_by_saga(SAGA.upper()), 1, "timeouts of the saga under its other name")
    await persister.add(kept)
    expect(await persister.try_remove(shouted), "it is removed under its other name")
    with expect_error(InvalidMessage, "an id that is no UUID"):
        await persister.add(named("no uuid", kept))
    with expect_error(InvalidMessage, "a saga that is no UUID"):
        await persister.add(replace(kept, saga_id="no uuid"))
    expect_equal(await persister.peek("no uuid"), None, "a timeout whose id is no UUID")
    expect(not await persister.try_remove("no uuid"), "there is nothing to remove")


@keeping.given(storage)
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


@keeping.given(storage)
async def a_saga_takes_all_its_timeouts_along(persister: TimeoutPersister) -> None:
    """All timeouts of one saga are removed and counted; those of others, and of none, stay (4.5)."""
    for number, saga in enumerate((SAGA, None, timeout_id(77), SAGA), 1):
        await persister.add(timeout(number, saga_id=saga))
    expect_equal(await persister.remove_by_saga(timeout_id(0)), 0, "timeouts of no saga, by the empty UUID")
    expect_equal(await persister.remove_by_saga(SAGA), 2, "timeouts of the saga")
    expect_equal(await persister.remove_by_saga(SAGA), 0, "timeouts of the saga, again")
    chunk = await persister.next_chunk(NOW - SECOND, NOW, 10)
    expect_equal([each.timeout_id for each in chunk.due], [timeout_id(2), timeout_id(3)], "what is left")


Deed = Callable[[TimeoutPersister], Awaitable[bool]]


async def _raced(subject: TimeoutSubject, persister: TimeoutPersister, deed: Deed) -> int:
    """Let several tasks do the same at once, through two handles where there can be two; return how many succeeded."""
    answers: list[bool] = []

    async def run(handle: TimeoutPersister) -> None:
        answers.append(await deed(handle))

    other = subject.open_elsewhere() if subject.durable else persister
    async with prepared(other), anyio.create_task_group() as tasks:
        for number in range(_AT_ONCE):
            tasks.start_soon(run, other if number % 2 else persister)
    return sum(answers)


@keeping
async def of_several_who_remove_one_is_told_so(subject: TimeoutSubject) -> None:
    """Among tasks and processes that remove one timeout at once, exactly one is told that it did (4.6)."""

    async def remove(handle: TimeoutPersister) -> bool:
        return await handle.try_remove(timeout_id(1))

    async with prepared(subject.open()) as persister:
        for _ in range(3):
            await persister.add(timeout())
            expect_equal(await _raced(subject, persister, remove), 1, "callers who removed the timeout")


@keeping
async def of_several_who_add_one_is_told_so(subject: TimeoutSubject) -> None:
    """Among tasks and processes that store one id at once, exactly one is told that it is new."""

    async def add(handle: TimeoutPersister) -> bool:
        return await handle.add(timeout())

    async with prepared(subject.open()) as persister:
        for _ in range(3):
            expect_equal(await _raced(subject, persister, add), 1, "callers who stored the timeout")
            await persister.try_remove(timeout_id(1))


@keeping
async def looking_waits_for_nobody(subject: TimeoutSubject) -> None:
    """While another transaction is removing a timeout, it can be peeked at and looked for at once (4.6)."""
    if not subject.durable:
        return
    async with prepared(subject.open()) as persister:
        await persister.add(timeout())
        await persister.add(timeout(2))
        with subject.removing_elsewhere(timeout_id(1)):
            with in_time("a look at a timeout that is being removed"):
                found = await persister.peek(timeout_id(1))
            expect(found is None or found == timeout(), "it is seen as it was, or not at all")
            with in_time("a look for due timeouts while one is being removed"):
                chunk = await persister.next_chunk(NOW - SECOND, NOW, 10)
            expect(timeout_id(2) in {each.timeout_id for each in chunk.due}, "the others are found")
        expect(await persister.try_remove(timeout_id(1)), "a removal that was rolled back has not removed")


@keeping
async def what_is_stored_survives_closing(subject: TimeoutSubject) -> None:
    """A timeout is there for the next handle if the storage is durable, and lost with its handle if not (row 104)."""
    async with prepared(subject.open()) as persister:
        await persister.add(timeout())
    async with prepared(subject.open()) as persister:
        found = await persister.peek(timeout_id(1))
        expect_equal(found, timeout() if subject.durable else None, "the timeout after a restart")


@keeping
async def each_endpoint_has_its_own(subject: TimeoutSubject) -> None:
    """Two endpoints on one database do not see each other's timeouts; each owns what it reads."""
    async with prepared(subject.open()) as ours, prepared(subject.open(), "Other % \"'`]") as theirs:
        await ours.add(timeout())
        expect_equal(await theirs.peek(timeout_id(1)), None, "a timeout of another endpoint")
        expect(await theirs.add(replace(timeout(), owner="Other % \"'`]")), "one id may be used by both")
        found = await theirs.peek(timeout_id(1))
        expect(found is not None and found.owner == "Other % \"'`]", "it belongs to the endpoint whose table it is")


@keeping
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


@keeping
async def without_its_table_it_says_so(subject: TimeoutSubject) -> None:
    """Before the set-up every call raises StoreNotSetUp."""
    if not subject.durable:
        return
    async with prepared(subject.open()) as persister:  # the schema or file is there
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
