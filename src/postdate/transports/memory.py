"""Queues in this process' memory: for tests and for trying things out. All is lost when the process ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from postdate.errors import ClaimLost, MessageTooLarge, PostdateError, QueueNotFound, UnsupportedTransactionMode
from postdate.messages import Envelope, check_headers, encode_headers, size_in_bytes, size_limit
from postdate.ports import HANDLED, End, Received, TransactionMode, TransportCapabilities, Work
from postdate.wakeup import Alarm


@dataclass(slots=True)
class _Queue:
    """Messages with their failure counts, and who waits for them."""

    messages: deque[tuple[Envelope, int]] = field(default_factory=deque[tuple[Envelope, int]])
    held: int = 0
    alarms: list[Alarm] = field(default_factory=list[Alarm])

    def put(self, envelope: Envelope, failures: int = 0, *, first: bool = False) -> None:
        (self.messages.appendleft if first else self.messages.append)((envelope, failures))
        for alarm in self.alarms:
            alarm.ring()


class MemoryTransport:
    """Queues in memory.

    Args:
        largest_message_bytes: of headers and body together.
    """

    def __init__(self, *, largest_message_bytes: int = 16 * 1024 * 1024) -> None:
        self._capabilities = TransportCapabilities(
            durable=False,
            transaction_modes=frozenset(TransactionMode) - {TransactionMode.TRANSACTION_SCOPE},
            largest_message_bytes=largest_message_bytes,
        )
        self.queues: dict[str, _Queue] = {}

    @property
    def capabilities(self) -> TransportCapabilities:
        """See :class:`postdate.ports.Transport`."""
        return self._capabilities

    async def create_queues(self, names: Sequence[str]) -> None:
        """See :meth:`postdate.ports.Transport.create_queues`."""
        for name in names:
            self.queues.setdefault(name, _Queue())

    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        """See :meth:`postdate.ports.Transport.send`."""
        refuse_work(work)
        return [self._send(envelope) for envelope in envelopes]

    def _send(self, envelope: Envelope) -> PostdateError | None:
        error = self.why_not(envelope)
        if error is None:
            self.queues[envelope.destination].put(envelope)
        return error

    def why_not(self, envelope: Envelope) -> PostdateError | None:
        """Return why a message cannot be sent, or ``None``."""
        check_headers(envelope.headers)
        if envelope.destination not in self.queues:
            return QueueNotFound(f"there is no queue {envelope.destination!r} for message {envelope.message_id!r}")
        size, limit = (
            size_in_bytes(encode_headers(envelope.headers), envelope.body),
            size_limit(envelope.headers, self._capabilities.largest_message_bytes),
        )
        if size > limit:
            return MessageTooLarge(
                f"message {envelope.message_id!r} has {size:,} bytes, this transport takes {limit:,}"
            )
        return None

    def receiver(self, queue: str) -> MemoryReceiver:
        """See :meth:`postdate.ports.Transport.receiver`."""
        return MemoryReceiver(self, queue)

    async def queue_lengths(self) -> Mapping[str, int]:
        """Return how many messages each queue holds, those being handled included."""
        return {name: len(queue.messages) + queue.held for name, queue in self.queues.items()}

    async def close(self) -> None:
        """Nothing to release."""


class MemoryReceiver:
    """Receives from one queue; see :class:`postdate.ports.Receiver`."""

    def __init__(self, transport: MemoryTransport, queue: str) -> None:
        self._transport, self._name = transport, queue
        self._alarm: Alarm | None = None
        self._held: dict[int, Received] = {}
        self._next_token = 1

    @property
    def _queue(self) -> _Queue:
        if self._name not in self._transport.queues:
            raise QueueNotFound(f"there is no queue {self._name!r}")
        return self._transport.queues[self._name]

    async def receive(self, limit: int) -> Sequence[Received]:
        """See :meth:`postdate.ports.Receiver.receive`."""
        queue = self._queue
        if self._alarm is None:
            self._alarm = Alarm()
            queue.alarms.append(self._alarm)
        while not queue.messages:
            self._alarm.reset()
            await self._alarm.wait()
        return [self._take(queue) for _ in range(min(limit, len(queue.messages)))]

    def _take(self, queue: _Queue) -> Received:
        envelope, failures = queue.messages.popleft()
        received = Received(envelope, failures, self._next_token)
        self._held[self._next_token] = received
        self._next_token += 1
        queue.held += 1
        return received

    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        """See :meth:`postdate.ports.Receiver.commit`."""
        refuse_work(end.work)
        for envelope in end.outgoing:
            error = self._transport.why_not(envelope)
            if error is not None:
                raise error
        self._let_go(received)
        for envelope in end.outgoing:
            self._transport.queues[envelope.destination].put(envelope)

    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        """See :meth:`postdate.ports.Receiver.roll_back`."""
        self._let_go(received)
        self._queue.put(received.envelope, received.failures + int(failed), first=True)

    async def close(self) -> None:
        """See :meth:`postdate.ports.Receiver.close`."""
        for received in list(self._held.values()):
            await self.roll_back(received, failed=False)
        if self._alarm is not None:
            self._queue.alarms.remove(self._alarm)
            self._alarm = None

    def _let_go(self, received: Received) -> None:
        if self._held.pop(received.token, None) is None:  # type: ignore[arg-type]
            raise ClaimLost(f"message {received.envelope.message_id!r} in {self._name!r} is no longer held here")
        self._queue.held -= 1


def refuse_work(work: Sequence[Work]) -> None:
    """Refuse to be part of a database transaction."""
    if work:
        raise UnsupportedTransactionMode("queues in memory cannot share a transaction with a database")
