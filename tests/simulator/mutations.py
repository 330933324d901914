"""Fixes taken out, one at a time: without each of them the simulator finds the promise broken that it keeps.

Each is a class of ADR 0019. A fix of the core is taken out of it for as long as the mutation lasts; one that every
adapter has of its own is taken out of the simulated ones.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from tests.simulator.clock import ProcessClock
from tests.simulator.run import RunResult, run
from tests.simulator.site import Breaks

from postdate.clock import LATEST
from postdate.core import limits, recoverability, zones
from postdate.core.due import finishing, poller, rate_limits
from postdate.core.health import deadlines, message_memory
from postdate.core.receive import intake
from postdate.core.upkeep import daily, store_clock, wall_times
from postdate.core.zones import ZoneRules, read_rules
from postdate.errors import PostdateError
from postdate.messages import DelayedMessage
from postdate.operations import error_returns
from postdate.ports import Claim
from postdate.testing.clock import START

Mutation = Callable[[], AbstractContextManager[Breaks]]

_ROOMS: Final = ("postdate.core", "postdate.endpoint")


@contextmanager
def _instead(owner: object, name: str, replacement: object) -> Generator[None]:
    """Put something in the place of an attribute."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _everywhere(original: object, replacement: object) -> Generator[Breaks]:
    """Put another function in the place of one, wherever the core or the endpoint has it."""
    with ExitStack() as stack:
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(_ROOMS):
                for name, value in list(vars(module).items()):
                    if value is original:
                        stack.enter_context(_instead(module, name, replacement))
        yield Breaks()


# --- A: time --------------------------------------------------------------------------------------------------------


@contextmanager
def durations_by_a_monotonic_clock() -> Generator[Breaks]:
    """A: Durations are measured by the wall clock."""

    def wall(self: ProcessClock) -> float:
        return (self.now() - START).total_seconds()

    with _instead(ProcessClock, "monotonic", wall):
        yield Breaks()


@contextmanager
def sums_that_end_with_the_calendar() -> Generator[Breaks]:
    """A: The poller adds to the due time of a message without looking where the calendar ends."""

    async def sleep(self: Any, alarm: Any, next_attempt: datetime | None, look_again: timedelta) -> None:
        until = self._clock.now() + poller.LONGEST_SLEEP
        if next_attempt is not None:
            until = min(until, next_attempt + max(look_again, timedelta(microseconds=1)))
        await self._clock.wait(alarm.event, until)

    with _instead(poller.Poller, "_sleep", sleep):
        yield Breaks()


@contextmanager
def wake_ups_that_end_pauses() -> Generator[Breaks]:
    """A: A pause after a failure lasts, though the store says that it is back."""

    async def deaf(self: Any, error: PostdateError, alarm: object) -> None:
        pause = self._breaker.report_failure(error, self._clock.monotonic())
        await self._clock.wait_for(self._stop, pause)

    with _instead(poller.Poller, "_pause_after", deaf):
        yield Breaks()


def the_clock_of_the_store() -> AbstractContextManager[Breaks]:
    """A: What is due is judged by the clock of the service."""

    def none(clock: object, store: object, *, is_authoritative: bool = True) -> None:
        return None

    return _everywhere(store_clock.clock_of_store, none)


# --- B: answers that never come ---------------------------------------------------------------------------------------


@contextmanager
def deadlines_of_calls() -> Generator[Breaks]:
    """B: A call of an adapter is waited for as long as it takes."""

    async def call_apart(self: Any, make: Callable[[], Awaitable[Any]], late: object = None) -> Any:
        try:
            return await make()
        except BaseException as error:  # noqa: BLE001 - all of it is raised again
            self.raise_translated(error)

    with _instead(deadlines.Deadlines, "call_in_task", call_apart):
        yield Breaks()


