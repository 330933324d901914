"""Durable, transactional queues in one SQLite file, for any number of processes on one machine.

A received message is held by the process, not by a lease: it is free again when the process commits, rolls back, or
dies. Receiving, the sends of the handler and whatever else happens in the file are one transaction. Source: ADR 0003.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import anyio

from postdate.clock import from_microseconds, to_microseconds
from postdate.embedded.file import SqliteFile, Transaction, queue_topic
from postdate.errors import ClaimLost, MessageTooLarge, PostdateError, QueueNotFound
from postdate.messages import Envelope, check_headers, decode_headers, encode_headers, size_in_bytes, size_limit
from postdate.ports import HANDLED, End, Received, Recording, TransactionMode, TransportCapabilities, Work
from postdate.wakeup import Alarm

_INSERT: Final = """
    INSERT INTO queue_message (queue_id, message_id, due, expires_at, content) VALUES (?, ?, ?, ?, ?)"""
_COLUMNS: Final = (
    "seq, message_id, due, expires_at, failures, "
    "(SELECT headers FROM content AS c WHERE c.seq = content), (SELECT body FROM content AS c WHERE c.seq = content)"
)
_CLAIM: Final = f"""
    UPDATE queue_message SET claimant = ? WHERE seq IN (
        SELECT seq FROM queue_message INDEXED BY queue_message_free
        WHERE queue_id = ? AND claimant IS NULL ORDER BY seq LIMIT ?)
    RETURNING {_COLUMNS}"""

_TAKE: Final = f"""
    UPDATE queue_message SET claimant = ? WHERE seq = (
        SELECT min(seq) FROM queue_message WHERE queue_id = ? AND message_id = ? AND claimant IS NULL)
    RETURNING {_COLUMNS}"""

_POLL_FLOOR_SECONDS = 1.0
"""A receiver looks by itself this often, should a wake-up be lost."""


class LocalTransport:
    """Queues in an SQLite file.

    Args:
        path: of the file; created by :meth:`create_queues` or at first use unless ``create`` is false.
        synchronous: see :class:`postdate.stores.sqlite.SqliteStore`; the store on the same file needs the same.
        recording: likewise.
        largest_message_bytes: of headers and body together.
        create: create the file and its tables when they are missing.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
        largest_message_bytes: int = 16 * 1024 * 1024,
        create: bool = True,
    ) -> None:
        self.file = SqliteFile.open(path, synchronous=synchronous, recording=recording, create=create)
        self._closed = False
        self._capabilities = TransportCapabilities(
            durable=True,
            transaction_modes=frozenset(TransactionMode),
            database=("sqlite", str(self.file.path)),
            largest_message_bytes=largest_message_bytes,
        )

    @property
    def capabilities(self) -> TransportCapabilities:
        """See :class:`postdate.ports.Transport`."""
        return self._capabilities

    async def create_queues(self, names: Sequence[str]) -> None:
        """See :meth:`postdate.ports.Transport.create_queues`."""

        def create(tx: Transaction) -> None:
            tx.executemany("INSERT INTO queue (name) VALUES (?) ON CONFLICT DO NOTHING", [(name,) for name in names])

        await self.file.write(create)

    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        """See :meth:`postdate.ports.Transport.send`."""
        rows = self.rows(envelopes)
        if work:
            await self.file.write(lambda tx: _send_and_work(tx, rows, work))
            return [None] * len(rows)
        return await self.file.write(lambda tx: [_send(tx, row) for row in rows])

    def rows(self, envelopes: Sequence[Envelope]) -> list[tuple[Any, ...] | MessageTooLarge]:
        """Return the rows of ``envelopes`` for the database; for this transport and its receivers only."""
        return [self._row(envelope) for envelope in envelopes]

    def _row(self, envelope: Envelope) -> tuple[Any, ...] | MessageTooLarge:
        check_headers(envelope.headers)
        headers = encode_headers(envelope.headers)
        size, limit = (
            size_in_bytes(headers, envelope.body),
            size_limit(envelope.headers, self._capabilities.largest_message_bytes),
        )
        if size > limit:
            return MessageTooLarge(
                f"message {envelope.message_id!r} to {envelope.destination!r} has {size:,} bytes, this transport takes "
                f"{limit:,}; keep large content elsewhere and send a reference, or raise largest_message_bytes"
            )
        due = None if envelope.due is None else to_microseconds(envelope.due)
        expires_at = None if envelope.expires_at is None else to_microseconds(envelope.expires_at)
        return (envelope.message_id, due, expires_at, headers, envelope.body, envelope.destination)

    def receiver(self, queue: str) -> LocalReceiver:
        """See :meth:`postdate.ports.Transport.receiver`."""
        return LocalReceiver(self, queue)

    async def queue_lengths(self) -> Mapping[str, int]:
        """Return how many messages each queue holds, those being handled included."""
        rows = await self.file.read(
            lambda c: c.execute(
                "SELECT name, (SELECT count(*) FROM queue_message m WHERE m.queue_id = q.queue_id) FROM queue AS q"
            ).fetchall()
        )
        return dict(rows)

    async def close(self) -> None:
        """Give the file back; a second time without effect."""
        closed, self._closed = self._closed, True
        if not closed:
            self.file.close()


