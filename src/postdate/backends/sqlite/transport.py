"""Durable, transactional queues in one SQLite file, for any number of processes on one machine.

A received message is claimed by the process, without a lease: the claim ends when the process acknowledges or rejects
the message, or dies. Receiving, the sends of the handler and all other changes of the file are one transaction.
Source: ADR 0003.

An expired message is not received; it expires by the clock of the machine. Every process that has the file open removes
expired messages, also if there is no receiver. A message that expires while it is claimed stays with its receiver.
Source: docs/guides/time-to-be-received.md.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, cast

import anyio
from typing_extensions import override

from postdate import errors, ports
from postdate.backends.sqlite import rows as sqlite_rows
from postdate.backends.sqlite.file import SqliteFile
from postdate.backends.sqlite.housekeeping import DEAD_LETTERS, INSERT_RECORD
from postdate.backends.sqlite.observation import FileObserver, queue_lengths
from postdate.backends.sqlite.unreadable import UnreadableFileRows
from postdate.clock import Clock, to_microseconds
from postdate.messages import Envelope, check_headers, encode_headers, too_large_error
from postdate.ports.transports import ExpiryRules, expiry_in_queue
from postdate.runtime.threads import WakeUp

__all__ = ["DEAD_LETTERS", "LocalReceiver", "LocalTransport"]

_IS_RECEIVABLE: Final = "claimant IS NULL AND (ends_at IS NULL OR ends_at >= :now)"
_FIRST: Final = f"""
    SELECT (
        SELECT seq FROM queue_message AS m INDEXED BY queue_message_free
        WHERE m.queue_id = q.queue_id AND {_IS_RECEIVABLE} ORDER BY seq LIMIT 1)
    FROM queue AS q WHERE q.name = :queue"""
_IN_QUEUE: Final = "queue_id = (SELECT q.queue_id FROM queue AS q WHERE q.name = :queue)"
# From the first unexpired message of an earlier read, so that expired ones are not read again under the lock.
_DELETE: Final = """
    DELETE FROM queue_message WHERE seq IN (SELECT value FROM json_each(?)) AND claimant = ?
    RETURNING seq, content, message_id"""
# One by one: for a list of numbers, SQLite reads the whole table if ANALYZE has seen it with one row.
_DELETE_CONTENT: Final = "DELETE FROM content WHERE seq = ?"

_CLAIM: Final = f"""
    UPDATE queue_message SET claimant = :claimant WHERE seq IN (
        SELECT seq FROM queue_message INDEXED BY queue_message_free
        WHERE {_IN_QUEUE} AND seq >= :first AND {_IS_RECEIVABLE} ORDER BY seq LIMIT :limit)
    RETURNING {sqlite_rows.QUEUED_COLUMNS}"""

_CLAIM_BY_ID: Final = f"""
    UPDATE queue_message SET claimant = :claimant WHERE seq = (
        SELECT min(seq) FROM queue_message WHERE {_IN_QUEUE} AND message_id = :id AND {_IS_RECEIVABLE})
    RETURNING {sqlite_rows.QUEUED_COLUMNS}"""

# Each count uses one index; only few of the free messages are expired.
_LENGTHS: Final = """
    SELECT q.name,
        (SELECT count(*) FROM queue_message AS m INDEXED BY queue_message_free
         WHERE m.queue_id = q.queue_id AND m.claimant IS NULL) -
        (SELECT count(*) FROM queue_message AS m INDEXED BY queue_message_ending
         WHERE m.ends_at < ? AND m.ends_at IS NOT NULL AND m.claimant IS NULL AND m.queue_id = q.queue_id)
    FROM queue AS q WHERE q.name IN (SELECT value FROM json_each(?))"""

_Row = tuple[Any, ...] | errors.MessageTooLarge | errors.TimeToBeReceivedInTransaction
"""The row of a message, or the reason why it cannot be sent."""

_POLL_FLOOR_SECONDS = 1.0
"""A receiver polls this often without a wake-up, as a wake-up may be lost."""


class LocalTransport(UnreadableFileRows, ports.Transport):
    """Queues in an SQLite file.

    Args:
        path: of the file; created by :meth:`create_queues` or at first use unless ``create`` is false.
        synchronous: see :class:`postdate.SqliteStore`; the store on the same file needs the same value.
        recording: see :class:`postdate.SqliteStore`; the store on the same file needs the same value.
        largest_message_bytes: of headers and body together.
        create: create the file and its tables when they are missing.
        expiry: ``None``: each message has a time to be received of its own, also in a transaction, and expired messages
            are deleted. With rules, the queues are as strict as those of MSMQ: in a transaction a time to be received
            is refused, or left to the receiver, and there are dead letters, in the queue :data:`DEAD_LETTERS`.
        clock: by which messages expire in their queues; default: the machine's. All adapters on one file in one
            process need the same clock and the same rules.
        holds_at_most: see :class:`postdate.SqliteStore`.

    Raises:
        ConfigurationError: a setting is invalid, or the file is open in this process with other settings.
    """

    _messages = sqlite_rows.QUEUED

    def __init__(  # noqa: PLR0913 - the settings
        self,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: ports.Recording = ports.Recording.ALL,
        largest_message_bytes: int = 16 * 1024 * 1024,
        create: bool = True,
        expiry: ExpiryRules | None = None,
        clock: Clock | None = None,
        holds_at_most: timedelta | None = None,
    ) -> None:
        rules = sqlite_rows.QueueRules(expiry=expiry) if clock is None else sqlite_rows.QueueRules(clock, expiry)
        self.file = SqliteFile.open(
            path, synchronous=synchronous, recording=recording, create=create, rules=rules, holds_at_most=holds_at_most
        )
        self._rules = rules
        self._capabilities = ports.TransportCapabilities(
            durable=True,
            transaction_modes=frozenset(ports.TransactionMode),
            database=("sqlite", str(self.file.path)),
            largest_message_bytes=largest_message_bytes,
            expires_messages=True,
            time_to_be_received_in_transactions=expiry is None or not expiry.one_per_transaction,
            dead_letters=expiry is not None,
            pipelines=True,
            prefetches=True,
            receives_by_id=True,
        )

    @property
    @override
    def capabilities(self) -> ports.TransportCapabilities:
        return self._capabilities  # a property here and not in a base class, as it is read for each message

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        def create(tx: sqlite_rows.Transaction) -> None:
            tx.executemany("INSERT INTO queue (name) VALUES (?) ON CONFLICT DO NOTHING", [(name,) for name in names])

        await self.file.write(create)

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[errors.PostdateError | None]:
        rows = self.rows(envelopes, now, in_transaction=bool(work))
        if work:
            await self.file.write(lambda tx: _send_and_run_works(tx, rows, work))
            return [None] * len(rows)
        return await self.file.write(lambda tx: [_send(tx, row) for row in rows])

    def rows(self, envelopes: Sequence[Envelope], now: datetime, *, in_transaction: bool) -> list[_Row]:
        return [self._row(envelope, now, in_transaction=in_transaction) for envelope in envelopes]

    def _row(self, envelope: Envelope, now: datetime, *, in_transaction: bool) -> _Row:
        check_headers(envelope.headers)
        headers = encode_headers(envelope.headers)
        if too_large := too_large_error(envelope, headers, self._capabilities.largest_message_bytes):
            return too_large
        try:
            ends_at, dead_letter = self._expiry_of(envelope, now, in_transaction=in_transaction)
        except errors.TimeToBeReceivedInTransaction as error:
            return error
        return sqlite_rows.queued_row(envelope, headers, ends_at, dead_letter=dead_letter)

    def _expiry_of(self, envelope: Envelope, now: datetime, *, in_transaction: bool) -> tuple[int | None, bool]:
        """Return when a message expires in the queue, and whether it is then kept as a dead letter."""
        if (expiry := self._rules.expiry) is not None:
            native = expiry.native_expiry(envelope, in_transaction=in_transaction)
            envelope = replace(envelope, time_to_be_received=native.time_to_be_received)
        if (lifetime := envelope.time_left(now)) is None:
            return None, expiry is not None and expiry.uses_dead_letters(envelope, expires=False)
        return expiry_in_queue(lifetime, self._rules.clock.now()), expiry is not None and expiry.uses_dead_letters(
            envelope, expires=True
        )

    @override
    def receiver(self, queue: str) -> LocalReceiver:
        return LocalReceiver(self, queue)

    async def queue_lengths(self) -> Mapping[str, int]:
        """Return the number of messages in each queue, including received ones."""
        return await self.file.read(queue_lengths)

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the number of messages in each queue, without received and expired ones."""
        values = (self._rules.now(), json.dumps([name for name in names if "\0" not in name]))
        return dict(await self.file.read(lambda c: c.execute(_LENGTHS, values).fetchall()))

    @override
    def observer(self) -> FileObserver:
        return FileObserver(self.file)


