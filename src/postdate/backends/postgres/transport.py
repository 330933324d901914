"""Durable, transactional queues in PostgreSQL.

A received message is claimed under the number of this process. The number ends with the process, so no lease expires.
Receiving, the sends of the handler and all other changes of the database are one transaction.

Messages expire by the clock of the server. The sender computes the time left until the expiry by its own clock, and
this time counts from the arrival. So differences between clocks of senders and receivers do not matter. An expired
message is not received and not counted, and is soon removed and recorded
(:mod:`postdate.backends.postgres.expiring`). A message that was received in time does not expire, unless it returns to
its queue. Source: ADR 0007.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import anyio
from typing_extensions import override

from postdate import ports
from postdate.backends.postgres.access import Access, Connection, OpenDatabase
from postdate.backends.postgres.errors import translate_queue_errors, transport_error_of
from postdate.backends.postgres.low_water import LowWater
from postdate.backends.postgres.names import array, queues_script, steps
from postdate.backends.postgres.observation import PostgresQueueObserver, server_facts
from postdate.backends.postgres.queues import Acknowledgement, Acknowledgements, QueueStatements, raise_first
from postdate.backends.postgres.rows import Row, Unreadable, decode_rows, envelope_of, queued_row
from postdate.backends.postgres.unreadable import (
    UnreadableInSchema,
    UnreadableStatements,
    mark_unreadable,
    statements_of_queues,
)
from postdate.errors import (
    ClaimLost,
    MessageTooLarge,
    PostdateError,
    QueueNotFound,
    StoreUnavailable,
    TransportUnavailable,
)
from postdate.messages import (
    Envelope,
    check_headers,
    encode_headers,
    too_large_error,
)
from postdate.runtime import forks
from postdate.runtime.resource import Resource
from postdate.runtime.threads import WakeUp, run_in_group, run_in_thread

_POLL_FLOOR_SECONDS: Final = 1.0
"""A receiver polls this often without a wake-up, as a wake-up may be lost."""

_NUMBER_INDEX: Final = 2
"""The index of the column with the number, in a claimed row."""

_IN_ONE_STATEMENT: Final = 1_000
_FEW: Final = 10
"""Up to this number of messages, a send shares its commit with other sends. More messages get their own transaction."""

_SENT_AT_ONCE: Final = _IN_ONE_STATEMENT // _FEW

_Rows = Sequence[Row | MessageTooLarge]
T = TypeVar("T")


class PostgresTransport(ports.Transport, UnreadableInSchema, ports.Scripted, forks.ForkAware):
    """Queues in a schema of PostgreSQL. They need direct connections: a pooler would lose wake-ups.

    Args:
        database: ``postgresql://user:password@host:port/database``, any connection string of libpq, or a
            :class:`postdate.Postgres` that other adapters use, too.
        schema: of the tables; a :class:`postdate.PostgresStore` in the same schema shares its transactions. ``None``:
            the schema of the database, by default ``postdate``.
        recording: how much of delayed messages is recorded here for audits; ``None``: the setting of the database, by
            default everything.
        largest_message_bytes: of headers and body together.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. ``None``: the
            setting of the database, by default 20 seconds.
        holds_at_most: if a process sends no heartbeat for this long, other processes that use the schema end its
            sessions, which releases the messages it has received; above 0. A slow handler does not stop the
            heartbeats. The others need the same role, or a role that is a member of it. ``None``: the setting of the
            database, by default a minute.

    Raises:
        ConfigurationError: the address, the schema or a duration is invalid.
    """

    def __init__(
        self,
        database: str | OpenDatabase,
        *,
        schema: str | None = None,
        recording: ports.Recording | None = None,
        largest_message_bytes: int = 16 * 1024 * 1024,
        answers_within: timedelta | None = None,
        holds_at_most: timedelta | None = None,
    ) -> None:
        self.database = Access(
            database,
            schema,
            recording=recording,
            answers_within=answers_within,
            holds_at_most=holds_at_most,
            claims=True,
        )
        self.sql = QueueStatements(self.database.names)
        self.unreadable = statements_of_queues(self.database.names)
        self.recording = self.database.recording
        self._receivers: list[PostgresReceiver] = []
        self._may_leave_claims = False
        self._queue_ids: dict[str, int] = {}
        self.claim_locks: defaultdict[str, threading.Lock] = defaultdict(forks.lock)
        self._capabilities = ports.TransportCapabilities(
            durable=True,
            transaction_modes=frozenset(ports.TransactionMode),
            database=self.database.identity,
            largest_message_bytes=largest_message_bytes,
            expires_messages=True,
            prefetches=True,
            receives_by_id=True,
        )
        forks.register(self)

    @property
    def resource(self) -> Resource:
        """The resource of the database."""
        return self.database.resource

    @override
    def after_fork_in_child(self) -> None:
        """Forget the receivers, which belong to the parent."""
        self._receivers, self._may_leave_claims = [], False

    @override
    def setup_statements(self, endpoint: str) -> str:
        names = self.database.names
        return names.script(steps(names.schema, None))

    @override
    def queue_statements(self, names: Sequence[str]) -> str:
        return queues_script(self.database.names.schema, names)

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        def create() -> None:
            self.database.setup_blocking()
            with self.database.lend_connection() as connection:
                for name in names:
                    connection.execute(self.sql.create, (name,))

        await run_in_thread(create)

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        rows = self.rows(envelopes, now)
        if not rows and not work:
            return []
        with translate_queue_errors():
            if work or len(rows) > _FEW:
                return await self.database.transaction(lambda c: self._send_all(c, rows, work))
            return await run_in_group(self, self._send_together, rows, _SENT_AT_ONCE)

    def _send_all(self, connection: Connection, rows: _Rows, work: Sequence[ports.Work]) -> list[PostdateError | None]:
        errors = self.insert(connection, rows)
        if work:
            raise_first(errors)
            ports.run_works(connection, work)
        return errors

    def _send_together(self, works: Sequence[_Rows]) -> Sequence[Sequence[PostdateError | None]]:
        rows = [row for each in works for row in each]
        errors = iter(self.database.run_blocking(lambda c: self.insert(c, rows)))
        return [list(islice(errors, len(each))) for each in works]

    async def _run(self, work: Callable[[Connection], Any], *, patiently: bool = False) -> Any:
        with translate_queue_errors():
            return await self.database.run(work, patiently=patiently)

    def rows(self, envelopes: Sequence[Envelope], now: datetime) -> list[Row | MessageTooLarge]:
        return [self._row(envelope, now) for envelope in envelopes]

    def _row(self, envelope: Envelope, now: datetime) -> Row | MessageTooLarge:
        check_headers(envelope.headers)
        headers = encode_headers(envelope.headers)
        if too_large := too_large_error(envelope, headers, self._capabilities.largest_message_bytes):
            return too_large
        return queued_row(envelope, headers, now)

    def insert(self, connection: Connection, rows: _Rows) -> list[PostdateError | None]:
        """Insert messages into their queues, in order, 1,000 in a statement; the commit sends the notifications."""
        valid_rows = [row for row in rows if isinstance(row, tuple)]
        inserted: dict[int, bool] = {}
        for start in range(0, len(valid_rows), _IN_ONE_STATEMENT):
            batch = valid_rows[start : start + _IN_ONE_STATEMENT]
            columns = [list(column) for column in zip(*batch, strict=True)]
            if ends := any(row[-2:] != (None, None) for row in batch):
                self.database.listener()  # its thread removes expired messages, also if there is no receiver
            statement = self.sql.insert_ending if ends else self.sql.insert
            result = connection.execute(statement, columns if ends else columns[:-2], prepare=True).fetchone()
            assert result is not None
            inserted.update((start + position - 1, True) for position in result[0] or ())
        errors = list[PostdateError | None]()
        position = 0
        for row in rows:
            if not isinstance(row, tuple):
                errors.append(row)
                continue
            errors.append(
                None if inserted.get(position) else QueueNotFound.of(row[0], row[1], database=self.database.where)
            )
            position += 1
        return errors

    @property
    @override
    def _unreadable(self) -> UnreadableStatements:
        return self.unreadable

    @override
    def _translate_errors(self) -> AbstractContextManager[None]:
        return translate_queue_errors()

    @override
    def receiver(self, queue: str) -> PostgresReceiver:
        receiver = PostgresReceiver(self, queue)
        self._receivers.append(receiver)
        return receiver

    def forget(self, receiver: PostgresReceiver) -> None:
        """Forget a closed receiver. If it may have left claims, closing this transport releases them."""
        self._may_leave_claims |= receiver.in_doubt
        if receiver in self._receivers:
            self._receivers.remove(receiver)

    def claimed_numbers(self, queue: str) -> list[int]:
        return [number for each in list(self._receivers) if each.queue == queue for number in each.claimed_numbers()]

    def queue_id(self, connection: Connection, queue: str) -> int:
        """Return the number of a queue; raises :class:`QueueNotFound`."""
        if queue not in self._queue_ids:
            if (row := connection.execute(self.sql.find, (queue,)).fetchone()) is None:
                raise QueueNotFound.of(queue, database=self.database.where)
            self._queue_ids[queue] = row[0]
        return self._queue_ids[queue]

    @override
    def observer(self) -> PostgresQueueObserver:
        return PostgresQueueObserver(self.database)

    @override
    async def server_facts(self) -> ports.ServerFacts:
        with translate_queue_errors():
            return await server_facts(self.database, None)

    async def queue_lengths(self) -> Mapping[str, int]:
        """Return the number of messages in each queue, including those in progress, without expired ones."""
        rows = await self._run(lambda c: c.execute(self.sql.lengths, ()).fetchall(), patiently=True)
        return dict(rows)

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the number of messages in each queue, including received ones."""
        lengths = await self._run(lambda c: c.execute(self.sql.lengths_of, (list(names),)).fetchall(), patiently=True)
        return dict(lengths)

    @override
    async def close(self) -> None:
        self.database.shorten_deadlines()
        receivers, self._receivers = self._receivers, []
        for receiver in receivers:
            try:
                await receiver.close()
            except TransportUnavailable:  # the end of this process's connection releases its messages
                self._may_leave_claims = True
        await run_in_thread(partial(self.database.close_blocking, in_doubt=self._may_leave_claims))


