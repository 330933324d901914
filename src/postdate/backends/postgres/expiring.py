"""Messages that nobody received in time leave their queues: removed, and recorded, by whichever process comes first.

Whether one has run out is a question to the clock of the server, which has also counted from the arrival of the
message: no other clock matters. Until it is removed it is as good as gone, for receivers and for whoever counts.
Source: specification 2.2, 2.5.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import Any, Final

import psycopg

from postdate.backends.postgres.names import SchemaNames, sql
from postdate.ports import RecordKind

Connection = psycopg.Connection[Any]

EXPIRED_IN_QUEUE: Final = "expired in its queue"
"""Detail of the record of a message that was removed without being received."""

REAPED_AT_ONCE: Final = 500
"""Messages removed by one statement: some 10 ms, for which the thread that does it hears no wake-up."""

_EVERY_SECONDS: Final = 2.0
_PART_OF_THE_TIME: Final = 1 / 50
"""A look that takes long, because an old snapshot keeps what was removed, comes seldom."""


class Turns:
    """When the processes' threads look: one of them at a time, however many adapters a process opened. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = dict[Hashable, float]()

    def take(self, subject: Hashable, now_seconds: float) -> bool:
        """Return whether it is time to look, and if so, keep others from it."""
        with self._lock:
            if now_seconds < self._next.get(subject, now_seconds):
                return False
            self._next[subject] = now_seconds + _EVERY_SECONDS
            return True

    def looked(self, subject: Hashable, began_seconds: float, ended_seconds: float, *, more: bool) -> None:
        """Say how long a look took and whether it left something: then the next one is at once."""
        pause = max(_EVERY_SECONDS, (ended_seconds - began_seconds) / _PART_OF_THE_TIME)
        with self._lock:
            self._next[subject] = ended_seconds if more else ended_seconds + pause


_TURNS: Final = Turns()


class Reaper:
    """Removes what has run out from all queues of a schema.

    Args:
        names: of the schema.
        identity: of the database and the schema; those of one process take turns there.
    """

    def __init__(self, names: SchemaNames, identity: Hashable) -> None:
        self._identity = identity
        self._statements = ExpiryStatements(names)

    def reap_in_turn(self, connection: Connection) -> bool:
        """Remove a batch if it is time for it; one look into an index when there is nothing.

        Returns:
            Whether there may be more, to be removed at once.

        Raises:
            psycopg.Error: nothing was removed.
        """
        began = time.monotonic()
        if not _TURNS.take(self._identity, began):
            return False
        more = self.reap(connection)
        _TURNS.looked(self._identity, began, time.monotonic(), more=more)
        return more

    def reap(self, connection: Connection) -> bool:
        """Remove a batch now; return whether there may be more."""
        row = connection.execute(self._statements.reap, {"limit": REAPED_AT_ONCE}, prepare=True).fetchone()
        assert row is not None
        return row[0] == REAPED_AT_ONCE

    def discard(self, connection: Connection, queue_id: int, numbers: str, holder: int) -> None:
        """Remove what was claimed and turned out to have run out.

        Args:
            connection: to do it on.
            queue_id: of the queue.
            numbers: of the messages, as PostgreSQL writes an array.
            holder: as whom they were claimed.
        """
        connection.execute(self._statements.discard, {"queue": queue_id, "numbers": numbers, "holder": holder})


class ExpiryStatements:
    """The SQL by which messages leave their queues without being received.

    Args:
        names: of the schema.
    """

    def __init__(self, names: SchemaNames) -> None:
        queue_message, content = names.of("queue_message"), names.of("content")
        removed = "RETURNING queue_id, content, message_id, due, store_id"
        # The server's clock has said that it is over, so it is the one that says when.
        recorded = f"""
            INSERT INTO {names.of("record")} (at, due, store_id, kind, message_id, destination, detail)
            SELECT statement_timestamp(), due, store_id, {int(RecordKind.DISCARDED)}, message_id,
                (SELECT name FROM {names.of("queue")} AS q WHERE q.queue_id = gone.queue_id), '{EXPIRED_IN_QUEUE}'
            FROM gone"""
        ending = f"""
            dropped AS (DELETE FROM {content} WHERE number = ANY (ARRAY(SELECT content FROM gone))),
            recorded AS ({recorded})
            SELECT count(*)::integer FROM gone"""
        # What a crash of the server undoes is done again by the next look, so its commit waits for no disk.
        hurried = "(SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL"
        # The order is that of the index, which makes it the only way. A row that was changed meanwhile is locked in its
        # new version, which the removal does not see: it stays, and is looked at again.
        self.reap = sql(f"""
            WITH ended AS MATERIALIZED (
                SELECT ctid AS place FROM {queue_message}
                WHERE ends_at < statement_timestamp() AND holder IS NULL AND {hurried}
                ORDER BY ends_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED),
            gone AS (DELETE FROM {queue_message} WHERE ctid = ANY (ARRAY(SELECT place FROM ended)) {removed}),
            {ending}""")
        self.discard = sql(f"""
            WITH gone AS (
                DELETE FROM {queue_message}
                WHERE queue_id = %(queue)s AND number = ANY(%(numbers)s::bigint[]) AND holder = %(holder)s AND {hurried}
                {removed}),
            {ending}""")