class LocalReceiver(ports.Receiver):
    def __init__(self, transport: LocalTransport, queue: str) -> None:
        self._transport, self._file, self._queue = transport, transport.file, queue
        self._wake_up: WakeUp | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._claims: dict[object, ports.Received] = {}

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        if self._wake_up is None:
            await self._file.read(self._first_number)
            wake_up = WakeUp()
            self._stop_listening = await self._file.listen(sqlite_rows.queue_topic(self._queue), wake_up.wake)
            self._wake_up = wake_up
        while True:
            self._wake_up.reset()
            first = await self._file.read(self._first_number)
            received = [] if first is None else await self._claim_messages(_CLAIM, first=first, limit=limit)
            if received or not wait:
                return received
            with anyio.move_on_after(_POLL_FLOOR_SECONDS):
                await self._wake_up.wait()

    @override
    async def receive_by_id(self, message_id: str) -> ports.Received | None:
        await self._file.read(self._first_number)
        received = await self._claim_messages(_CLAIM_BY_ID, id=message_id)
        return received[0] if received else None

    def _first_number(self, connection: sqlite3.Connection) -> int | None:
        row = connection.execute(_FIRST, {"queue": self._queue, "now": self._file.rules.now()}).fetchone()
        if row is None:
            raise errors.QueueNotFound.of(self._queue, database=str(self._file.path))
        return row[0]

    async def _claim_messages(self, sql: str, **values: object) -> list[ports.Received]:
        """Claim and remember readable messages; unreadable ones are marked in the same transaction."""

        def claim(tx: sqlite_rows.Transaction) -> list[ports.Received]:
            def decode(row: sqlite_rows.Row) -> ports.Received:
                envelope, failures, unanswered = sqlite_rows.envelope_of(row, self._queue)
                token, is_suspect = (row[0], tx.claimant), unanswered >= ports.SUSPECT_AFTER
                return ports.Received(envelope, failures + unanswered, token, unanswered, is_suspect=is_suspect)

            parameters = {"claimant": tx.claimant, "queue": self._queue, "now": tx.rules.now(), **values}
            messages = sqlite_rows.claim_rows(tx, sqlite_rows.QUEUED, sql, parameters, decode)
            count = ports.count_received_together(messages)
            if count < len(messages):
                self._reject(tx, messages[count:], 0)
            return messages[:count]

        messages = await self._file.write(claim)
        for each in messages:
            self._claims[each.token] = each
        return messages

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        rows = self._transport.rows(completion.outgoing, now, in_transaction=True)

        def commit(tx: sqlite_rows.Transaction) -> None:
            self._remove(tx, received)
            record = _record_of(tx, received, now, completion)
            tx.executemany(INSERT_RECORD, [] if record is None else [record])
            _send_and_run_works(tx, rows, completion.work)

        await self._file.write(commit)
        self._forget_claim(received)

    @override
    async def settle(self, settlements: Sequence[ports.Settlement]) -> Sequence[Exception | None]:
        """Settle all messages in one savepoint; if that fails, each message in its own."""
        rows = [self._transport.rows(each.completion.outgoing, each.at, in_transaction=True) for each in settlements]
        try:
            await self._file.write(lambda tx: self._settle(tx, settlements, rows))
        except errors.StoreUnreachable as error:
            return [error] * len(settlements)
        except Exception:  # noqa: BLE001 - settling one by one finds the message that caused it
            return await super().settle(settlements)
        for each in settlements:
            self._forget_claim(each.received)
        return [None] * len(settlements)

    def _settle(
        self, tx: sqlite_rows.Transaction, settlements: Sequence[ports.Settlement], rows: Sequence[Sequence[_Row]]
    ) -> None:
        numbers = {
            _claim_key(each.received, tx)[0]: each for each in settlements if self._is_claimed(each.received, tx)
        }
        deleted = tx.execute(_DELETE, (json.dumps(list(numbers)), tx.claimant)).fetchall()
        settled_numbers = [seq for seq, _, id_ in deleted if numbers[seq].received.envelope.message_id == id_]
        if len(settled_numbers) < len(settlements):
            raise errors.ClaimLost.of(*(each.received.envelope.message_id for each in settlements), queue=self._queue)
        tx.executemany(_DELETE_CONTENT, [(content,) for _, content, _ in deleted])
        records = [_record_of(tx, *each) for each in settlements]
        tx.executemany(INSERT_RECORD, [record for record in records if record is not None])
        _send_and_run_works(
            tx, [row for sent in rows for row in sent], [work for each in settlements for work in each.completion.work]
        )

    def _is_claimed(self, received: ports.Received, tx: sqlite_rows.Transaction) -> bool:
        return self._claims.get(received.token) is received and _claim_key(received, tx)[1] != 0

    def _forget_claim(self, received: ports.Received) -> None:
        # The message may have been received again meanwhile, under the same number.
        if self._claims.get(received.token) is received:
            del self._claims[received.token]

    def _remove(self, tx: sqlite_rows.Transaction, received: ports.Received) -> None:
        # A message that is rejected and received again here keeps its number, but has another `Received` object.
        deleted = (
            self._claims.get(received.token) is received
            and tx.execute(
                "DELETE FROM queue_message WHERE seq = ? AND claimant = ? AND message_id = ? RETURNING content",
                (*_claim_key(received, tx), received.envelope.message_id),
            ).fetchone()
        )
        if not deleted:
            raise errors.ClaimLost.of(received.envelope.message_id, queue=self._queue)
        tx.execute("DELETE FROM content WHERE seq = ?", deleted)

    @override
    async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
        if self._claims.get(received.token) is not received:
            return

        await self._file.write(lambda tx: self._reject(tx, [received], int(failed)))
        self._forget_claim(received)

    def _reject(self, tx: sqlite_rows.Transaction, received: Sequence[ports.Received], failures: int) -> None:
        tx.executemany(
            "UPDATE queue_message SET claimant = NULL, failures = failures + ? WHERE seq = ? AND claimant = ?",
            [(failures, *_claim_key(each, tx)) for each in received],
        )
        tx.signal(sqlite_rows.queue_topic(self._queue))

    @override
    async def close(self) -> None:
        if messages := list(self._claims.values()):
            with suppress(errors.StoreReplaced):  # no process uses the former file any more
                await self._file.write(lambda tx: self._reject(tx, messages, 0))
        for received in messages:
            self._forget_claim(received)
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = self._wake_up = None


