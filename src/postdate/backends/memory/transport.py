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

from postdate.clock import Clock, SystemClock, to_microseconds
from postdate.errors import ClaimLost, PostdateError, QueueNotFound
from postdate.messages import Envelope, check_headers, encode_headers, why_too_large
from postdate.ports import (
    HANDLED,
    End,
    Received,
    Receiver,
    TransactionMode,
    Transport,
    TransportCapabilities,
    Work,
    refuse_work,
)
from postdate.ports.transports import end_in_queue
from postdate.runtime.threads import Alarm


@dataclass(frozen=True, slots=True)
class _ExpiringEnvelope(Envelope):
    """A queued message that is not received after ``ends_at``, in microseconds since 1970 UTC."""

    ends_at: int = field(kw_only=True)


def _fields(envelope: Envelope) -> dict[str, Any]:
    return {each.name: getattr(envelope, each.name) for each in fields(Envelope)}


@dataclass(slots=True)
class _Queue:
    """A queue: messages with their failure counts, and the alarms of waiting receivers.

    ``ending`` is the number of messages with an expiry, ``first_end`` a lower bound of these, in microseconds since
    1970 UTC. ``claimed_count`` is the number of received messages.
    """

    messages: deque[tuple[Envelope, int]] = field(default_factory=deque[tuple[Envelope, int]])
    ending: int = 0
    first_end: int = 0
    claimed_count: int = 0
    alarms: list[Alarm] = field(default_factory=list[Alarm])

    def put(self, envelope: Envelope, failures: int = 0, *, first: bool = False) -> None:
        (self.messages.appendleft if first else self.messages.append)((envelope, failures))
        if isinstance(envelope, _ExpiringEnvelope):
            self.first_end = min(self.first_end, envelope.ends_at) if self.ending else envelope.ends_at
            self.ending += 1
        for alarm in self.alarms:
            alarm.ring()

    def take(self) -> tuple[Envelope, int]:
        envelope, failures = self.messages.popleft()
        self.ending -= isinstance(envelope, _ExpiringEnvelope)
        return envelope, failures

    def drop_expired(self, now: int) -> None:
        if not self.ending or now <= self.first_end:
            return
        self.messages = deque(each for each in self.messages if not _has_ended(each[0], now))
        ends = [envelope.ends_at for envelope, _ in self.messages if isinstance(envelope, _ExpiringEnvelope)]
        self.ending, self.first_end = len(ends), min(ends, default=0)


def _has_ended(envelope: Envelope, now: int) -> bool:
    return isinstance(envelope, _ExpiringEnvelope) and envelope.ends_at < now


class MemoryTransport(Transport):
    """Queues in memory; their messages are lost with the process.

    Args:
        largest_message_bytes: of headers and body together.
        clock: the clock by which messages expire in queues; default: the machine's clock.
    """

    def __init__(self, *, largest_message_bytes: int = 16 * 1024 * 1024, clock: Clock | None = None) -> None:
        self._capabilities = TransportCapabilities(
            durable=False,
            transaction_modes=frozenset(TransactionMode) - {TransactionMode.TRANSACTION_SCOPE},
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
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        refuse_work(work, "in memory")
        return [self._send(self.ending(envelope, now)) for envelope in envelopes]

    def _send(self, envelope: Envelope) -> PostdateError | None:
        if (error := self.why_not(envelope)) is None:
            self.queues[envelope.destination].put(envelope)
        return error

    def ending(self, envelope: Envelope, now: datetime) -> Envelope:
        """Return the envelope with its expiry by the clock of the queues; ``now``: time of the send, sender's clock."""
        ends_at = end_in_queue(envelope.time_left(now), self._clock.now())
        return envelope if ends_at is None else _ExpiringEnvelope(**_fields(envelope), ends_at=ends_at)

    def alive(self, name: str) -> _Queue:
        """Remove the expired messages of a queue and return the queue."""
        if name not in self.queues:
            raise QueueNotFound(f"there is no queue {name!r}")
        queue = self.queues[name]
        queue.drop_expired(to_microseconds(self._clock.now()))
        return queue

    def why_not(self, envelope: Envelope) -> PostdateError | None:
        """Return the reason why a message cannot be sent; ``None`` if it can."""
        check_headers(envelope.headers)
        if envelope.destination not in self.queues:
            return QueueNotFound(f"there is no queue {envelope.destination!r} for message {envelope.message_id!r}")
        return why_too_large(envelope, encode_headers(envelope.headers), self._capabilities.largest_message_bytes)

    @override
    def receiver(self, queue: str) -> MemoryReceiver:
        return MemoryReceiver(self, queue)

    async def queue_lengths(self) -> Mapping[str, int]:
        """Return the number of messages of each queue, including received ones."""
        return {name: len(self.alive(name).messages) + queue.claimed_count for name, queue in self.queues.items()}

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Received and expired messages are not counted."""
        return {name: len(self.alive(name).messages) for name in names if name in self.queues}

    @override
    async def close(self) -> None: ...


class MemoryReceiver(Receiver):
    def __init__(self, transport: MemoryTransport, queue: str) -> None:
        self._transport, self._name = transport, queue
        self._alarm: Alarm | None = None
        self._claimed: dict[int, tuple[Received, Envelope]] = {}
        self._next_token = 1

    @property
    def _queue(self) -> _Queue:
        return self._transport.alive(self._name)

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        queue = self._queue
        if self._alarm is None:
            self._alarm = Alarm()
            queue.alarms.append(self._alarm)
        while wait and not self._queue.messages:
            self._alarm.reset()
            await self._alarm.wait()
        return [self._take(queue) for _ in range(min(limit, len(queue.messages)))]

    def _take(self, queue: _Queue) -> Received:
        envelope, failures = queue.take()
        plain = Envelope(**_fields(envelope)) if isinstance(envelope, _ExpiringEnvelope) else envelope
        received = Received(plain, failures, self._next_token)
        self._claimed[self._next_token] = (received, envelope)
        self._next_token += 1
        queue.claimed_count += 1
        return received

    @override
    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        refuse_work(end.work, "in memory")
        for envelope in end.outgoing:
            if (error := self._transport.why_not(envelope)) is not None:
                raise error
        self._end_claim(received)
        for envelope in end.outgoing:
            self._transport.queues[envelope.destination].put(self._transport.ending(envelope, now))

    @override
    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        self._queue.put(self._end_claim(received), received.failures + int(failed), first=True)

    @override
    async def close(self) -> None:
        for received, _ in list(self._claimed.values()):
            await self.roll_back(received, failed=False)
        if self._alarm is not None:
            self._queue.alarms.remove(self._alarm)
            self._alarm = None

    def _end_claim(self, received: Received) -> Envelope:
        entry = self._claimed.pop(received.token, None) if isinstance(received.token, int) else None
        if entry is None:
            raise ClaimLost.of(received.envelope.message_id, queue=self._name)
        self._queue.claimed_count -= 1
        return entry[1]
