"""Expiry of queued messages: one process removes expired messages from their queues, and records that.

A message expires by the clock of the server alone, counted from its arrival there. Until it is removed, receivers and
counts ignore it. Source: docs/guides/time-to-be-received.md.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import psycopg

from postdate.backends.postgres.names import SchemaNames, ctids_of, sql
from postdate.clock import steady_seconds
from postdate.ports import RecordKind
from postdate.runtime import forks

Connection = psycopg.Connection[Any]

EXPIRED_IN_QUEUE: Final = "expired in its queue"
"""Detail of the record of a message that expired before it was received."""

REAPED_AT_ONCE: Final = 500
"""The messages that one statement removes: some 10 ms, in which the listener thread gets no notification."""

_EVERY_SECONDS: Final = 2.0  # the shortest pause between two queries, except after a full batch
_PART_OF_THE_TIME: Final = 1 / 50
"""The largest share of the time for such queries: while an old snapshot keeps removed rows, they are slow."""


class Turns:
    """The order in which a process's listener threads remove messages, per database and schema. Thread-safe."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._next = dict[Hashable, float]()

    def acquire_turn(self, subject: Hashable, now_seconds: float) -> bool:
        """Return whether it is time for a query; if so, the other threads wait for the next time."""
        with self._lock:
            if now_seconds < self._next.get(subject, now_seconds):
                return False
            self._next[subject] = now_seconds + _EVERY_SECONDS
            return True

    def release_turn(self, subject: Hashable, start_seconds: float, end_seconds: float, *, has_more: bool) -> None:
        """Set the time of the next query, from the last one's duration; it is at once if the last one left rows."""
        pause = max(_EVERY_SECONDS, (end_seconds - start_seconds) / _PART_OF_THE_TIME)
        with self._lock:
            self._next[subject] = end_seconds if has_more else end_seconds + pause


_TURNS: Final = Turns()


class Reaper:
    """Removes expired messages from all queues of a schema.

    ``identity`` is that of database and schema: reapers of one process with the same identity take turns.
    """

    def __init__(self, names: SchemaNames, identity: Hashable) -> None:
        self._identity = identity
        self._statements = ExpiryStatements(names)

    def reap_in_turn(self, connection: Connection) -> bool:
        """Remove a batch if it is this reaper's turn; return whether there may be more.

        Without work it reads one index.
        """
        start_seconds = steady_seconds()
        if not _TURNS.acquire_turn(self._identity, start_seconds):
            return False
        has_more = self.reap(connection)
        _TURNS.release_turn(self._identity, start_seconds, steady_seconds(), has_more=has_more)
        return has_more

    def reap(self, connection: Connection) -> bool:
        ((count,),) = connection.execute(self._statements.reap, {"limit": REAPED_AT_ONCE}, prepare=True).fetchall()
        return count == REAPED_AT_ONCE

    def discard(self, connection: Connection, queue_id: int, numbers: str, holder: int) -> None:
        """Remove messages that ``holder`` claimed and that had expired; ``numbers``: a PostgreSQL array as text."""
        connection.execute(self._statements.discard, {"queue": queue_id, "numbers": numbers, "holder": holder})


class ExpiryStatements:
    def __init__(self, names: SchemaNames) -> None:
        queue_message, content = names.name_of("queue_message"), names.name_of("content")
        returning = "RETURNING queue_id, content, message_id, due, store_id"
        # The server's clock has decided, so it also gives the time.
        insert_records = f"""
            INSERT INTO {names.name_of("record")} (at, due, store_id, kind, message_id, destination, detail)
            SELECT statement_timestamp(), due, store_id, {int(RecordKind.DISCARDED)}, message_id,
                (SELECT name FROM {names.name_of("queue")} AS q WHERE q.queue_id = gone.queue_id), '{EXPIRED_IN_QUEUE}'
            FROM gone"""
        finish = f"""
            dropped AS (DELETE FROM {content} WHERE number = ANY (ARRAY(SELECT content FROM gone))),
            recorded AS ({insert_records})
            SELECT count(*)::integer FROM gone"""
        # The next query repeats the changes that a crash of the server undoes, so the commit does not wait for the
        # disk.
        asynchronous_commit = "(SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL"
        # ORDER BY forces the index. A row that was changed meanwhile is locked in its new version, which the removal
        # does not see: it stays until the next query.
        self.reap = sql(f"""
            WITH ended AS MATERIALIZED (
                SELECT ctid AS place FROM {queue_message}
                WHERE ends_at < statement_timestamp() AND holder IS NULL AND {asynchronous_commit}
                ORDER BY ends_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED),
            gone AS (DELETE FROM {queue_message} WHERE ctid = ANY (ARRAY(SELECT place FROM ended)) {returning}),
            {finish}""")
        ctids = ctids_of(
            "unnest(%(numbers)s::bigint[]) AS k(number)", queue_message, "queue_id = %(queue)s AND number = k.number"
        )
        self.discard = sql(f"""
            WITH gone AS (
                DELETE FROM {queue_message}
                WHERE ctid = ANY ({ctids}) AND coalesce(holder, 0) = %(holder)s AND {asynchronous_commit} {returning}),
            {finish}""")
