"""Write transactions, and the rows of messages and records in the file. Times are microseconds since 1970 UTC.

Each row is decoded by itself. An unreadable row does not affect others, and is marked in the transaction that reads it
(ADR 0043). Stored messages are not checked against size limits again, as the limits may be tighter now.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar

from typing_extensions import override

from postdate.backends.sql.dialect import SqlDialect
from postdate.clock import Clock, SystemClock, from_microseconds, nearest_instant, to_microseconds
from postdate.errors import InvalidHeaders, InvalidMessage
from postdate.messages import DelayedMessage, Envelope, decode_headers, encode_for_store
from postdate.ports import Recording, RecordKind, StoreReport
from postdate.ports.observation import UNREADABLE
from postdate.ports.transports import ExpiryRules

DUE: Final = "due"
"""The topic of the signal that a message was stored that is due before all others."""

_MACHINE_CLOCK: Final = SystemClock()


def queue_topic(queue: str) -> str:
    return f"queue:{queue}"


@dataclass(frozen=True, slots=True)
class QueueRules:
    """How the queues of a file treat expired messages.

    ``clock`` is that of the machine. ``expiry`` has the rules of MSMQ; ``None``: each message has an expiry of its own,
    and expired messages are deleted.
    """

    clock: Clock = _MACHINE_CLOCK
    expiry: ExpiryRules | None = None

    def matches(self, other: QueueRules) -> bool:
        clocks = (self.clock, other.clock)
        same_clock = self.clock == other.clock or all(isinstance(clock, SystemClock) for clock in clocks)
        return same_clock and self.expiry == other.expiry

    def now(self) -> int:
        return to_microseconds(self.clock.now())

    @property
    def has_dead_letters(self) -> bool:
        """Return whether a message without its own setting becomes a dead letter when it expires in its queue."""
        return self.expiry is not None and self.expiry.use_dead_letter_queue_for_messages_with_time_to_be_received


class Transaction:
    """An open write transaction on the file, given to :data:`postdate.ports.Work`.

    Args:
        connection: in a transaction; do not commit or roll back.
        claimant: the number under which this process claims messages.
        recording: how much is recorded.
        rules: of the queues.
    """

    def __init__(self, connection: sqlite3.Connection, claimant: int, recording: Recording, rules: QueueRules) -> None:
        self.connection = connection
        self.claimant = claimant
        self.recording = recording
        self.rules = rules
        self.topics: set[str] = set()

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        return self.connection.execute(sql, parameters)

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> sqlite3.Cursor:
        return self.connection.executemany(sql, rows)

    def signal(self, topic: str) -> None:
        """Wake the listeners of ``topic`` after the commit."""
        self.topics.add(topic)


class SqliteSqlDialect(SqlDialect):
    """SQLite's form of the common statements: parameters are written ``:name``."""

    can_batch = True

    @override
    def statement_of(self, template: str) -> str:
        return re.sub(r"%%|%\((\w+)\)s", lambda match: f":{match[1]}" if match[1] else "%", template)

    @override
    def delete_statement(self, table: str, condition: str, order: str, index: str) -> tuple[str, str]:
        find = (
            f"SELECT rowid FROM {table} INDEXED BY postdate_{index} WHERE {condition} ORDER BY {order} LIMIT %(limit)s"
        )
        return self.statement_of(find), f"DELETE FROM {table} WHERE rowid = ?"

    @override
    def delete_first(self, session: Any, statement: tuple[str, str], values: Mapping[str, Any]) -> int:
        """Delete rows one by one.

        With a list of numbers, SQLite would scan the whole table if ANALYZE was run when it had one row.
        """
        find, delete = statement
        return session.executemany(delete, session.execute(find, values).fetchall()).rowcount


# --- messages as rows ---------------------------------------------------------------------------------------------

PENDING_FIELDS: Final = ("message_id", "due", "destination", "expires_at", "failures")
"""Columns of a pending message with fields of the message, without its content."""

QUEUED_FIELDS: Final = ("message_id", "due", "expires_at", "failures", "ends_at", "dead_letter")
"""Columns of a message in a queue with fields of the message, without its content."""