@contextmanager
def a_guard_against_cancellations() -> Generator[Breaks]:
    """G: A cancellation that an adapter lets out is taken for one of the service's own."""

    def theirs(adapter: object, error: BaseException, *others: object) -> PostdateError:
        if isinstance(error, asyncio.CancelledError):
            raise error
        return translate(adapter, error, *others)

    translate: Callable[..., PostdateError] = vars(deadlines)["_translate"]
    with _instead(deadlines, "_translate", theirs):
        yield Breaks()


# --- C: outages -------------------------------------------------------------------------------------------------------


def outages_that_count_against_nobody() -> AbstractContextManager[Breaks]:
    """C: An outage is a failure of the messages in hand."""

    def never(error: BaseException) -> bool:
        return False

    return _everywhere(recoverability.is_outage, never)


@contextmanager
def giving_back_without_a_record() -> Generator[Breaks]:
    """C: What an outage kept from being sent is given back as failed."""
    original = finishing.Finisher.release_claims

    async def as_failed(self: Any, releases: Sequence[message_memory.Release]) -> None:
        await original(self, [replace(each, reason=each.reason or "the queues take nothing") for each in releases])

    with _instead(finishing.Finisher, "release_claims", as_failed):
        yield Breaks()


# --- D: sent, and not removed -----------------------------------------------------------------------------------------


@contextmanager
def memory_of_what_was_sent() -> Generator[Breaks]:
    """D: What was sent and could not be removed is given back, to be attempted again."""

    async def finish(self: Any, claims: Sequence[Claim], outcome: Any, detail: str = "") -> None:
        try:
            await original(self, claims, outcome, detail)
        finally:
            unwritten = [claim for claim in claims if claim.message.message_id in self.unwritten_outcomes]
            for claim in unwritten:
                self._memory.forget_unwritten_outcome(claim.message.message_id)
            if unwritten:
                await self.release_claims([message_memory.Release(claim, None) for claim in unwritten])

    original = finishing.Finisher.finish
    with _instead(finishing.Finisher, "finish", finish):
        yield Breaks()


# --- E, F: promises of adapters ---------------------------------------------------------------------------------------


@contextmanager
def reading_row_by_row() -> Generator[Breaks]:
    """E: A store reads batches as a whole, and keeps claimed what it has claimed when reading fails."""
    yield Breaks(reads_whole_batches=True)


@contextmanager
def a_bound_on_holding() -> Generator[Breaks]:
    """F: A store lets a frozen process hold what it holds."""
    yield Breaks(holds_for_ever=True)


# --- limits of destinations, ADR 34 -----------------------------------------------------------------------------------


@contextmanager
def holding_what_is_limited() -> Generator[Breaks]:
    """ADR 34: What is claimed for a queue with limits is sent."""

    def none(self: Any, claim: Claim) -> None:
        return None

    with _instead(limits.LimitsCache, "assign_lane", none):
        yield Breaks()


@contextmanager
def freeing_what_was_held() -> Generator[Breaks]:
    """ADR 34: What limits have held stays where it is when they are lifted."""

    async def nothing(self: Any, kept: object, now: datetime) -> tuple[int, float]:
        return 0, 1.0

    with _instead(rate_limits.LimitedWork, "_release_lane", nothing):
        yield Breaks()


@contextmanager
def one_taker_of_a_turn() -> Generator[Breaks]:
    """ADR 34: Each of several services that take the same turn of a rate gets it."""
    yield Breaks(gives_turns_to_all=True)


@contextmanager
def keeping_to_windows() -> Generator[Breaks]:
    """ADR 34: A queue with a window takes messages at any time."""

    def at_once(self: Any, now: datetime) -> datetime:
        return LATEST if self.paused else now

    with _instead(rate_limits.Limits, "next_opening", at_once):
        yield Breaks()


@contextmanager
def holding_what_is_returned() -> Generator[Breaks]:
    """ADR 39: What is returned from the error queue goes to its queue at once, whatever limits that has."""

    async def nobody_has(store: object, destination: str) -> bool:
        return False

    with _instead(error_returns, "has_limits", nobody_has):
        yield Breaks()