class LocalReceiver:
    """Receives from one queue; see :class:`postdate.ports.Receiver`."""

    def __init__(self, transport: LocalTransport, queue: str) -> None:
        self._transport, self._file, self._queue = transport, transport.file, queue
        self._queue_id = 0
        self._alarm: Alarm | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._held: dict[object, Received] = {}

    async def receive(self, limit: int) -> Sequence[Received]:
        """See :meth:`postdate.ports.Receiver.receive`."""
        if self._alarm is None:
            await self._find_queue()
            alarm = Alarm()
            self._stop_listening = await self._file.listen(queue_topic(self._queue), alarm.ring)
            self._alarm = alarm
        while True:
            self._alarm.reset()
            if await self._file.read(self._has_message):
                rows = await self._file.write(lambda tx: self._claim(tx, limit))
                if rows:
                    rows.sort()
                    return [self._received(row) for row in rows]
            with anyio.move_on_after(_POLL_FLOOR_SECONDS):
                await self._alarm.wait()

    async def take(self, message_id: str) -> Received | None:
        """Hold one message of the queue, chosen by its id, or return ``None``: it is not there, or held already."""
        await self._find_queue()

        def take(tx: Transaction) -> tuple[Any, ...] | None:
            return tx.execute(_TAKE, (tx.claimant, self._queue_id, message_id)).fetchone()

        row = await self._file.write(take)
        return None if row is None else self._received(row)

    async def _find_queue(self) -> None:
        row = await self._file.read(
            lambda c: c.execute("SELECT queue_id FROM queue WHERE name = ?", (self._queue,)).fetchone()
        )
        if row is None:
            raise QueueNotFound(
                f"{self._file.path} has no queue {self._queue!r}; create it: postdate setup --queue {self._queue}"
            )
        self._queue_id = row[0]

    def _has_message(self, connection: Any) -> bool:
        found = connection.execute(
            "SELECT 1 FROM queue_message INDEXED BY queue_message_free WHERE queue_id = ? AND claimant IS NULL LIMIT 1",
            (self._queue_id,),
        ).fetchone()
        return found is not None

    def _claim(self, tx: Transaction, limit: int) -> list[tuple[Any, ...]]:
        return tx.execute(_CLAIM, (tx.claimant, self._queue_id, limit)).fetchall()

    def _received(self, row: tuple[Any, ...]) -> Received:
        seq, message_id, due, expires_at, failures, headers, body = row
        envelope = Envelope(
            destination=self._queue,
            message_id=message_id,
            headers=decode_headers(headers),
            body=body,
            expires_at=None if expires_at is None else from_microseconds(expires_at),
            due=None if due is None else from_microseconds(due),
        )
        received = self._held[seq] = Received(envelope, failures, token=seq)
        return received

    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        """See :meth:`postdate.ports.Receiver.commit`; one transaction."""
        rows = self._transport.rows(end.outgoing)

        def commit(tx: Transaction) -> None:
            self._remove(tx, received)
            _record_end(tx, received, to_microseconds(now), end)
            _send_and_work(tx, rows, end.work)

        await self._file.write(commit)
        self._held.pop(received.token, None)

    def _remove(self, tx: Transaction, received: Received) -> None:
        # The number of a message stays the same when it is given back and received again here: the object does not.
        held = (
            self._held.get(received.token) is received
            and tx.execute(
                "DELETE FROM queue_message WHERE seq = ? AND claimant = ? AND message_id = ? RETURNING content",
                (received.token, tx.claimant, received.envelope.message_id),
            ).fetchone()
        )
        if not held:
            raise ClaimLost(f"message {received.envelope.message_id!r} in {self._queue!r} is no longer held here")
        tx.execute("DELETE FROM content WHERE seq = ?", held)

    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        """See :meth:`postdate.ports.Receiver.roll_back`."""
        if self._held.get(received.token) is not received:
            return

        def give_back(tx: Transaction) -> None:
            tx.execute(
                "UPDATE queue_message SET claimant = NULL, failures = failures + ? WHERE seq = ? AND claimant = ?",
                (int(failed), received.token, tx.claimant),
            )
            tx.signal(queue_topic(self._queue))

        await self._file.write(give_back)
        self._held.pop(received.token, None)

    async def close(self) -> None:
        """See :meth:`postdate.ports.Receiver.close`."""
        for received in list(self._held.values()):
            await self.roll_back(received, failed=False)
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = self._alarm = None


def _send(tx: Transaction, row: tuple[Any, ...] | MessageTooLarge) -> PostdateError | None:
    if isinstance(row, MessageTooLarge):
        return row
    message_id, due, expires_at, headers, body, queue = row
    found = tx.execute("SELECT queue_id FROM queue WHERE name = ?", (queue,)).fetchone()
    if found is None:
        return QueueNotFound(
            f"there is no queue {queue!r} for message {message_id!r}; create it: postdate setup --queue {queue}"
        )
    content = tx.execute("INSERT INTO content (headers, body) VALUES (?, ?)", (headers, body)).lastrowid
    tx.execute(_INSERT, (found[0], message_id, due, expires_at, content))
    tx.signal(queue_topic(queue))
    return None


def _send_and_work(tx: Transaction, rows: Sequence[tuple[Any, ...] | MessageTooLarge], work: Sequence[Work]) -> None:
    for row in rows:
        error = _send(tx, row)
        if error is not None:
            raise error
    for each in work:
        each(tx)


def _record_end(tx: Transaction, received: Received, at: int, end: End) -> None:
    """Record how a message that had been delayed was handled; others are no concern of an audit."""
    due = received.envelope.due
    if due is None or end.record is None or tx.recording is not Recording.ALL:
        return
    message_id, queue = received.envelope.message_id, received.envelope.destination
    tx.execute(
        "INSERT INTO record (kind, message_id, at, due, destination, detail) VALUES (?, ?, ?, ?, ?, ?)",
        (int(end.record), message_id, at, to_microseconds(due), queue, end.detail or None),
    )
