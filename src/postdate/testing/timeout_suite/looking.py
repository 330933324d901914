"""Due timeouts are found: all of them, in order, each once from chunk to chunk (row 95)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from postdate.ports.timeouts import DueChunk, DueTimeout, TimeoutPersister
from postdate.testing.conformance import Topic, expect, expect_equal
from postdate.testing.timeout_suite.subject import NOW, SECOND, TimeoutSubject, storage, timeout, timeout_id

looking: Topic[TimeoutSubject] = Topic("due")

_LONG_AGO = datetime(1800, 1, 1, tzinfo=UTC)


def _chunk(next_query: datetime | None, *found: tuple[int, datetime]) -> DueChunk:
    return DueChunk([DueTimeout(timeout_id(number), due) for number, due in found], next_query)


@looking.given(storage)
async def the_start_is_exclusive_and_now_inclusive(persister: TimeoutPersister) -> None:
    """A timeout due at the start is not found, one due at ``now`` is: looks that follow each other meet (row 95)."""
    for number in range(3):
        await persister.add(timeout(number, NOW + number * SECOND))
    found = await persister.next_chunk(NOW, NOW + SECOND, 10)
    expect_equal(found, _chunk(NOW + 2 * SECOND, (1, NOW + SECOND)), "what is due after the start, until now")


@looking.given(storage)
async def the_next_query_is_the_earliest_to_come(persister: TimeoutPersister) -> None:
    """When all due timeouts were found, the next query is when the next one is due, or never without one (row 95)."""
    expect_equal(await persister.next_chunk(_LONG_AGO, NOW, 10), _chunk(None), "nothing at all")
    await persister.add(timeout(1, NOW))
    expect_equal(await persister.next_chunk(_LONG_AGO, NOW, 10), _chunk(None, (1, NOW)), "nothing to come")
    await persister.add(timeout(2, NOW + 9 * SECOND))
    await persister.add(timeout(3, NOW + 5 * SECOND))
    found = await persister.next_chunk(_LONG_AGO, NOW, 1)
    expect_equal(found, _chunk(NOW + 5 * SECOND, (1, NOW)), "a chunk that is full, with nothing more due")
    expect_equal(await persister.next_chunk(NOW, NOW, 1), _chunk(NOW + 5 * SECOND), "nothing due")


@looking.given(storage)
async def a_chunk_that_was_cut_is_followed_at_once(persister: TimeoutPersister) -> None:
    """When the limit has cut a chunk, the next query is ``now``, and the chunk has the earliest timeouts (row 95)."""
    for number in (3, 1, 2):
        await persister.add(timeout(number, NOW + number * SECOND))
    now = NOW + 5 * SECOND
    expected = _chunk(now, (1, NOW + SECOND), (2, NOW + 2 * SECOND))
    expect_equal(await persister.next_chunk(NOW, now, 2), expected, "the two that are due first")


@looking.given(storage)
async def a_chunk_does_not_end_between_equal_due_times(persister: TimeoutPersister) -> None:
    """All timeouts of the last due time are in the chunk, by id: the next one starts after that time (row 95)."""
    dues = {1: NOW, 5: NOW + SECOND, 3: NOW + SECOND, 4: NOW + SECOND, 2: NOW + 2 * SECOND}
    for number, due in dues.items():
        await persister.add(timeout(number, due))
    now = NOW + 5 * SECOND
    tied = [(3, NOW + SECOND), (4, NOW + SECOND), (5, NOW + SECOND)]
    for limit in (2, 3, 4):
        found = await persister.next_chunk(_LONG_AGO, now, limit)
        expect_equal(found, _chunk(now, (1, NOW), *tied), f"a chunk of {limit}")
    expect_equal(await persister.next_chunk(NOW, now, 1), _chunk(now, *tied), "a chunk of equal times only")
    found = await persister.next_chunk(NOW, NOW + SECOND, 2)
    expect_equal(found, _chunk(NOW + 2 * SECOND, *tied), "equal times up to the end: nothing more is due")


@looking.given(storage)
async def going_on_finds_each_one_once(persister: TimeoutPersister) -> None:
    """Looks that each start at the last due time of the one before find everything, in order, once."""
    for number in range(1, 41):  # times with as many digits as there are, some of them equal
        due = NOW + timedelta(microseconds=(number * 7 % 11) * 3_337)
        await persister.add(timeout(number, due))
    found, start, limits = list[DueTimeout](), _LONG_AGO, [1, 5, 2, 9] * 10
    for limit in limits:
        chunk = await persister.next_chunk(start, NOW + SECOND, limit)
        found += chunk.due
        if not chunk.due:
            break
        start = chunk.due[-1].due
    expect_equal(len(found), 40, "timeouts that were found")
    expect_equal({each.timeout_id for each in found}, {timeout_id(number) for number in range(1, 41)}, "which")
    expect(found == sorted(found, key=lambda each: (each.due, each.timeout_id)), "they come in order")


@looking.given(storage)
async def any_start_will_do(persister: TimeoutPersister) -> None:
    """A look may start at the beginning of the calendar and go on to its end."""
    await persister.add(timeout())
    everything = await persister.next_chunk(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC), 5)
    expect_equal(everything, _chunk(None, (1, NOW)), "everything")
