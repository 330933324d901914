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
from postdate.backends.postgres.names import SchemaNames, array, ctids_of, lookup_join, sql
from postdate.backends.postgres.rows import QUEUED_COLUMNS
from postdate.errors import ClaimLost, MessageTooLarge, PostdateError
from postdate.ports import Work, run_works
from postdate.runtime.threads import GroupCommit, run_in_halves, run_in_thread, run_jobs


class QueueStatements:
    def __init__(self, names: SchemaNames) -> None:
        queue, queue_message, content = names.name_of("queue"), names.name_of("queue_message"), names.name_of("content")
        columns = f"m.queue_id, m.number, {QUEUED_COLUMNS}"
        has_ended = "(m.ends_at IS NOT NULL AND m.ends_at < clock_timestamp())"
        content_of = (
            f"LEFT JOIN LATERAL (SELECT headers, body FROM {content} WHERE number = m.content OFFSET 0) AS c ON true"
        )

        self.create = sql(f"INSERT INTO {queue} (name) VALUES (%s) ON CONFLICT DO NOTHING")
        self.find = sql(f"SELECT queue_id FROM {queue} WHERE name = %s")
        self.lengths = sql(lengths_query(names))
        self.lengths_of = sql(f"{lengths_query(names)} WHERE name = ANY(%s)")
        # Most messages never expire, and for these there is a cheaper statement.
        self.insert, self.insert_ending = (sql(_insert_query(names, with_expiry=ending)) for ending in (False, True))
        # A claim need not survive a crash of the server, so its commit does not wait for the disk. Expired messages are
        # claimed like others, with a flag in the result: to skip them, each claim would have to read all of them. If a
        # row was claimed and released meanwhile, the lock is on its new version, which the update does not see. Then it
        # stays free, and the notification of its release causes the next claim.
        asynchronous_commit = "(SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL"
        self.claim = sql(f"""
            WITH free AS MATERIALIZED (
                SELECT ctid AS place FROM {queue_message}
                WHERE queue_id = %(queue)s AND number >= %(low)s AND holder IS NULL AND {asynchronous_commit}
                ORDER BY queue_id, number LIMIT %(limit)s FOR UPDATE SKIP LOCKED),
            m AS (
                UPDATE {queue_message} AS m SET holder = %(holder)s
                WHERE m.ctid = ANY (ARRAY(SELECT place FROM free)) RETURNING m.*)
            SELECT {has_ended}, {columns} FROM m {content_of} ORDER BY m.number""")
        self.receive_by_id = sql(f"""
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
        ctids = ctids_of(
            "unnest(%(numbers)s::bigint[]) AS k(number)", queue_message, "queue_id = %(queue)s AND number = k.number"
        )
        self.commit = sql(f"""
            WITH gone AS (
                DELETE FROM {queue_message}
                WHERE ctid = ANY ({ctids}) AND holder IS NOT DISTINCT FROM %(holder)s::integer
                RETURNING number, content, message_id, due, store_id),
            dropped AS (DELETE FROM {content} WHERE number = ANY (ARRAY(SELECT content FROM gone))),
            recorded AS (
                INSERT INTO {names.name_of("record")} (at, due, store_id, kind, message_id, destination, detail)
                SELECT e.at, due, store_id, e.kind, message_id, %(destination)s, e.detail
                FROM gone JOIN unnest(%(recorded)s::bigint[], %(times)s::timestamptz[], %(kinds)s::smallint[],
                    %(details)s::text[]) AS e(number, at, kind, detail) USING (number))
            SELECT array_agg(number) FROM gone""")
        self.reject = sql(f"""
            WITH back AS (
                UPDATE {queue_message} SET holder = NULL, failures = failures + %(failures)s
                WHERE ctid = ANY ({ctids}) AND coalesce(holder, 0) = ANY (%(holders)s) RETURNING number)
            SELECT count(*), pg_notify('{names.channel}', 'queue ' || %(queue)s || ' ' || min(number))
            FROM back HAVING count(*) > 0""")
        self.release_unremembered = sql(f"""
            UPDATE {queue_message} SET holder = NULL
            WHERE queue_id + 0 = %(queue)s AND holder = %(holder)s AND number <> ALL(%(numbers)s::bigint[])""")


def _insert_query(names: SchemaNames, *, with_expiry: bool) -> str:
    """Return the INSERT of messages, which also notifies receivers. It returns the positions whose queue exists.

    The parameters are arrays, one for each column. With ``with_expiry`` there are two more: the sender's expiry, and
    the time left, which counts from the arrival by the clock of the server.
    """
    ends = ", s.expires_at, clock_timestamp() + s.span AS ends_at" if with_expiry else ""
    arrays, columns, into = (
        (", %s::timestamptz[], %s::interval[]", ", expires_at, span", ", expires_at, ends_at")
        if with_expiry
        else ("", "", "")
    )
    number = names.name_of("number").replace("'", "''")
    return f"""
        WITH sent AS MATERIALIZED (
            SELECT s.position, q.queue_id, s.message_id, s.due, s.headers, s.body, nextval('{number}') AS content{ends}
            FROM unnest(%s::text[], %s::text[], %s::timestamptz[], %s::text[], %s::bytea[]{arrays})
                WITH ORDINALITY AS s(queue, message_id, due, headers, body{columns}, position)
            {lookup_join("queue_id", names.name_of("queue"), "name = s.queue", "q")} ORDER BY s.position),
        kept AS (INSERT INTO {names.name_of("content")} SELECT content, headers, body FROM sent),
        queued AS (
            INSERT INTO {names.name_of("queue_message")} (queue_id, content, due, message_id{into})
            SELECT queue_id, content, due, message_id{into} FROM sent ORDER BY position
            RETURNING queue_id, number)
        SELECT (SELECT array_agg(position::integer) FROM sent),
            (SELECT count(pg_notify('{names.channel}', 'queue ' || queue_id || ' ' || first))
             FROM (SELECT queue_id, min(number) AS first FROM queued GROUP BY queue_id) AS f)"""


def lengths_query(names: SchemaNames) -> str:
    """Return the query for the number of messages in each queue, without expired ones."""
    queue, queue_message = names.name_of("queue"), names.name_of("queue_message")
    # Expired messages are counted by an index of their own, so the other count can use an index without times.
    ended = f"""
        SELECT queue_id, count(*) AS messages FROM {queue_message}
        WHERE ends_at < statement_timestamp() AND holder IS NULL GROUP BY queue_id"""
    counted = f"SELECT count(*) FROM {queue_message} AS m WHERE m.queue_id = q.queue_id"
    return f"""
        WITH ended AS MATERIALIZED ({ended})
        SELECT name, ({counted}) - coalesce((SELECT messages FROM ended WHERE ended.queue_id = q.queue_id), 0)
        FROM {queue} AS q"""


_MAX_BATCH: Final = 500  # messages settled in one transaction

_SHORT_LOCK_TIMEOUT: Final = b"SET LOCAL lock_timeout = '50ms'"
_DEFAULT_LOCK_TIMEOUT: Final = b"SET LOCAL lock_timeout TO DEFAULT"

Row = tuple[Any, ...]
"""The values of a message for the INSERT."""
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


class _CannotShareTransaction(Exception):
    """Raised if messages cannot share a transaction: they have several holders, or their works may cause a deadlock."""


def run_works_with_timeout(connection: Connection, works: Sequence[Sequence[Work]]) -> None:
    """Run works. With several messages each waits at most 50 ms for a lock, as its owner may wait for one of theirs."""
    if len(works) > 1:
        connection.execute(_SHORT_LOCK_TIMEOUT)
    try:
        run_works(connection, chain.from_iterable(works))
        if len(works) > 1:  # PostgreSQL serializes commits that notify, which takes longer than 50 ms on a slow disk
            connection.execute(_DEFAULT_LOCK_TIMEOUT)
    except psycopg.errors.LockNotAvailable as error:
        if len(works) > 1:
            raise _CannotShareTransaction from error
        raise


class Acknowledgements:
    """Settles the messages of one receiver."""

    def __init__(self, database: Access, sql: QueueStatements, queue: str, insert: Insert) -> None:
        self._database, self._sql, self._queue, self._insert = database, sql, queue, insert
        self._group_commit = GroupCommit[Acknowledgement, None](_MAX_BATCH)

    async def settle(self, acknowledgement: Acknowledgement) -> None:
        await self._group_commit.run(lambda jobs: run_jobs(jobs, self._settle_blocking), acknowledgement)

    async def settle_all(self, acknowledgements: Sequence[Acknowledgement]) -> Sequence[Exception | None]:
        return await run_in_thread(lambda: run_in_halves(acknowledgements, self._settle_blocking))

    def _settle_blocking(self, acknowledgements: Sequence[Acknowledgement]) -> Sequence[Exception | None]:
        """Settle messages in one transaction; return `ClaimLost` for each whose claim was lost."""
        # The listener's connection was lost between the claims.
        if len({ending.holder for ending in acknowledgements}) > 1:
            raise _CannotShareTransaction
        numbers = self._database.run_blocking(lambda c: self._settle_rows(c, acknowledgements))
        return [
            None if each.number in numbers else ClaimLost.of(each.message_id, queue=self._queue)
            for each in acknowledgements
        ]

    def _settle_rows(self, connection: Connection, acknowledgements: Sequence[Acknowledgement]) -> set[int]:
        """Settle messages of one holder; return the numbers of those with a claim in force.

        Sends and works of messages with a lost claim are not carried out.
        """
        if not any(ending.rows or ending.work for ending in acknowledgements):
            return self._remove(connection, acknowledgements)
        with connection.transaction():
            numbers = self._remove(connection, acknowledgements)
            claimed = [ending for ending in acknowledgements if ending.number in numbers]
            raise_first(self._insert(connection, [row for ending in claimed for row in ending.rows]))
            run_works_with_timeout(connection, [ending.work for ending in claimed if ending.work])
        return numbers

    def _remove(self, connection: Connection, acknowledgements: Sequence[Acknowledgement]) -> set[int]:
        """Delete messages of one holder and write their records; return the numbers of the deleted rows."""
        to_record = [ending for ending in acknowledgements if ending.kind is not None]
        values: Mapping[str, Any] = {
            "queue": acknowledgements[0].queue_id,
            "numbers": array(ending.number for ending in acknowledgements),
            "holder": acknowledgements[0].holder,
            "recorded": array(ending.number for ending in to_record),
            "times": _times(ending.at for ending in to_record),
            "kinds": array(ending.kind for ending in to_record if ending.kind is not None),
            "details": [ending.detail for ending in to_record] if any(ending.detail for ending in to_record) else None,
            "destination": self._queue,
        }
        ((numbers,),) = connection.execute(self._sql.commit, values, prepare=True).fetchall()
        return set(numbers or ())


def _times(instants: Iterable[datetime]) -> str:
    """Return instants in the text form of an array. Mostly a batch has one object for all, which is formatted once."""
    texts, previous, text = list[str](), None, ""
    for instant in instants:
        if instant is not previous:
            previous, text = instant, instant.isoformat()
        texts.append(text)
    return "{" + ",".join(texts) + "}"


def raise_first(errors: Sequence[PostdateError | None]) -> None:
    """Raise the first error, if any: the sends of one transaction succeed or fail as a whole."""
    for error in errors:
        if error is not None:
            raise error
