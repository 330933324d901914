"""What a database server must have for :class:`postdate.backends.rowlocks.LockingStore`.

Times in rows are whole microseconds since 1970-01-01 UTC. Every method blocks and may raise the store errors of
:mod:`postdate.errors`; drivers' own errors do not leave the room of their server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol

from postdate.clock import from_microseconds, later, to_microseconds
from postdate.errors import InvalidHeaders, InvalidMessage, PipelineError, StoreUnavailable
from postdate.messages import DelayedMessage, encoded_deliver_at, opened
from postdate.ports import Recording, Scan, ScanFilter, ScanPart, ServerFacts


class Conflict(StoreUnavailable):
    """The transaction lost against another one; rolled back, it may be run again at once."""


class Row(NamedTuple):
    """A message as it is written and read."""

    message_id: str
    due: int
    destination: str
    expires_at: int | None
    failures: int
    headers: str
    body: bytes


class Aside(NamedTuple):
    """A message that was set aside, as it is written and read; columns of :class:`Row` may hold what is no message."""

    number: int
    at: int
    reason: str
    row: Row


class Waiting(NamedTuple):
    """A waiting message, locked, without its content."""

    number: int
    due: int
    attempt_at: int | None
    expires_at: int | None
    holder: int | None


def headers_retimed(old: int, new: int) -> dict[str, str]:
    """Return which piece of encoded headers says an old due time, and what takes its place; microseconds since 1970."""
    will_be = encoded_deliver_at(from_microseconds(new))
    try:
        return {"was": encoded_deliver_at(from_microseconds(old)), "is": will_be}
    except OverflowError:  # outside the calendar: no header says it
        return {"was": will_be, "is": will_be}


@dataclass(frozen=True, slots=True)
class Ending:
    """How messages leave the store.

    Args:
        at: time of the record.
        kind: number of the record's kind.
        detail: of the record.
    """

    at: int
    kind: int
    detail: str | None = None


class Session(Protocol):
    """One connection, in autocommit mode outside of :meth:`begin` … :meth:`commit`."""

    def begin(self) -> None:
        """Begin a transaction."""
        ...

    def commit(self) -> None:
        """Commit it."""
        ...

    def rollback(self) -> None:
        """Roll it back."""
        ...

    def close(self) -> None:
        """Close the connection; whatever it locked is free. Never raises."""
        ...

    def is_alive(self, at_most: float | None = None) -> bool:
        """Ask the server.

        Args:
            at_most: seconds; it has as long to answer as to anything else, but no longer than this. ``None``: two
                seconds, for a connection that was idle, in place of which there may as well be another one.
        """
        ...

    def abort(self) -> None:
        """End the connection from another thread: whoever waits for an answer hears that none comes. Never raises."""
        ...

    def patient(self) -> AbstractContextManager[None]:
        """Wait longer for answers within the block: for what reads or changes whole tables."""
        ...


class Server(Protocol):
    """Where connections come from."""

    @property
    def where(self) -> str:
        """The address without secrets, for texts."""
        ...

    def connect(self) -> Session:
        """Return a new connection."""
        ...


class Tables(Protocol):
    """The SQL of one store. Each method is a step inside a transaction that the caller begins and ends."""

    def setup(self, session: Any) -> None:
        """Create what is missing. Several processes may do it at once; it ends transactions itself."""
        ...

    def insert(self, session: Any, rows: Sequence[Row], at: int) -> Sequence[str]:
        """Write messages and their records, but for ids that are known; return the ids that were not."""
        ...

    def come_back(self, session: Any, row: Row, note: Ending) -> bool:
        """Write a message under its old number if its last record says that it went to the error queue."""
        ...

    def claim(self, session: Any, at: int, limit: int) -> Sequence[tuple[int, int, Row]]:
        """Lock the oldest messages with ``attempt_at`` before ``at`` that nobody else has locked.

        Returns:
            Number, ``attempt_at`` and row of each, oldest first.
        """
        ...

    def finish(self, session: Any, numbers: Sequence[int], holder: int | None, ending: Ending) -> int:
        """Remove and record those of ``numbers`` (ascending) that ``holder`` holds; return how many."""
        ...

    def lease(self, session: Any, numbers: Sequence[int], holder: int) -> None:
        """Have ``holder`` hold messages that this transaction has locked beyond its end.

        Raises:
            StoreUnavailable: the number is buried. It cannot be buried before this transaction has ended, either.
        """
        ...

    def free(self, session: Any, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int:
        """Give back what the holders hold, or those of ``numbers``; may be attempted at their due times."""
        ...

    def release(self, session: Any, numbers: Sequence[int], holder: int | None, attempt_at: int | None) -> int:
        """Give back those of ``numbers`` (ascending) that ``holder`` holds; ``attempt_at`` ``None``: they are due.

        Returns:
            How many.
        """
        ...

    def retry(self, session: Any, number: int, holder: int | None, attempt_at: int | None, note: Ending) -> bool:
        """Count a failure of what ``holder`` holds and give it back; ``attempt_at`` ``None``: at its due time."""
        ...

    def lock(self, session: Any, message_id: str) -> Waiting | None:
        """Lock a waiting message; ``None``: there is none, or somebody has it locked."""
        ...

    def reschedule(self, session: Any, found: Waiting, due: int, at: int) -> None:
        """Give a locked message another due time, also in the header that says it."""
        ...

    def appear(self, session: Any) -> int:
        """Return a new number under which this process may hold messages for as long as ``session`` is open."""
        ...

    def dead(self, session: Any) -> Sequence[int]:
        """Return the numbers whose connection is gone."""
        ...

    def unknown(self, session: Any) -> Sequence[int]:
        """Return the numbers that messages are leased under and nobody has: after a restore, or deletes by hand."""
        ...

    def bury(self, session: Any, holders: Sequence[int]) -> None:
        """Forget numbers; waits for transactions that lease under them, and keeps others from it until the end."""
        ...

    def next_attempt(self, session: Any, locked: Sequence[int]) -> int | None:
        """Return the earliest ``attempt_at``, but for those of ``locked``; waits for nobody."""
        ...

    def next_due(self, session: Any) -> int | None:
        """Return the earliest due time."""
        ...

    def statistics(self, session: Any, at: int) -> tuple[int, int, int, int, int | None]:
        """Return the values of :class:`postdate.ports.StoreStatistics`."""
        ...

    def record_counts(self, session: Any) -> Mapping[int, int]:
        """Count the records by kind."""
        ...

    def list_pending(
        self, session: Any, destination: str | None, due_from: int | None, due_to: int | None, limit: int
    ) -> Sequence[tuple[int, Row]]:
        """Return waiting messages with their numbers, by due time and number."""
        ...

    def get(self, session: Any, message_id: str) -> Sequence[tuple[int, Row]]:
        """Return a waiting message with its number, or nothing; waits for nobody."""
        ...

    def free_ones(self, session: Any, numbers: Sequence[int]) -> Sequence[tuple[int, Row]]:
        """Lock those of ``numbers`` (ascending) that nobody holds, and return them."""
        ...

    def set_aside(self, session: Any, bad: Mapping[int, str], at: int) -> None:
        """Take locked messages out of the way with their bytes, and record it.

        Args:
            session: in a transaction.
            bad: why each cannot be read, by its number.
            at: time of the record.
        """
        ...

    def set_aside_count(self, session: Any) -> int:
        """Count what is set aside."""
        ...

    def all_aside(self, session: Any, limit: int) -> Sequence[Aside]:
        """Return what is set aside, oldest first."""
        ...

    def lock_aside(self, session: Any, number: int) -> Aside | None:
        """Lock what is set aside under a number; ``None``: there is nothing."""
        ...

    def end_aside(self, session: Any, aside: Aside, ending: Ending | None) -> None:
        """Delete what is set aside; recorded unless ``ending`` is ``None``."""
        ...

    def history(self, session: Any, message_id: str) -> Sequence[tuple[Any, ...]]:
        """Return kind, id, at, due, destination and detail of each record of a message, in order."""
        ...

    def now(self, session: Any) -> int:
        """Return the time of the server."""
        ...

    def report_clock(self, session: Any, holder: int, ahead: int) -> None:
        """Note how far the clock of ``holder`` is ahead of the server's."""
        ...

    def reported_clocks(self, session: Any) -> Sequence[tuple[str, int, int]]:
        """Return machine, process id and how far the clock is ahead, of holders that live and have noted it."""
        ...

    def facts(self, session: Any) -> ServerFacts:
        """Return what the server says of itself; needs no tables."""
        ...

    def bounds(self, session: Any, what: str) -> tuple[int, int]:
        """Return the first number of a relation and the one after its last; equal when it is empty."""
        ...

    def scan(self, session: Any, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield pages of a share; columns are known ones."""
        ...

    @property
    def recording(self) -> Recording:
        """What is recorded."""
        ...


SCANNED: Final[Mapping[str, tuple[str, ...]]] = {
    "pending": ("message_id", "destination", "due", "expires_at", "headers", "body", "number_of_failures"),
    "records": ("number", "kind", "message_id", "at", "due", "destination", "detail"),
    "queued": ("message_id", "queue", "due"),
}
"""Relations and their columns; there are no queues in these databases, so nothing is queued."""


def check_columns(what: str, columns: Sequence[str] = ()) -> None:
    """Refuse what cannot be scanned.

    Raises:
        PipelineError: names what there is.
    """
    if what not in SCANNED:
        raise PipelineError(f"there is nothing called {what!r} to scan; choose one of {', '.join(SCANNED)}")
    unknown = [column for column in columns if column not in SCANNED[what]]
    if unknown:
        raise PipelineError(f"{what} has no column {unknown[0]!r}; it has {', '.join(SCANNED[what])}")


def filter_values(where: ScanFilter) -> dict[str, Any]:
    """Return the conditions that are given, by their names; times as in rows."""
    given: dict[str, Any] = {
        "message_ids": where.message_ids,
        "destinations": where.destinations,
        "due_from": None if where.due_from is None else to_microseconds(where.due_from),
        "due_to": None if where.due_to is None else to_microseconds(where.due_to),
    }
    return {name: value for name, value in given.items() if value is not None}


def from_row(row: Row) -> DelayedMessage:
    """Return the message of a row. What is stored was checked before, and is not held against limits again.

    Raises:
        InvalidMessage, InvalidHeaders: it cannot be read; the error says why.
    """
    body = bytes(row.body)
    return DelayedMessage.restored(
        row.message_id,
        _instant(row.due, "the due time"),
        row.destination,
        opened(row.headers, body),
        body,
        None if row.expires_at is None else _instant(row.expires_at, "the expiry"),
        row.failures,
    )


def _instant(microseconds: int, what: str) -> datetime:
    try:
        return from_microseconds(microseconds)
    except OverflowError as error:
        raise InvalidMessage(f"{what} is outside the years 1 to 9999: {microseconds} us since 1970") from error


def nearest_instant(microseconds: int) -> datetime:
    """Return the time of a column, or the end of the calendar that is nearest: for what is shown or slept for."""
    return later(from_microseconds(0), timedelta(microseconds=microseconds))


def readable_due(row: Row) -> int | None:
    """Return the due time for a record; ``None`` where it cannot be one."""
    return row.due if to_microseconds(nearest_instant(row.due)) == row.due else None


def decoded(rows: Iterable[tuple[int, Row]]) -> tuple[dict[int, DelayedMessage], dict[int, str]]:
    """Return by number, in order, what can be read, and of the others why not: each row is read by itself."""
    good, bad = dict[int, DelayedMessage](), dict[int, str]()
    for number, row in rows:
        try:
            good[number] = from_row(row)
        except (InvalidMessage, InvalidHeaders) as error:
            bad[number] = str(error)
    return good, bad