_CONTENT: Final = (
    "(SELECT CAST(headers AS BLOB) FROM content AS c WHERE c.seq = content), "
    "(SELECT body FROM content AS c WHERE c.seq = content)"
)
PENDING_COLUMNS: Final = f"seq, {', '.join(PENDING_FIELDS)}, {_CONTENT}"
"""Columns of a pending message, for :func:`message_of`. Headers are read as bytes, as they may be no UTF-8."""

QUEUED_COLUMNS: Final = f"seq, {', '.join(QUEUED_FIELDS[:4])}, {_CONTENT}, unanswered"
"""Columns of a message in a queue, for :func:`envelope_of`."""

INSERT_PENDING: Final = f"""
    INSERT INTO delayed_message (seq, {", ".join(PENDING_FIELDS[:-1])}, content, attempt_at)
    VALUES (?, ?, ?, ?, ?, ?, ?)"""
"""Parameters: the number, :data:`PENDING_FIELDS` without the failures, the number of the content, the due time again.
"""

INSERT_QUEUED: Final = f"""
    INSERT INTO queue_message (queue_id, {", ".join(QUEUED_FIELDS)}, content) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
"""Parameters: the number of the queue, :data:`QUEUED_FIELDS`, and the number of the content."""

T = TypeVar("T")
Row = Sequence[Any]


def pending_row(message: DelayedMessage, largest_message_bytes: int) -> tuple[Any, ...]:
    """Return :data:`PENDING_FIELDS` without the failures, then headers and body. Raises `MessageTooLarge`."""
    headers = encode_for_store(message, largest_message_bytes)
    expires_at = None if message.expires_at is None else to_microseconds(message.expires_at)
    return (message.message_id, to_microseconds(message.due), message.destination, expires_at, headers, message.body)


def queued_row(envelope: Envelope, headers: str, ends_at: int | None, *, dead_letter: bool) -> tuple[Any, ...]:
    """Return :data:`QUEUED_FIELDS` of a new message, the name of its queue, headers and body."""
    due = None if envelope.due is None else to_microseconds(envelope.due)
    expires_at = None if envelope.expires_at is None else to_microseconds(envelope.expires_at)
    fields = (envelope.message_id, due, expires_at, 0, ends_at, int(dead_letter))
    return (*fields, envelope.destination, headers, envelope.body)


def message_of(row: Row) -> DelayedMessage:
    """Return the message of a row of :data:`PENDING_COLUMNS`. Raises `InvalidMessage` or `InvalidHeaders`."""
    _, message_id, due, destination, expires_at, failures, headers, body = row
    return DelayedMessage.from_store(
        text_of(message_id, "the message id"),
        instant_of(due, "the due time"),
        text_of(destination, "the destination"),
        *content_of(headers, body),
        None if expires_at is None else instant_of(expires_at, "the expiry"),
        integer_of(failures, "the number of failures"),
    )


def envelope_of(row: Row, queue: str) -> tuple[Envelope, int, int]:
    """Return the envelope of a row of :data:`QUEUED_COLUMNS`, its failures, and how many processes died with it.

    Raises as :func:`message_of`.
    """
    _, message_id, due, expires_at, failures, headers, body, unanswered = row
    envelope = Envelope.from_queue(
        queue,
        text_of(message_id, "the message id"),
        *content_of(headers, body),
        None if expires_at is None else instant_of(expires_at, "the expiry"),
        None if due is None else instant_of(due, "the due time"),
    )
    return (
        envelope,
        integer_of(failures, "the number of failures"),
        integer_of(unanswered, "the number of dead processes"),
    )


def text_of(value: object, what: str) -> str:
    if type(value) is str:
        return value
    raise InvalidMessage(f"{what} is no text: {_short_text(value)}")


def integer_of(value: object, what: str) -> int:
    if type(value) is int:
        return value
    raise InvalidMessage(f"{what} is no whole number: {_short_text(value)}")


def instant_of(value: object, what: str) -> datetime:
    """Return the time of a column, which must hold microseconds since 1970 UTC."""
    try:
        return from_microseconds(integer_of(value, what))
    except OverflowError as error:
        raise InvalidMessage(f"{what} is outside the years 1 to 9999: {value} us since 1970") from error


def time_of(value: object) -> datetime | None:
    """Return the time of a column, clamped to the calendar; ``None`` if it is no number.

    It does not raise: the claim of the message finds an invalid time and marks the row.
    """
    return nearest_instant(value) if type(value) is int else None


def content_of(headers: object, body: object) -> tuple[Mapping[str, str], bytes]:
    if not isinstance(headers, bytes | str):
        problem = f"the headers are no text: {_short_text(headers)}"
        raise InvalidHeaders("the headers are gone" if headers is None else problem)
    decoded_headers = decode_headers(headers)
    if type(body) is bytes:
        return decoded_headers, body
    raise InvalidMessage("the content is gone" if body is None else f"the body is not bytes: {_short_text(body)}")


def display_text(value: str | bytes) -> str:
    """Return a text for display; bytes that are no UTF-8 are replaced."""
    return value if isinstance(value, str) else value.decode(errors="replace")


def _short_text(value: object) -> str:
    return repr(value)[:80]


def read_rows(connection: sqlite3.Connection, sql: str, values: Sequence[Any] | Mapping[str, Any]) -> list[Row]:
    """Return the rows of a statement that may write, in the caller's transaction. Text that is no UTF-8 is bytes.

    Python's driver raises an error for all rows if one text is no UTF-8. Then the statement is undone and run again
    with a lenient decoder. That decoder is not used at first, as it costs a call for each text.
    """
    connection.execute("SAVEPOINT reading")
    try:
        try:
            return connection.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            if not is_undecodable(error):
                raise
        connection.execute("ROLLBACK TO reading")
        connection.text_factory = _decode_leniently
        try:
            return connection.execute(sql, values).fetchall()
        finally:
            connection.text_factory = str
    finally:
        if connection.in_transaction:  # a full disk may have rolled back the whole transaction
            connection.execute("RELEASE reading")


def is_undecodable(error: sqlite3.Error) -> bool:
    return "Could not decode to UTF-8" in str(error)


def _decode_leniently(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def decode_rows(rows: Sequence[Row], decode: Callable[[Row], T]) -> tuple[list[T], dict[int, str]]:
    """Return the decoded rows, in order, and the reasons for rows that cannot be decoded, by number (first column)."""
    decoded_rows, reasons = list[T](), dict[int, str]()
    for row in rows:
        try:
            decoded_rows.append(decode(row))
        except (InvalidMessage, InvalidHeaders) as error:
            reasons[row[0]] = str(error)
    return decoded_rows, reasons


# --- storing, and records -----------------------------------------------------------------------------------------

INSERT_SCHEDULED: Final = """
    INSERT INTO record (seq, kind, message_id, at, due, destination) VALUES (?, 1, ?, ?, ?, ?)
    ON CONFLICT (message_id) WHERE kind = 1 DO NOTHING"""
_INSERT_CONTENT: Final = "INSERT INTO content (seq, headers, body) VALUES (?, ?, ?)"

FAILED_LAST: Final = """
    SELECT s.seq FROM record AS s WHERE s.kind = 1 AND s.message_id = :id
        AND NOT EXISTS (SELECT 1 FROM delayed_message AS d WHERE d.seq = s.seq)
        AND NOT EXISTS (SELECT 1 FROM record AS later WHERE later.message_id = :id AND later.kind IN (2, 3, 5, 6, 9)
            AND later.seq > (SELECT max(f.seq) FROM record AS f WHERE f.kind = 7 AND f.message_id = :id))
        AND EXISTS (SELECT 1 FROM record AS f WHERE f.kind = 7 AND f.message_id = :id)"""
"""The number of a message that is not pending and whose last record is a failure: only such a message may return."""

NEXT_NUMBER: Final = """
    SELECT max(coalesce((SELECT max(seq) FROM record NOT INDEXED), 0),
        coalesce((SELECT max(seq) FROM delayed_message NOT INDEXED), 0)) + 1"""
"""The next number. It is also above the numbers of pending messages, which may have no record in older files.

