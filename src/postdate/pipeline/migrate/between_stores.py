"""Moves messages from one Postdate store into another by methods of every store: claim, store, finish. Without Spark.

A batch moves in five steps; their order keeps a message from being delivered twice or not at all, whenever the
process ends, or pauses and goes on later:

1. the old store gives the batch out by a claim, so that none of its services is delivering it;
2. the *intent* is stored in the old store: a message, due in the year 9999, whose body is the batch;
3. the old store finishes the claims, recorded as moved away by this intent: it will never deliver them;
4. the new store stores the messages, idempotent by id; those that it knew before are compared;
5. the intent is cancelled.

A process that finds an intent looks up each of its messages in the old store. Messages that were moved away go forward,
for the new store may have them. Others are rescheduled to the due time that they have: this is refused while
there is a claim, and it voids older claims. Only then may the intent go. Source: ADR 0015, "Another store".
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make arrays generic in a type that only the running program knows.

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import anyio
import pyarrow as pa

from postdate.backends.registry import place_of
from postdate.clock import LATEST, SystemClock, from_microseconds, steady_seconds, to_microseconds
from postdate.config import resolved
from postdate.core.letting_through import free_lanes
from postdate.core.limits import limits_of
from postdate.core.wall_times import Keeping, markers, note_rules, rules_in
from postdate.errors import MessageError, MigrationConflict, PipelineError
from postdate.messages import INTENTS, OF_THE_STORE, DelayedMessage, Headers
from postdate.pipeline.migrate.ends import TargetStore, opened_target
from postdate.pipeline.migrate.looking import BATCH_SIZE, EVERYTHING, begun_with, meant_by, nothing_new, target_of
from postdate.pipeline.migrate.moving import MovedBatch, Tally, late_in
from postdate.pipeline.migrate.results import (
    EndpointPreview,
    EndpointResult,
    MigrateResult,
    PreviewResult,
    RunStatus,
    StatusResult,
)
from postdate.pipeline.migrate.verifying import look_closer, only
from postdate.pipeline.rows import MESSAGE_COLUMNS, checked, restored, to_columns
from postdate.pipeline.stores import StoreSpec
from postdate.ports import (
    OUTCOME_RECORDS,
    Claim,
    ClaimingStore,
    MessageFilter,
    Outcome,
    Record,
    RecordKind,
    ReplacingStore,
    ScannableStore,
)
from postdate.ports.backends import Place
from postdate.ports.changing import KEYED, KEYED_ID
from postdate.ports.limits import LimitingStore
from postdate.ports.migrating import MOVED_AWAY, BatchStatus, MigrationBatch, MigrationRun, MigrationStatus
from postdate.ports.scanning import ARCHIVED, ArchivableStore
from postdate.wiring.sources import moves_of_older_versions

_NAMED: Final = "migration-"

_NEVER: Final = datetime(9999, 1, 1, tzinfo=UTC)
_ALL: Final = datetime(9000, 1, 1, tzinfo=UTC)
"""Messages with an earlier next attempt move."""

_INTENT_BYTES: Final = 8 * 1024 * 1024
_BESIDE_BYTES: Final = 8_000
"""Size of an intent besides the content of its messages, if there is only one."""

_ENDS: Final = frozenset(OUTCOME_RECORDS.values())
"""Records of how a message left its store."""

_WITH_THAT: Final = "resume or abort it with that version"

_LOOKS: Final = 6
"""How often waiting but claimed messages are looked for, half a second apart: the claims may be of a dead process."""

_PATIENCE_SECONDS: Final = 90
"""How long to wait for claims of others: stores free those of a dead process within a minute."""

T = TypeVar("T")

log = logging.getLogger("postdate.pipeline")


@dataclass(frozen=True, slots=True)
class StoreMove:
    """Moves messages from one store into another. The services of both may run meanwhile.

    Args:
        source: the old store; ``endpoints`` override its endpoint and table.
        target: the new store; it must exist.
        endpoints: whose messages, by name in any case; ``None``: of all that have a store there. A file is one store,
            named after the file.
        batch_size: messages that move together, at most.
    """

    source: StoreSpec
    target: StoreSpec
    endpoints: tuple[str, ...] | None = None
    batch_size: int = BATCH_SIZE

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise PipelineError(f"batches have at least one message, not batch_size={self.batch_size}")

    def preview(self) -> PreviewResult:
        """Return the messages that would move, and reasons why they cannot; changes nothing.

        Raises:
            StoreError: one of the stores is missing or unreachable.
            PipelineError: there is no such endpoint.
        """
        return PreviewResult(self.source.shown, self.target.shown, self._each(_Passage.preview))

    def run(self) -> MigrateResult:
        """Move waiting messages, the next due first, and finish the batches of earlier runs.

        Run it again after a failure of any kind, and for messages stored meanwhile.

        Raises:
            PipelineError: one of the endpoints cannot move: nothing was moved.
            StoreError: one of the stores failed; run it again.
        """
        nothing_new(self.preview())
        return self._done(_Passage.move)

    def resume(self) -> MigrateResult:
        """Do the same as :meth:`run` for the endpoints with a batch on its way.

        Raises:
            PipelineError: there is none.
        """
        going = tuple(dict.fromkeys(each.run.endpoint for each in status_of_store(self.source, self.endpoints).runs))
        if not going:
            raise PipelineError(f"no batch is on its way in {self.source.shown}; `run` moves what waits there")
        return replace(self, endpoints=going).run()

    def abort(self) -> MigrateResult:
        """End the batches on their way: each message is then either in the old store or in the new one, never in both.

        Messages that the old store has finished go forward, for the new one may have them. End a live run first.

        Raises:
            MigrationConflict: a batch is on its way to another store; nothing was changed.
            StoreError: one of the stores failed; abort again.
        """
        return self._done(_Passage.abort)

    def _done(self, step: Callable[[_Passage], EndpointResult]) -> MigrateResult:
        started, found = time.perf_counter(), self._each(step)
        return MigrateResult(self.source.shown, self.target.shown, found, time.perf_counter() - started)

    def _each(self, step: Callable[[_Passage], T]) -> tuple[T, ...]:
        """Do a step for one endpoint after the other; its stores are closed before the next, or an error, is seen."""
        found = list[T]()
        for name, spec in _chosen(self.source, self.endpoints).items():
            with opened_target(spec) as source, opened_target(self.target) as target:
                found.append(step(_Passage(self, name, source, target)))
        return tuple(found)


def status_of_store(source: StoreSpec, endpoints: Sequence[str] | None = None) -> StatusResult:
    """Return the batches on their way out of a store, each as a run of its own; changes nothing.

    Raises:
        StoreError: the store is missing or unreachable.
        PipelineError: there is no such endpoint.
    """
    found = list[RunStatus]()
    for name, spec in _chosen(source, endpoints).items():
        with opened_target(spec) as store:
            found += [_status(name, intent) for intent in _intents(store)]
    return StatusResult(source.shown, tuple(found))


def _chosen(source: StoreSpec, endpoints: Sequence[str] | None) -> dict[str, StoreSpec]:
    """Return the stores of endpoints by name; see :class:`StoreMove`.

    Raises MigrationConflict if an older version has left a run on its way there, and PipelineError without such an
    endpoint, or if none was named and the stores there cannot be listed.
    """
    for run_id in moves_of_older_versions(source.address, source.schema):
        raise MigrationConflict(f"{_by_an_older_version(run_id, source)}, which has hidden its messages: {_WITH_THAT}")
    address = resolved(source.address, os.environ)
    with opened_target(source) as store:
        if place_of(address.scheme) is Place.FILE:
            known = {Path(address).name: source}
        elif isinstance(store.itself, ArchivableStore):
            tables = store.itself.tables_of_stores()
            known = {each.removesuffix(".timeouts"): replace(source, table=each) for each in tables}
        elif endpoints is not None:
            return {name: replace(source, endpoint=name) for name in endpoints}
        else:
            raise PipelineError(f"the stores in {source.shown} cannot be listed; name each with --endpoint")
    names = known if endpoints is None else [meant_by(each, sorted(known)) for each in endpoints]
    return {name: known[name] for name in names}


def _by_an_older_version(run_id: str, store: StoreSpec) -> str:
    return f"migration {run_id} is on its way out of {store.shown}, begun by an older version of Postdate"


def _history(store: TargetStore, id_: str) -> Sequence[Record]:
    return store.ask(lambda store: store.history(id_))


async def _nothing() -> None: ...


async def _look_soon(store: ClaimingStore) -> None:
    """Wait half a second, then look: by that a store frees the claims of dead processes."""
    await anyio.sleep(0.5)
    await store.next_attempt()


# --- intents ----------------------------------------------------------------------------------------------------------


def _intents(store: TargetStore) -> Sequence[DelayedMessage]:
    return store.ask(lambda store: store.list_pending(MessageFilter(INTENTS, due_from=_NEVER), 1_000))


def _markers(store: TargetStore) -> Sequence[DelayedMessage]:
    """Return what says of which zones' rules messages depend: it goes into both stores."""
    return store.ask(markers)


