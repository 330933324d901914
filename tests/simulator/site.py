"""A database as a store or as queues, or as both: what is in it, transactions, and who holds what.

It keeps what the ports promise of every adapter, and can be told to break a part of that: so a promise is shown to be
needed. No process runs in here: what it does happens at once, when a request arrives.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from tests.simulator.ledger import Ledger, origin_of, origin_of_row

from postdate import ports
from postdate.clock import to_microseconds
from postdate.core.limits import NO_LIMITS, Limits, decode_limits
from postdate.core.windows import Window
from postdate.errors import (
    ClaimLost,
    DuplicateMessage,
    InvalidHeaders,
    PostdateError,
    QueueNotFound,
    StoreUnavailable,
)
from postdate.messages import (
    OF_THE_STORE,
    DelayedMessage,
    Envelope,
    Headers,
    copy_with_due,
    copy_with_failures,
    to_envelope,
)
from postdate.ports.administration import cursor_text, parse_cursor
from postdate.ports.changing import CreateMessage, KeyedIds
from postdate.ports.common import OUTCOME_RECORDS
from postdate.ports.limits import LANES, LimitsInUse, StoredLimits

HOLDS_AT_MOST: Final = timedelta(seconds=60)
HEARD_WITHIN_SECONDS: Final = 1.5
"""After so long, every service goes by the limits that were set."""

LIFTED_WITHIN_SECONDS: Final = 15.0
"""After so long, what was held goes the way of all others; also what one has held that had not heard of it."""


@dataclass(frozen=True, slots=True)
class Breaks:
    """Promises of adapters that this site does not keep.

    Args:
        reads_whole_batches: one row that cannot be read fails a claim, and what it has claimed stays claimed.
        holds_for_ever: what a frozen process holds stays with it.
        gives_turns_to_all: of several processes that take the same turns of a limited queue, each gets them.
        keeps_wall_times: what is rescheduled to an instant keeps the header of its wall time.
    """

    reads_whole_batches: bool = False
    holds_for_ever: bool = False
    gives_turns_to_all: bool = False
    keeps_wall_times: bool = False


class SiteSession:
    """A process as a site sees it.

    Args:
        life: of the process: its name and which start of it this is.
    """

    def __init__(self, life: str) -> None:
        self.life = life
        self.is_alive = True


@dataclass(slots=True)
class Row:
    """A delayed message that waits."""

    message: DelayedMessage
    attempt_at: datetime
    number: int
    since: float
    session: SiteSession | None = None
    token: int = 0


@dataclass(eq=False, slots=True)
class SimulatedMessage:
    """A message in a queue."""

    envelope: Envelope
    since: float
    failures: int = 0
    unanswered: int = 0
    session: SiteSession | None = None
    token: int = 0

    def received(self) -> ports.Received:
        """Return it for the process that has it: as a suspect sooner than real queues do, and not alone."""
        is_suspect = self.unanswered > 0
        return ports.Received(self.envelope, self.failures, self.token, self.unanswered, is_suspect=is_suspect)


@dataclass(slots=True)
class LimitedQueue:
    """A queue whose limits were set, or lifted: since when, in seconds of the run, and what has come to it since."""

    limits: Limits
    since: float
    arrivals: list[float] = field(default_factory=list[float])


@dataclass(eq=False, slots=True)
class PendingReceive:
    """A receive that has found nothing yet."""

    session: SiteSession
    limit: int
    give: Callable[[Sequence[ports.Received]], bool]


class Site:
    """See the module.

    Args:
        ledger: told of everything after it is committed.
        now: the time by which is judged whether a message is early.
        breaks: promises that it does not keep.
    """

    def __init__(self, ledger: Ledger, now: Callable[[], datetime], breaks: Breaks) -> None:
        self._ledger, self._now, self._breaks = ledger, now, breaks
        self.rows: dict[str, Row] = {}
        self.known: dict[str, None] = {}
        self.damaged: dict[str, None] = {}
        self.unreadable: dict[str, DelayedMessage] = {}
        self.clocks: dict[str, timedelta] = {}
        self.records: dict[str, list[ports.Record]] = {}
        """Of what became of each message, by id."""
        self.keys: dict[str, str] = {}
        """By key: the id of the last message that was stored under it."""
        self.changes: Counter[str] = Counter()
        """How often operators have rescheduled each message."""
        self.instants: Callable[[str], Sequence[datetime]] = lambda _: ()
        """When the wall time of a header is by each version of the rules."""
        self.queues: dict[str, list[SimulatedMessage]] = {}
        self.limits: dict[str, StoredLimits] = {}
        self.limited: dict[str, LimitedQueue] = {}
        """By name: what was let through since its limits were changed last."""
        self.sinks: dict[str, None] = {}
        """Queues whose messages stay: somebody else's."""
        self.listeners: dict[int, tuple[SiteSession, ports.Wake]] = {}
        self._waiting: dict[str, list[PendingReceive]] = {}
        self._numbers = itertools.count(1)
        self._undo: list[Callable[[], object]] = []
        self._committed: list[Callable[[], None]] = []
        self._is_open = False
        self.taken_at: dict[str, float] = {}
        """When a message was claimed, moved, or returned, last."""
        self.counts_unanswered = False
        """Whether messages tell how often they came back without an answer."""
        self.is_alone = True
        """Whether this is the only site, so that what is taken arrives at once."""
        self.are_lifted = False
        self.clock_is_set: Callable[[], bool] = lambda: False
        """Whether the clock that is judged by was ever set."""

    # --- transactions ---------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Do all of it or nothing; the ledger hears of it at the end."""
        if self._is_open:
            yield
            return
        self._is_open = True
        try:
            yield
        except BaseException:
            for undo in reversed(self._undo):
                undo()
            self._committed.clear()
            raise
        finally:
            self._undo.clear()
            self._is_open = False
        committed, self._committed = self._committed, []
        for tell in committed:
            tell()
        self._serve()

    def _add_row(self, row: Row) -> None:
        id_ = row.message.message_id
        self.rows[id_] = row
        self._undo.append(lambda: self.rows.pop(id_))
        self._committed.insert(0, lambda: self._ledger.placed(origin_of_row(row.message), "the store", +1))

    def _remove_row(self, row: Row, why: str) -> None:
        id_ = row.message.message_id
        del self.rows[id_]
        self._undo.append(lambda: self.rows.__setitem__(id_, row))
        self._committed.append(lambda: self._ledger.placed(origin_of_row(row.message), f"the store ({why})", -1))

    def _put(self, envelope: Envelope) -> None:
        """Put a message into a queue.

        Raises:
            QueueNotFound: there is none.
        """
        queue = self.queues.get(envelope.destination)
        if queue is None:
            origin = origin_of(envelope.message_id, envelope.headers)
            self._ledger.blame([origin], "there is no such queue")
            raise QueueNotFound(f"there is no queue {envelope.destination!r}")
        parcel = SimulatedMessage(envelope, self._ledger.now)
        queue.append(parcel)
        self._undo.append(lambda: queue.remove(parcel))
        self._committed.insert(0, lambda: self._has_come(envelope))

    def _allows_repetition(self, origin: str, headers: Mapping[str, str]) -> None:
        """Note that a second copy may be in the error queue once the first has arrived.

        A handler that is run again sends its message again, with another due time. Nothing tells it that it does, if
        its own message came twice, or came back and the queue does not count that.
        """
        is_told = self.counts_unanswered and self._ledger.arrived[headers.get(Headers.RELATED_TO, "")] < 2
        is_duplicate = headers.get(Headers.ERROR_CODE) == DuplicateMessage.code
        if is_duplicate and self._ledger.arrived[origin] and not is_told:
            self._ledger.blamed[origin] += 1

    def _has_come(self, envelope: Envelope) -> None:
        ledger, origin = self._ledger, origin_of(envelope.message_id, envelope.headers)
        ledger.placed(origin, envelope.destination, +1)
        if envelope.destination == "error":
            ledger.in_error_queue[origin] += 1
            of_dispatch = envelope.headers.get(Headers.FAILED_QUEUE, "").endswith(".timeouts")
            why = envelope.headers.get(Headers.EXCEPTION_MESSAGE, "")
            self._allows_repetition(origin, envelope.headers)
            ledger.becomes_error(origin, why, instead=of_dispatch)
        elif not envelope.destination.endswith(".timeouts"):
            ledger.arrives(envelope)
            ledger.check_time(origin, self._now())
            self._check_limits(envelope.destination, origin)
        ledger.check_count(origin)

    def _take_off(self, queue: str, parcel: SimulatedMessage, why: str) -> None:
        parcels = self.queues[queue]
        at = parcels.index(parcel)
        del parcels[at]
        self._undo.append(lambda: parcels.insert(at, parcel))
        origin = origin_of(parcel.envelope.message_id, parcel.envelope.headers)
        self._committed.append(lambda: self._ledger.placed(origin, f"{queue} ({why})", -1))
        if queue == "error":
            self._committed.append(lambda: self._ledger.in_error_queue.subtract([origin]))

    # --- the store ------------------------------------------------------------------------------------------------

    def _record(self, kind: ports.RecordKind, message: DelayedMessage) -> None:
        records = self.records.setdefault(message.message_id, [])
        records.append(ports.Record(kind, message.message_id, self._now(), message.due, message.destination))
        self._undo.append(records.pop)

    def store(self, message: DelayedMessage, version: int = 0) -> None:
        """See :meth:`postdate.ports.DelayedMessageStore.store`; ``version``: of the zone rules of who stores it."""
        if self.store_many([message], version).duplicate_ids:
            raise DuplicateMessage(f"message {message.message_id!r} was stored before")

    def store_many(self, messages: Sequence[DelayedMessage], version: int = 0) -> ports.StoreReport:
        """See :meth:`postdate.ports.ClaimingStore.store_many`."""
        first = self.next_attempt()
        there: list[str] = []
        with self.transaction():
            for message in messages:
                id_ = message.message_id
                if id_ in self.known:
                    there.append(id_)
                    continue
                self.known[id_] = None
                self._undo.append(lambda id_=id_: self.known.pop(id_))
                if self._ledger.in_error_queue[origin_of_row(message)] > 0:
                    self._lets_arrive_again(origin_of_row(message))
                self._add_row(Row(copy_with_failures(message, 0), message.due, next(self._numbers), self._ledger.now))
                self._record(ports.RecordKind.SCHEDULED, message)
                if Headers.WALL_TIME in message.headers:
                    self._committed.append(lambda message=message: self._is_stored_by_clocks(message, version))
            self._committed.append(lambda: self._wake_if_earlier(first))
        return ports.StoreReport(len(messages) - len(there), tuple(there))

    def _is_stored_by_clocks(self, message: DelayedMessage, version: int) -> None:
        ledger, origin = self._ledger, origin_of_row(message)
        ledger.is_stored_by_clocks(origin, version)
        instants = ledger.moved_by_hand.get(origin, ())
        is_later = message.due in instants and message.due > max(ledger.dues[origin], self._now())
        if is_later and not self._has_copies(origin):
            ledger.fail("what is rescheduled by hand keeps its time", f"{origin} sleeps again, until {message.due}")

    def _has_copies(self, origin: str) -> bool:
        """Return whether there may be another copy of a message, which an operator has not changed."""
        return not self._ledger.bounds.same_database and self._ledger.doubts[origin] > 0

    def _wake_if_earlier(self, first: datetime | None) -> None:
        now_first = self.next_attempt()
        if now_first is not None and (first is None or now_first < first):
            self.wake()

    def wake(self) -> None:
        """Wake every process that listens."""
        for session, wake in list(self.listeners.values()):
            if session.is_alive:
                wake()

    def next_attempt(self) -> datetime | None:
        """See :meth:`postdate.ports.ClaimingStore.next_attempt`."""
        return min((row.attempt_at for row in self.rows.values() if row.session is None), default=None)

    def _due(self, now: datetime) -> list[Row]:
        due = [row for row in self.rows.values() if row.session is None and row.attempt_at < now]
        due.sort(key=lambda row: (row.attempt_at, row.number))
        return due

    def claim(self, session: SiteSession, now: datetime, limit: int) -> Sequence[ports.Claim]:
        """See :meth:`postdate.ports.ClaimingStore.claim_due`."""
        return self._claim(session, self._due(now)[:limit])

    def claim_held(self, session: SiteSession, kept: StoredLimits, limit: int) -> Sequence[ports.Claim]:
        """See :meth:`postdate.ports.limits.LimitingStore.claim_lane`."""
        return self._claim(
            session, [row for row in self._due(kept.lane_end) if row.attempt_at >= kept.lane_start][:limit]
        )

    def limits_in_use(self) -> LimitsInUse:
        """See :meth:`postdate.ports.limits.LimitingStore.load_limits_in_use`."""
        times = [row.attempt_at for row in self.rows.values() if row.session is None and row.attempt_at > LANES]
        held = [each for each in self.limits.values() if any(each.lane_start <= at < each.lane_end for at in times)]
        return LimitsInUse(any(each.limits for each in self.limits.values()), held)

    def _claim(self, session: SiteSession, rows: Sequence[Row]) -> Sequence[ports.Claim]:
        claims: list[ports.Claim] = []
        unreadable: str | None = None
        for row in rows:
            if row.message.message_id in self.damaged:
                if not self._breaks.reads_whole_batches:
                    self._mark_unreadable(row)
                    continue
                unreadable = row.message.message_id
            row.session, row.token = session, next(self._numbers)
            self.taken_at[origin_of_row(row.message)] = self._ledger.now
            claims.append(ports.Claim(row.message, row.token))
            self._ledger.note(f"{origin_of_row(row.message)} claimed by {session.life}")
        if unreadable is not None:
            raise InvalidHeaders(f"the headers of {unreadable!r} are no JSON")
        return claims

    def _mark_unreadable(self, row: Row) -> None:
        with self.transaction():
            self.unreadable[row.message.message_id] = row.message
            origin = origin_of_row(row.message)
            self._committed.insert(0, lambda: self._ledger.placed(origin, "unreadable", +1))
            self._remove_row(row, "marked as unreadable")

    def _held(self, claim: ports.Claim) -> Row | None:
        row = self.rows.get(claim.message.message_id)
        return row if row is not None and row.session is not None and row.token == claim.token else None

    def finish(self, claims: Sequence[ports.Claim], outcome: ports.Outcome) -> int:
        """See :meth:`postdate.ports.ClaimingStore.finish`."""
        held = [row for claim in claims if (row := self._held(claim)) is not None]
        with self.transaction():
            for row in held:
                self._remove_row(row, outcome.value)
                self._record(OUTCOME_RECORDS[outcome], row.message)
                if outcome is ports.Outcome.FAILED:  # so that it can be stored again when it is returned
                    self._free_id(row.message.message_id)
        return len(held)

    def _free_id(self, id_: str) -> None:
        del self.known[id_]
        self._undo.append(lambda: self.known.__setitem__(id_, None))

    def finishing(self, claims: Sequence[ports.Claim], outcome: ports.Outcome) -> ports.Work:
        """See :meth:`postdate.ports.MovingStore.finishing_work`."""

        def work(site: object) -> None:
            assert site is self
            if self.finish(claims, outcome) < len(claims):
                raise ClaimLost("a claim is no longer held")

        return work

    def storing(self, messages: Sequence[DelayedMessage], version: int = 0) -> ports.Work:
        """See :meth:`postdate.ports.MovingStore.storing_work`."""

        def work(site: object) -> None:
            assert site is self
            if there := self.store_many(messages, version).duplicate_ids:
                raise DuplicateMessage(f"message {there[0]!r} is stored already")

        return work

    def retry_later(self, claim: ports.Claim, attempt_at: datetime, reason: str) -> bool:
        """See :meth:`postdate.ports.ClaimingStore.retry_later`."""
        row = self._held(claim)
        if row is None:
            return False
        row.message = copy_with_failures(row.message, row.message.number_of_failures + 1)
        row.attempt_at, row.session = attempt_at, None
        self._ledger.is_retried(origin_of_row(row.message), reason)
        return True

    def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        """See :class:`postdate.ports.stores.ClaimingStore`."""
        held = [row for claim in claims if (row := self._held(claim)) is not None]
        for row in held:
            self._ledger.note(f"{origin_of_row(row.message)} given back, not before {attempt_at or row.attempt_at}")
            row.session = None
            row.attempt_at = row.attempt_at if attempt_at is None else attempt_at
        return len(held)

    def cancel(self, message_id: str) -> bool:
        """See :meth:`postdate.ports.AdministrableStore.cancel`."""
        row = self.rows.get(message_id)
        if row is None or row.session is not None:
            return False
        origin = origin_of_row(row.message)
        self._ledger.cancelled[origin] = self._ledger.now
        with self.transaction():
            self._committed.insert(0, lambda: self._ledger.placed(origin, "what was cancelled", +1))
            self._remove_row(row, "cancelled")
            self._record(ports.RecordKind.CANCELLED, row.message)
        return True

    def reschedule(
        self, message_id: str, due: datetime, wall_time: str | None, version: int, changes_before: int | None
    ) -> bool:
        """See :meth:`postdate.ports.AdministrableStore.reschedule`.

        Args:
            message_id: of the message.
            due: from now on.
            wall_time: as the header says it.
            version: of the zone rules of the process that does so.
            changes_before: how many changes by operators the service knew of; ``None``: an operator does it.
        """
        row = self.rows.get(message_id)
        if row is None or row.session is not None:
            return False
        origin, before = origin_of_row(row.message), row.message
        row.message, row.attempt_at = copy_with_due(before, due, wall_time), due
        if self._breaks.keeps_wall_times and wall_time is None and Headers.WALL_TIME in before.headers:
            headers = {**row.message.headers, Headers.WALL_TIME: before.headers[Headers.WALL_TIME]}
            row.message = replace(row.message, headers=headers)
        with self.transaction():
            self._record(ports.RecordKind.RESCHEDULED, row.message)
        if changes_before is None:
            self._ledger.note(f"{origin} is rescheduled to {wall_time or due}")
            self.changes[message_id] += 1
            if wall_time is None:
                self._ledger.is_rescheduled(origin, due)
            else:
                self._ledger.follows_clocks(origin, self.instants(wall_time), version, is_there=True)
        elif wall_time is None:
            self._ledger.note(f"{origin} has come back, and is due at {due}")
            if changes_before != self.changes[message_id]:
                self._ledger.is_due(origin, due)
        else:
            self._ledger.note(f"{origin} is moved from {before.due} to {due}")
            is_informed = changes_before == self.changes[message_id]
            self._check_move(origin, wall_time, is_informed=is_informed)
        self.wake()
        return True

    def _check_move(self, origin: str, wall_time: str, *, is_informed: bool) -> None:
        """Fail when a service moves what an operator had rescheduled; what came in between may be overwritten."""
        if origin not in self._ledger.moved_by_hand:
            return
        if is_informed and not self._has_copies(origin):
            self._ledger.fail("what is rescheduled by hand keeps its time", f"{origin} is moved by new rules of a zone")
        self._ledger.follows_clocks(origin, self.instants(wall_time), 0, is_there=True)

    # --- what waits, for questions ---------------------------------------------------------------------------------

    def get(self, message_id: str) -> DelayedMessage | None:
        """See :meth:`postdate.ports.AdministrableStore.get`."""
        row = self.rows.get(message_id)
        return None if row is None else row.message

    def pending_state_of(self, message_id: str) -> ports.PendingState | None:
        """See :meth:`postdate.ports.Observer.pending_state_of`."""
        row = self.rows.get(message_id)
        return None if row is None else ports.PendingState(row.message, None if row.session else row.attempt_at)

    def read_pending(self, where: ports.MessageFilter, limit: int) -> ports.PendingPage:
        """See :meth:`postdate.ports.AdministrableStore.read_pending`."""
        listed = [(to_microseconds(row.message.due), row.number, row.message) for row in self.rows.values()]
        listed.sort(key=lambda each: each[:2])
        begin = (-1, -1) if where.after is None else parse_cursor(where.after)
        messages = [
            copy(message).set_cursor(cursor_text(due, number))
            for due, number, message in listed
            if (due, number) > begin and where.matches(message) and message.message_id not in self.damaged
        ]
        return ports.PendingPage.of(messages[:limit], limit)

    def replace(self, key: str, make: CreateMessage) -> str:
        """See :meth:`postdate.ports.ReplacingStore.replace`; for what is the store's own, which no ledger counts."""
        row = self.rows.get(self.keys.get(key, ""))
        if row is not None:
            row.message = make(row.message.message_id, self._now())
            return row.message.message_id
        message = make(KeyedIds(key).first, None)
        assert message.destination in OF_THE_STORE
        self.keys[key] = message.message_id
        self.known[message.message_id] = None
        self.rows[message.message_id] = Row(message, message.due, next(self._numbers), self._ledger.now)
        return message.message_id

    # --- limits -------------------------------------------------------------------------------------------------

    def keep_limits(self, destination: str, limits: str, free_at: datetime, before: str) -> bool:
        """See :meth:`postdate.ports.limits.LimitingStore.store_limits`.

        Raises:
            StoreUnavailable: nobody may set limits any more.
        """
        kept = self.limits.get(destination, StoredLimits(destination, len(self.limits) + 1, "", free_at))
        if self.are_lifted and limits:
            raise StoreUnavailable("no limits are kept any more")
        if kept.limits != before:
            return False
        self.limits[destination] = replace(kept, limits=limits, free_at=free_at)
        self.limited[destination] = LimitedQueue(decode_limits(self.limits[destination]), self._ledger.now)
        self._ledger.note(f"{destination} has the limits: {limits or 'none'}")
        return True

    def lift_limits(self, now: datetime) -> None:
        """Lift all limits, for good."""
        self.are_lifted = True
        for kept in list(self.limits.values()):
            self.keep_limits(kept.destination, "", now, kept.limits)

    def take_turns(self, kept: StoredLimits, free_at: datetime) -> bool:
        """See :meth:`postdate.ports.limits.LimitingStore.reserve_slots`."""
        if self.limits.get(kept.destination) != kept and not self._breaks.gives_turns_to_all:
            return False
        self.limits[kept.destination] = replace(self.limits[kept.destination], free_at=free_at)
        return True

    def _check_limits(self, destination: str, origin: str) -> None:
        """Fail when a message of the store comes to a queue whose limits did not let it through."""
        taken_at, queue = self.taken_at.pop(origin, None), self.limited.get(destination)
        if taken_at is None or queue is None:
            return
        # What was taken before everybody could know goes out, and trouble holds up what went before.
        if taken_at < max(queue.since, self._ledger.trouble_until) + HEARD_WITHIN_SECONDS:
            queue.arrivals.clear()
            return
        if queue.limits.paused:
            self._ledger.fail("limits are kept", f"{origin} was let through, but {destination} is paused")
        if queue.limits.windows and not self._may_be_open(queue.limits, taken_at):
            self._ledger.fail("limits are kept", f"{origin} was let through, but not {queue.limits}")
        if (rate := queue.limits.per_second) is None or not self.is_alone:
            return
        queue.arrivals.append(self._ledger.now)
        for number, first in enumerate(queue.arrivals):
            count, seconds = len(queue.arrivals) - number, self._ledger.now - first
            if count > 1.5 + max(0.2 * rate, 1.5) + rate * seconds:
                self._ledger.fail("limits are kept", f"{count} came to {destination} in {seconds:.2f} s, of {rate:g}/s")

    def _may_be_open(self, limits: Limits, taken_at: float) -> bool:
        """Return whether a window is open about the time at which a message was taken, by a clock that was never set.

        Its process decides by its own clock some time before it takes the message.
        """
        taken = self._now() - timedelta(seconds=self._ledger.now - taken_at)
        before = [taken - timedelta(seconds=seconds) for seconds in (0, 0.5, 1, 1.5)]
        windows = [Window.parse_and_check_zone(each) for each in limits.windows]
        return self.clock_is_set() or any(each.next_opening(at) == at for at in before for each in windows)

    def move(self, now: datetime, limit: int) -> ports.MoveReport:
        """See :meth:`postdate.ports.MovingStore.move_due`."""
        moved, left_behind = Counter[str](), False
        with self.transaction():
            for row in self._due(now)[:limit]:
                if row.message.destination in self.limits and self.limits[row.message.destination].limits:
                    left_behind = True
                elif row.message.message_id in self.damaged:
                    if self._breaks.reads_whole_batches:
                        raise InvalidHeaders(f"the headers of {row.message.message_id!r} are no JSON")
                    self._mark_unreadable(row)
                elif row.message.destination in self.queues:
                    self.taken_at[origin_of_row(row.message)] = self._ledger.now
                    self._put(to_envelope(row.message))
                    self._remove_row(row, "moved")
                    self._record(ports.RecordKind.DELIVERED, row.message)
                    moved[row.message.destination] += 1
                else:
                    left_behind = True
        return ports.MoveReport(moved.total(), 0, left_behind, self.next_attempt(), moved)

    # --- the queues -----------------------------------------------------------------------------------------------

    def send(self, envelopes: Sequence[Envelope], work: Sequence[ports.Work]) -> Sequence[PostdateError | None]:
        """See :meth:`postdate.ports.Transport.send`."""
        if work:
            with self.transaction():
                for each in work:
                    each(self)
                for envelope in envelopes:
                    self._put(envelope)
            return [None] * len(envelopes)
        return [self._send(envelope) for envelope in envelopes]

    def _send(self, envelope: Envelope) -> PostdateError | None:
        try:
            with self.transaction():
                self._put(envelope)
        except QueueNotFound as error:
            return error
        return None

    def receive(
        self, session: SiteSession, queue: str, limit: int, give: Callable[[Sequence[ports.Received]], bool]
    ) -> None:
        """Give up to ``limit`` messages as soon as there is one; ``give`` returns whether they are wanted still.

        Raises:
            QueueNotFound: there is no such queue.
        """
        if queue not in self.queues:
            raise QueueNotFound(f"there is no queue {queue!r}")
        self._waiting.setdefault(queue, []).append(PendingReceive(session, limit, give))
        self._serve()

    def _serve(self) -> None:
        for queue, waiting in self._waiting.items():
            while waiting and (free := [parcel for parcel in self.queues[queue] if parcel.session is None]):
                first = waiting.pop(0)
                if not first.session.is_alive:
                    continue
                taken = free[: first.limit]
                for parcel in taken:
                    parcel.session, parcel.token = first.session, next(self._numbers)
                if not first.give([each.received() for each in taken]):
                    for parcel in taken:
                        parcel.session = None

    def break_receives(self, session: SiteSession | None = None) -> None:
        """End the receives that wait, of one process or of all: their connection is lost."""
        for line in self._waiting.values():
            ended = [each for each in line if session is None or each.session is session]
            line[:] = [each for each in line if each not in ended]
            for each in ended:
                each.give(())

    def _parcel(self, received: ports.Received) -> tuple[str, SimulatedMessage]:
        queue = received.envelope.destination
        for parcel in self.queues.get(queue, ()):
            if parcel.session is not None and parcel.token == received.token:
                return queue, parcel
        raise ClaimLost(f"message {received.envelope.message_id!r} is not claimed by this process any more")

    def commit(self, received: ports.Received, end: ports.Completion) -> None:
        """See :meth:`postdate.ports.Receiver.commit`."""
        queue, parcel = self._parcel(received)
        origin = origin_of(parcel.envelope.message_id, parcel.envelope.headers)
        ledger = self._ledger
        with self.transaction():
            for work in end.work:
                work(self)
            if end.record is ports.RecordKind.RETRIED or (queue == "error" and end.outgoing):
                self._lets_arrive_again(origin)
                if queue == "error":
                    self.taken_at[origin] = ledger.now
            elif end.record is ports.RecordKind.HANDLED:
                self._committed.insert(0, lambda: ledger.placed(origin, "what was handled", +1))
            for envelope in end.outgoing:
                self._put(envelope)
            self._take_off(queue, parcel, "committed")

    def _lets_arrive_again(self, origin: str) -> None:
        self._ledger.rounds[origin] += 1
        self._undo.append(lambda: self._ledger.rounds.subtract([origin]))

    def roll_back(self, received: ports.Received, *, failed: bool) -> None:
        """See :meth:`postdate.ports.Receiver.roll_back`."""
        _, parcel = self._parcel(received)
        parcel.session = None
        parcel.failures += failed
        self._serve()

    # --- processes ------------------------------------------------------------------------------------------------

    def held_by(self, session: SiteSession) -> Sequence[str]:
        """Return the origins of what a process holds here."""
        rows = [origin_of_row(row.message) for row in self.rows.values() if row.session is session]
        parcels = [parcel.envelope for line in self.queues.values() for parcel in line if parcel.session is session]
        return [*rows, *(origin_of(each.message_id, each.headers) for each in parcels)]

    def lose(self, session: SiteSession) -> None:
        """Take from a process what it holds: its claims are void."""
        self._ledger.doubt(self.held_by(session), f"{session.life} lost what it held")
        for row in self.rows.values():
            if row.session is session:
                row.session = None
        for line in self.queues.values():
            for parcel in line:
                if parcel.session is session:
                    parcel.session = None
                    parcel.failures += self.counts_unanswered
                    parcel.unanswered += self.counts_unanswered
        self.break_receives(session)
        self.wake()
        self._serve()

    def end(self, session: SiteSession) -> None:
        """Forget a process that has ended."""
        self.lose(session)
        session.is_alive = False
        for number, (other, _) in list(self.listeners.items()):
            if other is session:
                del self.listeners[number]

    def close_receiver(self, session: SiteSession, queue: str) -> None:
        """Give back what is held of one queue."""
        for parcel in self.queues.get(queue, ()):
            if parcel.session is session:
                parcel.session = None
        waiting = self._waiting.setdefault(queue, [])
        waiting[:] = [each for each in waiting if each.session is not session]
        self._serve()

    # --- what waits -----------------------------------------------------------------------------------------------

    def waiting(self, now: datetime, second: float, *, set_back: bool) -> list[tuple[str, float, str]]:
        """Return what is due here or has come to a queue, since when, and where it is.

        Args:
            now: by the clock that is judged by.
            second: of the run.
            set_back: that clock was set back: what was given back before waits for the time that it shows.
        """
        found = list[tuple[str, float, str]]()
        for row in self.rows.values():
            since, queue = row.since, self.limited.get(row.message.destination)
            if queue is not None:
                if queue.limits != NO_LIMITS:
                    continue
                since = max(since, queue.since + LIFTED_WITHIN_SECONDS)
            waits_for_clock = set_back and row.session is None and row.attempt_at > now
            due = row.message.due
            if Headers.WALL_TIME in row.message.headers:
                origin = origin_of_row(row.message)
                due, holds_since = self._ledger.last_due(origin) or (due, since)
                since = max(since, holds_since)
                if self._has_copies(origin):  # this one may be the copy that an operator has not changed
                    due = max(due, row.message.due)
            if due < now and not waits_for_clock:
                late = (now - due).total_seconds()
                found.append((origin_of_row(row.message), max(since, second - late), _place(row)))
        for name, line in self.queues.items():
            if name not in self.sinks:
                found += [
                    (origin_of(each.envelope.message_id, each.envelope.headers), each.since, f"queue {name}")
                    for each in line
                ]
        return found


def _place(row: Row) -> str:
    held = "held by nobody" if row.session is None else f"held by {row.session.life}"
    return f"the store, {held}, to be attempted at {row.attempt_at.time()}"
