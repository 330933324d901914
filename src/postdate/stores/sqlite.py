"""Delayed messages in one SQLite file: the embedded default.

Together with the local transport on the same file, a due message moves to its queue, is removed and is recorded in
one transaction, by set-based SQL: bodies never pass through Python. Source: ADR 0002, ADR 0003, specification 1.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from postdate.clock import from_microseconds, to_microseconds
from postdate.embedded.file import DUE, SqliteFile, Transaction, queue_topic
from postdate.errors import ClaimLost, DuplicateMessage, InvalidMessage, MessageTooLarge, PipelineError
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
    ScanPart,
    StoreCapabilities,
    StoreReport,
    StoreStatistics,
    TransactionMode,
    Wake,
    Work,
)

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

# The batch is written down first: every later statement works on exactly these rows, whatever the planner does.
_TAKE_BATCH: Final = """
    INSERT INTO temp.batch (seq, queue_id, expired)
    SELECT d.seq, q.queue_id, coalesce(d.expires_at < :now, 0)
    FROM delayed_message AS d INDEXED BY delayed_message_attempt CROSS JOIN queue AS q ON q.name = d.destination
    WHERE d.attempt_at < :now ORDER BY d.attempt_at LIMIT :limit"""
_SEND_BATCH: Final = """
    INSERT INTO queue_message (queue_id, message_id, due, expires_at, content)
    SELECT b.queue_id, d.message_id, d.due, d.expires_at, d.content
    FROM temp.batch AS b CROSS JOIN delayed_message AS d ON d.seq = b.seq
    WHERE NOT b.expired ORDER BY b.position"""
_RECORD_BATCH: Final = """
    INSERT INTO record (kind, message_id, at, due, destination)
    SELECT iif(b.expired, 5, 2), d.message_id, :now, d.due, d.destination
    FROM temp.batch AS b CROSS JOIN delayed_message AS d ON d.seq = b.seq
    ORDER BY b.position"""
_DROP_EXPIRED_CONTENT: Final = """
    DELETE FROM content WHERE seq IN (
        SELECT d.content FROM temp.batch AS b CROSS JOIN delayed_message AS d ON d.seq = b.seq WHERE b.expired)"""
_REMOVE_BATCH: Final = """
    DELETE FROM delayed_message WHERE seq IN (SELECT seq FROM temp.batch)"""
_FORGET_BATCH: Final = """
    DELETE FROM record WHERE kind = 1 AND message_id IN (
        SELECT message_id FROM delayed_message WHERE seq IN (SELECT seq FROM temp.batch))"""
_HEAD_HAS_NO_QUEUE: Final = """
    SELECT NOT EXISTS (SELECT 1 FROM queue AS q WHERE q.name = d.destination)
    FROM delayed_message AS d INDEXED BY delayed_message_attempt
    WHERE d.attempt_at < :now ORDER BY d.attempt_at LIMIT 1"""


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
        return _instant(await self.file.read(_first_due))

    # --- claims -------------------------------------------------------------------------------------------------

    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        """See :meth:`postdate.ports.ClaimingStore.claim_due`."""

        def claim(tx: Transaction) -> list[tuple[Any, ...]]:
            return tx.execute(
                f"UPDATE delayed_message SET claimant = ?, attempt_at = NULL WHERE seq IN (SELECT seq "
                f"FROM delayed_message WHERE attempt_at < ? ORDER BY attempt_at LIMIT ?) RETURNING seq, {_COLUMNS}",
                (tx.claimant, to_microseconds(now), limit),
            ).fetchall()

        rows = await self.file.write(claim)
        rows.sort(key=lambda row: (row[2], row[0]))
        return [Claim(_message(row[1:]), token=row[0]) for row in rows]

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
            held = tx.execute(
                "SELECT 1 FROM delayed_message WHERE seq = ? AND claimant = ? AND failures = ? AND message_id = ?",
                (claim.token, tx.claimant, claim.message.number_of_failures, claim.message.message_id),
            ).fetchone()
            return held is not None and _count_failure(tx, claim.token, attempt_at, to_microseconds(now), reason)

        return await self.file.write(give_back)

    async def next_attempt(self) -> datetime | None:
        """See :meth:`postdate.ports.ClaimingStore.next_attempt`."""
        return await self.file.read(_next_attempt)

    async def listen(self, wake: Wake) -> Callable[[], None]:
        """See :meth:`postdate.ports.ClaimingStore.listen`; other processes are heard, too."""
        return await self.file.listen(DUE, wake)

    # --- moving -------------------------------------------------------------------------------------------------

    async def move_due(self, now: datetime, limit: int) -> MoveReport:
        """See :meth:`postdate.ports.MovingStore.move_due`."""
        at = to_microseconds(now)
        return await self.file.write(lambda tx: _move(tx, at, limit))

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
        return await self.file.read(lambda c: _statistics(c, to_microseconds(now)))

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

    def scan_parts(self, what: str, parts: int) -> Sequence[ScanPart]:
        """See :meth:`postdate.ports.ScannableStore.scan_parts`."""
        table = _scanned(what).table
        first, last = self.file.read_blocking(
            lambda c: c.execute(f"SELECT coalesce(min(seq), 0), coalesce(max(seq), -1) FROM {table}").fetchone()
        )
        step = max(-(-(last + 1 - first) // max(parts, 1)), 1)
        return [ScanPart(start, min(start + step, last + 1)) for start in range(first, last + 1, step)]

    def scan(self, what: str, part: ScanPart, columns: Sequence[str], page: int) -> Iterable[list[tuple[Any, ...]]]:
        """See :meth:`postdate.ports.ScannableStore.scan`."""
        source = _scanned(what)
        unknown = [column for column in columns if column not in source.columns]
        if unknown:
            raise PipelineError(f"{what} has no column {unknown[0]!r}; it has {', '.join(source.columns)}")
        wanted = ", ".join(source.columns[column] for column in columns) or "1"
        connection = self.file.snapshot()
        try:
            cursor = connection.execute(
                f"SELECT {wanted} FROM {source.relation} WHERE t.seq >= ? AND t.seq < ? ORDER BY t.seq",
                (part.first, part.end),
            )
            while rows := cursor.fetchmany(page):
                yield rows
        finally:
            connection.close()


class _Scanned:
    """A relation that can be scanned by ``t.seq``, and what its columns are called outside."""

    def __init__(self, table: str, relation: str, **columns: str) -> None:
        self.table, self.relation, self.columns = table, relation, columns


_SCANNED: Final = {
    "pending": _Scanned(
        "delayed_message",
        "delayed_message AS t JOIN content AS c ON c.seq = t.content",
        message_id="t.message_id",
        destination="t.destination",
        due="t.due",
        expires_at="t.expires_at",
        headers="c.headers",
        body="c.body",
        number_of_failures="t.failures",
    ),
    "records": _Scanned(
        "record",
        "record AS t",
        kind="t.kind",
        message_id="t.message_id",
        at="t.at",
        due="t.due",
        destination="t.destination",
        detail="t.detail",
    ),
    "queued": _Scanned(
        "queue_message",
        "queue_message AS t JOIN queue AS q USING (queue_id)",
        message_id="t.message_id",
        queue="q.name",
        due="t.due",
    ),
}


def _scanned(what: str) -> _Scanned:
    if what not in _SCANNED:
        raise PipelineError(f"there is nothing called {what!r} to scan; choose one of {', '.join(_SCANNED)}")
    return _SCANNED[what]


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
    revived = [row for row in rows if row[0] in report.already_there and _revive(tx, row, at)]
    back = {row[0] for row in revived}
    return StoreReport(report.stored + len(back), tuple(id_ for id_ in report.already_there if id_ not in back))


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


def _move(tx: Transaction, now: int, limit: int) -> MoveReport:
    tx.execute(
        "CREATE TEMP TABLE IF NOT EXISTS batch (position INTEGER PRIMARY KEY, seq INTEGER, queue_id INTEGER, expired)"
    )
    tx.execute("DELETE FROM temp.batch")
    values = {"now": now, "limit": limit}
    if tx.execute(_TAKE_BATCH, values).rowcount:
        delivered, expired = _move_batch(tx, now)
    else:
        delivered = expired = 0
    head = tx.execute(_HEAD_HAS_NO_QUEUE, {"now": now}).fetchone()
    return MoveReport(delivered, expired, bool(head and head[0]), _next_attempt(tx.connection))


def _move_batch(tx: Transaction, now: int) -> tuple[int, int]:
    delivered = tx.execute(_SEND_BATCH).rowcount
    if tx.recording is Recording.NONE:
        tx.execute(_FORGET_BATCH)
    else:
        tx.execute(_RECORD_BATCH, {"now": now})
    tx.execute(_DROP_EXPIRED_CONTENT)
    removed = tx.execute(_REMOVE_BATCH).rowcount
    for (name,) in tx.execute(
        "SELECT name FROM queue WHERE queue_id IN (SELECT queue_id FROM temp.batch WHERE NOT expired)"
    ).fetchall():
        tx.signal(queue_topic(name))
    return delivered, removed - delivered


def _next_attempt(connection: sqlite3.Connection) -> datetime | None:
    row = connection.execute(
        "SELECT attempt_at FROM delayed_message WHERE attempt_at IS NOT NULL ORDER BY attempt_at LIMIT 1"
    ).fetchone()
    return None if row is None else from_microseconds(row[0])


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


def _finish(tx: Transaction, claim: Claim, kind: RecordKind, at: int, detail: str) -> int:
    # Every claim that ends without removing the message counts a failure: with the count, an old claim is told apart.
    held = _delete(
        tx,
        "seq = ? AND claimant = ? AND message_id = ? AND failures = ?",
        (claim.token, tx.claimant, claim.message.message_id, claim.message.number_of_failures),
    )
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


_FIRST_DUE: Final = """
    SELECT min(first) FROM (
        SELECT min(attempt_at) AS first FROM delayed_message
        UNION ALL SELECT min(due) FROM delayed_message WHERE failures > 0
        UNION ALL SELECT min(due) FROM delayed_message WHERE attempt_at IS NULL)"""


def _first_due(connection: sqlite3.Connection) -> int | None:
    """Return the earliest due time without reading every row: only failed and held rows differ from attempt_at."""
    (first,) = connection.execute(_FIRST_DUE).fetchone()
    return first


def _statistics(connection: sqlite3.Connection, now: int) -> StoreStatistics:
    def count(condition: str, *values: int) -> int:
        sql = f"SELECT count(*) FROM delayed_message WHERE {condition}"
        number: int = connection.execute(sql, values).fetchone()[0]
        return number

    return StoreStatistics(
        pending=count("1"),
        overdue=count("attempt_at < ?", now) + count("failures > 0 AND attempt_at >= ? AND due < ?", now, now),
        claimed=count("attempt_at IS NULL"),
        failing=count("failures > 0"),
        next_due=_instant(_first_due(connection)),
    )
