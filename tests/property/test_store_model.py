"""Every store against a dictionary: whatever is asked of both, in whatever order, they give the same answers."""

import asyncio
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from postdate import DelayedMessage, MemoryStore, SqliteStore
from postdate.errors import DuplicateMessage, InvalidMessage
from postdate.messages import copy_with_failures
from postdate.ports import Claim, MessageFilter, Outcome

START = datetime(2026, 1, 31, 12, tzinfo=UTC)
T = TypeVar("T")

IDS = st.sampled_from(["a", "b", "c", "d", "é🕰", "f"])
OFFSETS = st.integers(-3, 12).map(lambda each: timedelta(seconds=each, microseconds=each % 2))
OUTCOMES = st.sampled_from([Outcome.DELIVERED, Outcome.EXPIRED, Outcome.FAILED])


@dataclass
class Kept:
    """A message in the dictionary."""

    message: DelayedMessage
    attempt_at: datetime | None
    claim: int | None = None


@dataclass(frozen=True)
class Held:
    """A claim, the number under which the dictionary knows it, and the life of store and message it belongs to.

    A process does not have the claims of another one, and nobody uses a claim of a message that has come back from the
    error queue since: such claims are not used here either.
    """

    claim: Claim
    number: int
    life: object


class StoreModel(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.now = START
        self.kept: dict[str, Kept] = {}
        self.known: set[str] = set()
        self.in_error_queue: set[str] = set()
        self.claims = self.processes = 0
        self.comebacks: list[str] = []
        self.folder = tempfile.TemporaryDirectory()
        self.store = self.open()

    def open(self) -> MemoryStore | SqliteStore:
        raise NotImplementedError

    def ask(self, question: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(question)

    def teardown(self) -> None:
        self.ask(self.store.close())
        self.runner.close()
        self.folder.cleanup()

    def still(self, held: Held) -> bool:
        kept = self.kept.get(held.claim.message.message_id)
        return kept is not None and kept.claim == held.number

    def life(self, id_: str) -> object:
        return (self.processes, self.comebacks.count(id_))

    def usable(self, held: list[Held]) -> list[Held]:
        return [each for each in held if each.life == self.life(each.claim.message.message_id)]

    def message(self, id_: str, offset: timedelta, *, expires: bool) -> DelayedMessage:
        due = START + offset
        return DelayedMessage(id_, due, "queue", {"é": id_}, b"\0" + id_.encode(), due if expires else None)

    # --- what is asked ------------------------------------------------------------------------------------------------

    @rule(id_=IDS, offset=OFFSETS, expires=st.booleans())
    def store_one(self, id_: str, offset: timedelta, expires: bool) -> None:
        message = self.message(id_, offset, expires=expires)
        if id_ in self.known and id_ not in self.in_error_queue:
            with pytest.raises(DuplicateMessage):
                self.ask(self.store.store(message, self.now))
            return
        self.ask(self.store.store(message, self.now))
        if id_ in self.in_error_queue:
            self.comebacks.append(id_)
        self.keep(message)

    def keep(self, message: DelayedMessage) -> None:
        self.kept[message.message_id] = Kept(message, message.due)
        self.known.add(message.message_id)
        self.in_error_queue.discard(message.message_id)

    @rule(batch=st.lists(st.tuples(IDS, OFFSETS), max_size=5))
    def store_many(self, batch: list[tuple[str, timedelta]]) -> None:
        messages = [self.message(id_, offset, expires=False) for id_, offset in batch]
        report = self.ask(self.store.store_many(messages, self.now))
        already_there: list[str] = []
        for message in messages:
            if message.message_id in self.known:
                already_there.append(message.message_id)
            else:
                self.keep(message)
        assert (report.stored, list(report.duplicate_ids)) == (len(batch) - len(already_there), already_there)

    @rule(target=held, limit=st.integers(1, 4))
    def claim(self, limit: int):
        eligible = {
            id_: kept.attempt_at
            for id_, kept in self.kept.items()
            if kept.attempt_at is not None and kept.attempt_at < self.now
        }
        claims = self.ask(self.store.claim_due(self.now, limit))
        claimed = [claim.message.message_id for claim in claims]
        assert len(claimed) == len(set(claimed)) == min(limit, len(eligible))
        assert set(claimed) <= set(eligible)
        latest = max((eligible[id_] for id_ in claimed), default=self.now)
        assert all(attempt_at >= latest for id_, attempt_at in eligible.items() if id_ not in claimed)
        held: list[Held] = []
        for claim in claims:
            kept = self.kept[claim.message.message_id]
            assert claim.message == kept.message
            self.claims += 1
            kept.attempt_at, kept.claim = None, self.claims
            held.append(Held(claim, self.claims, self.life(claim.message.message_id)))
        return multiple(*held)

    @rule(batch=st.lists(held, max_size=3, unique=True), outcome=OUTCOMES)
    def finish(self, batch: list[Held], outcome: Outcome) -> None:
        batch = self.usable(batch)
        ends = [each for each in batch if self.still(each)]
        assert self.ask(self.store.finish([each.claim for each in batch], outcome, self.now, "why")) == len(ends)
        for each in ends:
            del self.kept[each.claim.message.message_id]
            if outcome is Outcome.FAILED:
                self.in_error_queue.add(each.claim.message.message_id)

    @rule(one=consumes(held) | held, wait=st.integers(0, 5))
    def retry_later(self, one: Held, wait: int) -> None:
        if not self.usable([one]):
            return
        attempt_at = self.now + timedelta(seconds=wait)
        assert self.ask(self.store.retry_later(one.claim, attempt_at, self.now, "why")) == self.still(one)
        if self.still(one):
            kept = self.kept[one.claim.message.message_id]
            self.fail(kept, attempt_at)

    def fail(self, kept: Kept, attempt_at: datetime) -> None:
        kept.message = copy_with_failures(kept.message, kept.message.number_of_failures + 1)
        kept.attempt_at, kept.claim = attempt_at, None

    @rule(id_=IDS)
    def increment_failure_count(self, id_: str) -> None:
        assert self.ask(self.store.increment_failure_count(id_, self.now)) == (id_ in self.kept)
        if id_ in self.kept:
            self.fail(self.kept[id_], self.kept[id_].message.due)

    @rule(id_=IDS)
    def remove(self, id_: str) -> None:
        assert self.ask(self.store.remove(id_, self.now)) == (self.kept.pop(id_, None) is not None)

    @rule(id_=IDS)
    def cancel(self, id_: str) -> None:
        free = id_ in self.kept and self.kept[id_].claim is None
        assert self.ask(self.store.cancel(id_, self.now)) == free
        if free:
            del self.kept[id_]

    @rule(id_=IDS, offset=OFFSETS)
    def reschedule(self, id_: str, offset: timedelta) -> None:
        kept, due = self.kept.get(id_), START + offset
        if kept is None or kept.claim is not None:
            assert not self.ask(self.store.reschedule(id_, due, self.now))
        elif kept.message.expires_at is not None and kept.message.expires_at < due:
            with pytest.raises(InvalidMessage):
                self.ask(self.store.reschedule(id_, due, self.now))
        else:
            assert self.ask(self.store.reschedule(id_, due, self.now))
            message = kept.message
            kept.message = DelayedMessage(
                id_, due, message.destination, message.headers, message.body, message.expires_at,
                message.number_of_failures,
            )  # fmt: skip
            kept.attempt_at = due

    @rule(seconds=st.integers(0, 5))
    def wait(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds, microseconds=1)

    # --- what must always hold ----------------------------------------------------------------------------------------

    @invariant()
    def the_answers_are_those_of_the_dictionary(self) -> None:
        kept = self.kept.values()
        attempts = [each.attempt_at for each in kept if each.attempt_at is not None]
        next_due = min((each.message.due for each in kept), default=None)
        assert self.ask(self.store.next_attempt()) == min(attempts, default=None)
        assert self.ask(self.store.next_due()) == next_due
        counts = self.ask(self.store.statistics(self.now))
        assert (counts.pending, counts.next_due) == (len(kept), next_due)
        assert counts.overdue == sum(each.message.due < self.now for each in kept if each.claim is None)
        assert counts.claimed == sum(each.claim is not None for each in kept)
        assert counts.failing == sum(each.message.number_of_failures > 0 for each in kept)

    @invariant()
    def the_messages_are_those_of_the_dictionary(self) -> None:
        listed = self.ask(self.store.list_pending(MessageFilter(), 100))
        assert {each.message_id: each for each in listed} == {id_: kept.message for id_, kept in self.kept.items()}
        assert [each.due for each in listed] == sorted(each.due for each in listed)


class MemoryStoreModel(StoreModel):
    def open(self) -> MemoryStore:
        return MemoryStore()


class SqliteStoreModel(StoreModel):
    def open(self) -> SqliteStore:
        return SqliteStore(Path(self.folder.name) / "store.db", synchronous="normal")

    @invariant()
    def no_content_outlives_its_message(self) -> None:
        count = "SELECT count(*) FROM content"
        assert self.store.file.read_blocking(lambda c: c.execute(count).fetchone()) == (len(self.kept),)

    @rule()
    def end_the_process_and_start_another(self) -> None:
        self.ask(self.store.close())
        self.store = self.open()
        self.processes += 1
        for kept in self.kept.values():
            if kept.claim is not None:
                kept.attempt_at, kept.claim = kept.message.due, None


TestMemoryStore = MemoryStoreModel.TestCase
TestMemoryStore.settings = settings(stateful_step_count=40)
TestSqliteStore = SqliteStoreModel.TestCase
TestSqliteStore.settings = settings(stateful_step_count=15, max_examples=settings().max_examples * 2 // 5)