# --- wall times, ADR 33, 42 -----------------------------------------------------------------------------------------


@contextmanager
def following_new_rules() -> Generator[Breaks]:
    """ADR 33: What waits stays where it is when the rules of its zone change."""

    def always(one: bytes, other: bytes, year: int) -> bool:
        return True

    with _instead(zones, "has_same_rules", always):
        yield Breaks()


@contextmanager
def looking_for_what_old_files_store() -> Generator[Breaks]:
    """ADR 33: What is stored by the rules of before is not looked for after the first look with new ones."""
    with _instead(wall_times, "_SEARCH_DURATION", timedelta.min):
        yield Breaks()


@contextmanager
def looking_again_after_a_failure() -> Generator[Breaks]:
    """ADR 33: A look for new rules that has failed is not repeated before the next day."""
    day = timedelta(days=1)
    with _instead(daily, "_AGAIN_AFTER", day), _instead(daily, "_SHORTEST_PAUSE", day):
        yield Breaks()


@contextmanager
def going_by_the_newest_files() -> Generator[Breaks]:
    """ADR 33: A service whose zone files are older moves messages back."""

    def without_version(zone: str) -> ZoneRules:
        return replace(read_rules(zone), version="")

    with _instead(zones, "read_rules", without_version):
        yield Breaks()


@contextmanager
def storing_by_own_rules() -> Generator[Breaks]:
    """ADR 33: What comes through a queue is due by the rules of its sender."""

    async def as_sent(self: Any, message: DelayedMessage, wall: object, now: datetime) -> DelayedMessage:
        return message

    with _instead(intake.Intake, "_follow_zone", as_sent):
        yield Breaks()


@contextmanager
def leaving_what_is_rescheduled_by_hand() -> Generator[Breaks]:
    """ADR 42: What is rescheduled to an instant keeps the header of its wall time."""
    yield Breaks(keeps_wall_times=True)


def first_found(fix: str, seeds: Iterable[int]) -> RunResult | None:
    """Return the first of some runs that misses a fix, and that keeps every promise with it; ``None``: none does."""
    for seed in seeds:
        with MUTATIONS[fix]() as breaks:
            without = run(seed, breaks=breaks)
        if without.violation is not None and run(seed).violation is None:
            return without
    return None


def table(seeds: Iterable[int]) -> Iterator[str]:
    """Return the rows of the table in docs/guides/testing.md: fix, what is done instead, seed, promise."""
    for fix, mutation in MUTATIONS.items():
        said = str(mutation.__doc__).strip().rstrip(".")
        found = first_found(fix, seeds)
        seed, promise = (
            ("none", "") if found is None or found.violation is None else (found.seed, found.violation.promise)
        )
        yield f"| `{fix}` | {said} | {seed} | {promise} |"


def _named(mutations: Collection[Mutation]) -> Mapping[str, Mutation]:
    return {each.__name__.replace("_", "-"): each for each in mutations}


MUTATIONS: Final = _named(
    [
        durations_by_a_monotonic_clock,
        sums_that_end_with_the_calendar,
        wake_ups_that_end_pauses,
        the_clock_of_the_store,
        deadlines_of_calls,
        a_guard_against_cancellations,
        outages_that_count_against_nobody,
        giving_back_without_a_record,
        memory_of_what_was_sent,
        reading_row_by_row,
        a_bound_on_holding,
        holding_what_is_limited,
        freeing_what_was_held,
        one_taker_of_a_turn,
        keeping_to_windows,
        holding_what_is_returned,
        following_new_rules,
        looking_for_what_old_files_store,
        looking_again_after_a_failure,
        going_by_the_newest_files,
        storing_by_own_rules,
        leaving_what_is_rescheduled_by_hand,
    ]
)
"""By the name of the fix that is taken out."""
