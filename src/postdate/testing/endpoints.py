"""An endpoint under test: in memory, on a clock that tests move, without a broker and without waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import msgspec
from typing_extensions import override

from postdate import ports
from postdate.backends.memory.database import MemorySagaStore
from postdate.backends.memory.store import MemoryStore
from postdate.backends.memory.transport import MemoryReceiver, MemoryTransport
from postdate.core.changes import EVERYTHING, cancel, list_matching, reschedule
from postdate.core.recoverability import Recoverability
from postdate.endpoint.completions import MessageCompletions
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.outbox import Outbox
from postdate.endpoint.outgoing import Outgoing, OutgoingMessages, reply_options
from postdate.endpoint.sagas import Saga, correlation_text
from postdate.endpoint.send_options import SendKeywords, SendOptions, read_send_options
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import ConfigurationError, InvalidMessage, PostdateError
from postdate.messages import Envelope, Headers
from postdate.testing.clock import START, VirtualClock

S = TypeVar("S")

_NO_RETRIES = Recoverability(immediate_retries=0, delayed_retries=0)
_ERRORS = "error"
_ALL = 1_000_000
_STEPS_AFTER_DUE = (timedelta(microseconds=1), timedelta(milliseconds=1), timedelta(milliseconds=1))
"""Steps after a due time. A message is sent strictly after its due time, and the poller pauses for a millisecond after
each query that returned messages."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that left the endpoint under test.

    Args:
        message: as the handler sent it.
        destination: queue.
        at: when it arrived there; UTC.
        headers: of the message.
    """

    message: object
    destination: str
    at: datetime
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """A delayed message that is not due yet, saga timeouts included.

    Args:
        message: as it was sent.
        destination: queue.
        due: UTC.
    """

    message: object
    destination: str
    due: datetime


class EndpointTest:
    """Runs an endpoint as its application configures it. Use it as an asynchronous context manager, on asyncio.

    When a call returns, its consequences have happened: handlers have run, due messages have been delivered. The same
    test does the same things in the same order every time. A message that would go to the error queue makes the call
    raise the error of its handler instead.

    Queues need not exist; messages that the endpoint sends to other queues are in :attr:`sent`.

    Args:
        configure: registers handlers, sagas and routes, as for the real endpoint.
        name: of the endpoint.
        start: first time of the clock; aware.
        recoverability: how often handling is tried; default: once.
        outbox: for handlers that call ``context.transaction()``. It must have a :class:`~postdate.SqliteOutbox`, which
            the test closes itself. Other databases answer after real time, not when the clock moves.
        sagas: store of saga instances. Default: in memory. With an outbox the default is no sagas, because these must
            be in the file of the outbox.
    """

    def __init__(
        self,
        configure: Callable[[Endpoint], None],
        *,
        name: str = "tested",
        start: datetime = START,
        recoverability: Recoverability = _NO_RETRIES,
        outbox: Outbox | None = None,
        sagas: ports.SagaStore | None = None,
    ) -> None:
        self.deliveries: list[SentMessage] = []
        """Messages that left the endpoint for other queues, in order."""
        self._store = _WakingStore()
        self.clock: VirtualClock = _ObservedClock(start, self._store.wake)
        """The clock of the endpoint. ``step`` wakes the poller; a real poller notices a set clock within a minute."""
        self._sagas = sagas or (MemorySagaStore() if outbox is None else None)
        self._endpoint = _RememberingEndpoint(
            name,
            transport=_ExitTransport(self.clock, self._remember_sent),
            delayed_delivery=DelayedDelivery(self._store),
            recoverability=recoverability,
            error_queue=_ERRORS,
            clock=self.clock,
            sagas=self._sagas,
            outbox=outbox,
            transaction_mode=None if outbox is None else ports.TransactionMode.RECEIVE_ONLY,
        )
        self._own_queues = {name, timeouts_queue(name), _ERRORS}
        self._stack = AsyncExitStack()
        configure(self._endpoint)

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._endpoint)
        await self.clock.run_until_idle()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    # --- actions of a test ----------------------------------------------------------------------------------------

    async def send(self, message: object, **options: Unpack[SendKeywords]) -> str:
        """Send a message to the endpoint under test; its immediate consequences have happened on return.

        Arguments are those of :meth:`postdate.Endpoint.send`, but the default destination is the endpoint's own queue.

        Raises:
            Exception: the error that its handler raised.
        """
        if options.get("destination") is None:
            options["destination"] = self._endpoint.name
        return await self._send_outgoing(self._endpoint.outgoing.create(message, read_send_options("send", options)))

    async def _send_outgoing(self, outgoing: Outgoing) -> str:
        await self._endpoint.outgoing.send([outgoing])
        await self._deliver_due_messages()
        return outgoing.message_id

    async def reply(self, message: object, to: SentMessage, headers: Mapping[str, str] | None = None) -> str:
        """Send the endpoint under test a reply to one of its messages, as the handler of another endpoint replies.

        Args:
            message: of a type that the endpoint handles.
            to: one of :attr:`deliveries`.
            headers: additional headers of the reply.

        Raises:
            InvalidMessage: replies to the message go to another queue, or it accepts none.
            Exception: the error that its handler raised.
        """
        options = reply_options(to.headers, to.headers.get(Headers.MESSAGE_ID, ""), headers)
        if options.destination != self._endpoint.name:
            raise InvalidMessage(f"replies to it go to {options.destination!r}, not to {self._endpoint.name!r}")
        return await self._send_outgoing(self._endpoint.outgoing.create(message, options, related_to=to.headers))

    async def advance(
        self,
        duration: timedelta = timedelta(0),
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Let time pass, and deliver all messages that become due in this time, including its last instant.

        If a message is due exactly at the end, the clock goes on until it is delivered, usually by a microsecond.

        Raises:
            Exception: the error that a handler raised.
        """
        await self.clock.advance(duration + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds))
        await self._deliver_due_messages()

    async def _deliver_due_messages(self) -> None:
        await self.clock.run_until_idle()
        end = self.clock.now() + timedelta(microseconds=1)
        for step in _STEPS_AFTER_DUE:
            if not await self._store.list_pending(ports.MessageFilter(due_to=end), 1):
                break
            await self.clock.advance(step)
        failures = self._endpoint.failures[:]
        self._endpoint.failures.clear()
        if failures:
            raise failures[0]

    async def cancel(self, message_id: str) -> ports.Answer:
        """Cancel a delayed message, as :meth:`postdate.Client.cancel` does."""
        return await cancel(self._store, message_id, self.now)

    async def reschedule(
        self,
        message_id: str,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | str | None = None,
        zone: str | None = None,
    ) -> ports.Answer:
        """Give a delayed message another due time, as :meth:`postdate.Client.reschedule` does."""
        options = SendOptions(delay=delay, deliver_at=deliver_at, zone=zone)
        wall_time = None if zone is None else str(options.wall_time)
        return await reschedule(self._store, message_id, options.due(self.now) or self.now, self.now, wall_time)

    # --- results of a test ----------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time of the clock, UTC."""
        return self.clock.now()

    @property
    def sent(self) -> Sequence[object]:
        """Messages that the endpoint sent to other queues, in the order of their arrival.

        Delayed messages arrive when they are due.
        """
        return [each.message for each in self.deliveries]

    def sent_to(self, destination: str) -> Sequence[object]:
        """Return the messages that were sent to one queue, in order."""
        return [each.message for each in self.deliveries if each.destination == destination]

    async def waiting(self) -> Sequence[WaitingMessage]:
        """Return the delayed messages that are not due yet, by due time; saga timeouts are among them."""
        return [
            WaitingMessage(self._endpoint.messages_by_id.get(each.message_id, each.body), each.destination, each.due)
            for each in await list_matching(self._store, EVERYTHING, _ALL)
        ]

    async def state_of(self, saga: type[Saga[S]], value: object) -> S | None:
        """Return the state of the saga instance with a correlation value; ``None``: there is none (any more).

        Raises:
            ConfigurationError: the test has no store of sagas.
        """
        if self._sagas is None:
            raise ConfigurationError(
                "beside an outbox there are sagas only in its file: pass sagas=SqliteSagaStore(…) to EndpointTest"
            )
        definition = saga.definition
        text = correlation_text(value, definition.correlated_by, saga.__name__)
        record = await self._sagas.find(definition.name, ports.Correlation(definition.correlated_by, text))
        return None if record is None else msgspec.json.decode(record.state, type=definition.state_type)

    def _remember_sent(self, envelope: Envelope) -> None:
        if envelope.destination not in self._own_queues:
            message = self._endpoint.messages_by_id.get(envelope.message_id, envelope.body)
            self.deliveries.append(SentMessage(message, envelope.destination, self.clock.now(), envelope.headers))