NOT INDEXED: SQLite would scan an index that ANALYZE has seen with one row, as it is smaller than the table.
"""


def insert(tx: Transaction, rows: Sequence[tuple[Any, ...]], at: int) -> StoreReport:
    """Insert messages whose ids are new. The rows have the form of :func:`pending_row`."""
    if not rows:
        return StoreReport(0)
    (base,) = tx.execute(NEXT_NUMBER).fetchone()
    numbered_rows = [(base + offset, *row) for offset, row in enumerate(rows)]
    records = [(seq, id_, at, due, destination) for seq, id_, due, destination, *_ in numbered_rows]
    new, duplicates = numbered_rows, tuple[str, ...]()
    if tx.executemany(INSERT_SCHEDULED, records).rowcount < len(rows):
        new_numbers = {seq for (seq,) in tx.execute("SELECT seq FROM record WHERE seq >= ?", (base,))}
        new = [row for row in numbered_rows if row[0] in new_numbers]
        duplicates = tuple(row[1] for row in numbered_rows if row[0] not in new_numbers)
    if new:
        signal_if_first(tx, min(row[2] for row in new))
        (content,) = tx.execute("SELECT coalesce(max(seq), 0) + 1 FROM content").fetchone()
        tx.executemany(_INSERT_CONTENT, [(content + number, *row[5:]) for number, row in enumerate(new)])
        tx.executemany(INSERT_PENDING, [(*row[:5], content + number, row[2]) for number, row in enumerate(new)])
    return StoreReport(len(new), duplicates)


def insert_or_revive(tx: Transaction, rows: Sequence[tuple[Any, ...]], at: int) -> StoreReport:
    """Insert messages. A message that is in the error queue is stored again under its old number."""
    report = insert(tx, rows, at)
    rows_by_id = {row[0]: row for row in reversed(rows)}  # if an id occurs twice the first row counts
    duplicate_ids = list[str]()
    for id_ in report.duplicate_ids:
        row = rows_by_id.pop(id_, None)
        if row is None or not _revive(tx, row, at):
            duplicate_ids.append(id_)
    return StoreReport(len(rows) - len(duplicate_ids), tuple(duplicate_ids))


def _revive(tx: Transaction, row: tuple[Any, ...], at: int) -> bool:
    if (row_of_record := tx.execute(FAILED_LAST, {"id": row[0]}).fetchone()) is None:
        return False
    message_id, due, destination, *_ = row
    signal_if_first(tx, due)
    content = tx.execute("INSERT INTO content (headers, body) VALUES (?, ?)", row[4:]).lastrowid
    tx.execute(INSERT_PENDING, (row_of_record[0], *row[:4], content, due))
    record(tx, RecordKind.RESCHEDULED, (message_id, due, destination), at, "came back from the error queue")
    return True


def signal_if_first(tx: Transaction, due: int) -> None:
    """Wake the poller if a message is due before all others. Most messages are not, and wake-ups cost something."""
    (first,) = tx.execute("SELECT min(attempt_at) FROM delayed_message").fetchone()
    if type(first) is not int or due < first:  # another program may have written a value that is no time
        tx.signal(DUE)


def record(
    tx: Transaction, kind: RecordKind, fields: tuple[str, int | None, str | None], at: int, detail: str = ""
) -> None:
    """Record an event of a message; ``fields``: id, due time, destination."""
    tx.execute(
        "INSERT INTO record (kind, at, detail, message_id, due, destination) VALUES (?, ?, ?, ?, ?, ?)",
        (int(kind), at, detail or None, *fields),
    )


# --- unreadable rows ----------------------------------------------------------------------------------------------

log = logging.getLogger("postdate.embedded")


@dataclass(frozen=True, slots=True)
class MessageTable:
    """A table whose rows are read as messages.

    Args:
        name: of the table.
        columns: the columns that :attr:`decode` reads.
        release_assignments: assignments of an UPDATE that end a claim of the row and hide the row from later claims.
        record_columns: SQL for id, due time and destination of a row.
        decode: decodes :attr:`columns`; raises if the row is unreadable.
    """

    name: str
    columns: str
    release_assignments: str
    record_columns: str
    decode: Callable[[Row], object]


PENDING: Final = MessageTable(
    "delayed_message",
    PENDING_COLUMNS,
    "claimant = NULL, attempt_at = NULL",
    "message_id, due, destination",
    message_of,
)
QUEUED: Final = MessageTable(
    "queue_message",
    QUEUED_COLUMNS,
    "claimant = NULL, queue_id = -queue_id, ends_at = NULL",
    "message_id, due, (SELECT name FROM queue AS q WHERE q.queue_id = abs(t.queue_id))",
    lambda row: envelope_of(row, ""),
)


def mark_unreadable(tx: Transaction, table: MessageTable, reasons: Mapping[int, str], at: int | None = None) -> None:
    """Mark rows as unreadable, so that nothing claims them, and record that.

    ``reasons``: the reason for each row, by its number; ``at``: microseconds since 1970 UTC, by default now.
    """
    marked_at = tx.rules.now() if at is None else at
    # Numbers of content are used again: a row whose content is gone must not get the content of another message.
    content = "coalesce((SELECT c.seq FROM content AS c WHERE c.seq = t.content), 0)"
    mark = f"""
        UPDATE {table.name} AS t SET {table.release_assignments}, content = {content}, unreadable = ?, unreadable_at = ?
        WHERE seq = ?"""
    for seq, reason in reasons.items():
        tx.execute(mark, (reason, marked_at, seq))
        record_unreadable(tx, RecordKind.FAILED, unreadable_parts(tx, table, seq), reason, marked_at)


def mark_and_log(tx: Transaction, table: MessageTable, reasons: Mapping[int, str], at: int | None = None) -> None:
    """Call :func:`mark_unreadable` for rows that were just read, and log once, with the reason of the first."""
    mark_unreadable(tx, table, reasons, at)
    if reasons:
        text = "cannot be read, and marked so: %d messages (%s); `postdate messages list --unreadable` lists them"
        log.error(text, len(reasons), next(iter(reasons.values())))


def unreadable_parts(tx: Transaction, table: MessageTable, seq: int) -> Row:
    """Return id, due time and destination of a row. The values may be of any type."""
    (row,) = read_rows(tx.connection, f"SELECT {table.record_columns} FROM {table.name} AS t WHERE seq = ?", (seq,))
    return row


def record_unreadable(tx: Transaction, kind: RecordKind, parts: Row, reason: str, at: int) -> None:
    """Record an event of an unreadable row, if its id can be read."""
    message_id, due, destination = parts
    if isinstance(message_id, str):
        destination_text = destination if isinstance(destination, str) else None
        record(tx, kind, (message_id, readable_due(due), destination_text), at, f"{UNREADABLE}{reason}")


def readable_due(due: object) -> int | None:
    """Return a due time in microseconds; ``None``: the value is no instant."""
    nearest = time_of(due)
    exact = None if nearest is None else to_microseconds(nearest)
    return exact if exact == due else None


def claim_rows(
    tx: Transaction,
    table: MessageTable,
    sql: str,
    values: Sequence[Any] | Mapping[str, Any],
    decode: Callable[[Row], T],
    at: int | None = None,
) -> list[T]:
    """Run a statement that claims; return the readable rows. Unreadable rows are marked.

    If all claimed rows are unreadable, the statement runs again. So the result is empty only if there is nothing to
    claim. Any other error rolls back the transaction, and the claims with it.
    """
    while True:
        decoded_rows, reasons = decode_rows(
            sorted(read_rows(tx.connection, sql, values), key=lambda row: row[0]), decode
        )
        if reasons:
            mark_and_log(tx, table, reasons, at)
        if decoded_rows or not reasons:
            return decoded_rows


def next_attempt(connection: sqlite3.Connection) -> datetime | None:
    """Return the earliest next attempt; claimed messages have none."""
    row = connection.execute(
        "SELECT attempt_at FROM delayed_message WHERE attempt_at IS NOT NULL ORDER BY attempt_at LIMIT 1"
    ).fetchone()
    return None if row is None else time_of(row[0])
