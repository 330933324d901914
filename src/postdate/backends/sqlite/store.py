"""Delayed messages in one SQLite file: the embedded default.

Together with the local transport on the same file, a due message moves to its queue, is removed and is recorded in
one transaction, by set-based SQL: bodies never pass through Python. Source: ADR 0002, ADR 0003.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from typing_extensions import override

from postdate import ports
from postdate.backends.sql.limits import SqlLimits
from postdate.backends.sql.questions import page_of
from postdate.backends.sqlite import rows as sqlite_rows
from postdate.backends.sqlite.bulk import BulkOnFile
from postdate.backends.sqlite.file import SqliteFile
from postdate.backends.sqlite.moving import move
from postdate.backends.sqlite.observation import FileObserver
from postdate.backends.sqlite.questions import SqliteQuestions
from postdate.backends.sqlite.replacing import STORE_KEY, newest_of_key, replace_newest, replace_pending
from postdate.backends.sqlite.unreadable import UnreadableFileRows, read_readable_and_all_rows
from postdate.clock import to_microseconds
from postdate.errors import ClaimLost, DuplicateMessage, PostdateError
from postdate.messages import DelayedMessage, check_reschedule, text_with_due
from postdate.ports.changing import CreateMessage, KeyedIds
from postdate.ports.limits import StoredLimits

_HEADERS: Final = """
    SELECT seq, CAST(headers AS BLOB) FROM content
    WHERE seq = (SELECT content FROM delayed_message WHERE seq = ?) AND headers NOT NULL"""
_SET_HEADERS: Final = "UPDATE content SET headers = ? WHERE seq = ?"


class _ClaimedBatch:
    """Messages claimed together under one claimant number. The object lives as long as any of their claims."""

    def __init__(self, claimant: int, message_ids: Sequence[str]) -> None:
        self.claimant, self.message_ids = claimant, message_ids


@dataclass(slots=True, eq=False)
class _ClaimToken:
    """The token of a claim. It distinguishes the claim from a later claim of the same message.

    Args:
        seq: number of the pending message.
        batch: the messages claimed with it.
        latest: number of the latest record at the time of the claim.
        is_released: whether the claim was released; then another claim may have the message.
    """

    seq: int
    batch: _ClaimedBatch
    latest: int
    is_released: bool = False


class SqliteStore(SqlLimits, UnreadableFileRows, BulkOnFile, ports.MovingStore, ports.ReplacingStore):
    """Keeps delayed messages in an SQLite file.

    Several processes may use one file at once; one file is one store, shared by all endpoints on it.

    Args:
        path: of the file; created by :meth:`setup` or at first use unless ``create`` is false.
        synchronous: ``full``: a commit survives loss of power; ``normal``: it survives any end of the process.
        recording: how much is kept for audits.
        largest_message_bytes: of headers and body together.
        create: create the file and its tables when they are missing.
        holds_at_most: a process that is frozen for this long loses its claims to other processes, and writes with lost
            claims have no effect; at least 3 s. Default: the value of the transport on this file, or 60 s.

    Raises:
        ConfigurationError: a setting is invalid, or the file is open in this process with other settings.
    """

    _messages = sqlite_rows.PENDING
    _dialect = sqlite_rows.SqliteSqlDialect()
    _sql = SqliteQuestions

    def __init__(
        self,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: ports.Recording = ports.Recording.ALL,
        largest_message_bytes: int = 16 * 1024 * 1024,
        create: bool = True,
        holds_at_most: timedelta | None = None,
    ) -> None:
        self._sessions = self.file = SqliteFile.open(
            path, synchronous=synchronous, recording=recording, create=create, holds_at_most=holds_at_most
        )
        self._batches = WeakSet[_ClaimedBatch]()
        self._capabilities = ports.StoreCapabilities(
            durable=True,
            shared=True,
            time_precision=timedelta(microseconds=1),
            transaction_modes=frozenset(ports.TransactionMode),
            database=("sqlite", str(self.file.path)),
            largest_message_bytes=largest_message_bytes,
        )

    @property
    @override
    def capabilities(self) -> ports.StoreCapabilities:
        # A transport that was opened later has set it.
        if self._capabilities.holds_at_most != self.file.registration.holds_at_most:
            self._capabilities = replace(self._capabilities, holds_at_most=self.file.registration.holds_at_most)
        return self._capabilities

    @override
    async def initialize(self, endpoint: str, mode: ports.TransactionMode) -> None:
        await self.file.setup()

    @override
    async def setup(self) -> None:
        await self.file.setup()

    @override
    def observer(self) -> FileObserver:
        return FileObserver(self.file)

    # --- storing ------------------------------------------------------------------------------------------------

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        row, at = sqlite_rows.pending_row(message, self._capabilities.largest_message_bytes), to_microseconds(now)
        await self.file.write(lambda tx: _insert_new(tx, [row], at))

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        return await self.file.write(self._inserting_work(messages, now))

    def store_many_blocking(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        """Call :meth:`store_many` in the calling thread, for pipeline processes."""
        return self.file.write_blocking(self._inserting_work(messages, now))

    @override
    def storing_work(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.Work:
        rows, at = self._rows(messages), to_microseconds(now)

        return lambda tx: _insert_new(tx, rows, at)

    def _inserting_work(
        self, messages: Sequence[DelayedMessage], now: datetime
    ) -> Callable[[sqlite_rows.Transaction], ports.StoreReport]:
        rows, at = self._rows(messages), to_microseconds(now)
        return lambda tx: sqlite_rows.insert(tx, rows, at)

    def _rows(self, messages: Sequence[DelayedMessage]) -> list[tuple[Any, ...]]:
        limit = self._capabilities.largest_message_bytes
        return [sqlite_rows.pending_row(message, limit) for message in messages]

    # --- the simple contract ------------------------------------------------------------------------------------

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        return await self.file.write(
            lambda tx: _remove_and_record(tx, message_id, ports.RecordKind.DELIVERED, to_microseconds(now))
        )

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        def count_failure(tx: sqlite_rows.Transaction) -> bool:
            row = _find(tx, message_id)
            return row is not None and _count_failure(tx, row[0], None, to_microseconds(now), "")

        return await self.file.write(count_failure)

    # --- claims -------------------------------------------------------------------------------------------------

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        at = to_microseconds(now)
        return await self._claim(at, limit, _EARLIEST, at)

    @override
    async def claim_lane(self, stored_limits: StoredLimits, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return await self._claim(
            to_microseconds(now),
            limit,
            to_microseconds(stored_limits.lane_start),
            to_microseconds(stored_limits.lane_end),
        )

    async def _claim(self, at: int, limit: int, start: int, end: int) -> Sequence[ports.Claim]:
        """Claim messages with an attempt time at or after ``start`` and before ``end``.

        ``at``: now. All times in microseconds since 1970 UTC.
        """

        def claim(tx: sqlite_rows.Transaction) -> tuple[list[tuple[int, DelayedMessage]], int, int]:
            (latest,) = tx.execute("SELECT coalesce(max(seq), 0) FROM record").fetchone()
            values = (tx.claimant, start, end, limit)
            rows = sqlite_rows.claim_rows(
                tx, sqlite_rows.PENDING, _CLAIM, values, lambda row: (row[0], sqlite_rows.message_of(row)), at
            )
            return rows, tx.claimant, latest

        rows, claimant, latest = await self.file.write(claim)
        rows.sort(key=lambda each: (each[1].due, each[0]))
        batch = _ClaimedBatch(claimant, [message.message_id for _, message in rows])
        self._batches.add(batch)
        return [ports.Claim(message, token=_ClaimToken(seq, batch, latest)) for seq, message in rows]

    @override
    def listen_for_lost_claims(self, on_lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        """Register ``on_lost``, called after this process was frozen or the file was replaced."""
        loop = asyncio.get_running_loop()

        def report(claimant: int) -> None:
            on_lost([id_ for batch in self._batches if batch.claimant == claimant for id_ in batch.message_ids])

        # Called in another thread. The thread of the loop adds batches meanwhile, so only the loop may iterate.
        def schedule_report(claimant: int) -> None:
            with suppress(RuntimeError):  # the loop is closed, so it sends no messages any more
                loop.call_soon_threadsafe(report, claimant)

        return self.file.registration.listen_for_lost_claims(schedule_report)

    @override
    def is_in_force(self, claim: ports.Claim) -> bool:
        token = claim.token
        assert isinstance(token, _ClaimToken)
        return not token.is_released and self.file.is_in_force(token.batch.claimant)

    @override
    async def finish(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> int:
        at = to_microseconds(now)
        return await self.file.write(
            lambda tx: sum(_finish(tx, claim, ports.OUTCOME_RECORDS[outcome], at, detail) for claim in claims)
        )

    @override
    def finishing_work(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> ports.Work:
        at = to_microseconds(now)

        def finish(tx: sqlite_rows.Transaction) -> None:
            for claim in claims:
                if not _finish(tx, claim, ports.OUTCOME_RECORDS[outcome], at, detail):
                    raise ClaimLost.of(claim.message.message_id)

        return finish

    @override
    async def retry_later(self, claim: ports.Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        def retry(tx: sqlite_rows.Transaction) -> bool:
            row = tx.execute(_FIND_CLAIMED, _claim_values(tx, claim)).fetchone()
            attempt_microseconds, at = to_microseconds(attempt_at), to_microseconds(now)
            return row is not None and _count_failure(tx, row[0], attempt_microseconds, at, reason)

        return await self.file.write(retry)

    @override
    async def mark_unreadable(self, claim: ports.Claim, reason: str, now: datetime) -> bool:
        def mark(tx: sqlite_rows.Transaction) -> bool:
            if (row := tx.execute(_FIND_CLAIMED, _claim_values(tx, claim)).fetchone()) is not None:
                sqlite_rows.mark_unreadable(tx, sqlite_rows.PENDING, {row[0]: reason}, to_microseconds(now))
            return row is not None

        return await self.file.write(mark)

    @override
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        at = None if attempt_at is None else to_microseconds(attempt_at)
        released_tokens = list[_ClaimToken]()

        def release_rows(tx: sqlite_rows.Transaction) -> int:
            for claim in claims:
                if tx.execute(_RELEASE, (at, *_claim_values(tx, claim))).rowcount:
                    assert isinstance(claim.token, _ClaimToken)
                    claim.token.is_released = True
                    released_tokens.append(claim.token)
            if released_tokens:
                tx.signal(sqlite_rows.DUE)
            return len(released_tokens)

        try:
            return await self.file.write(release_rows)
        except PostdateError:  # the transaction was rolled back: the claims are still in force
            for token in released_tokens:
                token.is_released = False
            raise

    @override
    async def next_attempt(self) -> datetime | None:
        return await self.file.read(sqlite_rows.next_attempt)

    @override
    async def listen(self, wake: ports.Wake) -> Callable[[], None]:
        return await self.file.listen(sqlite_rows.DUE, wake)

    # --- moving -------------------------------------------------------------------------------------------------

    @override
    async def move_due(self, now: datetime, limit: int, *, listing: bool = False) -> ports.MoveReport:
        at = to_microseconds(now)
        return await self.file.write(lambda tx: move(tx, at, limit, listing=listing))

    @override
    async def yield_to_writers(self) -> None:
        await self.file.yield_to_writers()

    # --- administration -----------------------------------------------------------------------------------------

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        at = to_microseconds(now)
        return await self.file.write(
            lambda tx: _remove_and_record(tx, message_id, ports.RecordKind.CANCELLED, at, only_unclaimed=True)
        )

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        new_due, at = to_microseconds(due), to_microseconds(now)

        def change(tx: sqlite_rows.Transaction) -> bool:
            if (row := _find(tx, message_id, only_unclaimed=True)) is None:
                return False
            seq, old_due, destination, expires_at = row
            check_reschedule(message_id, due, sqlite_rows.time_of(expires_at))
            sqlite_rows.signal_if_first(tx, new_due)
            tx.execute(_RESCHEDULE, (new_due, new_due, seq))
            for content, headers in tx.execute(_HEADERS, (seq,)).fetchall():
                changed = text_with_due(headers, sqlite_rows.time_of(old_due), due, wall_time)
                if changed is not None:
                    tx.execute(_SET_HEADERS, (changed, content))
            sqlite_rows.record(tx, ports.RecordKind.RESCHEDULED, (message_id, new_due, destination), at)
            return True

        return await self.file.write(change)

    @override
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        """Replace in two steps, because one thread writes for many callers and must not run their code.

        First ``create_message`` is called with the newest message that a reader sees. Then a transaction writes the
        result if that message is still the newest one of the key. Otherwise both steps are repeated.
        """
        ids, at = KeyedIds(key), to_microseconds(now)
        while True:
            newest, id_ = await self.file.read(lambda connection: newest_of_key(connection, ids))
            stored_at = None if newest.seq is None else sqlite_rows.time_of(newest.stored_at)
            (row,) = self._rows([create_message(id_, stored_at)])
            if await self.file.write(partial(replace_newest, ids=ids, newest=newest, row=row, at=at)):
                return id_

    @override
    async def replace_pending(self, message: DelayedMessage, now: datetime) -> bool:
        (row,) = self._rows([message])
        return await self.file.write(partial(replace_pending, row=row, at=to_microseconds(now)))

    @override
    async def store_keys(self, message_ids: Sequence[str]) -> None:
        values = [(each,) for each in message_ids]
        await self.file.write(lambda tx: tx.executemany(STORE_KEY, values) and None)

    @override
    async def _page(self, statement: str, values: Mapping[str, Any]) -> ports.PendingPage:
        def decode_numbered(row: sqlite_rows.Row) -> tuple[int, DelayedMessage]:
            return row[0], sqlite_rows.message_of(row)

        messages, rows = await read_readable_and_all_rows(
            self.file, sqlite_rows.PENDING, statement, values, decode_numbered
        )
        return page_of(messages, [(_due_of(row), row[0]) for row in rows], values.get("limit"))


def _due_of(row: sqlite_rows.Row) -> int:
    """Return the due time of a listed row, for the cursor; 0 if another program has written a value that is no time."""
    due = row[2]
    return math.ceil(due) if isinstance(due, int | float) else 0


def _insert_new(tx: sqlite_rows.Transaction, rows: Sequence[tuple[Any, ...]], at: int) -> None:
    report = sqlite_rows.insert_or_revive(tx, rows, at)
    if report.duplicate_ids:
        raise DuplicateMessage.of(report.duplicate_ids[0])


def _remove_and_record(
    tx: sqlite_rows.Transaction, message_id: str, kind: ports.RecordKind, at: int, *, only_unclaimed: bool = False
) -> bool:
    if (row := _find(tx, message_id, only_unclaimed=only_unclaimed)) is None:
        return False
    seq, due, destination, _ = row
    _delete(tx, "seq = ?", (seq,))
    sqlite_rows.record(tx, kind, (message_id, due, destination), at)
    return True


def _delete(tx: sqlite_rows.Transaction, condition: str, values: Sequence[Any]) -> int:
    contents = tx.execute(f"DELETE FROM delayed_message WHERE {condition} RETURNING content", values).fetchall()
    tx.executemany("DELETE FROM content WHERE seq = ?", contents)
    return len(contents)


_RESCHEDULE: Final = "UPDATE delayed_message SET due = ?, attempt_at = ?, failures = 0 WHERE seq = ?"
_OF_ID: Final = "WHERE unreadable IS NULL AND seq = (SELECT seq FROM record WHERE kind = 1 AND message_id = ?)"
_EARLIEST: Final = -(2**63)
_CLAIM: Final = f"""
    UPDATE delayed_message SET claimant = ?, attempt_at = NULL WHERE seq IN (
        SELECT seq FROM delayed_message WHERE attempt_at >= ? AND attempt_at < ? ORDER BY attempt_at LIMIT ?)
    RETURNING {sqlite_rows.PENDING_COLUMNS}"""


# How an old claim of a row is recognized. A claim that ends without removing the message counts a failure, so the
# number of failures differs. A message that was returned from the error queue begins again at 0, but it has a failure
# record that is later than the old claim. A message that was rescheduled or replaced has a later record of that, too
# (the range of kinds is the condition of the index). A release counts no failure, so its token is marked as released.
_IS_CLAIMED: Final = """
    seq = ? AND claimant = ? AND message_id = ? AND failures = ? AND NOT EXISTS (
        SELECT 1 FROM record AS failed WHERE failed.kind = 7 AND failed.message_id = ? AND failed.seq > ?)
    AND NOT EXISTS (
        SELECT 1 FROM record AS moved WHERE moved.kind BETWEEN 8 AND 11 AND moved.kind = 8
            AND moved.message_id = ? AND moved.seq > ?)"""
_FIND_CLAIMED: Final = f"SELECT seq FROM delayed_message WHERE {_IS_CLAIMED}"
_RELEASE: Final = f"UPDATE delayed_message SET claimant = NULL, attempt_at = coalesce(?, due) WHERE {_IS_CLAIMED}"


def _claim_values(tx: sqlite_rows.Transaction, claim: ports.Claim) -> tuple[object, ...]:
    id_, token = claim.message.message_id, claim.token
    assert isinstance(token, _ClaimToken)
    # No claimant has the number 0, so a lost claim finds no row.
    claimant = 0 if token.is_released or token.batch.claimant != tx.claimant else tx.claimant
    return (token.seq, claimant, id_, claim.message.number_of_failures, id_, token.latest, id_, token.latest)


def _finish(tx: sqlite_rows.Transaction, claim: ports.Claim, kind: ports.RecordKind, at: int, detail: str) -> int:
    if count := _delete(tx, _IS_CLAIMED, _claim_values(tx, claim)):
        message = claim.message
        sqlite_rows.record(
            tx, kind, (message.message_id, to_microseconds(message.due), message.destination), at, detail
        )
    return count


def _count_failure(tx: sqlite_rows.Transaction, seq: object, attempt_at: int | None, at: int, reason: str) -> bool:
    row = tx.execute(
        "UPDATE delayed_message SET failures = failures + 1, claimant = NULL, attempt_at = coalesce(?, due) "
        "WHERE seq = ? AND (claimant IS NULL OR claimant = ?) RETURNING message_id, due, destination",
        (attempt_at, seq, tx.claimant),
    ).fetchone()
    if row is None:
        return False
    if tx.recording is ports.Recording.ALL:
        sqlite_rows.record(tx, ports.RecordKind.RETRIED, row, at, reason)
    return True


def _find(
    tx: sqlite_rows.Transaction, message_id: str, *, only_unclaimed: bool = False
) -> tuple[int, int, str, int | None] | None:
    """Return number, due time, destination and expiry of a pending message.

    ``only_unclaimed``: only if it is unclaimed.
    """
    condition = f"{_OF_ID} AND claimant IS NULL" if only_unclaimed else _OF_ID
    sql = f"SELECT seq, due, destination, expires_at FROM delayed_message {condition}"
    return tx.execute(sql, (message_id,)).fetchone()
