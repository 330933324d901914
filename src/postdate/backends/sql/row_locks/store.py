"""The store, which is the same for each server with row locks and SKIP LOCKED. Source: ADR 0008."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final

from typing_extensions import override

from postdate.backends.sql.dialect import closing_on_error
from postdate.backends.sql.limits import SqlLimits
from postdate.backends.sql.questions import page_of
from postdate.backends.sql.row_locks.claims import Claims
from postdate.backends.sql.row_locks.database import RowLockSchema
from postdate.backends.sql.row_locks.liveness import Liveness
from postdate.backends.sql.row_locks.names import steps_of
from postdate.backends.sql.row_locks.parts import (
    MessageRow,
    RecordNote,
    WaitingRow,
    decoded,
    to_row,
)
from postdate.backends.sql.row_locks.pool import Pool
from postdate.backends.sql.row_locks.statements import RowLockStatements
from postdate.backends.sql.row_locks.tables import RowLockTables, numbered
from postdate.backends.sql.row_locks.unreadable import UnreadableInTable
from postdate.clock import brought_up_to_date, from_microseconds, steady_seconds, to_microseconds
from postdate.errors import (
    ConfigurationError,
    DuplicateMessage,
    UnsupportedTransactionMode,
)
from postdate.messages import DelayedMessage, check_reschedule
from postdate.ports import (
    OUTCOME_RECORDS,
    Claim,
    ClaimingStore,
    Outcome,
    PendingPage,
    Recording,
    RecordKind,
    Scan,
    ScannableStore,
    ScanPart,
    Scripted,
    ServerFacts,
    StoreCapabilities,
    StoreReport,
    TransactionMode,
    Wake,
)
from postdate.ports.limits import KeptLimits
from postdate.ports.scanning import check_scanned, shares
from postdate.runtime.next_due import NextDue
from postdate.runtime.threads import in_thread, together

_MICROSECOND: Final = timedelta(microseconds=1)
_CLOSE_WITHIN_SECONDS: Final = 5.0

log = logging.getLogger("postdate.stores")

_MODES: Final = frozenset(TransactionMode) - {TransactionMode.TRANSACTION_SCOPE}


class LockingStore(SqlLimits, UnreadableInTable, ClaimingStore, ScannableStore, Scripted):
    """Keeps delayed messages in a table of a database server. Queues are elsewhere, so delivery is at least once."""

    made_from: ClassVar[type[RowLockSchema]]
    largest_message: ClassVar[int] = 16 * 1024 * 1024
    """Default of ``largest_message_bytes``."""
    ends_silent_connections: ClassVar[bool] = False
    """Whether the server itself ends connections that are silent for ``holds_at_most``."""

    def __init__(  # noqa: PLR0913 - the settings that stand beside an address
        self,
        url: str | RowLockSchema,
        *,
        schema: str | None = None,
        table: str | None = None,
        recording: Recording = Recording.ALL,
        largest_message_bytes: int | None = None,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        self._database = database = self.made_from.of(url, schema, holds_at_most, answers_within)
        self._table, self._recording = table, recording
        self.server, self._dialect = database.server, database.dialect
        self._holds_at_most = database.holds_at_most if self.ends_silent_connections else None
        self._sessions = self._pool = Pool(database.connections)
        self._next_due = NextDue[int]()
        self._parts: tuple[RowLockTables, Claims, Liveness] | None = None
        self._capabilities = StoreCapabilities(
            durable=True,
            shared=True,
            time_precision=timedelta(microseconds=1),
            transaction_modes=_MODES,
            largest_message_bytes=self.largest_message if largest_message_bytes is None else largest_message_bytes,
            holds_at_most=self._holds_at_most,
            has_clock=True,
        )
        if table is not None:
            self._assemble(table)

    @abstractmethod
    def _tables_of(self, table: str) -> RowLockTables:
        """Return the SQL of the store for a table name."""

    def _assemble(self, table: str) -> None:
        tables = self._tables_of(table)
        liveness = Liveness(self.server, tables, self._next_due, self._holds_at_most)

        def holder() -> int:
            liveness.start(claims)
            return liveness.holder()

        claims = Claims(self._pool, tables, holder)
        self._parts = (tables, claims, liveness)

    @override
    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
        if mode not in _MODES:
            raise UnsupportedTransactionMode(
                f"{type(self).__name__} does not support transaction mode {mode.value!r}: its queues are in another "
                f"place, and one transaction over both cannot be had; use 'sends_atomic_with_receive'"
            )
        if self._parts is None:
            self._assemble(f"{endpoint}.timeouts")

    @override
    async def setup(self) -> None:
        names, migrate = self._tables.names, self._database.tables.migrate
        await self._pool.run(lambda session: migrate(session, names, steps_of(names)), patiently=True)

    @override
    def setup_statements(self, endpoint: str) -> str:
        names = self._database.names_of(self._database.schema, self._table or f"{endpoint}.timeouts")
        return self._database.tables.script(names, steps_of(names))

    @override
    async def close(self) -> None:
        """Close the store without waiting for a silent server: closing the connections ends the claims there."""

        def give_back() -> None:
            try:
                if self._parts is not None:
                    self._claims.give_up()
            finally:
                if self._parts is not None:
                    self._liveness.stop()
                self._pool.close()

        await in_thread(_done_within, _CLOSE_WITHIN_SECONDS, give_back, self._abort)

    def _abort(self) -> None:
        self._pool.abort()
        if self._parts is not None:
            self._liveness.abort()

    @property
    def _assembled(self) -> tuple[RowLockTables, Claims, Liveness]:
        if self._parts is None:
            name = type(self).__name__
            raise ConfigurationError(
                f"{name} does not know its table yet: call initialize(endpoint, mode) first, or give table="
            )
        return self._parts

    @property
    @override
    def _tables(self) -> RowLockTables:
        return self._assembled[0]

    @property
    def _claims(self) -> Claims:
        return self._assembled[1]

    @property
    def _liveness(self) -> Liveness:
        return self._assembled[2]

    # --- storing ------------------------------------------------------------------------------------------------

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        row, at = to_row(message, self._capabilities.largest_message_bytes), to_microseconds(now)
        if not await together(self, self._stored, (row, at)):
            back = RecordNote(at, int(RecordKind.RESCHEDULED), "came back from the error queue")
            # In a new transaction: INSERTs that found the id share a lock on it, and two of them would deadlock here.
            if not await self._pool.transaction(lambda session: self._tables.come_back(session, row, back)):
                raise DuplicateMessage.of(message.message_id)
        self._next_due.announce(row.due)

    def _stored(self, works: Sequence[tuple[MessageRow, int]]) -> Sequence[bool]:
        unique = {row.message_id: row for row, _ in reversed(works)}
        at = max(at for _, at in works)
        fresh = set(
            self._pool.transaction_blocking(lambda session: self._tables.insert(session, list(unique.values()), at))
        )
        are_new = list[bool]()
        for row, _ in works:
            are_new.append(row.message_id in fresh)
            fresh.discard(row.message_id)
        return are_new

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        return await in_thread(self.store_many_blocking, messages, now)

    def store_many_blocking(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        """:meth:`store_many` in the calling thread, for pipeline processes."""
        most = self._capabilities.largest_message_bytes
        rows, at = [to_row(message, most) for message in messages], to_microseconds(now)
        if not rows:
            return StoreReport(0)
        unique = {row.message_id: row for row in reversed(rows)}
        ordered = list(reversed(unique.values()))  # the first row of each id, in the order of the argument
        fresh = set(self._pool.transaction_blocking(lambda session: self._tables.insert(session, ordered, at)))
        if fresh:
            self._next_due.announce(min(row.due for row in ordered if row.message_id in fresh))
        return StoreReport.of((row.message_id for row in rows), fresh)

    # --- the simple contract ------------------------------------------------------------------------------------

    @override
    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        def fetch() -> DelayedMessage | None:
            claims = self._claim(to_microseconds(now), 1)
            # Lease it: a row lock would occupy one connection for each message.
            self._claims.lease(self._claims.tokens_of(claims))
            return claims[0].message if claims else None

        return await in_thread(fetch)

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        ending = RecordNote(to_microseconds(now), int(RecordKind.DELIVERED))
        return await self._ended(
            message_id, lambda session, row: self._tables.finish(session, [row.number], row.holder, ending)
        )

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        note = RecordNote(to_microseconds(now), int(RecordKind.RETRIED))
        return await self._ended(
            message_id, lambda session, row: self._tables.retry(session, row.number, row.holder, None, note)
        )

    async def _ended(self, message_id: str, change: Callable[[Any, WaitingRow], int]) -> bool:
        """Change a message that is free or claimed here, which ends its claim; return whether it was changed."""

        def end(session: Any) -> int | None:
            row = self._tables.lock(session, message_id)
            if row is None or (row.holder is not None and row.holder not in self._claims.holders()):
                return None
            return row.number if change(session, row) else None

        if (number := await self._pool.transaction(end)) is not None:
            self._claims.forget(number)
        return number is not None

    # --- claims -------------------------------------------------------------------------------------------------

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        return await in_thread(self._claim, to_microseconds(now), limit)

    @override
    async def claim_held(self, kept: KeptLimits, now: datetime, limit: int) -> Sequence[Claim]:
        lane = (to_microseconds(kept.begin) - 1, to_microseconds(kept.end))
        return await in_thread(self._claim, to_microseconds(now), limit, lane)

    def _claim(self, at: int, limit: int, lane: tuple[int, int] | None = None) -> list[Claim]:
        begin, end = lane or (None, at)
        session = self._pool.take()
        with closing_on_error(session):  # closing the connection ends the row locks
            while True:
                session.begin()
                rows = self._tables.claim(session, end, limit, begin)
                messages, bad = decoded((number, row) for number, _, row in rows)
                if not bad:
                    break
                self._mark(session, bad, at)
                session.commit()  # the marks must be visible to all before any message is claimed
            if not rows:
                session.rollback()
        if not rows:
            self._pool.put(session)
            return []
        tokens = self._claims.hold(session, [(number, attempt_at) for number, attempt_at, _ in rows])
        self._liveness.start(self._claims)  # its thread keeps the connection of the batch alive
        return [Claim(messages[token.number], token) for token in tokens]

    @override
    def still_holds(self, claim: Claim) -> bool:
        return self._claims.holds(claim)

    @override
    async def finish(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> int:
        ending = RecordNote(to_microseconds(now), int(OUTCOME_RECORDS[outcome]), detail or None)

        def remove(session: Any, numbers: Sequence[int], holder: int | None) -> int:
            return self._tables.finish(session, numbers, holder, ending)

        return await in_thread(self._claims.settle, claims, remove)

    @override
    async def retry_later(self, claim: Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        note = RecordNote(to_microseconds(now), int(RecordKind.RETRIED), reason or None)
        then = to_microseconds(attempt_at)

        def count(session: Any, numbers: Sequence[int], holder: int | None) -> int:
            return sum(self._tables.retry(session, number, holder, then, note) for number in numbers)

        if done := await in_thread(self._claims.settle, [claim], count):
            self._next_due.announce(then)
        return bool(done)

    @override
    async def mark_unreadable(self, claim: Claim, reason: str, now: datetime) -> bool:
        def mark(session: Any, numbers: Sequence[int], holder: int | None) -> int:
            row = self._tables.lock(session, claim.message.message_id)
            if row is None or row.number not in numbers or row.holder != holder:
                return 0
            self._tables.mark_unreadable(session, {row.number: reason}, to_microseconds(now))
            return 1

        return bool(await in_thread(self._claims.settle, [claim], mark))

    @override
    async def release(self, claims: Sequence[Claim], attempt_at: datetime | None) -> int:
        then = None if attempt_at is None else to_microseconds(attempt_at)

        def give_back(session: Any, numbers: Sequence[int], holder: int | None) -> int:
            if then is None and holder is None:
                return len(numbers)  # claimed by row locks only: the end of the transaction releases them unchanged
            return self._tables.release(session, numbers, holder, then)

        done = await in_thread(partial(self._claims.settle, as_it_was=then is None), claims, give_back)
        if done and then is not None:
            self._next_due.announce(then)
        elif done:
            self._next_due.forget()
        return done

    @override
    async def next_attempt(self) -> datetime | None:
        """Return the earliest next attempt, also of messages that other processes have locked."""

        def look(session: Any) -> int | None:
            return self._next_due.seen(self._next_due.look(), self._tables.next_attempt(session, self._claims.locked()))

        return self._dialect.instant(await self._pool.run(look))

    @override
    async def listen(self, wake: Wake) -> Callable[[], None]:
        """Register ``wake``. Messages stored by other processes are noticed within 0.1 s."""

        def start() -> Callable[[], None]:
            self._liveness.start(self._claims)
            self._liveness.holder()
            return self._next_due.listen(wake)

        return await in_thread(start)

    # --- administration -----------------------------------------------------------------------------------------

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        ending = RecordNote(to_microseconds(now), int(RecordKind.CANCELLED))

        def cancel(session: Any) -> bool:
            row = self._tables.lock(session, message_id)
            return (
                row is not None
                and row.holder is None
                and bool(self._tables.finish(session, [row.number], None, ending))
            )

        return await self._pool.transaction(cancel)

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        new_due, at = to_microseconds(due), to_microseconds(now)

        def reschedule(session: Any) -> bool:
            row = self._tables.lock(session, message_id)
            if row is None or row.holder is not None:
                return False
            check_reschedule(message_id, due, self._dialect.instant(row.expires_at))
            self._tables.reschedule(session, row, new_due, wall_time, at)
            return True

        if done := await self._pool.transaction(reschedule):
            self._next_due.announce(new_due)
        return done

    @property
    @override
    def _sql(self) -> RowLockStatements:
        return self._tables.sql

    @override
    def _of_store(self, session: Any) -> Mapping[str, int]:
        return {"store": self._tables.store_id(session)}

    @override
    def _counted(self, session: Any, at: int) -> Sequence[Any]:
        return self._tables.statistics(session, at)

    @override
    async def _page(self, statement: str, values: Mapping[str, Any]) -> PendingPage:
        def look(session: Any) -> Sequence[tuple[int, MessageRow]]:
            return numbered(self._asked(session, statement, values))

        messages, rows = await in_thread(self._read, look)
        return page_of(messages.items(), [(row.due, number) for number, row in rows], values.get("limit"))

    @override
    async def server_facts(self) -> ServerFacts:
        return await self._pool.run(self._tables.facts)

    # --- the clock of the server --------------------------------------------------------------------------------

    @override
    async def server_now(self) -> datetime:
        def ask(session: Any) -> tuple[datetime, float]:
            return from_microseconds(self._tables.now(session)), steady_seconds()

        return brought_up_to_date(*await self._pool.run(ask))

    @override
    async def report_clock(self, ahead: timedelta) -> None:
        def report() -> None:
            self._liveness.start(self._claims)
            holder = self._liveness.holder()
            self._pool.run_blocking(lambda session: self._tables.report_clock(session, holder, ahead // _MICROSECOND))

        await in_thread(report)

    @override
    async def reported_clocks(self) -> Mapping[str, timedelta]:
        rows = await self._pool.run(self._tables.reported_clocks)
        return {f"{machine}:{pid}": ahead * _MICROSECOND for machine, pid, ahead in rows}

    # --- scans --------------------------------------------------------------------------------------------------

    @override
    def scan_parts(self, what: str, parts: int) -> Sequence[ScanPart]:
        check_scanned(what)
        if what == "queued":
            return []
        return shares(
            *self._pool.run_blocking(lambda session: self._tables.bounds(session, what), patiently=True), parts
        )

    @override
    def scan(self, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        check_scanned(scan.what, scan.columns)
        if scan.what == "queued":
            return
        with closing(self.server.connect()) as session:
            yield from self._tables.scan(session, scan, part, page)


def _done_within(seconds: float, work: Callable[[], None], abort: Callable[[], None]) -> None:
    """Run ``work`` in a thread; after ``seconds`` call ``abort``, wait as long again, then leave the thread behind."""
    failed = list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of who called
            failed.append(error)

    thread = threading.Thread(target=run, name="postdate-store-closing", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        abort()
        thread.join(seconds)
        log.warning("the server of the store does not answer; its connections were ended")
        return
    for error in failed:
        raise error
