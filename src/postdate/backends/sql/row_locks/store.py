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

from postdate import ports
from postdate.backends.sql.dialect import closing_on_error
from postdate.backends.sql.limits import SqlLimits
from postdate.backends.sql.questions import page_of
from postdate.backends.sql.row_locks.claims import Claims
from postdate.backends.sql.row_locks.database import RowLockSchema
from postdate.backends.sql.row_locks.liveness import Liveness
from postdate.backends.sql.row_locks.names import steps_of
from postdate.backends.sql.row_locks.parts import (
    MessageRow,
    NewRecord,
    PendingRow,
    decode_rows,
    to_row,
)
from postdate.backends.sql.row_locks.pool import Pool
from postdate.backends.sql.row_locks.statements import RowLockStatements
from postdate.backends.sql.row_locks.tables import RowLockTables, numbered_rows
from postdate.backends.sql.row_locks.unreadable import UnreadableInTable
from postdate.clock import earliest_time_now, from_microseconds, steady_seconds, to_microseconds
from postdate.errors import (
    ConfigurationError,
    DuplicateMessage,
    UnsupportedTransactionMode,
)
from postdate.messages import DelayedMessage, check_reschedule
from postdate.ports.limits import StoredLimits
from postdate.ports.scanning import check_scan, split_into_shares
from postdate.runtime.next_due import NextDue
from postdate.runtime.threads import run_in_group, run_in_thread

_MICROSECOND: Final = timedelta(microseconds=1)
_CLOSE_WITHIN_SECONDS: Final = 5.0  # then connections are aborted, as the server may be silent

log = logging.getLogger("postdate.stores")

_MODES: Final = frozenset(ports.TransactionMode) - {ports.TransactionMode.TRANSACTION_SCOPE}