class PostgresReceiver(ports.Receiver, forks.ForkAware):
    def __init__(self, transport: PostgresTransport, queue: str) -> None:
        self._transport, self._database, self._sql, self.queue = transport, transport.database, transport.sql, queue
        self._wake_up: WakeUp | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._claimed: dict[int, ports.Received] = {}
        """Received messages by the number of their row. A later claim of a row replaces the earlier one."""
        self._low_water = LowWater()
        self._acknowledgements = Acknowledgements(self._database, self._sql, queue, transport.insert)
        self.in_doubt = False
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Forget all claims: they belong to the parent, and must be neither settled nor released here."""
        self._claimed, self._wake_up, self._stop_listening, self.in_doubt = {}, None, None, False

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        if self._wake_up is None:
            wake_up = WakeUp()
            self._stop_listening = await self._run_in_thread(lambda: self._listen(wake_up))
            self._wake_up = wake_up
        while True:
            self._wake_up.reset()
            if (received := await self._run_in_thread(lambda: self._claim(limit))) is None:
                continue
            if received or not wait:
                return received
            with anyio.move_on_after(_POLL_FLOOR_SECONDS):
                await self._wake_up.wait()

    async def _run_in_thread(self, work: Callable[[], Any]) -> Any:
        with translate_queue_errors():
            return await run_in_thread(work)

    def _listen(self, wake_up: WakeUp) -> Callable[[], None]:
        queue_id = self._database.run_blocking(lambda c: self._transport.queue_id(c, self.queue))
        listener = self._database.listener()
        listener.add_role(receives=self.queue)

        def on_notification(topic: str, number: int, value: int) -> None:
            if topic == "lost":
                self._low_water.forget()
                wake_up.wake()
            elif topic == "queue" and number == queue_id:
                self._low_water.remember_free(value)
                wake_up.wake()

        return listener.listen(on_notification)

    def claimed_numbers(self) -> list[int]:
        return list(self._claimed)

    def _claim(self, limit: int) -> list[ports.Received] | None:
        """Return claimed messages; ``None`` if all of them were expired or unreadable, so that more may follow."""
        holder = self._database.listener().wait_for_holder()
        with self._transport.claim_locks[self.queue]:
            return self._run_claim(holder, lambda: self._claim_as(holder, limit))

    def _run_claim(self, holder: int, claim: Callable[[], T]) -> T:
        """Run ``claim``. If an earlier claim failed, first release the messages that it may have claimed."""
        if self.in_doubt:
            values = {"holder": holder, "numbers": array(self._transport.claimed_numbers(self.queue))}

            def release(connection: Connection) -> None:
                queue_id = self._transport.queue_id(connection, self.queue)
                connection.execute(self._sql.release_unremembered, {**values, "queue": queue_id})

            self._database.run_blocking(release)
            self._low_water.forget()
            # An abandoned claim may still run on the server; then the next claim releases its messages again.
            self.in_doubt = not self._database.is_outcome_known
        try:
            return claim()
        except BaseException:
            self.in_doubt = True
            raise

    def _claim_as(self, holder: int, limit: int) -> list[ports.Received] | None:
        rows, unreadable = self._claim_rows(holder, limit)
        unexpired = [row for row in rows if not row[0]]
        if len(unexpired) < len(rows):
            self._discard([row for row in rows if row[0]], holder)
        if unreadable:
            self._mark_unreadable(unreadable, holder)
        if (rows or unreadable) and not unexpired:
            return None
        received = [self._received(row, holder) for row in unexpired]
        count = ports.count_received_together(received)
        if count < len(received):
            self._reject_blocking(
                [_QueueClaim(row[1], row[_NUMBER_INDEX], holder) for row in unexpired[count:]], failures=0
            )
        self._claimed |= {row[_NUMBER_INDEX]: each for row, each in zip(unexpired[:count], received, strict=False)}
        return received[:count]

    def _claim_rows(self, holder: int, limit: int) -> tuple[list[Row], list[Unreadable]]:
        def claim(connection: Connection) -> tuple[list[Row], list[Unreadable]]:
            values = {
                "holder": holder,
                "queue": self._transport.queue_id(connection, self.queue),
                "limit": limit,
                "low": self._low_water.value(),
            }
            cursor = connection.execute(self._sql.claim, values, prepare=True, binary=True)
            return decode_rows(cursor, _NUMBER_INDEX, self._decode_row)

        rows, unreadable = self._database.run_blocking(claim)
        self._low_water.remember_claimed([*(row[_NUMBER_INDEX] for row in rows), *(row.number for row in unreadable)])
        return rows, unreadable

    def _mark_unreadable(self, unreadable: Sequence[Unreadable], holder: int) -> None:
        """Mark unreadable messages that were claimed. If this process ends before, other processes do it."""

        def mark(connection: Connection) -> None:
            values = {"queue": self._transport.queue_id(connection, self.queue), "holder": holder}
            mark_unreadable(connection, self._transport.unreadable, values, unreadable)

        self._database.run_blocking(mark)

    def _discard(self, rows: Sequence[Row], holder: int) -> None:
        """Remove claimed messages that have expired, and a batch of other expired ones, as there may be many."""

        def discard(connection: Connection) -> None:
            self._database.reaper.discard(connection, rows[0][1], array(row[2] for row in rows), holder)
            self._database.reaper.reap(connection)

        self._database.run_blocking(discard)

    @override
    async def receive_by_id(self, message_id: str) -> ports.Received | None:
        def receive() -> ports.Received | None:
            holder = self._database.listener().wait_for_holder()
            with self._transport.claim_locks[self.queue]:
                return self._run_claim(holder, lambda: claim_as(holder))

        def claim_as(holder: int) -> ports.Received | None:
            def claim(connection: Connection) -> tuple[list[Row], list[Unreadable]]:
                values = {"holder": holder, "queue": self._transport.queue_id(connection, self.queue), "id": message_id}
                return decode_rows(
                    connection.execute(self._sql.receive_by_id, values, binary=True), _NUMBER_INDEX, self._decode_row
                )

            rows, unreadable = self._database.run_blocking(claim)
            if unreadable:
                self._mark_unreadable(unreadable, holder)
                return claim_as(holder)  # another message may have the same id
            if rows and rows[0][0]:
                self._discard(rows, holder)
                return None
            if not rows:
                return None
            received = self._received(rows[0], holder)
            self._claimed[rows[0][_NUMBER_INDEX]] = received
            return received

        return await self._run_in_thread(receive)

    def _decode_row(self, row: Row) -> Row:
        has_ended, queue_id, number, *columns = row
        return (has_ended, queue_id, number, *envelope_of(self.queue, *columns))

    def _received(self, row: Row, holder: int) -> ports.Received:
        _, queue_id, number, envelope, failures, unanswered = row
        token, is_suspect = _QueueClaim(queue_id, number, holder), unanswered >= ports.SUSPECT_AFTER
        return ports.Received(envelope, failures + unanswered, token, unanswered, is_suspect=is_suspect)

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        acknowledgement = self._acknowledgement(received, now, completion)
        if isinstance(acknowledgement, ClaimLost):
            raise acknowledgement
        with translate_queue_errors():
            await self._acknowledgements.settle(acknowledgement)
        self._forget(received)

    @override
    async def settle(self, settlements: Sequence[ports.Settlement]) -> Sequence[Exception | None]:
        outcomes = [self._acknowledgement(*ending) for ending in settlements]
        acknowledgements = [each for each in outcomes if isinstance(each, Acknowledgement)]
        errors = iter(await self._acknowledgements.settle_all(acknowledgements) if acknowledgements else ())
        results = [each if isinstance(each, ClaimLost) else next(errors) for each in outcomes]
        for settlement, error in zip(settlements, results, strict=True):
            if error is None:
                self._forget(settlement.received)
        return [transport_error_of(error) if isinstance(error, StoreUnavailable) else error for error in results]

    def _acknowledgement(
        self, received: ports.Received, now: datetime, completion: ports.Completion
    ) -> Acknowledgement | ClaimLost:
        token = self._token_of(received)
        if token is None:
            return ClaimLost.of(received.envelope.message_id, queue=self.queue)
        rows = self._transport.rows(completion.outgoing, now) if completion.outgoing else ()
        kind, detail = self._kind_to_record(received, completion), completion.detail or None
        id_ = received.envelope.message_id
        return Acknowledgement(
            id_, token.queue_id, token.number, token.holder, now, kind, detail, rows, completion.work
        )

    def _kind_to_record(self, received: ports.Received, completion: ports.Completion) -> int | None:
        """Return the kind to record, or ``None``. For a message that was never delayed only a discard is recorded."""
        if completion.record is ports.RecordKind.DISCARDED:
            return int(completion.record)
        is_recorded = received.envelope.due is not None and self._transport.recording is ports.Recording.ALL
        return int(completion.record) if is_recorded and completion.record is not None else None

    @override
    async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
        if self._token_of(received) is not None:
            await self._reject([received], failures=int(failed))

    def _token_of(self, received: ports.Received) -> _QueueClaim | None:
        token = received.token
        return token if isinstance(token, _QueueClaim) and self._claimed.get(token.number) is received else None

    def _forget(self, received: ports.Received) -> None:
        token = self._token_of(received)
        if token is not None:
            self._claimed.pop(token.number, None)

    async def _reject(self, messages: Sequence[ports.Received], failures: int) -> None:
        tokens = [hold for each in messages if (hold := self._token_of(each)) is not None]
        await self._run_in_thread(lambda: self._reject_blocking(tokens, failures))
        for each in messages:
            self._forget(each)

    def _reject_blocking(self, tokens: Sequence[_QueueClaim], failures: int) -> None:
        def reject(connection: Connection) -> None:
            connection.execute(
                self._sql.reject,
                {
                    "queue": self._transport.queue_id(connection, self.queue),
                    "numbers": [hold.number for hold in tokens],
                    "holders": list({hold.holder for hold in tokens}),
                    "failures": failures,
                },
            )

        self._database.run_blocking(reject)
        for hold in tokens:
            self._low_water.remember_free(hold.number)

    @override
    async def close(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = self._wake_up = None
        self._transport.forget(self)
        if self._claimed:
            await self._reject(list(self._claimed.values()), failures=0)


class _QueueClaim:
    __slots__ = ("holder", "number", "queue_id")

    def __init__(self, queue_id: int, number: int, holder: int) -> None:
        self.queue_id, self.number, self.holder = queue_id, number, holder