class _RememberingMessages(OutgoingMessages):
    """Remembers messages by the ids of their envelopes."""

    def __init__(self, *parts: Any, messages_by_id: dict[str, object]) -> None:
        super().__init__(*parts)
        self.messages_by_id = messages_by_id

    @override
    def create(self, message: object, options: SendOptions, related_to: Mapping[str, str] | None = None) -> Outgoing:
        outgoing = super().create(message, options, related_to)
        self.messages_by_id[outgoing.message_id] = message
        return outgoing


@dataclass(frozen=True)
class _RememberingEndings(MessageCompletions):
    """Remembers the errors because of which messages went to the error queue."""

    failures: list[Exception] = field(default_factory=list[Exception])

    @override
    def error_completion(
        self, received: ports.Received, error: Exception, queue: str | None = None, *, brief: bool = False
    ) -> ports.Completion:
        if not brief:
            self.failures.append(error)
        return super().error_completion(received, error, queue, brief=brief)


class _WakingStore(MemoryStore):
    """A store that wakes the poller only for its own messages and on :meth:`wake`."""

    def wake(self) -> None:
        for wake in self._wakes:
            wake()


class _ObservedClock(VirtualClock):
    """A clock that calls ``on_wait`` when it is set."""

    def __init__(self, start: datetime, on_wait: Callable[[], None]) -> None:
        super().__init__(start)
        self._on_wait = on_wait

    @override
    def step(self, duration: timedelta) -> None:
        super().step(duration)
        self._on_wait()


