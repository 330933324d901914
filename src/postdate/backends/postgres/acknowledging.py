"""Settling received messages: those settled at the same time share one transaction, and one wait for the disk.

What their handlers sent is inserted by one statement. A message that cannot be settled does no harm to others: it is
settled alone then. Works of several messages (sagas, delayed messages) lock rows in any order: as soon as one has to
wait, all are rolled back and done in smaller parts. Source: ADR 0018, 0026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.names import array
from postdate.backends.postgres.queues import QueueStatements
from postdate.errors import ClaimLost, MessageTooLarge, PostdateError, StoreUnreachable
from postdate.ports import Work
from postdate.runtime.threads import GroupCommit, Job, do_jobs, in_parts, in_thread

_AT_ONCE: Final = 500

_NO_LONG_WAIT: Final = b"SET LOCAL lock_timeout = '50ms'"
_AS_LONG_AS_IT_TAKES: Final = b"SET LOCAL lock_timeout TO DEFAULT"

Row = tuple[Any, ...]
"""A message for the INSERT."""
Insert = Callable[[Connection, Sequence[Row | MessageTooLarge]], Sequence[PostdateError | None]]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    message_id: str
    queue_id: int
    number: int
    holder: int
    at: datetime
    kind: int | None
    detail: str | None
    rows: Sequence[Row | MessageTooLarge] = ()
    work: Sequence[Work] = ()


class _NotTogether(Exception):
    """These messages cannot share a transaction: they have several holders, or their works may deadlock with others."""


class Acknowledgements:
    """Settles the messages of one receiver."""

    def __init__(self, database: Access, sql: QueueStatements, queue: str, insert: Insert) -> None:
        self._database, self._sql, self._queue, self._insert = database, sql, queue, insert
        self._together = GroupCommit[Acknowledgement, None](_AT_ONCE)

    async def end(self, ending: Acknowledgement) -> None:
        await self._together.run(self._end_jobs, ending)

    async def end_all(self, endings: Sequence[Acknowledgement]) -> Sequence[Exception | None]:
        return await in_thread(self._end_all, endings)

    def _end_jobs(self, jobs: Sequence[Job[Acknowledgement, None]]) -> None:
        do_jobs(jobs, self._ended, StoreUnreachable)

    def _end_all(self, endings: Sequence[Acknowledgement]) -> Sequence[Exception | None]:
        return in_parts(endings, self._ended, StoreUnreachable)

    def _ended(self, endings: Sequence[Acknowledgement]) -> Sequence[Exception | None]:
        """Settle messages in one transaction; return `ClaimLost` for each that was no longer held."""
        if len({ending.holder for ending in endings}) > 1:  # the connection that holds was lost in between
            raise _NotTogether
        gone = self._database.run_blocking(lambda c: self._end(c, endings))
        return [None if ending.number in gone else self._lost(ending) for ending in endings]

    def _end(self, connection: Connection, endings: Sequence[Acknowledgement]) -> set[int]:
        """Settle messages of one holder; return the numbers of those still held. The others send and do nothing."""
        if not any(ending.rows or ending.work for ending in endings):
            return self._remove(connection, endings)
        with connection.transaction():
            gone = self._remove(connection, endings)
            held = [ending for ending in endings if ending.number in gone]
            raise_first(self._insert(connection, [row for ending in held for row in ending.rows]))
            self._do_works(connection, [ending.work for ending in held if ending.work])
        return gone

    def _do_works(self, connection: Connection, works: Sequence[Sequence[Work]]) -> None:
        """Run the works; those of several messages wait 50 ms for a lock, as its owner may wait for another of them."""
        if len(works) > 1:
            connection.execute(_NO_LONG_WAIT)
        try:
            for work in works:
                for each in work:
                    each(connection)
            if len(works) > 1:  # commits that notify go one after the other, which on a slow disk takes longer
                connection.execute(_AS_LONG_AS_IT_TAKES)
        except psycopg.errors.LockNotAvailable as error:
            if len(works) > 1:
                raise _NotTogether from error
            raise

    def _remove(self, connection: Connection, endings: Sequence[Acknowledgement]) -> set[int]:
        """Delete messages of one holder and write their records; return the numbers of the deleted ones."""
        recorded = [ending for ending in endings if ending.kind is not None]
        values: Mapping[str, Any] = {
            "queue": endings[0].queue_id,
            "numbers": array(ending.number for ending in endings),
            "holder": endings[0].holder,
            "recorded": array(ending.number for ending in recorded),
            "times": _times(ending.at for ending in recorded),
            "kinds": array(ending.kind for ending in recorded if ending.kind is not None),
            "details": [ending.detail for ending in recorded] if any(ending.detail for ending in recorded) else None,
            "destination": self._queue,
        }
        ((gone,),) = connection.execute(self._sql.commit, values, prepare=True).fetchall()
        return set(gone or ())

    def _lost(self, ending: Acknowledgement) -> ClaimLost:
        return ClaimLost.of(ending.message_id, queue=self._queue)


def _times(instants: Iterable[datetime]) -> str:
    """Return instants in the text form of an array; most in a batch are the same object, formatted once."""
    found, before, text = list[str](), None, ""
    for instant in instants:
        if instant is not before:
            before, text = instant, instant.isoformat()
        found.append(text)
    return "{" + ",".join(found) + "}"


def raise_first(errors: Sequence[PostdateError | None]) -> None:
    """Raise the first error, if any: the sends of one transaction succeed or fail as a whole."""
    for error in errors:
        if error is not None:
            raise error
