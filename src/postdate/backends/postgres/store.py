"""Delayed messages in PostgreSQL.

Due messages are claimed by row locks of an open transaction: a claim ends with its connection and needs no lease. One
statement moves a batch to queues in the same schema, and bodies never leave the database.
Source: ADR 0007.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import psycopg
from typing_extensions import override

from postdate import ports
from postdate.backends.postgres.access import Access, Connection, OpenDatabase
from postdate.backends.postgres.bulk import PostgresBulk
from postdate.backends.postgres.changing import PostgresChanges
from postdate.backends.postgres.claims import PostgresClaims, group_by_holder
from postdate.backends.postgres.errors import is_conflict
from postdate.backends.postgres.inserting import notice
from postdate.backends.postgres.names import array, check_name, steps
from postdate.backends.postgres.next_due import PostgresNextDue
from postdate.backends.postgres.observation import (
    PostgresObserver,
    old_snapshots,
    report_clock,
    reported_clocks,
    server_facts,
    server_now,
)
from postdate.backends.postgres.rows import Row, Unreadable, decode_rows, message_of, page_of_rows, utc
from postdate.backends.postgres.statements import PostgresSqlDialect, Statements
from postdate.backends.postgres.unreadable import (
    UnreadableInSchema,
    UnreadableStatements,
    mark_unreadable,
    reasons,
)
from postdate.backends.sql.limits import SqlLimits
from postdate.clock import earliest_time_now, from_microseconds
from postdate.errors import (
    ClaimLost,
    UnsupportedTransactionMode,
)
from postdate.messages import DelayedMessage, copy_with_due
from postdate.ports.limits import StoredLimits
from postdate.runtime.resource import Resource
from postdate.runtime.threads import run_in_group, run_in_thread

if TYPE_CHECKING:
    from postdate.backends.postgres.columnar import Columns


_MANY: Final = 5_000
"""Storing more messages than this in one call may take longer than any other call, so its deadline is longer."""


class PostgresStore(PostgresBulk, PostgresChanges, SqlLimits, ports.MovingStore, UnreadableInSchema, ports.Scripted):
    """Keeps delayed messages in a table of PostgreSQL. It needs direct connections: a pooler would lose wake-ups.

    Args:
        database: ``postgresql://user:password@host:port/database``, any connection string of libpq, or a
            :class:`postdate.Postgres` that other adapters use, too.
        schema: of the tables; any characters. ``None``: the schema of the database, by default ``postdate``.
        table: of the pending messages; any characters. ``None``: ``{endpoint}.timeouts``.
        recording: how much is recorded for audits; ``None``: the setting of the database, by default everything.
        largest_message_bytes: of headers and body together.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. Statements on
            whole tables may take ten minutes. ``None``: the setting of the database, by default 20 seconds.
        holds_at_most: if a process sends no heartbeat for this long, other processes that use the schema end its
            sessions, which releases its claims; above 0. They need the same role, or a role that is a member of it.
            ``None``: the setting of the database, by default a minute.

    Raises:
        ConfigurationError: the address, the schema, the table or a duration is invalid.
    """

    _dialect = PostgresSqlDialect()

    def __init__(  # noqa: PLR0913 - the settings that stand beside an address
        self,
        database: str | OpenDatabase,
        *,
        schema: str | None = None,
        table: str | None = None,
        recording: ports.Recording | None = None,
        largest_message_bytes: int = 16 * 1024 * 1024,
        answers_within: timedelta | None = None,
        holds_at_most: timedelta | None = None,
    ) -> None:
        self._sessions = self.database = Access(
            database,
            schema,
            recording=recording,
            answers_within=answers_within,
            holds_at_most=holds_at_most,
            claims=True,
        )
        self._table = None if table is None else check_name(table, "table")
        self._claims = PostgresClaims(self.database, lambda: self._sql)
        self._next_due = PostgresNextDue()
        self._columnar: Columns | None = None
        self._many_due = False
        self._capabilities = ports.StoreCapabilities(
            durable=True,
            shared=True,
            time_precision=timedelta(microseconds=1),
            transaction_modes=frozenset(ports.TransactionMode),
            database=self.database.identity,
            largest_message_bytes=largest_message_bytes,
            holds_at_most=self.database.holds_at_most,
            has_clock=True,
        )

    @property
    def resource(self) -> Resource:
        """The resource of the database."""
        return self.database.resource

    @override
    async def initialize(self, endpoint: str, mode: ports.TransactionMode) -> None:
        if mode not in self._capabilities.transaction_modes:
            raise UnsupportedTransactionMode(f"PostgresStore does not support transaction mode {mode.value!r}")
        self._table = self._table or check_name(f"{endpoint}.timeouts", "table")
        self._statements = Statements(self.database.names, self._table, self.database.recording)

    @override
    def setup_statements(self, endpoint: str) -> str:
        names = self.database.names
        return names.script(steps(names.schema, self._table or f"{endpoint}.timeouts"))

    @override
    async def setup(self) -> None:
        await run_in_thread(self.database.setup_blocking, self._sql.table)

    @override
    async def close(self) -> None:
        await run_in_thread(self._close)

    def _close(self) -> None:
        self.database.shorten_deadlines()
        all_released = False
        try:
            if self._table is not None:
                self._claims.release_all()
            all_released = not self._claims.may_leave_leases
        finally:
            self.database.close_blocking(in_doubt=not all_released)
            if self._columnar is not None:
                self._columnar.close()

    # --- storing ------------------------------------------------------------------------------------------------

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        row = self._row(message)
        if not await run_in_group(self, self._store_blocking, (row, now)):
            await self.database.transaction(lambda c: self._insert_new_or_revive(c, [row], now))
        self._next_due.announce(message.due)

    def _store_blocking(self, works: Sequence[tuple[Row, datetime]]) -> Sequence[bool]:
        rows, now = [row for row, _ in works], max(now for _, now in works)
        if len(rows) == 1:
            return [self.database.run_blocking(lambda c: self._insert_one(c, rows[0], now))]
        report = self.database.transaction_blocking(lambda c: self._insert(c, rows, now))
        new_counts = Counter(row[0] for row in rows) - Counter(report.duplicate_ids)
        return [new_counts.pop(row[0], 0) > 0 for row in rows]

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        return await run_in_thread(self.store_many_blocking, messages, now)

    def store_many_blocking(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        """Call :meth:`store_many` in the calling thread, for pipeline processes."""
        if not (rows := [self._row(message) for message in messages]):
            return ports.StoreReport(0)
        report = self.database.transaction_blocking(lambda c: self._insert(c, rows, now), patiently=len(rows) > _MANY)
        if report.stored:
            self._next_due.announce(min(message.due for message in messages))
        return report

    @override
    def storing_work(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.Work:
        rows = [self._row(message) for message in messages]

        return lambda connection: self._insert_new_or_revive(connection, rows, now)

    # --- the simple contract ------------------------------------------------------------------------------------

    @override
    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        def fetch() -> DelayedMessage | None:
            claims = self._claim(now, 1)
            # Lease it: a row lock would occupy one connection for each message.
            self._claims.lease(self._claims.tokens_of(claims))
            return claims[0].message if claims else None

        return await run_in_thread(fetch)

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        values = {
            "id": message_id,
            "now": now,
            "others": array(self._claims.holders()),
        }
        return await self._change_by_id(self._sql.remove_by_id, values)

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        return await self._change_by_id(
            self._sql.count_failure_by_id, {"id": message_id, "now": now, "others": array(self._claims.holders())}
        )

    async def _change_by_id(self, sql: bytes, values: dict[str, Any]) -> bool:
        def change(connection: Connection) -> bool:
            row = connection.execute(sql, {**values, "store": self._store_id(connection)}).fetchone()
            if row is not None:
                self._claims.forget(row[0])
            return row is not None

        return await self.database.run(change)

    # --- claims -------------------------------------------------------------------------------------------------

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return await run_in_thread(self._claim, now, limit)

    @override
    async def claim_lane(self, stored_limits: StoredLimits, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return await run_in_thread(self._claim, now, limit, stored_limits)

    def _claim(self, now: datetime, limit: int, stored: StoredLimits | None = None) -> list[ports.Claim]:
        while True:
            connection = self.database.acquire()
            try:
                with self.database.translate_errors():
                    self._claims.forget_finished(connection)
                    self._claims.release_abandoned(connection)
                    if self._next_due.count_batch():
                        self._query_next_attempt(connection)
                    connection.execute("BEGIN")
                    rows, unreadable = self._claim_rows(connection, now, limit, stored)
                    if not rows or unreadable:
                        connection.execute("COMMIT")
                    else:
                        self.database.listener()  # its heartbeat shows other processes that the claims are in force
            except BaseException:  # closing the connection ends the transaction and so the claims
                self.database.close_connection(connection)
                raise
            if rows and not unreadable:
                break
            self.database.release(connection)
            if not unreadable:
                return []  # otherwise poll again: the unreadable rows are marked now, and the other rows are unlocked
        tokens = self._claims.remember_batch(connection, [(number, message.due) for number, message in rows])
        return [ports.Claim(message, token) for (_, message), token in zip(rows, tokens, strict=True)]

    def _claim_rows(
        self, connection: Connection, now: datetime, limit: int, stored: StoredLimits | None = None
    ) -> tuple[list[tuple[int, DelayedMessage]], list[Unreadable]]:
        """Lock due messages in the open transaction; unreadable rows are marked in it."""
        after, before = (self._next_due.lower_bound(), now) if stored is None else (stored.lane_start, stored.lane_end)
        values: dict[str, Any] = {"now": before, "limit": limit, "from": after}
        rows, unreadable = decode_rows(
            connection.execute(self._sql.claim, values, prepare=True, binary=True), 0, _decode_numbered
        )
        if unreadable:
            values = {"now": now, "holder": None, "store": self._store_id(connection)}
            mark_unreadable(connection, self._sql.unreadable, values, unreadable)
        return rows, unreadable

    @override
    def is_in_force(self, claim: ports.Claim) -> bool:
        return self._claims.has_claim(claim)

    @override
    async def finish(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> int:
        return await run_in_thread(self._finish, claims, outcome, now, detail)

    def _finish(self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str) -> int:
        values = {"now": now, "kind": int(ports.OUTCOME_RECORDS[outcome]), "detail": detail or None}

        def remove(connection: Connection, numbers: Sequence[int], holder: int | None) -> int:
            claimed = {"numbers": array(numbers), "holder": holder, "store": self._store_id(connection)}
            return connection.execute(self._sql.finish, {**values, **claimed}, prepare=True).fetchall()[0][0]

        return self._claims.settle(claims, remove)

    @override
    def finishing_work(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> ports.Work:
        def finish(connection: Connection) -> None:
            removed = 0
            tokens = self._claims.tokens_of(claims)
            self._claims.lease(tokens)  # the transaction of the queue must not wait for row locks of this process
            for holder, numbers in group_by_holder(tokens):
                values = {"now": now, "kind": int(ports.OUTCOME_RECORDS[outcome]), "detail": detail or None}
                values |= {"numbers": array(numbers), "holder": holder, "store": self._store_id(connection)}
                removed += connection.execute(self._sql.finish, values).fetchall()[0][0]
            self._claims.remember_finished(tokens)
            if removed < len(claims):
                raise ClaimLost.of(*(claim.message.message_id for claim in claims))

        return finish

    @override
    async def retry_later(self, claim: ports.Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        def retry(connection: Connection, numbers: Sequence[int], holder: int | None) -> int:
            values = {
                "numbers": array(numbers),
                "holder": holder,
                "attempt_at": attempt_at,
                "now": now,
                "reason": reason,
            }
            changed_count = connection.execute(
                self._sql.retry, {**values, "store": self._store_id(connection)}
            ).rowcount
            if changed_count:  # notify other processes, as this one may end before the next attempt
                self._notify(connection, attempt_at, now)
            return changed_count

        def release() -> bool:
            if done := self._claims.settle([claim], retry):
                self._next_due.announce(attempt_at)
            return bool(done)

        return await run_in_thread(release)

    @override
    async def mark_unreadable(self, claim: ports.Claim, reason: str, now: datetime) -> bool:
        def mark(connection: Connection, numbers: Sequence[int], holder: int | None) -> int:
            values = reasons([Unreadable(number, reason) for number in numbers])
            values |= {"now": now, "holder": holder, "store": self._store_id(connection)}
            return connection.execute(self._sql.unreadable.mark, values).fetchall()[0][0]

        return bool(await run_in_thread(self._claims.settle, [claim], mark))

    @override
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        """Release a whole batch by ending its transaction."""

        def release_rows(connection: Connection, numbers: Sequence[int], holder: int | None) -> int:
            values = {"numbers": array(numbers), "holder": holder, "attempt_at": attempt_at}
            row = connection.execute(self._sql.release, {**values, "store": self._store_id(connection)}).fetchone()
            return 0 if row is None else row[0]

        def release() -> int:
            if done := self._claims.settle(claims, release_rows, is_unchanged=attempt_at is None):
                self._next_due.announce(attempt_at or min(claim.message.due for claim in claims))
            return done

        return await run_in_thread(release)

    @override
    async def next_attempt(self) -> datetime | None:
        return await self.database.run(self._query_next_attempt)

    def _query_next_attempt(self, connection: Connection) -> datetime | None:
        query = self._next_due.start_query()
        locked, first_locked = self._claims.locked_numbers(), self._claims.first_locked()
        values = {"from": self._next_due.lower_bound(), "held": array(locked), **self._store_values(connection)}
        row = connection.execute(self._sql.next_attempt, values, prepare=True).fetchone()
        return self._next_due.finish_bounded_query(query, None if row is None else row[0], first_locked, None)

    @override
    async def listen(self, wake: ports.Wake) -> Callable[[], None]:
        def start() -> Callable[[], None]:
            store_id = self.database.run_blocking(self._store_id)
            listener = self.database.listener()
            listener.add_role(delivers_from=store_id)

            def on_notification(topic: str, number: int, value: int) -> None:
                if topic == "lost":
                    self._next_due.forget()
                elif topic == "due" and number == store_id:
                    self._next_due.announce(from_microseconds(value))

            listener.wait_for_holder()
            stop_listening = listener.listen(on_notification)
            stop_waking = self._next_due.listen(wake)

            def stop() -> None:
                stop_waking()
                stop_listening()

            return stop

        return await run_in_thread(start)

    # --- moving -------------------------------------------------------------------------------------------------

    @override
    async def move_due(self, now: datetime, limit: int, *, listing: bool = False) -> ports.MoveReport:
        def move(connection: Connection) -> ports.MoveReport:
            query = self._next_due.start_query()
            locked, first_locked = self._claims.locked_numbers(), self._claims.first_locked()
            values = {
                "now": now,
                "limit": limit,
                "store": self._store_id(connection),
                "from": self._next_due.lower_bound(),
            }
            sql = self._sql.move if self._many_due else self._sql.move_few
            values |= {"held": array(locked), "listing": listing}
            try:
                row = connection.execute(sql, values, prepare=True, binary=True).fetchone()
            except psycopg.DataError as error:  # one unreadable row makes the whole statement fail
                if is_conflict(error) or not self._mark_unreadable_due(connection, now, limit):
                    raise
                row = connection.execute(sql, values, prepare=True, binary=True).fetchone()
            assert row is not None
            delivered, expired, delivered_to, first_due, _, *listed, head, can_move = row
            if self._many_due:
                head, can_move = connection.execute(self._sql.next_attempt, values, prepare=True).fetchone() or (
                    None,
                    None,
                )
            self._many_due = delivered + expired == limit
            next_attempt = self._next_due.finish_bounded_query(query, head, first_locked, now)
            has_unmoved = head is not None and head < now and not can_move
            moved = None if not listing else ports.NOTHING_MOVED if listed[0] is None else ports.MovedMessages(*listed)
            return ports.MoveReport(
                delivered, expired, has_unmoved, next_attempt, delivered_to or {}, utc(first_due), moved
            )

        return await self.database.run(move)

    def _mark_unreadable_due(self, connection: Connection, now: datetime, limit: int) -> bool:
        """Mark the unreadable messages of the next batch to move; return whether there were any."""
        with connection.transaction():
            _, unreadable = self._claim_rows(connection, now, limit)
        return bool(unreadable)

    @override
    async def yield_to_writers(self) -> None:
        """Do nothing: writers of PostgreSQL do not wait for each other."""

    # --- unreadable messages ------------------------------------------------------------------------------------

    @property
    @override
    def _unreadable(self) -> UnreadableStatements:
        return self._sql.unreadable

    @override
    def _values_of_unreadable(self, connection: Connection) -> dict[str, Any]:
        return {"store": self._store_id(connection)}

    # --- administration -----------------------------------------------------------------------------------------

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        return await self.database.run(lambda c: self._run_steps(c, self._cancel_steps(message_id, now)))

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        def reschedule(connection: Connection) -> bool:
            if self._run_steps(connection, self._reschedule_steps(message_id, due, now, wall_time)):
                return True
            for message in self._read_page(connection, self._sql.get, {"id": message_id}).messages:
                copy_with_due(message, due)  # raises if the message was not changed because it expires before
            return False

        if done := await self.database.transaction(reschedule):
            self._next_due.announce(due)
        return done

    @override
    async def replace_pending(self, message: DelayedMessage, now: datetime) -> bool:
        row = self._row(message)
        done = await self.database.run(lambda c: self._run_steps(c, self._replace_steps(row, now)))
        if done:
            self._next_due.announce(message.due)
        return done

    @override
    def _store_values(self, session: Connection) -> Mapping[str, int]:
        return {"store": self._store_id(session)}

    @override
    async def _page(self, statement: bytes, values: Mapping[str, Any]) -> ports.PendingPage:
        # It may read the whole table, so it needs a longer deadline.
        is_whole_table = statement is self._sql.list_pending
        return await self.database.run(lambda c: self._read_page(c, statement, values), patiently=is_whole_table)

    def _read_page(self, connection: Connection, statement: bytes, values: Mapping[str, Any]) -> ports.PendingPage:
        rows = connection.execute(statement, {**values, **self._store_values(connection)}, binary=True).fetchall()
        return page_of_rows(rows, values.get("limit"))

    @override
    async def history(self, message_id: str) -> Sequence[ports.Record]:
        def read_rows(connection: Connection) -> Sequence[tuple[Any, ...]]:
            connection.execute("SET LOCAL enable_bitmapscan = on")  # a BRIN index can only be used by a bitmap scan
            return self._query_rows(connection, self._sql.history, {"id": message_id})

        return self._records(await self.database.transaction(read_rows, patiently=True))

    @override
    def observer(self) -> PostgresObserver:
        return PostgresObserver(self.database, lambda: self._sql.table)

    @override
    async def server_facts(self) -> ports.ServerFacts:
        return await server_facts(self.database, self._table)

    @override
    async def server_now(self) -> datetime:
        return earliest_time_now(*await self.database.run(server_now))

    @override
    async def report_clock(self, ahead: timedelta) -> None:
        await run_in_thread(report_clock, self.database, ahead)

    @override
    async def reported_clocks(self) -> Mapping[str, timedelta]:
        return await self.database.run(lambda c: reported_clocks(c, self.database.names))

    @override
    async def old_snapshots(self) -> Sequence[ports.OldSnapshot]:
        return await old_snapshots(self.database)

    # --- columns ------------------------------------------------------------------------------------------------

    @property
    @override
    def has_columns(self) -> bool:
        # The driver for columns comes with Spark. Without it, tables are stored as rows.
        return find_spec("adbc_driver_postgresql") is not None

    @override
    def scan_columns(self, scan: ports.Scan, part: ports.ScanPart) -> Iterable[ports.ArrowBatch]:
        return self._columns().read(self._sql.table, scan, part)

    @override
    def store_columns(self, batch: ports.ArrowBatch, now: datetime) -> ports.StoreReport:
        if not batch.num_rows:
            return ports.StoreReport(0)
        columns, store_id = self._columns(), self._sql.store_id or self.database.run_blocking(self._store_id)
        due = columns.earliest_due(batch)
        report = columns.store(batch, self._sql, now, notice(store_id, due, now))
        if report is None:
            rows = columns.rows(batch)
            report = self.database.transaction_blocking(lambda c: self._insert(c, rows, now), patiently=True)
        if report.stored:
            self._next_due.announce(due)
        return report

    def _columns(self) -> Columns:
        if self._columnar is None:
            from postdate.backends.postgres.columnar import Columns  # needs Arrow

            self._columnar = Columns(self.database)
        return self._columnar


def _decode_numbered(row: tuple[Any, ...]) -> tuple[int, DelayedMessage]:
    return row[0], message_of(*row[1:])