class _RememberingEndpoint(Endpoint):
    """Remembers the messages that it made, and the errors because of which some went to the error queue.

    Its poller never polls by itself, which would be 43,200 queries for each month: the store and the clock wake it.
    """

    _longest_sleep = timedelta(days=36_500)

    def __init__(self, name: str, **settings: Any) -> None:
        self.messages_by_id: dict[str, object] = {}
        self.failures: list[Exception] = []
        self._create_outgoing = partial(_RememberingMessages, messages_by_id=self.messages_by_id)
        self._create_completions = partial(_RememberingEndings, failures=self.failures)
        super().__init__(name, **settings)


class _ExitTransport(MemoryTransport):
    """Queues in memory that are created when a message is sent to them; calls ``on_sent`` for every sent message."""

    def __init__(self, clock: VirtualClock, on_sent: Callable[[Envelope], None]) -> None:
        super().__init__(clock=clock)
        self.on_sent = on_sent

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        await self.create_queues([envelope.destination for envelope in envelopes])
        errors = await super().send(envelopes, now, work=work)
        for envelope, error in zip(envelopes, errors, strict=True):
            if error is None:
                self.on_sent(envelope)
        return errors

    @override
    def receiver(self, queue: str) -> MemoryReceiver:
        return _ReportingReceiver(self, queue)


class _ReportingReceiver(MemoryReceiver):
    """Creates the queues of messages that are sent with a commit, and calls ``note`` for these messages."""

    def __init__(self, transport: _ExitTransport, queue: str) -> None:
        super().__init__(transport, queue)
        self._exit_transport = transport

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        await self._exit_transport.create_queues([envelope.destination for envelope in completion.outgoing])
        await super().commit(received, now, completion)
        for envelope in completion.outgoing:
            self._exit_transport.on_sent(envelope)
