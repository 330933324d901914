"""Delayed messages in one SQLite file: the embedded default.

Together with the local transport on the same file, a due message moves to its queue, is removed and is recorded in
one transaction, by set-based SQL: bodies never pass through Python. Source: ADR 0002, ADR 0003, specification 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from typing_extensions import override

from postdate.backends.sql.questions import SqlQuestions
from postdate.backends.sqlite import pruning, waiting
from postdate.backends.sqlite.file import DUE, SqliteFile, Transaction
from postdate.backends.sqlite.moving import move
from postdate.backends.sqlite.observation import FileObserver
from postdate.backends.sqlite.quarantine import FileQuarantine, looked_at
from postdate.backends.sqlite.recording import insert, insert_or_revive, record, signal_if_first
from postdate.backends.sqlite.rows import WAITING_COLUMNS, Row, message_of, time_of, waiting_row
from postdate.backends.sqlite.scanning import read_scan, scan_parts
from postdate.backends.sqlite.setting_aside import WAITING, claimed, set_aside
from postdate.backends.sqlite.transaction import SqliteSqlDialect
from postdate.backends.sqlite.waiting import next_attempt
from postdate.clock import to_microseconds
from postdate.errors import ClaimLost, DuplicateMessage, PostdateError
from postdate.messages import DelayedMessage, check_reschedule, encoded_deliver_at
from postdate.ports import (
    OUTCOME_RECORDS,
    ArchivableStore,
    Claim,
    MoveReport,
    MovingStore,
    Outcome,
    Recording,
    RecordKind,
    Scan,
    ScanPart,
    StoreCapabilities,
    StoreReport,
    TransactionMode,
    Wake,
    Work,
)
from postdate.ports.scanning import StoredRecord

_RETIME: Final = """
    UPDATE content SET headers = replace(headers, ?, ?)
    WHERE seq = (SELECT content FROM delayed_message WHERE seq = ?)"""


class _Claimed:
    """Messages claimed together under one claimant number; kept as long as any of their claims is."""

    def __init__(self, claimant: int, message_ids: Sequence[str]) -> None:
        self.claimant, self.message_ids = claimant, message_ids


@dataclass(slots=True, eq=False)
class _Token:
    """Identifies a claim, so that a later claim of the same message is told apart.

    Args:
        seq: number of the waiting message.
        batch: claimed with it.
        latest: number of the latest record at that time.
        released: given back; whoever holds the message now has another claim.
    """

    seq: int
    batch: _Claimed
    latest: int
    released: bool = False


class SqliteStore(SqlQuestions, FileQuarantine, MovingStore, ArchivableStore):
    """Keeps delayed messages in an SQLite file.

    Several processes may use one file at once; one file is one store, shared by all endpoints on it.

    Args:
        path: of the file; created by :meth:`setup` or at first use unless ``create`` is false.
        synchronous: ``full``: a commit survives loss of power; ``normal``: it survives any end of the process.
        recording: how much is kept for audits.
        largest_message_bytes: of headers and body together.
        create: create the file and its tables when they are missing.
        holds_at_most: a process that is frozen for so long loses its claims to others, and is fenced off; at least
            3 s. By default that of the transport on this file, or 60 s.

    Raises:
        ConfigurationError: a setting is invalid, or the file is open in this process with other settings.
    """

    _place = "place = ''"
    _dialect = SqliteSqlDialect()

    def __init__(
        self,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
        largest_message_bytes: int = 16 * 1024 * 1024,
        create: bool = True,
        holds_at_most: timedelta | None = None,
    ) -> None:
        self.file = SqliteFile.open(
            path, synchronous=synchronous, recording=recording, create=create, holds_at_most=holds_at_most
        )
        self._claimed = WeakSet[_Claimed]()
        self._capabilities = StoreCapabilities(
            durable=True,
            shared=True,
            time_precision=timedelta(microseconds=1),
            transaction_modes=frozenset(TransactionMode),
            database=("sqlite", str(self.file.path)),
            largest_message_bytes=largest_message_bytes,
        )

    @property
    @override
    def capabilities(self) -> StoreCapabilities:
        if self._capabilities.holds_at_most != self.file.holds_at_most:  # said by a transport that was opened later
            self._capabilities = replace(self._capabilities, holds_at_most=self.file.holds_at_most)
        return self._capabilities

    @override
    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
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
        row, at = waiting_row(message, self._capabilities.largest_message_bytes), to_microseconds(now)
        await self.file.write(lambda tx: _insert_new(tx, [row], at))

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        work = self._storing(messages, now)
        return await self.file.write(work)

    def store_many_blocking(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        """:meth:`store_many` in the calling thread, for pipeline processes."""
        return self.file.write_blocking(self._storing(messages, now))

    @override
    def storing(self, messages: Sequence[DelayedMessage], now: datetime) -> Work:
        rows, at = self._rows(messages), to_microseconds(now)

        return lambda tx: _insert_new(tx, rows, at)

    def _storing(self, messages: Sequence[DelayedMessage], now: datetime) -> Callable[[Transaction], StoreReport]:
        rows, at = self._rows(messages), to_microseconds(now)
        return lambda tx: insert(tx, rows, at)

    def _rows(self, messages: Sequence[DelayedMessage]) -> list[tuple[Any, ...]]:
        limit = self._capabilities.largest_message_bytes
        return [waiting_row(message, limit) for message in messages]

    # --- the simple contract ------------------------------------------------------------------------------------

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        return await self.file.write(lambda tx: _end(tx, message_id, RecordKind.DELIVERED, to_microseconds(now)))

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        def count(tx: Transaction) -> bool:
            row = _find(tx, message_id)
            return row is not None and _count_failure(tx, row[0], None, to_microseconds(now), "")

        return await self.file.write(count)

    # --- claims -------------------------------------------------------------------------------------------------

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        at = to_microseconds(now)

        def claim(tx: Transaction) -> tuple[list[tuple[int, DelayedMessage]], int, int]:
            (latest,) = tx.execute("SELECT coalesce(max(seq), 0) FROM record").fetchone()
            return claimed(tx, WAITING, _CLAIM, (tx.claimant, at, limit), _numbered, at), tx.claimant, latest

        found, claimant, latest = await self.file.write(claim)
        found.sort(key=lambda each: (each[1].due, each[0]))
        batch = _Claimed(claimant, [message.message_id for _, message in found])
        self._claimed.add(batch)
        return [Claim(message, token=_Token(seq, batch, latest)) for seq, message in found]

    @override
    def when_lost(self, lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        """Called after this process was frozen, or the file replaced."""
        loop = asyncio.get_running_loop()

        def fenced(claimant: int) -> None:
            ids = [id_ for batch in list(self._claimed) if batch.claimant == claimant for id_ in batch.message_ids]
            with suppress(RuntimeError):  # the loop is closed: nobody sends anything there any more
                loop.call_soon_threadsafe(lost, ids)

        return self.file.when_fenced(fenced)

    @override
    def still_holds(self, claim: Claim) -> bool:
        token = claim.token
        assert isinstance(token, _Token)
        return not token.released and self.file.is_in_force(token.batch.claimant)

    @override
    async def finish(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> int:
        at = to_microseconds(now)
        return await self.file.write(
            lambda tx: sum(_finish(tx, claim, OUTCOME_RECORDS[outcome], at, detail) for claim in claims)
        )

    @override
    def finishing(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> Work:
        at = to_microseconds(now)

        def finish(tx: Transaction) -> None:
            for claim in claims:
                if not _finish(tx, claim, OUTCOME_RECORDS[outcome], at, detail):
                    raise ClaimLost.of(claim.message.message_id)

        return finish

    @override
    async def retry_later(self, claim: Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        def give_back(tx: Transaction) -> bool:
            held = tx.execute(f"SELECT seq FROM delayed_message WHERE {_HELD}", _held_by(tx, claim)).fetchone()
            return held is not None and _count_failure(
                tx, held[0], to_microseconds(attempt_at), to_microseconds(now), reason
            )

        return await self.file.write(give_back)

    @override
    async def set_aside(self, claim: Claim, reason: str, now: datetime) -> bool:
        def put(tx: Transaction) -> bool:
            held = tx.execute(f"SELECT seq FROM delayed_message WHERE {_HELD}", _held_by(tx, claim)).fetchone()
            if held is not None:
                set_aside(tx, WAITING, {held[0]: reason}, to_microseconds(now))
            return held is not None

        return await self.file.write(put)

    @override
    async def release(self, claims: Sequence[Claim], attempt_at: datetime | None) -> int:
        at = None if attempt_at is None else to_microseconds(attempt_at)
        released = list[_Token]()

        def give_back(tx: Transaction) -> int:
            for claim in claims:
                if tx.execute(_RELEASE, (at, *_held_by(tx, claim))).rowcount:
                    assert isinstance(claim.token, _Token)
                    claim.token.released = True
                    released.append(claim.token)
            if released:
                tx.signal(DUE)
            return len(released)

        try:
            return await self.file.write(give_back)
        except PostdateError:  # nothing of it was kept: they are still held
            for token in released:
                token.released = False
            raise

    @override
    async def next_attempt(self) -> datetime | None:
        return await self.file.read(next_attempt)

    @override
    async def listen(self, wake: Wake) -> Callable[[], None]:
        return await self.file.listen(DUE, wake)

    # --- moving -------------------------------------------------------------------------------------------------

    @override
    async def move_due(self, now: datetime, limit: int, *, listing: bool = False) -> MoveReport:
        at = to_microseconds(now)
        return await self.file.write(lambda tx: move(tx, at, limit, listing=listing))

    @override
    async def pause(self) -> None:
        await self.file.give_way()

    # --- administration -----------------------------------------------------------------------------------------

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        at = to_microseconds(now)
        return await self.file.write(lambda tx: _end(tx, message_id, RecordKind.CANCELLED, at, free=True))

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime) -> bool:
        new_due, at = to_microseconds(due), to_microseconds(now)

        def reschedule(tx: Transaction) -> bool:
            row = _find(tx, message_id, free=True)
            if row is None:
                return False
            seq, old_due, destination, expires_at = row
            check_reschedule(message_id, due, time_of(expires_at))
            signal_if_first(tx, new_due)
            tx.execute("UPDATE delayed_message SET due = ?, attempt_at = ? WHERE seq = ?", (new_due, new_due, seq))
            old = time_of(old_due)
            if old is not None:
                tx.execute(_RETIME, (encoded_deliver_at(old), encoded_deliver_at(due), seq))
            record(tx, RecordKind.RESCHEDULED, (message_id, new_due, destination), at)
            return True

        return await self.file.write(reschedule)

    @property
    @override
    def _sessions(self) -> SqliteFile:
        return self.file

    @property
    @override
    def _questions(self) -> Any:
        return waiting

    @override
    async def _messages(self, statement: str, values: Mapping[str, Any]) -> list[DelayedMessage]:
        return await looked_at(self.file, WAITING, statement, values, message_of)

    # --- scans --------------------------------------------------------------------------------------------------

    @override
    def scan_parts(self, what: str, parts: int) -> Sequence[ScanPart]:
        return scan_parts(self.file, what, parts)

    @override
    def scan(self, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        return read_scan(self.file, scan, part, page)

    @property
    @override
    def records_in_commit_order(self) -> bool:
        return True

    @override
    def tables_of_stores(self) -> Sequence[str]:
        return ()

    # --- pruning ------------------------------------------------------------------------------------------------

    @property
    @override
    def pruned_at_once(self) -> int:
        """Few, because other processes wait for each transaction."""
        return 2_000

    @override
    def mark_archived(self, part: ScanPart, numbers: Sequence[int]) -> int:
        return pruning.mark_archived(self.file, numbers)

    @override
    def prune(self, part: ScanPart, numbers: Sequence[int]) -> int:
        return pruning.prune(self.file, numbers)

    @override
    def restore(self, records: Sequence[StoredRecord]) -> int:
        return pruning.restore(self.file, records)


def _insert_new(tx: Transaction, rows: Sequence[tuple[Any, ...]], at: int) -> None:
    report = insert_or_revive(tx, rows, at)
    if report.already_there:
        raise DuplicateMessage.of(report.already_there[0])


def _end(tx: Transaction, message_id: str, kind: RecordKind, at: int, *, free: bool = False) -> bool:
    row = _find(tx, message_id, free=free)
    if row is None:
        return False
    seq, due, destination, _ = row
    _delete(tx, "seq = ?", (seq,))
    record(tx, kind, (message_id, due, destination), at)
    return True


def _delete(tx: Transaction, condition: str, values: Sequence[Any]) -> int:
    found = tx.execute(f"DELETE FROM delayed_message WHERE {condition} RETURNING content", values).fetchall()
    tx.executemany("DELETE FROM content WHERE seq = ?", found)
    return len(found)


_OF_ID: Final = "WHERE seq = (SELECT seq FROM record WHERE kind = 1 AND message_id = ?)"
_CLAIM: Final = f"""
    UPDATE delayed_message SET claimant = ?, attempt_at = NULL WHERE seq IN (
        SELECT seq FROM delayed_message WHERE attempt_at < ? ORDER BY attempt_at LIMIT ?)
    RETURNING {WAITING_COLUMNS}"""


def _numbered(row: Row) -> tuple[int, DelayedMessage]:
    return row[0], message_of(row)


# A claim that ends without removing the message counts a failure, so the count tells an old claim apart. A message that
# came back from the error queue begins again at 0: it has a failure record later than an old claim. A release counts no
# failure: its token is marked.
_HELD: Final = """
    seq = ? AND claimant = ? AND message_id = ? AND failures = ? AND NOT EXISTS (
        SELECT 1 FROM record AS failed WHERE failed.kind = 7 AND failed.message_id = ? AND failed.seq > ?)"""
_RELEASE: Final = f"UPDATE delayed_message SET claimant = NULL, attempt_at = coalesce(?, due) WHERE {_HELD}"


def _held_by(tx: Transaction, claim: Claim) -> tuple[object, ...]:
    id_, token = claim.message.message_id, claim.token
    assert isinstance(token, _Token)
    # No claimant is numbered 0: a void claim finds no row.
    claimant = 0 if token.released or token.batch.claimant != tx.claimant else tx.claimant
    return (token.seq, claimant, id_, claim.message.number_of_failures, id_, token.latest)


def _finish(tx: Transaction, claim: Claim, kind: RecordKind, at: int, detail: str) -> int:
    held = _delete(tx, _HELD, _held_by(tx, claim))
    if held:
        message = claim.message
        record(tx, kind, (message.message_id, to_microseconds(message.due), message.destination), at, detail)
    return held


def _count_failure(tx: Transaction, seq: object, attempt_at: int | None, at: int, reason: str) -> bool:
    row = tx.execute(
        "UPDATE delayed_message SET failures = failures + 1, claimant = NULL, attempt_at = coalesce(?, due) "
        "WHERE seq = ? AND (claimant IS NULL OR claimant = ?) RETURNING message_id, due, destination",
        (attempt_at, seq, tx.claimant),
    ).fetchone()
    if row is None:
        return False
    if tx.recording is Recording.ALL:
        record(tx, RecordKind.RETRIED, row, at, reason)
    return True


def _find(tx: Transaction, message_id: str, *, free: bool = False) -> tuple[int, int, str, int | None] | None:
    """Return number, due time, destination and expiry of a waiting message, readable or not; ``free``: if unclaimed."""
    condition = f"{_OF_ID} AND claimant IS NULL" if free else _OF_ID
    sql = f"SELECT seq, due, destination, expires_at FROM delayed_message {condition}"
    return tx.execute(sql, (message_id,)).fetchone()