def _own(store: TargetStore) -> int:
    """Return how many of the waiting messages are none of an application."""
    return len(_intents(store)) + len(_markers(store))


def _content(intent: DelayedMessage) -> pa.RecordBatch:
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(intent.body), MESSAGE_COLUMNS)
    except (pa.ArrowException, OSError) as error:
        raise PipelineError(f"message {intent.message_id!r} is no batch of a migration any more: {error}") from error


def _target(intent: DelayedMessage) -> Mapping[str, str]:
    return {name: value for name, value in intent.headers.items() if name != "begun"}


def _moved_by(intent: DelayedMessage) -> str:
    return f"{MOVED_AWAY}{intent.message_id.removeprefix(_NAMED)} to {intent.headers['target']}"


def _status(endpoint: str, intent: DelayedMessage) -> RunStatus:
    batch, begun, named = _content(intent), datetime.fromisoformat(intent.headers["begun"]), _target(intent)
    count, first, status = batch.num_rows, restored(batch.slice(0, 1))[0].due, MigrationStatus.PREPARED
    run = MigrationRun(intent.message_id, endpoint, status, named, EVERYTHING, begun, None, 1, count)
    return RunStatus.of(run, [MigrationBatch(1, BatchStatus.STAGED, count, first)])


# --- one endpoint -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Passage:
    plan: StoreMove
    endpoint: str
    source: TargetStore
    target: TargetStore
    _tally: Tally = field(default_factory=Tally)
    _refused: int = 0
    _stayed: int = 0
    _kept: set[str] = field(default_factory=set[str])
    _has_cancelled: bool | None = None
    _gone: set[str] = field(default_factory=set[str])

    # --- looking -------------------------------------------------------------------------------------------------

    def preview(self) -> EndpointPreview:
        now = SystemClock().now()
        self.target.overdue(now)  # it is there
        counted, intents = self.source.ask(lambda store: store.statistics(now)), _intents(self.source)
        destinations, dues, back = Counter[str](), (to_microseconds(LATEST), 0), list[str]()
        gone = self._given_away()
        for id_, destination, due in self.source.rows("pending", ("message_id", "destination", "due")):
            if destination not in OF_THE_STORE:
                destinations[destination] += 1
                dues = min(dues[0], due), max(dues[1], due)
                back += [id_] if id_ in gone else []
        count, aside = counted.pending - _own(self.source), counted.quarantined
        problems = [*self._in_the_way(intents), *self._limited()]
        if back:
            some = ", ".join(sorted(back)[:10]) + (", …" if len(back) > 10 else "")
            said = "were moved out of the target before, which knows their ids and would not take them back"
            problems.append(f"{len(back):,} {said}: {some}; move to a table or file of another name")
        return EndpointPreview(
            self.endpoint,
            count,
            0,
            from_microseconds(dues[0]) if destinations else counted.next_due if count else None,
            from_microseconds(dues[1]) if destinations else None,
            destinations,
            tuple(problems),
            (f"{aside:,} cannot be read and are set aside: `postdate errors` shows them",) if aside else (),
        )

    def _limited(self) -> list[str]:
        store = self.source.itself
        limits = self.source.ask(lambda _: limits_of(store)) if isinstance(store, LimitingStore) else {}
        mend = "set them in the new store, and lift them in the old one: postdate destinations limit QUEUE"
        return [f"limits of its queues would be lost: {', '.join(sorted(limits))}; {mend}"] if limits else []

    def _given_away(self) -> set[str]:
        """Return the ids of all messages that were ever moved out of the target."""
        if not self.target.ask(lambda store: store.record_counts()).get(RecordKind.CANCELLED):
            return set()
        rows = self.target.rows("records", ("message_id", "detail"))
        return {id_ for id_, detail in rows if (detail or "").startswith(MOVED_AWAY)}

    def _came_from_target(self, ids: Sequence[str]) -> set[str]:
        """Return the ids of messages that were moved out of the target, where :meth:`preview` could not find them."""
        can_scan = [isinstance(each.itself, ScannableStore) for each in (self.source, self.target)]
        if all(can_scan):
            return set()
        if self._has_cancelled is None:
            counts = self.target.ask(lambda store: store.record_counts())
            self._has_cancelled = bool(counts.get(RecordKind.CANCELLED))
            self._gone = self._given_away()
        if not self._has_cancelled or can_scan[1]:
            return self._gone.intersection(ids)
        return {each.message_id for each in self.target.recorded(ids) if each.detail.startswith(MOVED_AWAY)}

    def _in_the_way(self, intents: Sequence[DelayedMessage]) -> list[str]:
        """Return why nothing can move from the one into the other."""
        first: Sequence[DelayedMessage] = self.source.ask(lambda store: store.list_pending(MessageFilter(), 1))
        for id_ in [each.message_id for each in first]:
            here, there = (_history(each, id_)[:1] for each in (self.source, self.target))
            if here and here == there:  # stored at the same instant
                return ["its messages wait in the target already: source and target are the same store"]
        if _intents(self.target):
            return ["the target itself is being emptied by a migration: end that one first"]
        for run_id in moves_of_older_versions(self.plan.target.address, self.plan.target.schema):
            return [
                f"the target itself is being emptied: {_by_an_older_version(run_id, self.plan.target)}: {_WITH_THAT}"
            ]
        if _markers(self.source) and not Keeping.is_one(self.target.itself):
            cannot = type(self.target.itself).__name__
            return [f"there are messages that follow the clocks of zones, which {cannot} cannot have them do"]
        elsewhere = [each for each in intents if _target(each) != target_of(self.plan.target)]
        return [f"a batch is on its way, begun with {begun_with(_target(each))}" for each in elsewhere[:1]]

    # --- moving --------------------------------------------------------------------------------------------------

    def move(self) -> EndpointResult:
        """Finish batches on their way, and move waiting messages."""
        self._settle(patience_seconds=0)
        for marker in _markers(self.source):
            with suppress(ValueError):  # a damaged one says nothing of messages
                zone, rules = marker.headers.get("zone", ""), rules_in(marker)
                self.target.ask(partial(note_rules, zone=zone, rules=rules, now=SystemClock().now()))
        self.source.ask(lambda store: free_lanes(store, SystemClock().now()))
        before = self.source.ask(lambda store: store.statistics(SystemClock().now()))
        left, aside = before.pending - _own(self.source), list[Claim]()
        looks = _LOOKS
        while left > 0 and looks:
            most = min(left, self.plan.batch_size)
            claims: Sequence[Claim] = self.source.ask(lambda store, most=most: store.claim_due(_ALL, most))
            if not claims:
                self.source.ask(_look_soon)
            refused = self._take(claims) if claims else []
            left, aside = left - len(claims), [*aside, *refused]
            looks = _LOOKS if len(refused) < len(claims) else looks - 1
            log.info("%s: %s messages are left to be moved", self.endpoint, f"{left:,}")
        self.source.ask(lambda store: store.release(aside, None))
        self._settle(patience_seconds=_PATIENCE_SECONDS)
        after = self.source.ask(lambda store: store.statistics(SystemClock().now()))
        if after.quarantined > before.quarantined:
            self._refuse(after.quarantined - before.quarantined, "cannot be read: `postdate errors` shows them")
        waiting = after.pending - _own(self.source) - len(aside)
        if waiting > 0:
            why = "a service of it holds them, or they were stored meanwhile; run this again"
            self._tally.problems.append(f"{waiting:,} wait in the old store still: {why}")
        return self._result("completed", 0)

    def abort(self) -> EndpointResult:
        """Finish batches on their way."""
        self._settle(patience_seconds=_PATIENCE_SECONDS)
        return self._result("aborted", self._stayed)

    def _result(self, status: str, returned: int) -> EndpointResult:
        tally = self._tally
        moved = tally.verified + tally.delivered_meanwhile + tally.mismatched
        return tally.result(self.endpoint, None, status, moved=moved, returned=returned, refused=self._refused)

    def _refuse(self, count: int, why: str) -> None:
        self._refused += count
        self._tally.problems.append(f"{count:,} {why}")

    def _take(self, claims: Sequence[Claim]) -> list[Claim]:
        """Move claimed messages; return the claims that must stay, unchanged."""
        messages = to_columns([claim.message for claim in claims])
        largest = min(self.target.largest_message_bytes, self.source.largest_message_bytes - _BESIDE_BYTES)
        bad = {row.position: row.detail for row in checked(messages, largest, of_a_store=True)[1]}
        back = self._came_from_target([claim.message.message_id for claim in claims])
        bad |= {
            place: "was moved out of the target before, which would not take it back"
            for place, claim in enumerate(claims)
            if claim.message.message_id in back
        }
        for place, why in bad.items():
            self._refuse(1, f"cannot move: {claims[place].message.message_id!r}: {why}")
        taken = [claim for place, claim in enumerate(claims) if place not in bad]
        if taken:
            self._ship(taken, to_columns([claim.message for claim in taken]) if bad else messages)
        return [claims[place] for place in bad]

    def _ship(self, claims: Sequence[Claim], batch: pa.RecordBatch) -> None:
        """Move claimed messages by one intent, or by several where one would be too large."""
        if len(claims) > 1 and batch.nbytes > min(_INTENT_BYTES, self.source.largest_message_bytes - _BESIDE_BYTES):
            half = len(claims) // 2
            self._ship(claims[:half], batch.slice(0, half))
            self._ship(claims[half:], batch.slice(half))
            return
        now, id_ = SystemClock().now(), f"{_NAMED}{uuid.uuid4().hex}"
        headers = {**target_of(self.plan.target), "begun": now.isoformat()}
        intent = DelayedMessage(id_, _NEVER, INTENTS, headers, batch.serialize().to_pybytes())
        self.source.ask(lambda store: store.store(intent, now))
        if self.target.ask(lambda store: store.get(id_)) is not None:
            self.source.ask(lambda store: store.cancel(id_, now))
            raise PipelineError(f"{self.plan.source.shown} and {self.plan.target.shown} are the same store")
        said = _moved_by(intent)
        done = self.source.ask(lambda store: store.finish(claims, Outcome.CANCELLED, now, said))
        if done < len(claims):
            ids = [claim.message.message_id for claim in claims]
            batch = only(batch, [each for each in ids if self._has_left(intent, each)])
        self._forward(intent, batch)

    def _forward(self, intent: DelayedMessage, batch: pa.RecordBatch) -> None:
        """Store messages that left the old store, compare those that the target knew before, and cancel the intent."""
        now, refused = SystemClock().now(), list[str]()
        there = self._store(batch, now, refused)
        self._keep_keys(batch)
        known = only(batch, there)
        self._tally.moved(MovedBatch(intent.message_id, 1, known.num_rows, late_in(batch, now)))
        fresh = batch.num_rows - known.num_rows - len(refused)
        found = look_closer(self.target, intent.message_id, known, fresh)
        self._tally.compared(found)
        if found.differences or refused:  # its messages are nowhere else as they were
            self._kept.add(intent.message_id)
            self._tally.problems.append(f"{intent.message_id} stays in the old store, with its messages as they were")
        else:
            self.source.ask(lambda store: store.cancel(intent.message_id, now))

    def _store(self, batch: pa.RecordBatch, now: datetime, refused: list[str]) -> list[str]:
        """Store messages; return the ids known before. Refused messages go to ``refused`` and hold up no others."""
        try:
            return list(self.target.store_batch(batch, now).already_there)
        except MessageError as error:
            half = batch.num_rows // 2
            if half:
                parts = (batch.slice(0, half), batch.slice(half))
                return [each for part in parts for each in self._store(part, now, refused)]
            self._refuse(1, f"is refused by the target: {error}")
            refused.append(str(batch.column("message_id")[0]))
            return []

    def _keep_keys(self, batch: pa.RecordBatch) -> None:
        """Have those that waited under a key in the old store wait under it in the new one."""
        likely = [id_ for id_ in map(str, batch.column("message_id")) if KEYED_ID.search(id_)]
        keyed = [
            id_
            for id_ in likely
            if any(each.kind is RecordKind.SCHEDULED and each.detail == KEYED for each in _history(self.source, id_))
        ]
        if keyed:
            self.target.ask(lambda store: store.keep_keys(keyed) if isinstance(store, ReplacingStore) else _nothing())

    # --- ending --------------------------------------------------------------------------------------------------

    def _settle(self, *, patience_seconds: float) -> None:
        """Finish all batches on their way, whoever began them; wait for claims that others may still finish.

        Raises MigrationConflict for a batch on its way to another store.
        """
        until = steady_seconds() + patience_seconds
        for intent in _intents(self.source):
            if _target(intent) != target_of(self.plan.target):
                raise MigrationConflict(f"{intent.message_id} is on its way, begun with {begun_with(_target(intent))}")
            if intent.message_id in self._kept:
                continue
            batch = _content(intent)
            left = self._left(intent, batch)
            while left is None and steady_seconds() < until:
                self.source.ask(_look_soon)
                left = self._left(intent, batch)
            if left is not None:
                self._stayed += batch.num_rows - len(left)
                self._forward(intent, only(batch, left))
            elif patience_seconds:
                self._refuse(batch.num_rows, "are held by another process: end it, and run this again")

    def _left(self, intent: DelayedMessage, batch: pa.RecordBatch) -> list[str] | None:
        """Return the ids that left the old store by this intent; ``None`` while somebody may still finish others."""
        left = list[str]()
        for id_ in map(str, batch.column("message_id").to_pylist()):
            if self._has_left(intent, id_):
                left.append(id_)
            elif not self._is_free(id_):
                if self._waiting(id_) is not None:
                    return None
                if self._has_left(intent, id_):  # just now
                    left.append(id_)
                elif any(each.detail == ARCHIVED for each in _history(self.source, id_)):
                    raise PipelineError(
                        f"what became of {id_!r} is in an archive: bring it back with `pipeline restore`"
                    )
        return left

    def _is_free(self, id_: str) -> bool:
        """Return whether a message waits without a claim; if so, older claims of it are void."""
        found, now = self._waiting(id_), SystemClock().now()
        if found is None:
            return False
        wall_time = found.headers.get(Headers.WALL_TIME)  # it follows the clocks of a zone as before
        return self.source.ask(lambda store: store.reschedule(id_, found.due, now, wall_time))

    def _waiting(self, id_: str) -> DelayedMessage | None:
        return self.source.ask(lambda store: store.get(id_))

    def _has_left(self, intent: DelayedMessage, id_: str) -> bool:
        # A store without transactions may have recorded it, and not removed it. If such a message has ended since, its
        # last end says so: delivered, it must not go to the new store as well.
        ends = [each for each in _history(self.source, id_) if each.kind in _ENDS]
        return bool(ends) and ends[-1].detail == _moved_by(intent) and self._waiting(id_) is None