class LockingStore(SqlLimits, UnreadableInTable, ports.ClaimingStore, ports.ScannableStore, ports.Scripted):
    """Keeps delayed messages in a table of a database server. Queues are elsewhere, so delivery is at least once."""

    database_type: ClassVar[type[RowLockSchema]]
    largest_message: ClassVar[int] = 16 * 1024 * 1024
    """The default of ``largest_message_bytes``."""
    ends_silent_connections: ClassVar[bool] = False
    """Whether the server itself ends connections that are silent for ``holds_at_most``."""

    def __init__(  # noqa: PLR0913 - the settings that stand beside an address
        self,
        url: str | RowLockSchema,
        *,
        schema: str | None = None,
        table: str | None = None,
        recording: ports.Recording = ports.Recording.ALL,
        largest_message_bytes: int | None = None,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        self._database = database = self.database_type.of(url, schema, holds_at_most, answers_within)
        self._table = table
        self._recording = recording
        self.server = database.server
        self._dialect = database.dialect
        self._holds_at_most = database.holds_at_most if self.ends_silent_connections else None
        self._sessions = self._pool = Pool(database.connections)
        self._next_due = NextDue[int]()
        self._parts: tuple[RowLockTables, Claims, Liveness] | None = None  # `None` until the table's name is known
        self._capabilities = ports.StoreCapabilities(
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
            return liveness.wait_for_holder()

        claims = Claims(self._pool, tables, holder)
        self._parts = (tables, claims, liveness)

    @override
    async def initialize(self, endpoint: str, mode: ports.TransactionMode) -> None:
        if mode not in _MODES:
            raise UnsupportedTransactionMode(
                f"{type(self).__name__} does not support transaction mode {mode.value!r}: its queues are in another "
                f"place, and one transaction cannot cover both; use 'sends_atomic_with_receive'"
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

        def release_and_close() -> None:
            try:
                if self._parts is not None:
                    self._claims.release_all()
            finally:
                if self._parts is not None:
                    self._liveness.stop()
                self._pool.close()

        await run_in_thread(_run_with_abort, _CLOSE_WITHIN_SECONDS, release_and_close, self._abort)

    def _abort(self) -> None:
        self._pool.abort()
        if self._parts is not None:
            self._liveness.abort()

    @property
    def _parts_or_error(self) -> tuple[RowLockTables, Claims, Liveness]:
        if self._parts is None:
            name = type(self).__name__
            raise ConfigurationError(
                f"{name} does not know its table yet: call initialize(endpoint, mode) first, or give table="
            )
        return self._parts

    @property
    @override
    def _tables(self) -> RowLockTables:
        return self._parts_or_error[0]

    @property
    def _claims(self) -> Claims:
        return self._parts_or_error[1]

    @property
    def _liveness(self) -> Liveness:
        return self._parts_or_error[2]

    # --- storing ------------------------------------------------------------------------------------------------

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        row, at = to_row(message, self._capabilities.largest_message_bytes), to_microseconds(now)
        if not await run_in_group(self, self._store_blocking, (row, at)):
            record = NewRecord(at, int(ports.RecordKind.RESCHEDULED), "came back from the error queue")
            # In a new transaction: INSERTs that found the id share a lock on it, and two of them would deadlock here.
            if not await self._pool.transaction(lambda session: self._tables.revive(session, row, record)):
                raise DuplicateMessage.of(message.message_id)
        self._next_due.announce(row.due)

    def _store_blocking(self, works: Sequence[tuple[MessageRow, int]]) -> Sequence[bool]:
        unique = {row.message_id: row for row, _ in reversed(works)}
        at = max(at for _, at in works)
        new_ids = set(
            self._pool.transaction_blocking(lambda session: self._tables.insert(session, list(unique.values()), at))
        )
        are_new = list[bool]()
        for row, _ in works:
            are_new.append(row.message_id in new_ids)
            new_ids.discard(row.message_id)
        return are_new

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        return await run_in_thread(self.store_many_blocking, messages, now)

    def store_many_blocking(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        """Call :meth:`store_many` in the calling thread, for pipeline processes."""
        max_bytes = self._capabilities.largest_message_bytes
        rows, at = [to_row(message, max_bytes) for message in messages], to_microseconds(now)
        if not rows:
            return ports.StoreReport(0)
        unique = {row.message_id: row for row in reversed(rows)}
        ordered = list(reversed(unique.values()))  # the first row of each id, in the order of the argument
        new_ids = set(self._pool.transaction_blocking(lambda session: self._tables.insert(session, ordered, at)))
        if new_ids:
            self._next_due.announce(min(row.due for row in ordered if row.message_id in new_ids))
        return ports.StoreReport.of((row.message_id for row in rows), new_ids)

    # --- the simple contract ------------------------------------------------------------------------------------

    @override
    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        def fetch() -> DelayedMessage | None:
            claims = self._claim(to_microseconds(now), 1)
            # Lease it: a row lock would occupy one connection for each message.
            self._claims.lease(self._claims.tokens_of(claims))
            return claims[0].message if claims else None

        return await run_in_thread(fetch)

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        ending = NewRecord(to_microseconds(now), int(ports.RecordKind.DELIVERED))
        return await self._change_message(
            message_id, lambda session, row: self._tables.finish(session, [row.number], row.holder, ending)
        )

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        record = NewRecord(to_microseconds(now), int(ports.RecordKind.RETRIED))
        return await self._change_message(
            message_id, lambda session, row: self._tables.retry(session, row.number, row.holder, None, record)
        )

    async def _change_message(self, message_id: str, change: Callable[[Any, PendingRow], int]) -> bool:
        """Change a message that is free or claimed here, which ends its claim; return whether it was changed."""

        def change_locked(session: Any) -> int | None:
            row = self._tables.lock(session, message_id)
            if row is None or (row.holder is not None and row.holder not in self._claims.holders()):
                return None
            return row.number if change(session, row) else None

        if (number := await self._pool.transaction(change_locked)) is not None:
            self._claims.forget(number)
        return number is not None

    # --- claims -------------------------------------------------------------------------------------------------

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return await run_in_thread(self._claim, to_microseconds(now), limit)

    @override
    async def claim_lane(self, stored_limits: StoredLimits, now: datetime, limit: int) -> Sequence[ports.Claim]:
        lane = (to_microseconds(stored_limits.lane_start) - 1, to_microseconds(stored_limits.lane_end))
        return await run_in_thread(self._claim, to_microseconds(now), limit, lane)

    def _claim(self, at: int, limit: int, lane: tuple[int, int] | None = None) -> list[ports.Claim]:
        after, before = lane or (None, at)
        session = self._pool.acquire()
        with closing_on_error(session):  # closing the connection ends the row locks
            while True:
                session.begin()
                rows = self._tables.claim(session, before, limit, after)
                messages, reasons = decode_rows((number, row) for number, _, row in rows)
                if not reasons:
                    break
                self._mark_and_log(session, reasons, at)
                session.commit()  # the marks must be visible to all before any message is claimed
            if not rows:
                session.rollback()
        if not rows:
            self._pool.release(session)
            return []
        tokens = self._claims.remember_batch(session, [(number, attempt_at) for number, attempt_at, _ in rows])
        self._liveness.start(self._claims)  # its thread keeps the connection of the batch alive
        return [ports.Claim(messages[token.number], token) for token in tokens]

    @override
    def is_in_force(self, claim: ports.Claim) -> bool:
        return self._claims.has_claim(claim)

    @override
    async def finish(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> int:
        ending = NewRecord(to_microseconds(now), int(ports.OUTCOME_RECORDS[outcome]), detail or None)

        def remove(session: Any, numbers: Sequence[int], holder: int | None) -> int:
            return self._tables.finish(session, numbers, holder, ending)

        return await run_in_thread(self._claims.settle, claims, remove)

    @override
    async def retry_later(self, claim: ports.Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        record = NewRecord(to_microseconds(now), int(ports.RecordKind.RETRIED), reason or None)
        attempt_microseconds = to_microseconds(attempt_at)

        def retry(session: Any, numbers: Sequence[int], holder: int | None) -> int:
            return sum(self._tables.retry(session, number, holder, attempt_microseconds, record) for number in numbers)

        if done := await run_in_thread(self._claims.settle, [claim], retry):
            self._next_due.announce(attempt_microseconds)
        return bool(done)

    @override
    async def mark_unreadable(self, claim: ports.Claim, reason: str, now: datetime) -> bool:
        def mark(session: Any, numbers: Sequence[int], holder: int | None) -> int:
            row = self._tables.lock(session, claim.message.message_id)
            if row is None or row.number not in numbers or row.holder != holder:
                return 0
            self._tables.mark_unreadable(session, {row.number: reason}, to_microseconds(now))
            return 1

        return bool(await run_in_thread(self._claims.settle, [claim], mark))

    @override
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        attempt_microseconds = None if attempt_at is None else to_microseconds(attempt_at)

        def release(session: Any, numbers: Sequence[int], holder: int | None) -> int:
            if attempt_microseconds is None and holder is None:
                return len(numbers)  # claimed by row locks only: the end of the transaction releases them unchanged
            return self._tables.release(session, numbers, holder, attempt_microseconds)

        done = await run_in_thread(
            partial(self._claims.settle, is_unchanged=attempt_microseconds is None), claims, release
        )
        if done and attempt_microseconds is not None:
            self._next_due.announce(attempt_microseconds)
        elif done:
            self._next_due.forget()
        return done

    @override
    async def next_attempt(self) -> datetime | None:
        """Return the earliest next attempt, also of messages that other processes have locked."""

        def read_next_attempt(session: Any) -> int | None:
            return self._next_due.finish_query(
                self._next_due.start_query(), self._tables.next_attempt(session, self._claims.locked_numbers())
            )

        return self._dialect.instant(await self._pool.run(read_next_attempt))

    @override
    async def listen(self, wake: ports.Wake) -> Callable[[], None]:
        """Register ``wake``. Messages stored by other processes are noticed within 0.1 s."""

        def start() -> Callable[[], None]:
            self._liveness.start(self._claims)
            self._liveness.wait_for_holder()
            return self._next_due.listen(wake)

        return await run_in_thread(start)

    # --- administration -----------------------------------------------------------------------------------------

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        ending = NewRecord(to_microseconds(now), int(ports.RecordKind.CANCELLED))

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
    def _store_values(self, session: Any) -> Mapping[str, int]:
        return {"store": self._tables.store_id(session)}

    @override
    def _query_statistics(self, session: Any, at: int) -> Sequence[Any]:
        return self._tables.statistics(session, at)

    @override
    async def _page(self, statement: str, values: Mapping[str, Any]) -> ports.PendingPage:
        def read_rows(session: Any) -> Sequence[tuple[int, MessageRow]]:
            return numbered_rows(self._query_rows(session, statement, values))

        messages, rows = await run_in_thread(self._read_messages, read_rows)
        return page_of(messages.items(), [(row.due, number) for number, row in rows], values.get("limit"))

    @override
    async def server_facts(self) -> ports.ServerFacts:
        return await self._pool.run(self._tables.facts)

    # --- the clock of the server --------------------------------------------------------------------------------

    @override
    async def server_now(self) -> datetime:
        def read_clock(session: Any) -> tuple[datetime, float]:
            return from_microseconds(self._tables.now(session)), steady_seconds()

        return earliest_time_now(*await self._pool.run(read_clock))

    @override
    async def report_clock(self, ahead: timedelta) -> None:
        def report() -> None:
            self._liveness.start(self._claims)
            holder = self._liveness.wait_for_holder()
            self._pool.run_blocking(lambda session: self._tables.report_clock(session, holder, ahead // _MICROSECOND))

        await run_in_thread(report)

    @override
    async def reported_clocks(self) -> Mapping[str, timedelta]:
        rows = await self._pool.run(self._tables.reported_clocks)
        return {f"{machine}:{pid}": ahead * _MICROSECOND for machine, pid, ahead in rows}

    # --- scans --------------------------------------------------------------------------------------------------

    @override
    def scan_parts(self, row_kind: str, parts: int) -> Sequence[ports.ScanPart]:
        check_scan(row_kind)
        if row_kind == "queued":
            return []
        return split_into_shares(
            *self._pool.run_blocking(lambda session: self._tables.bounds(session, row_kind), patiently=True), parts
        )

    @override
    def scan(self, scan: ports.Scan, part: ports.ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        check_scan(scan.row_kind, scan.columns)
        if scan.row_kind == "queued":
            return
        with closing(self.server.connect()) as session:
            yield from self._tables.scan(session, scan, part, page)


def _run_with_abort(seconds: float, work: Callable[[], None], abort: Callable[[], None]) -> None:
    """Run ``work`` in a thread; after ``seconds`` call ``abort``, wait as long again, then leave the thread behind."""
    errors = list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of who called
            errors.append(error)

    thread = threading.Thread(target=run, name="postdate-store-closing", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        abort()
        thread.join(seconds)
        log.warning("the server of the store does not answer; its connections were ended")
        return
    for error in errors:
        raise error
