"""How messages end that were received from a queue: those that end at the same time do so in one transaction.

So a commit waits for the disk once for all of them. One that cannot end as it should spoils nothing for others: each
is ended by itself then. What has work in the database always is, for works of several messages might wait for each
other. Source: ADR 0018.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.queues import QueueStatements
from postdate.errors import ClaimLost, MessageTooLarge, PostdateError, StoreUnreachable
from postdate.ports import Work
from postdate.runtime.group_commit import GroupCommit, Job
from postdate.runtime.threads import in_thread

_AT_ONCE: Final = 500

Row = tuple[Any, ...]
"""A message as it is inserted."""
Insert = Callable[[Connection, Sequence[Row | MessageTooLarge]], Sequence[PostdateError | None]]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The end of one received message.

    Args:
        message_id: of it.
        number: of it in its queue.
        holder: number under which it is held.
        at: when it ended.
        kind: what is recorded; ``None``: nothing.
        detail: for the record.
        rows: what is sent with it, or why that cannot be.
        work: done in the same transaction.
    """

    message_id: str
    number: int
    holder: int
    at: datetime
    kind: int | None
    detail: str | None
    rows: Sequence[Row | MessageTooLarge] = ()
    work: Sequence[Work] = ()


class Acknowledgements:
    """Ends the messages of one receiver.

    Args:
        database: of the queue.
        sql: of its schema.
        queue: name of the queue.
        insert: puts messages into their queues.
    """

    def __init__(self, database: Access, sql: QueueStatements, queue: str, insert: Insert) -> None:
        self._database, self._sql, self._queue, self._insert = database, sql, queue, insert
        self._together = GroupCommit[tuple[int, Acknowledgement], None](_AT_ONCE)

    async def end(self, queue_id: int, ending: Acknowledgement) -> None:
        """End a message, which belongs to the queue of this number; see :meth:`postdate.ports.Receiver.commit`."""
        if ending.work:
            await in_thread(self._alone, queue_id, ending)
        else:
            await self._together.run(self._end_jobs, (queue_id, ending))

    def _end_jobs(self, jobs: Sequence[Job[tuple[int, Acknowledgement], None]]) -> None:
        try:
            # After a loss of the connection that holds, some may be held under another number.
            holders = {ending.holder for _, ending in (job.work for job in jobs)}
            if len(jobs) == 1 or len(holders) > 1 or not self._ended_together(jobs):
                for job in jobs:
                    self._end_job(job)
        except BaseException as error:  # noqa: BLE001 - handed to each caller, whose thread this is not
            for job in jobs:
                job.error = job.error or error
        finally:
            for job in jobs:
                job.done = True

    def _ended_together(self, jobs: Sequence[Job[tuple[int, Acknowledgement], None]]) -> bool:
        """Return whether it is known what became of all; if not, nothing was done."""
        endings = [job.work[1] for job in jobs]
        try:
            gone = self._database.run_blocking(lambda c: self._end(c, jobs[0].work[0], endings))
        except StoreUnreachable as error:  # it may have been done
            for job in jobs:
                job.error = error
            return True
        except Exception:  # noqa: BLE001 - told to the one whose fault it is, when each is ended by itself
            return False
        for job, ending in zip(jobs, endings, strict=True):
            job.error = None if ending.number in gone else self._lost(ending)
        return True

    def _end_job(self, job: Job[tuple[int, Acknowledgement], None]) -> None:
        try:
            self._alone(*job.work)
        except BaseException as error:  # noqa: BLE001 - raised where the message is handled
            job.error = error

    def _alone(self, queue_id: int, ending: Acknowledgement) -> None:
        def end(connection: Connection) -> None:
            if ending.rows or ending.work:
                with connection.transaction():
                    self._end_in_transaction(connection, queue_id, ending)
            elif not self._remove(connection, queue_id, [ending]):
                raise self._lost(ending)

        self._database.run_blocking(end)

    def _end_in_transaction(self, connection: Connection, queue_id: int, ending: Acknowledgement) -> None:
        if not self._remove(connection, queue_id, [ending]):
            raise self._lost(ending)
        raise_first(self._insert(connection, ending.rows))
        for each in ending.work:
            each(connection)

    def _end(self, connection: Connection, queue_id: int, endings: Sequence[Acknowledgement]) -> set[int]:
        """End messages of one holder without works; return the numbers of those that were held."""
        if not any(ending.rows for ending in endings):
            return self._remove(connection, queue_id, endings)
        with connection.transaction():
            gone = self._remove(connection, queue_id, endings)
            rows = [row for ending in endings if ending.number in gone for row in ending.rows]
            raise_first(self._insert(connection, rows))
        return gone

    def _remove(self, connection: Connection, queue_id: int, endings: Sequence[Acknowledgement]) -> set[int]:
        """Take messages of one holder off the queue, with their records; return the numbers of those there were."""
        recorded = [ending for ending in endings if ending.kind is not None]
        values: Mapping[str, Any] = {
            "queue": queue_id,
            "numbers": [ending.number for ending in endings],
            "holder": endings[0].holder,
            "recorded": [ending.number for ending in recorded],
            "times": [ending.at for ending in recorded],
            "kinds": [ending.kind for ending in recorded],
            "details": [ending.detail for ending in recorded],
            "destination": self._queue,
        }
        ((gone,),) = connection.execute(self._sql.commit, values, prepare=True).fetchall()
        return set(gone or ())

    def _lost(self, ending: Acknowledgement) -> ClaimLost:
        return ClaimLost(f"message {ending.message_id!r} in {self._queue!r} is no longer held here")


def raise_first(errors: Sequence[PostdateError | None]) -> None:
    """Raise the first error, if any: what belongs to one transaction is sent as a whole or not at all."""
    for error in errors:
        if error is not None:
            raise error
