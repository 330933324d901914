"""Delayed messages in one SQLite file: the embedded default.

Together with the local transport on the same file, a due message moves to its queue, is removed and is recorded in
one transaction, by set-based SQL: bodies never pass through Python. Source: ADR 0002, ADR 0003, specification 1.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from postdate.clock import from_microseconds, to_microseconds
from postdate.embedded import pruning
from postdate.embedded.file import DUE, SqliteFile, Transaction
from postdate.embedded.moving import move
from postdate.embedded.scanning import read_scan, scan_parts
from postdate.embedded.waiting import first_due, next_attempt, statistics
from postdate.errors import ClaimLost, DuplicateMessage, InvalidMessage, MessageTooLarge
from postdate.messages import DelayedMessage, decode_headers, encode_headers, size_in_bytes
from postdate.ports import (
    OUTCOME_RECORDS,
    Claim,
    MessageFilter,
    MoveReport,
    Outcome,
    Record,
    Recording,
    RecordKind,
    Scan,
    ScanPart,
    StoreCapabilities,
    StoreReport,
    StoreStatistics,
    TransactionMode,
    Wake,
    Work,
)
from postdate.ports.pruning import StoredRecord
from postdate.ports.stores import Discarding

_COLUMNS: Final = (
    "message_id, due, destination, expires_at, failures, "
    "(SELECT headers FROM content AS c WHERE c.seq = content), (SELECT body FROM content AS c WHERE c.seq = content)"
)

_INSERT_SCHEDULED: Final = """
    INSERT INTO record (seq, kind, message_id, at, due, destination) VALUES (?, 1, ?, ?, ?, ?)
    ON CONFLICT (message_id) WHERE kind = 1 DO NOTHING"""
_INSERT_MESSAGE: Final = """
    INSERT INTO delayed_message (seq, message_id, due, attempt_at, destination, expires_at, content)
    VALUES (?, ?, ?, ?, ?, ?, ?)"""
_INSERT_CONTENT: Final = "INSERT INTO content (seq, headers, body) VALUES (?, ?, ?)"


class _Token(NamedTuple):
    """What fences a claim: the number of the waiting message, and of the latest record when it was claimed."""

    seq: int
    latest: int


class SqliteStore:
    """Keeps delayed messages in an SQLite file.

    Several processes may use one file at once; one file is one store, whatever endpoints are on it.

    Args:
        path: of the file; created by :meth:`setup` or at first use unless ``create`` is false.
        synchronous: ``full``: a commit survives loss of power; ``normal``: it survives any end of the process.
        recording: how much is kept for audits.
        largest_message_bytes: of headers and body together.
        create: create the file and its tables when they are missing.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
        largest_message_bytes: int = 16 * 1024 * 1024,
        create: bool = True,
    ) -> None:
        self.file = SqliteFile.open(path, synchronous=synchronous, recording=recording, create=create)
        self._closed = False
        self._capabilities = StoreCapabilities(
            durable=True,
            shared=True,
            time_precision=timedelta(microseconds=1),
            transaction_modes=frozenset(TransactionMode),
            database=("sqlite", str(self.file.path)),
            largest_message_bytes=largest_message_bytes,
        )

    @property
    def capabilities(self) -> StoreCapabilities:
        """See :class:`postdate.ports.DelayedMessageStore`."""
        return self._capabilities

    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
        """Open the file; every transaction mode is supported. See :class:`postdate.ports.DelayedMessageStore`."""
        await self.file.setup()

    async def setup(self) -> None:
        """Create the file and its tables."""
        await self.file.setup()

    async def close(self) -> None:
        """Give the file back; a second time without effect."""
        closed, self._closed = self._closed, True
        if not closed:
            self.file.close()

    # --- storing ------------------------------------------------------------------------------------------------

    async def store(self, message: DelayedMessage, now: datetime) -> None:
        """See :meth:`postdate.ports.DelayedMessageStore.store`."""
        work, at = self._row(message), to_microseconds(now)
        report = await self.file.write(lambda tx: _insert_or_revive(tx, [work], at))
        if report.already_there:
            raise DuplicateMessage(f"message {message.message_id!r} was stored before; the first one is unchanged")

    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        """See :meth:`postdate.ports.ClaimingStore.store_many`."""
        work = self._storing(messages, now)
        return await self.file.write(work)

    def store_many_blocking(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        """Do the same as :meth:`store_many` in the calling thread; for pipeline processes."""
        return self.file.write_blocking(self._storing(messages, now))

    def storing(self, messages: Sequence[DelayedMessage], now: datetime) -> Work:
        """See :meth:`postdate.ports.EnlistingStore.storing`."""
        rows, at = [self._row(message) for message in messages], to_microseconds(now)

        def store(tx: Transaction) -> None:
            _insert_or_revive(tx, rows, at)

        return store

    def _storing(self, messages: Sequence[DelayedMessage], now: datetime) -> Callable[[Transaction], StoreReport]:
        rows = [self._row(message) for message in messages]
        at = to_microseconds(now)
        return lambda tx: _insert(tx, rows, at)

    def _row(self, message: DelayedMessage) -> tuple[Any, ...]:
        due = to_microseconds(message.due)
        headers = encode_headers(message.headers)
        size, limit = size_in_bytes(headers, message.body), self._capabilities.largest_message_bytes
        if size > limit:
            raise MessageTooLarge(
                f"message {message.message_id!r} has {size:,} bytes, this store takes {limit:,}; keep large content "
                f"elsewhere and send a reference, or raise largest_message_bytes"
            )
        expires_at = None if message.expires_at is None else to_microseconds(message.expires_at)
        return (message.message_id, due, due, message.destination, expires_at, headers, message.body)

    # --- the simple contract ------------------------------------------------------------------------------------

    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        """See :meth:`postdate.ports.DelayedMessageStore.fetch_next_due`."""
        claims = await self.claim_due(now, 1)
        return claims[0].message if claims else None

    async def remove(self, message_id: str, now: datetime) -> bool:
        """See :meth:`postdate.ports.DelayedMessageStore.remove`; recorded as delivered."""
        return await self.file.write(lambda tx: _end(tx, message_id, RecordKind.DELIVERED, to_microseconds(now), ""))

    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        """See :meth:`postdate.ports.DelayedMessageStore.increment_failure_count`."""

        def count(tx: Transaction) -> bool:
            row = _find(tx.connection, message_id)
            return row is not None and _count_failure(tx, row[0], row[1].due, to_microseconds(now), "")

        return await self.file.write(count)

    async def next_due(self) -> datetime | None:
        """See :meth:`postdate.ports.DelayedMessageStore.next_due`; looks at every message, claimed ones too."""
        return _instant(await self.file.read(first_due))

    # --- claims -------------------------------------------------------------------------------------------------

    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        """See :meth:`postdate.ports.ClaimingStore.claim_due`."""

        def claim(tx: Transaction) -> tuple[list[tuple[Any, ...]], int]:
            (latest,) = tx.execute("SELECT coalesce(max(seq), 0) FROM record").fetchone()
            rows = tx.execute(
                f"UPDATE delayed_message SET claimant = ?, attempt_at = NULL WHERE seq IN (SELECT seq "
                f"FROM delayed_message WHERE attempt_at < ? ORDER BY attempt_at LIMIT ?) RETURNING seq, {_COLUMNS}",
                (tx.claimant, to_microseconds(now), limit),
            ).fetchall()
            return rows, latest

        rows, latest = await self.file.write(claim)
        rows.sort(key=lambda row: (row[2], row[0]))
        return [Claim(_message(row[1:]), token=_Token(row[0], latest)) for row in rows]

    async def finish(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> int:
        """See :meth:`postdate.ports.ClaimingStore.finish`."""
        at = to_microseconds(now)
        return await self.file.write(
            lambda tx: sum(_finish(tx, claim, OUTCOME_RECORDS[outcome], at, detail) for claim in claims)
        )

    def finishing(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> Work:
        """See :meth:`postdate.ports.EnlistingStore.finishing`."""
        at = to_microseconds(now)

        def finish(tx: Transaction) -> None:
            for claim in claims:
                if not _finish(tx, claim, OUTCOME_RECORDS[outcome], at, detail):
                    raise ClaimLost(f"message {claim.message.message_id!r} is no longer held by this process")

        return finish

    async def retry_later(self, claim: Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        """See :meth:`postdate.ports.ClaimingStore.retry_later`."""

        def give_back(tx: Transaction) -> bool:
            held = tx.execute(f"SELECT seq FROM delayed_message WHERE {_HELD}", _held_by(tx, claim)).fetchone()
            return held is not None and _count_failure(tx, held[0], attempt_at, to_microseconds(now), reason)

        return await self.file.write(give_back)

    async def next_attempt(self) -> datetime | None:
        """See :meth:`postdate.ports.ClaimingStore.next_attempt`."""
        return await self.file.read(next_attempt)

    async def listen(self, wake: Wake) -> Callable[[], None]:
        """See :meth:`postdate.ports.ClaimingStore.listen`; other processes are heard, too."""
        return await self.file.listen(DUE, wake)

    # --- moving -------------------------------------------------------------------------------------------------

    async def move_due(self, now: datetime, limit: int, *, listing: bool = False) -> MoveReport:
        """See :meth:`postdate.ports.MovingStore.move_due`."""
        at = to_microseconds(now)
        return await self.file.write(lambda tx: move(tx, at, limit, listing=listing))

    async def move_wanted(
        self, now: datetime, limit: int, discarding: Discarding, *, listing: bool = False
    ) -> MoveReport:
        """See :meth:`postdate.ports.stores.DiscardingStore.move_wanted`."""
        at = to_microseconds(now)
        return await self.file.write(lambda tx: move(tx, at, limit, discarding, listing=listing))

    async def pause(self) -> None:
        """See :meth:`postdate.ports.MovingStore.pause`."""
        await self.file.give_way()

    # --- administration -----------------------------------------------------------------------------------------

    async def cancel(self, message_id: str, now: datetime) -> bool:
        """See :meth:`postdate.ports.AdministrableStore.cancel`."""

        def cancel(tx: Transaction) -> bool:
            if _is_claimed(tx, message_id):
                return False
            return _end(tx, message_id, RecordKind.CANCELLED, to_microseconds(now), "")

        return await self.file.write(cancel)

    async def reschedule(self, message_id: str, due: datetime, now: datetime) -> bool:
        """See :meth:`postdate.ports.AdministrableStore.reschedule`."""
        new_due, at = to_microseconds(due), to_microseconds(now)

        def reschedule(tx: Transaction) -> bool:
            row = _find(tx.connection, message_id)
            if row is None or _is_claimed(tx, message_id):
                return False
            seq, message = row
            if message.expires_at is not None and due > message.expires_at:
                raise InvalidMessage(f"message {message_id!r} expires at {message.expires_at.isoformat()}, before that")
            _signal_if_first(tx, new_due)
            tx.execute("UPDATE delayed_message SET due = ?, attempt_at = ? WHERE seq = ?", (new_due, new_due, seq))
            _record(tx, RecordKind.RESCHEDULED, (message_id, new_due, message.destination), at)
            return True

        return await self.file.write(reschedule)

    async def statistics(self, now: datetime) -> StoreStatistics:
        """See :meth:`postdate.ports.InspectableStore.statistics`."""
        return await self.file.read(lambda c: statistics(c, to_microseconds(now)))

    async def record_counts(self) -> Mapping[RecordKind, int]:
        """See :meth:`postdate.ports.InspectableStore.record_counts`."""
        rows = await self.file.read(
            lambda c: c.execute("SELECT kind, count(*) FROM record GROUP BY kind ORDER BY kind").fetchall()
        )
        return {RecordKind(kind): count for kind, count in rows}

    async def list_pending(self, where: MessageFilter, limit: int) -> Sequence[DelayedMessage]:
        """See :meth:`postdate.ports.InspectableStore.list_pending`."""
        conditions, values = ["1"], list[Any]()
        for condition, value in (
            ("destination = ?", where.destination),
            ("due >= ?", None if where.due_from is None else to_microseconds(where.due_from)),
            ("due < ?", None if where.due_to is None else to_microseconds(where.due_to)),
        ):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        sql = f"SELECT {_COLUMNS} FROM delayed_message WHERE {' AND '.join(conditions)} ORDER BY due, seq LIMIT ?"
        rows = await self.file.read(lambda c: c.execute(sql, (*values, limit)).fetchall())
        return [_message(row) for row in rows]

    async def get(self, message_id: str) -> DelayedMessage | None:
        """See :meth:`postdate.ports.InspectableStore.get`."""
        row = await self.file.read(lambda c: _find(c, message_id))
        return None if row is None else row[1]

    async def history(self, message_id: str) -> Sequence[Record]:
        """See :meth:`postdate.ports.InspectableStore.history`."""
        rows = await self.file.read(
            lambda c: c.execute(
                "SELECT kind, message_id, at, due, destination, detail FROM record WHERE message_id = ? ORDER BY seq",
                (message_id,),
            ).fetchall()
        )
        return [
            Record(RecordKind(kind), id_, from_microseconds(at), _instant(due), destination, detail or "")
            for kind, id_, at, due, destination, detail in rows
        ]

    # --- scans --------------------------------------------------------------------------------------------------

    def snapshot(self) -> AbstractContextManager[str | None]:
        """See :meth:`postdate.ports.ScannableStore.snapshot`; no other process could adopt one."""
        return nullcontext()

    def scan_parts(self, what: str, parts: int) -> Sequence[ScanPart]:
        """See :meth:`postdate.ports.ScannableStore.scan_parts`."""
        return scan_parts(self.file, what, parts)

    def scan(self, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        """See :meth:`postdate.ports.ScannableStore.scan`."""
        return read_scan(self.file, scan, part, page)

    @property
    def records_in_commit_order(self) -> bool:
        """See :class:`postdate.ports.auditing.AuditableStore`: one transaction writes at a time."""
        return True

    def tables_of_stores(self) -> Sequence[str]:
        """See :meth:`postdate.ports.auditing.AuditableStore.tables_of_stores`."""
        return ()

    # --- pruning ------------------------------------------------------------------------------------------------

    @property
    def pruned_at_once(self) -> int:
        """See :class:`postdate.ports.pruning.PrunableStore`: other processes wait for each transaction."""
        return 2_000

    def mark_archived(self, part: ScanPart, numbers: Sequence[int]) -> int:
        """See :meth:`postdate.ports.pruning.PrunableStore.mark_archived`; a number is a place."""
        return pruning.mark_archived(self.file, numbers)

    def prune(self, part: ScanPart, numbers: Sequence[int]) -> int:
        """See :meth:`postdate.ports.pruning.PrunableStore.prune`."""
        return pruning.prune(self.file, numbers)

    def restore(self, records: Sequence[StoredRecord]) -> int:
        """See :meth:`postdate.ports.pruning.PrunableStore.restore`."""
        return pruning.restore(self.file, records)


def _insert(tx: Transaction, rows: Sequence[tuple[Any, ...]], at: int) -> StoreReport:
    if not rows:
        return StoreReport(0)
    (base,) = tx.execute("SELECT coalesce(max(seq), 0) + 1 FROM record").fetchone()
    numbered = [(base + offset, *row) for offset, row in enumerate(rows)]
    records = [(seq, id_, at, due, destination) for seq, id_, due, _, destination, *_ in numbered]
    new, duplicates = numbered, tuple[str, ...]()
    if tx.executemany(_INSERT_SCHEDULED, records).rowcount < len(rows):
        fresh = {seq for (seq,) in tx.execute("SELECT seq FROM record WHERE seq >= ?", (base,))}
        new = [row for row in numbered if row[0] in fresh]
        duplicates = tuple(row[1] for row in numbered if row[0] not in fresh)
    if new:
        _signal_if_first(tx, min(row[2] for row in new))
        (content,) = tx.execute("SELECT coalesce(max(seq), 0) + 1 FROM content").fetchone()
        tx.executemany(_INSERT_CONTENT, [(content + number, *row[6:]) for number, row in enumerate(new)])
        tx.executemany(_INSERT_MESSAGE, [(*row[:6], content + number) for number, row in enumerate(new)])
    return StoreReport(len(new), duplicates)


_FAILED_LAST: Final = """
    SELECT s.seq FROM record AS s WHERE s.kind = 1 AND s.message_id = :id
        AND NOT EXISTS (SELECT 1 FROM delayed_message AS d WHERE d.seq = s.seq)
        AND NOT EXISTS (SELECT 1 FROM record AS later WHERE later.message_id = :id AND later.kind IN (2, 3, 5, 6, 9)
            AND later.seq > (SELECT max(f.seq) FROM record AS f WHERE f.kind = 7 AND f.message_id = :id))
        AND EXISTS (SELECT 1 FROM record AS f WHERE f.kind = 7 AND f.message_id = :id)"""


def _insert_or_revive(tx: Transaction, rows: Sequence[tuple[Any, ...]], at: int) -> StoreReport:
    """Insert; what is known and went to the error queue last comes back under its old number."""
    report = _insert(tx, rows, at)
    content_of = {row[0]: row for row in reversed(rows)}  # of an id that stands twice the first one counts
    still_there = list[str]()
    for id_ in report.already_there:
        row = content_of.pop(id_, None)
        if row is None or not _revive(tx, row, at):
            still_there.append(id_)
    return StoreReport(len(rows) - len(still_there), tuple(still_there))


def _revive(tx: Transaction, row: tuple[Any, ...], at: int) -> bool:
    found = tx.execute(_FAILED_LAST, {"id": row[0]}).fetchone()
    if found is None:
        return False
    message_id, due, _, destination, *_ = row
    _signal_if_first(tx, due)
    content = tx.execute("INSERT INTO content (headers, body) VALUES (?, ?)", row[5:]).lastrowid
    tx.execute(_INSERT_MESSAGE, (found[0], *row[:5], content))
    _record(tx, RecordKind.RESCHEDULED, (message_id, due, destination), at, "came back from the error queue")
    return True


def _signal_if_first(tx: Transaction, due: int) -> None:
    """Wake the poller only when it would otherwise sleep too long: most messages are due after the first one."""
    (first,) = tx.execute("SELECT min(attempt_at) FROM delayed_message").fetchone()
    if first is None or due < first:
        tx.signal(DUE)


def _end(tx: Transaction, message_id: str, kind: RecordKind, at: int, detail: str) -> bool:
    row = _find(tx.connection, message_id)
    if row is None:
        return False
    _delete(tx, "seq = ?", (row[0],))
    _record(tx, kind, (message_id, to_microseconds(row[1].due), row[1].destination), at, detail)
    return True


def _delete(tx: Transaction, condition: str, values: Sequence[Any]) -> int:
    """Delete waiting messages with their content; return how many."""
    found = tx.execute(f"DELETE FROM delayed_message WHERE {condition} RETURNING content", values).fetchall()
    tx.executemany("DELETE FROM content WHERE seq = ?", found)
    return len(found)


# Every claim that ends without removing the message counts a failure: with the count, an old claim is told apart. A
# message that came back from the error queue begins again at none: it has failed since an old claim was made.
_HELD: Final = """
    seq = ? AND claimant = ? AND message_id = ? AND failures = ? AND NOT EXISTS (
        SELECT 1 FROM record AS failed WHERE failed.kind = 7 AND failed.message_id = ? AND failed.seq > ?)"""


def _held_by(tx: Transaction, claim: Claim) -> tuple[object, ...]:
    """Return the values of :data:`_HELD`."""
    id_, token = claim.message.message_id, claim.token
    assert isinstance(token, _Token)
    return (token.seq, tx.claimant, id_, claim.message.number_of_failures, id_, token.latest)


def _finish(tx: Transaction, claim: Claim, kind: RecordKind, at: int, detail: str) -> int:
    held = _delete(tx, _HELD, _held_by(tx, claim))
    if held:
        message = claim.message
        _record(tx, kind, (message.message_id, to_microseconds(message.due), message.destination), at, detail)
    return held


def _count_failure(tx: Transaction, seq: object, attempt_at: datetime, at: int, reason: str) -> bool:
    row = tx.execute(
        "UPDATE delayed_message SET failures = failures + 1, claimant = NULL, attempt_at = ? "
        "WHERE seq = ? AND (claimant IS NULL OR claimant = ?) RETURNING message_id, due, destination",
        (to_microseconds(attempt_at), seq, tx.claimant),
    ).fetchone()
    if row is None:
        return False
    if tx.recording is Recording.ALL:
        _record(tx, RecordKind.RETRIED, row, at, reason)
    return True


def _record(tx: Transaction, kind: RecordKind, of: tuple[str, int, str], at: int, detail: str = "") -> None:
    """Record what happened to the message given as id, due time and destination."""
    if tx.recording is Recording.NONE:
        tx.execute("DELETE FROM record WHERE kind = 1 AND message_id = ?", of[:1])
        return
    tx.execute(
        "INSERT INTO record (kind, at, detail, message_id, due, destination) VALUES (?, ?, ?, ?, ?, ?)",
        (int(kind), at, detail or None, *of),
    )


def _find(connection: sqlite3.Connection, message_id: str) -> tuple[int, DelayedMessage] | None:
    row = connection.execute(
        f"SELECT seq, {_COLUMNS} FROM delayed_message "
        f"WHERE seq = (SELECT seq FROM record WHERE kind = 1 AND message_id = ?)",
        (message_id,),
    ).fetchone()
    return None if row is None else (row[0], _message(row[1:]))


def _is_claimed(tx: Transaction, message_id: str) -> bool:
    row = tx.execute(
        "SELECT claimant FROM delayed_message WHERE seq = (SELECT seq FROM record WHERE kind = 1 AND message_id = ?)",
        (message_id,),
    ).fetchone()
    return row is not None and row[0] is not None


def _message(row: Sequence[Any]) -> DelayedMessage:
    message_id, due, destination, expires_at, failures, headers, body = row
    return DelayedMessage(
        message_id=message_id,
        due=from_microseconds(due),
        destination=destination,
        headers=decode_headers(headers),
        body=body,
        expires_at=_instant(expires_at),
        number_of_failures=failures,
    )


def _instant(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else from_microseconds(microseconds)
