"""What is asked of a table at the same time goes together, and everybody hears of their own part."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import cast

import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import until

from postdate.backends.azure.groups import Operation, OperationBatcher, Table
from postdate.backends.azure.lease import ClaimLimit
from postdate.errors import StoreUnavailable, StoreUnreachable

Key = tuple[str, str]

ASKED = st.lists(st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from("abcdefgh")), max_size=4), max_size=12)
"""For each of those who ask, the keys of the entities."""


class Recorder:
    """Stands in for a table: it takes a while, and notes what it was asked for in each round.

    Args:
        gone: keys of entities of which the table says that they were not as expected.
        failing: the numbers of the rounds that fail.
    """

    description = "table"

    def __init__(self, gone: frozenset[Key] = frozenset(), failing: frozenset[int] = frozenset()) -> None:
        self.rounds: list[list[Key]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.is_busy = False
        self._gone, self._failing = gone, failing

    async def apply_each(self, operations: Sequence[Operation]) -> list[bool]:
        assert not self.is_busy, "one round at a time"
        self.is_busy = True
        keys = [key_of(operation) for operation in operations]
        self.rounds.append(keys)
        number = len(self.rounds) - 1
        try:
            await anyio.lowlevel.checkpoint()
            await self.open.wait()
            if number in self._failing:
                raise StoreUnavailable(f"round {number}")
            return [key not in self._gone for key in keys]
        finally:
            self.is_busy = False


def key_of(operation: Operation) -> Key:
    return operation.entity["PartitionKey"], operation.entity["RowKey"]


def deletions(keys: Sequence[Key]) -> list[Operation]:
    return [Operation("delete", {"PartitionKey": partition, "RowKey": row}) for partition, row in keys]


def rounds_of(table: Recorder) -> OperationBatcher:
    return OperationBatcher(cast("Table", table))


def distinct(asked: Sequence[Sequence[Key]]) -> list[list[Key]]:
    """Return what may be asked for: nobody asks for one entity twice in one call."""
    return [list(dict.fromkeys(keys)) for keys in asked]


@given(asked=ASKED, gone=st.frozensets(st.tuples(st.sampled_from("pq"), st.sampled_from("abcdefgh")), max_size=5))
def test_everybody_hears_of_their_own_part_and_no_round_has_an_entity_twice(
    asked: list[list[Key]], gone: frozenset[Key]
) -> None:
    wanted = distinct(asked)

    async def ask() -> None:
        table = Recorder(gone)
        rounds = rounds_of(table)
        answers = await asyncio.gather(*(rounds.apply_each(deletions(keys)) for keys in wanted))
        assert answers == [[key not in gone for key in keys] for keys in wanted]
        assert all(len(set(keys)) == len(keys) for keys in table.rounds)
        assert sorted(key for keys in table.rounds for key in keys) == sorted(key for keys in wanted for key in keys)
        await rounds.stop(math.inf)

    asyncio.run(ask())


@given(asked=ASKED, failing=st.frozensets(st.integers(0, 6)))
def test_a_round_that_fails_is_told_to_those_in_it_and_the_next_goes_on(
    asked: list[list[Key]], failing: frozenset[int]
) -> None:
    wanted = distinct(asked)

    async def ask() -> None:
        table = Recorder(failing=failing)
        rounds = rounds_of(table)
        answers = await asyncio.gather(*(rounds.apply_each(deletions(keys)) for keys in wanted), return_exceptions=True)
        for keys, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, BaseException):
                assert isinstance(answer, StoreUnavailable)
                number = int(str(answer).removeprefix("round "))
                assert set(keys) <= set(table.rounds[number])
            else:
                assert answer == [True] * len(keys)
        failed = sum(isinstance(answer, StoreUnavailable) for answer in answers)
        assert bool(failed) == any(number < len(table.rounds) for number in failing)

    asyncio.run(ask())


async def test_what_comes_while_a_round_is_on_its_way_goes_together_in_the_next() -> None:
    table = Recorder()
    table.open.clear()
    rounds = rounds_of(table)
    first = asyncio.ensure_future(rounds.apply_each(deletions([("p", "a")])))
    while not table.rounds:
        await anyio.lowlevel.checkpoint()
    others = [asyncio.ensure_future(rounds.apply_each(deletions([("p", row)]))) for row in "bcd"]
    await anyio.lowlevel.checkpoint()
    table.open.set()
    assert await asyncio.gather(first, *others) == [[True]] * 4
    assert table.rounds == [[("p", "a")], [("p", "b"), ("p", "c"), ("p", "d")]]


async def test_whoever_is_cancelled_holds_up_nobody() -> None:
    table = Recorder()
    table.open.clear()
    rounds = rounds_of(table)
    one, other = (asyncio.ensure_future(rounds.apply_each(deletions([("p", row)]))) for row in "ab")
    while not table.rounds:
        await anyio.lowlevel.checkpoint()
    one.cancel()
    table.open.set()
    assert await other == [True]
    with pytest.raises(asyncio.CancelledError):
        await one


async def test_stopping_waits_for_what_is_on_its_way() -> None:
    table = Recorder()
    rounds = rounds_of(table)
    await rounds.stop(math.inf)
    asked = asyncio.ensure_future(rounds.apply_each(deletions([("p", "a")])))
    await anyio.lowlevel.checkpoint()
    await rounds.stop(math.inf)
    assert await asked == [True]
    assert not table.is_busy


async def test_what_has_no_answer_when_its_time_is_over_is_cut_off() -> None:
    table = Recorder()
    table.open.clear()
    rounds = rounds_of(table)
    asked = asyncio.ensure_future(rounds.apply_each(deletions([("p", "a")])))
    await until(lambda: table.rounds)
    await rounds.stop(deadline=0)
    with pytest.raises(StoreUnreachable, match="before the store was closed"):
        await asked


# --- how many at once -------------------------------------------------------------------------------------------------

LONGEST = st.integers(1, 1_000)
PIECES = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 5)), max_size=30)
"""Of each piece of work, how long after the last it was done, and how long it took."""


def worked(longest: int, pieces: list[tuple[float, float]]) -> Iterator[tuple[ClaimLimit, float]]:
    """Yield the stride, and the time, before any work and after each piece of it."""
    stride, now = ClaimLimit(longest), 0.0
    yield stride, now
    for pause, seconds in pieces:
        now += pause
        stride.adjust_limit(now, seconds)
        yield stride, now


@given(longest=LONGEST, pieces=PIECES, held=st.integers(0, 5_000))
def test_there_is_never_more_room_than_the_most_and_never_too_little_for_one_who_holds_nothing(
    longest: int, pieces: list[tuple[float, float]], held: int
) -> None:
    for stride, now in worked(longest, pieces):
        assert 0 <= stride.free_capacity(held, now) <= longest
        assert stride.free_capacity(0, now) >= min(longest, 16)


@given(longest=LONGEST, pieces=PIECES, held=st.integers(0, 5_000))
def test_what_was_slow_is_forgotten_so_that_nobody_waits_for_who_hangs(
    longest: int, pieces: list[tuple[float, float]], held: int
) -> None:
    *_, (stride, now) = worked(longest, pieces)
    assert stride.free_capacity(held, now + 2.0) == longest


@given(longest=LONGEST, slow=st.integers(1, 20))
def test_while_it_is_slow_pieces_become_shorter_and_few_are_in_hand_and_with_speed_they_grow_again(
    longest: int, slow: int
) -> None:
    stride = ClaimLimit(longest)
    lengths = [stride.free_capacity(0, 0.0)]
    for _ in range(slow):
        stride.adjust_limit(0.0, 1.0)
        lengths.append(stride.free_capacity(0, 0.0))
    assert lengths == sorted(lengths, reverse=True)
    shortest = min(longest, 16)
    assert lengths[-1] == max(shortest, longest >> slow)
    if lengths[-1] < longest:
        assert stride.free_capacity(4 * lengths[-1], 0.0) == 0
        assert stride.free_capacity(4 * lengths[-1] - 1, 0.0) == 1
    for _ in range(40):
        stride.adjust_limit(0.0, 0.1)
    assert stride.free_capacity(0, 0.0) == longest