def _claim_key(received: ports.Received, tx: sqlite_rows.Transaction) -> tuple[int, int]:
    """Return the number of a message and its claimant; 0, which no process has, if this process lost its claims."""
    seq, claimant = cast("tuple[int, int]", received.token)
    return seq, claimant if claimant == tx.claimant else 0


def _send(tx: sqlite_rows.Transaction, row: _Row) -> errors.PostdateError | None:
    if not isinstance(row, tuple):
        return row
    *fields, queue, headers, body = row
    if (queue_row := tx.execute("SELECT queue_id FROM queue WHERE name = ?", (queue,)).fetchone()) is None:
        return errors.QueueNotFound.of(queue, fields[0])
    content = tx.execute("INSERT INTO content (headers, body) VALUES (?, ?)", (headers, body)).lastrowid
    tx.execute(sqlite_rows.INSERT_QUEUED, (queue_row[0], *fields, content))
    tx.signal(sqlite_rows.queue_topic(queue))
    return None


def _send_and_run_works(tx: sqlite_rows.Transaction, rows: Sequence[_Row], work: Sequence[ports.Work]) -> None:
    for row in rows:
        if (error := _send(tx, row)) is not None:
            raise error
    ports.run_works(tx, work)


def _record_of(
    tx: sqlite_rows.Transaction, received: ports.Received, at: datetime, completion: ports.Completion
) -> tuple[object, ...] | None:
    """Return the record of a message's outcome, or ``None``.

    For a message that was not delayed only a discard is recorded: it leaves no other trace, and audits need no more.
    """
    due = received.envelope.due
    is_recorded = completion.record is ports.RecordKind.DISCARDED or (
        due is not None and tx.recording is ports.Recording.ALL
    )
    if completion.record is None or not is_recorded:
        return None
    message_id, queue = received.envelope.message_id, received.envelope.destination
    due_at = None if due is None else to_microseconds(due)
    return int(completion.record), message_id, to_microseconds(at), due_at, queue, completion.detail or None
