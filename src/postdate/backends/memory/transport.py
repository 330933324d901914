"""Queues in memory, for tests and trials.

An expired message is dropped by the next receive, count or send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from typing_extensions import override

from postdate import ports
from postdate.clock import Clock, SystemClock, to_microseconds
from postdate.errors import ClaimLost, PostdateError, QueueNotFound
from postdate.messages import Envelope, check_headers, encode_headers, too_large_error
from postdate.ports.transports import expiry_in_queue
from postdate.runtime.threads import WakeUp


@dataclass(frozen=True, slots=True)
class _ExpiringEnvelope(Envelope):
    """A queued message that is not received after ``expiry_in_queue``, in microseconds since 1970 UTC."""

    expiry_in_queue: int = field(kw_only=True)


def _fields(envelope: Envelope) -> dict[str, Any]:
    return {each.name: getattr(envelope, each.name) for each in fields(Envelope)}


@dataclass(slots=True)
class _Queue:
    """A queue: messages with their failure counts, and the alarms of waiting receivers.

    ``expiring_count`` is the number of messages with an expiry, ``first_expiry`` a lower bound of these, in
    microseconds since 1970 UTC. ``claimed_count`` is the number of received messages.
    """

    messages: deque[tuple[Envelope, int]] = field(default_factory=deque[tuple[Envelope, int]])
    expiring_count: int = 0
    first_expiry: int = 0
    claimed_count: int = 0
    wake_ups: list[WakeUp] = field(default_factory=list[WakeUp])

    def put(self, envelope: Envelope, failures: int = 0, *, first: bool = False) -> None:
        (self.messages.appendleft if first else self.messages.append)((envelope, failures))
        if isinstance(envelope, _ExpiringEnvelope):
            self.first_expiry = (
                min(self.first_expiry, envelope.expiry_in_queue) if self.expiring_count else envelope.expiry_in_queue
            )
            self.expiring_count += 1
        for wake_up in self.wake_ups:
            wake_up.wake()

    def pop_first(self) -> tuple[Envelope, int]:
        envelope, failures = self.messages.popleft()
        self.expiring_count -= isinstance(envelope, _ExpiringEnvelope)
        return envelope, failures

    def remove_expired(self, now: int) -> None:
        if not self.expiring_count or now <= self.first_expiry:
            return
        self.messages = deque(each for each in self.messages if not _has_expired(each[0], now))
        expiries = [
            envelope.expiry_in_queue for envelope, _ in self.messages if isinstance(envelope, _ExpiringEnvelope)
        ]
        self.expiring_count, self.first_expiry = len(expiries), min(expiries, default=0)


def _has_expired(envelope: Envelope, now: int) -> bool:
    return isinstance(envelope, _ExpiringEnvelope) and envelope.expiry_in_queue < now


class MemoryTransport(ports.Transport):
    """Queues in memory; their messages are lost with the process.

    Args:
        largest_message_bytes: of headers and body together.
        clock: the clock by which messages expire in queues; default: the machine's clock.
    """

    def __init__(self, *, largest_message_bytes: int = 16 * 1024 * 1024, clock: Clock | None = None) -> None:
        self._capabilities = ports.TransportCapabilities(
            durable=False,
            transaction_modes=frozenset(ports.TransactionMode) - {ports.TransactionMode.TRANSACTION_SCOPE},
            largest_message_bytes=largest_message_bytes,
            expires_messages=True,
        )
        self._clock = clock or SystemClock()
        self.queues: dict[str, _Queue] = {}

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        for name in names:
            self.queues.setdefault(name, _Queue())

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        ports.check_no_work(work, "in memory")
        return [self._send(self.add_expiry(envelope, now)) for envelope in envelopes]

    def _send(self, envelope: Envelope) -> PostdateError | None:
        if (error := self.send_error_of(envelope)) is None:
            self.queues[envelope.destination].put(envelope)
        return error

    def add_expiry(self, envelope: Envelope, now: datetime) -> Envelope:
        """Return the envelope with its expiry by the clock of the queues; ``now``: time of the send, sender's clock."""
        expiry = expiry_in_queue(envelope.time_left(now), self._clock.now())
        return envelope if expiry is None else _ExpiringEnvelope(**_fields(envelope), expiry_in_queue=expiry)

    def find_queue(self, name: str) -> _Queue:
        """Remove the expired messages of a queue and return the queue."""
        if name not in self.queues:
            raise QueueNotFound(f"there is no queue {name!r}")
        queue = self.queues[name]
        queue.remove_expired(to_microseconds(self._clock.now()))
        return queue

    def send_error_of(self, envelope: Envelope) -> PostdateError | None:
        """Return the reason why a message cannot be sent; ``None`` if it can."""
        check_headers(envelope.headers)
        if envelope.destination not in self.queues:
            return QueueNotFound(f"there is no queue {envelope.destination!r} for message {envelope.message_id!r}")
        return too_large_error(envelope, encode_headers(envelope.headers), self._capabilities.largest_message_bytes)

    @override
    def receiver(self, queue: str) -> MemoryReceiver:
        return MemoryReceiver(self, queue)

    async def queue_lengths(self) -> Mapping[str, int]:
        """Return the number of messages of each queue, including received ones."""
        return {name: len(self.find_queue(name).messages) + queue.claimed_count for name, queue in self.queues.items()}

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Received and expired messages are not counted."""
        return {name: len(self.find_queue(name).messages) for name in names if name in self.queues}

    @override
    async def close(self) -> None: ...


class MemoryReceiver(ports.Receiver):
    def __init__(self, transport: MemoryTransport, queue: str) -> None:
        self._transport, self._name = transport, queue
        self._wake_up: WakeUp | None = None
        self._unsettled: dict[int, tuple[ports.Received, Envelope]] = {}
        self._next_token = 1

    @property
    def _queue(self) -> _Queue:
        return self._transport.find_queue(self._name)

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        queue = self._queue
        if self._wake_up is None:
            self._wake_up = WakeUp()
            queue.wake_ups.append(self._wake_up)
        while wait and not self._queue.messages:
            self._wake_up.reset()
            await self._wake_up.wait()
        return [self._receive_first(queue) for _ in range(min(limit, len(queue.messages)))]

    def _receive_first(self, queue: _Queue) -> ports.Received:
        envelope, failures = queue.pop_first()
        plain_envelope = Envelope(**_fields(envelope)) if isinstance(envelope, _ExpiringEnvelope) else envelope
        received = ports.Received(plain_envelope, failures, self._next_token)
        self._unsettled[self._next_token] = (received, envelope)
        self._next_token += 1
        queue.claimed_count += 1
        return received

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        ports.check_no_work(completion.work, "in memory")
        for envelope in completion.outgoing:
            if (error := self._transport.send_error_of(envelope)) is not None:
                raise error
        self._pop_unsettled(received)
        for envelope in completion.outgoing:
            self._transport.queues[envelope.destination].put(self._transport.add_expiry(envelope, now))

    @override
    async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
        self._queue.put(self._pop_unsettled(received), received.failures + int(failed), first=True)

    @override
    async def close(self) -> None:
        for received, _ in list(self._unsettled.values()):
            await self.roll_back(received, failed=False)
        if self._wake_up is not None:
            self._queue.wake_ups.remove(self._wake_up)
            self._wake_up = None

    def _pop_unsettled(self, received: ports.Received) -> Envelope:
        entry = self._unsettled.pop(received.token, None) if isinstance(received.token, int) else None
        if entry is None:
            raise ClaimLost.of(received.envelope.message_id, queue=self._name)
        self._queue.claimed_count -= 1
        return entry[1]
