"""Storage that can be claimed from gives each timeout to one caller at a time, and waits for nobody."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from postdate.ports.timeouts import TimeoutPersister
from postdate.testing.conformance import Topic, expect, expect_equal, in_time
from postdate.testing.timeout_suite.subject import NOW, SECOND, TimeoutSubject, named, prepared, timeout, timeout_id

claiming: Topic[TimeoutSubject] = Topic("claiming")


@asynccontextmanager
async def _two(subject: TimeoutSubject) -> AsyncGenerator[tuple[TimeoutPersister, TimeoutPersister]]:
    """Open two handles on storage with timeout 1, as two processes have them where it is durable."""
    async with prepared(subject.open()) as ours:
        await ours.add(timeout())
        if not subject.durable:
            yield ours, ours
            return
        async with prepared(subject.open_elsewhere()) as theirs:
            yield ours, theirs


@claiming.given(_two)
async def of_several_who_claim_one_has_it(ours: TimeoutPersister, theirs: TimeoutPersister) -> None:
    """A claim can remove its timeout; meanwhile, and afterwards, other callers get none, and do not wait for it."""
    claim = await ours.claim(named(timeout_id(1).upper(), timeout()).timeout_id)
    expect(claim is not None and claim.timeout == timeout(), "the timeout is claimed as it is stored")
    assert claim is not None
    with in_time("a claim of what somebody else has claimed"):
        expect_equal([await each.claim(timeout_id(1)) for each in (ours, theirs)], [None, None], "further claims")
    expect(await claim.remove(), "who has claimed it removes it")
    await claim.release()  # without effect
    for each in (ours, theirs):
        expect_equal(await each.peek(timeout_id(1)), None, "what was claimed and removed")
        expect_equal([await each.claim(id_) for id_ in (timeout_id(1), "no uuid")], [None, None], "what is gone")


@claiming.given(_two)
async def what_was_let_go_is_as_it_was(ours: TimeoutPersister, theirs: TimeoutPersister) -> None:
    """A timeout whose claim was released can be claimed again, unchanged, and removed."""
    for each in (ours, theirs, ours):
        claim = await each.claim(timeout_id(1))
        expect(claim is not None and claim.timeout == timeout(), "what was let go can be claimed, unchanged")
        assert claim is not None
        await claim.release()
    expect(await theirs.try_remove(timeout_id(1)), "what was let go can be removed")


@claiming.given(_two)
async def looking_sees_what_is_claimed(ours: TimeoutPersister, theirs: TimeoutPersister) -> None:
    """A claim hides nothing: its timeout is stored until it is removed, and others see it without waiting."""
    claim = await ours.claim(timeout_id(1))
    assert claim is not None
    with in_time("looks at a timeout that somebody has claimed"):
        expect_equal(await theirs.peek(timeout_id(1)), timeout(), "a claimed timeout, peeked at")
        chunk = await theirs.next_chunk(NOW - SECOND, NOW, 10)
    expect_equal([each.timeout_id for each in chunk.due], [timeout_id(1)], "what is due")
    await claim.release()
