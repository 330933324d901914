"""The SQL of PostgreSQL queues, with psycopg's parameters, and the settling of received messages.

Messages that are settled at the same time share one transaction and so one wait for the disk. One statement inserts all
messages that their handlers sent. If a message cannot be settled, the messages are settled one by one, so that it does
not affect others. The works of several messages (sagas, delayed messages) lock rows in any order: if one of them has to
wait for a lock, all are rolled back and done in smaller parts. Source: ADR 0018, 0026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, Final

import psycopg

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.names import SchemaNames, array, looked_up, places, sql
from postdate.backends.postgres.rows import QUEUED
from postdate.errors import ClaimLost, MessageTooLarge, PostdateError
from postdate.ports import Work, do_works
from postdate.runtime.threads import GroupCommit, do_jobs, in_parts, in_thread


class QueueStatements:
    def __init__(self, names: SchemaNames) -> None:
        queue, queue_message, content = names.of("queue"), names.of("queue_message"), names.of("content")
        columns = f"m.queue_id, m.number, {QUEUED}"
        has_ended = "(m.ends_at IS NOT NULL AND m.ends_at < clock_timestamp())"
        content_of = (
            f"LEFT JOIN LATERAL (SELECT headers, body FROM {content} WHERE number = m.content OFFSET 0) AS c ON true"
        )

        self.create = sql(f"INSERT INTO {queue} (name) VALUES (%s) ON CONFLICT DO NOTHING")
        self.find = sql(f"SELECT queue_id FROM {queue} WHERE name = %s")
        self.lengths = sql(lengths_query(names))
        self.lengths_of = sql(f"{lengths_query(names)} WHERE name = ANY(%s)")
        # Most messages never expire, and for these there is a cheaper statement.
        self.insert, self.insert_ending = (sql(_insertion(names, ending=ending)) for ending in (False, True))
        # A claim need not survive a crash of the server, so its commit does not wait for the disk. Expired messages are
        # claimed like others, with a flag in the result: to skip them, each claim would have to read all of them. If a
        # row was claimed and released meanwhile, the lock is on its new version, which the update does not see. Then it
        # stays free, and the notification of its release causes the next claim.
        hurried = "(SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL"
        self.claim = sql(f"""
            WITH free AS MATERIALIZED (
                SELECT ctid AS place FROM {queue_message}
                WHERE queue_id = %(queue)s AND number >= %(low)s AND holder IS NULL AND {hurried}
                ORDER BY queue_id, number LIMIT %(limit)s FOR UPDATE SKIP LOCKED),
            m AS (
                UPDATE {queue_message} AS m SET holder = %(holder)s
                WHERE m.ctid = ANY (ARRAY(SELECT place FROM free)) RETURNING m.*)
            SELECT {has_ended}, {columns} FROM m {content_of} ORDER BY m.number""")
        self.take = sql(f"""
            WITH found AS MATERIALIZED (
                SELECT ctid AS place FROM {queue_message}
                WHERE queue_id = %(queue)s AND message_id = %(id)s AND holder IS NULL
                ORDER BY queue_id, number LIMIT 1 FOR UPDATE SKIP LOCKED),
            m AS (
                UPDATE {queue_message} AS m SET holder = %(holder)s
                WHERE m.ctid = ANY (ARRAY(SELECT place FROM found)) RETURNING m.*)
            SELECT {has_ended}, {columns} FROM m {content_of}""")
        # Conditions on the holder are written so that the index of claimed messages does not match them. That index is
        # empty when the plan is made, so the planner would prefer it; later it is full of just deleted entries.
        numbered = places(
            "unnest(%(numbers)s::bigint[]) AS k(number)", queue_message, "queue_id = %(queue)s AND number = k.number"
        )
        self.commit = sql(f"""
            WITH gone AS (
                DELETE FROM {queue_message}
                WHERE ctid = ANY ({numbered}) AND holder IS NOT DISTINCT FROM %(holder)s::integer
                RETURNING number, content, message_id, due, store_id),
            dropped AS (DELETE FROM {content} WHERE number = ANY (ARRAY(SELECT content FROM gone))),
            recorded AS (
                INSERT INTO {names.of("record")} (at, due, store_id, kind, message_id, destination, detail)
                SELECT e.at, due, store_id, e.kind, message_id, %(destination)s, e.detail
                FROM gone JOIN unnest(%(recorded)s::bigint[], %(times)s::timestamptz[], %(kinds)s::smallint[],
                    %(details)s::text[]) AS e(number, at, kind, detail) USING (number))
            SELECT array_agg(number) FROM gone""")
        self.give_back = sql(f"""
            WITH back AS (
                UPDATE {queue_message} SET holder = NULL, failures = failures + %(failures)s
                WHERE ctid = ANY ({numbered}) AND coalesce(holder, 0) = ANY (%(holders)s) RETURNING number)
            SELECT count(*), pg_notify('{names.channel}', 'queue ' || %(queue)s || ' ' || min(number))
            FROM back HAVING count(*) > 0""")
        self.free_processes = sql(f"""
            UPDATE {queue_message} SET holder = NULL
            WHERE queue_id + 0 = %(queue)s AND holder = %(holder)s AND number <> ALL(%(numbers)s::bigint[])""")


def _insertion(names: SchemaNames, *, ending: bool) -> str:
    """Return the INSERT of messages, which also notifies receivers. It returns the positions whose queue exists.

    The parameters are arrays, one for each column. With ``ending`` there are two more: the sender's expiry, and the
    time left, which counts from the arrival by the clock of the server.
    """
    ends = ", s.expires_at, clock_timestamp() + s.span AS ends_at" if ending else ""
    arrays, columns, into = (
        (", %s::timestamptz[], %s::interval[]", ", expires_at, span", ", expires_at, ends_at")
        if ending
        else ("", "", "")
    )
    number = names.of("number").replace("'", "''")
    return f"""
        WITH sent AS MATERIALIZED (
            SELECT s.position, q.queue_id, s.message_id, s.due, s.headers, s.body, nextval('{number}') AS content{ends}
            FROM unnest(%s::text[], %s::text[], %s::timestamptz[], %s::text[], %s::bytea[]{arrays})
                WITH ORDINALITY AS s(queue, message_id, due, headers, body{columns}, position)
            {looked_up("queue_id", names.of("queue"), "name = s.queue", "q")} ORDER BY s.position),
        kept AS (INSERT INTO {names.of("content")} SELECT content, headers, body FROM sent),
        queued AS (
            INSERT INTO {names.of("queue_message")} (queue_id, content, due, message_id{into})
            SELECT queue_id, content, due, message_id{into} FROM sent ORDER BY position
            RETURNING queue_id, number)
        SELECT (SELECT array_agg(position::integer) FROM sent),
            (SELECT count(pg_notify('{names.channel}', 'queue ' || queue_id || ' ' || first))
             FROM (SELECT queue_id, min(number) AS first FROM queued GROUP BY queue_id) AS f)"""


def lengths_query(names: SchemaNames) -> str:
    """Return the query for the number of messages in each queue, without expired ones."""
    queue, queue_message = names.of("queue"), names.of("queue_message")
    # Expired messages are counted by an index of their own, so the other count can use an index without times.
    ended = f"""
        SELECT queue_id, count(*) AS messages FROM {queue_message}
        WHERE ends_at < statement_timestamp() AND holder IS NULL GROUP BY queue_id"""
    counted = f"SELECT count(*) FROM {queue_message} AS m WHERE m.queue_id = q.queue_id"
    return f"""
        WITH ended AS MATERIALIZED ({ended})
        SELECT name, ({counted}) - coalesce((SELECT messages FROM ended WHERE ended.queue_id = q.queue_id), 0)
        FROM {queue} AS q"""


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
    """Raised if messages cannot share a transaction: they have several holders, or their works may cause a deadlock."""


def do_works_of(connection: Connection, works: Sequence[Sequence[Work]]) -> None:
    """Run works. With several messages each waits at most 50 ms for a lock, as its owner may wait for one of theirs."""
    if len(works) > 1:
        connection.execute(_NO_LONG_WAIT)
    try:
        do_works(connection, chain.from_iterable(works))
        if len(works) > 1:  # PostgreSQL serializes commits that notify, which takes longer than 50 ms on a slow disk
            connection.execute(_AS_LONG_AS_IT_TAKES)
    except psycopg.errors.LockNotAvailable as error:
        if len(works) > 1:
            raise _NotTogether from error
        raise


class Acknowledgements:
    """Settles the messages of one receiver."""

    def __init__(self, database: Access, sql: QueueStatements, queue: str, insert: Insert) -> None:
        self._database, self._sql, self._queue, self._insert = database, sql, queue, insert
        self._together = GroupCommit[Acknowledgement, None](_AT_ONCE)

    async def end(self, ending: Acknowledgement) -> None:
        await self._together.run(lambda jobs: do_jobs(jobs, self._ended), ending)

    async def end_all(self, endings: Sequence[Acknowledgement]) -> Sequence[Exception | None]:
        return await in_thread(lambda: in_parts(endings, self._ended))

    def _ended(self, endings: Sequence[Acknowledgement]) -> Sequence[Exception | None]:
        """Settle messages in one transaction; return `ClaimLost` for each whose claim was lost."""
        if len({ending.holder for ending in endings}) > 1:  # the listener's connection was lost between the claims
            raise _NotTogether
        numbers = self._database.run_blocking(lambda c: self._end(c, endings))
        return [
            None if each.number in numbers else ClaimLost.of(each.message_id, queue=self._queue) for each in endings
        ]

    def _end(self, connection: Connection, endings: Sequence[Acknowledgement]) -> set[int]:
        """Settle messages of one holder; return the numbers of those with a claim in force.

        Sends and works of messages with a lost claim are not carried out.
        """
        if not any(ending.rows or ending.work for ending in endings):
            return self._remove(connection, endings)
        with connection.transaction():
            numbers = self._remove(connection, endings)
            settled = [ending for ending in endings if ending.number in numbers]
            raise_first(self._insert(connection, [row for ending in settled for row in ending.rows]))
            do_works_of(connection, [ending.work for ending in settled if ending.work])
        return numbers

    def _remove(self, connection: Connection, endings: Sequence[Acknowledgement]) -> set[int]:
        """Delete messages of one holder and write their records; return the numbers of the deleted rows."""
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
        ((numbers,),) = connection.execute(self._sql.commit, values, prepare=True).fetchall()
        return set(numbers or ())


def _times(instants: Iterable[datetime]) -> str:
    """Return instants in the text form of an array. Mostly a batch has one object for all, which is formatted once."""
    texts, before, text = list[str](), None, ""
    for instant in instants:
        if instant is not before:
            before, text = instant, instant.isoformat()
        texts.append(text)
    return "{" + ",".join(texts) + "}"


def raise_first(errors: Sequence[PostdateError | None]) -> None:
    """Raise the first error, if any: the sends of one transaction succeed or fail as a whole."""
    for error in errors:
        if error is not None:
            raise error
