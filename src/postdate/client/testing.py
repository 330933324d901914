"""A client for tests of programs that send: its messages stay in memory, and the test moves its clock."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from typing_extensions import override

from postdate.client.background import Background, StoreSession
from postdate.client.calls import ClientCalls
from postdate.client.client import Client
from postdate.clock import Clock, SystemClock
from postdate.config import load_settings
from postdate.core.changes import EVERYTHING, list_matching
from postdate.endpoint.send_options import SendOptions
from postdate.messages import DelayedMessage
from postdate.ports import AdministrableStore, Outcome
from postdate.testing.clock import VirtualClock
from postdate.testing.endpoints import SentMessage, WaitingMessage

_ALL = 1_000_000
_INSTANT = timedelta(microseconds=1)
"""A store claims what is due strictly before a time."""


class ClientTest(Client):
    """A client whose messages a test can look at. The store is in memory, and time passes only in :meth:`advance`.

    Give it, or its :attr:`~postdate.Client.blocking`, to the code under test. All methods of this class block for an
    instant, in tests with and without ``async``. No handler runs: see :class:`postdate.testing.EndpointTest` for that.
    Limits and pauses of queues hold nothing back.

    The store cannot be part of a transaction: code that passes ``transaction=`` is tested with its database. When the
    code under test closes the client, the messages stay, so that a test can look at them. :meth:`end` ends the store.

    Args:
        endpoint: as of :func:`postdate.connect`.
        start: first time of the clock; aware. ``None``: the present, so that times which the code under test takes from
            its own clock are about right.
    """

    def __init__(self, endpoint: str = "tested", *, start: datetime | None = None) -> None:
        self._clock = VirtualClock(SystemClock().now() if start is None else start)
        self._deliveries = list[SentMessage]()
        settings = load_settings(None, {}, {"store.address": "memory:", "endpoint.name": endpoint})
        self._background = self._lasting_background = _LastingBackground(
            lambda: settings, create=True, clock=self._clock
        )
        self._calls = self._remembering_calls = _RememberingCalls(endpoint)

    def end(self) -> None:
        """Discard the messages, and end the thread of the store."""
        self._lasting_background.end()

    def advance(
        self,
        duration: timedelta = timedelta(0),
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Let time pass. Messages that become due meanwhile, the last instant included, are delivered.

        Raises:
            ValueError: the duration is negative.
        """
        total = duration + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if total < timedelta(0):
            raise ValueError(f"time does not run backwards by {-total}")
        self._deliver_due_messages()
        previous = self.now
        self._clock.step(total)
        self._deliver_due_messages(previous)

    @property
    def now(self) -> datetime:
        """The time of the clock, UTC."""
        return self._clock.now()

    @property
    def sent(self) -> Sequence[object]:
        """Messages that were delivered to their queues, in order. Delayed messages are delivered when they are due."""
        return [each.message for each in self.deliveries]

    def sent_to(self, destination: str) -> Sequence[object]:
        """Return the messages that were delivered to one queue, in order."""
        return [each.message for each in self.deliveries if each.destination == destination]

    @property
    def deliveries(self) -> Sequence[SentMessage]:
        """The messages of :attr:`sent` with destination, headers and time."""
        self._deliver_due_messages()
        return list(self._deliveries)

    def waiting(self) -> Sequence[WaitingMessage]:
        """Return the messages that are not due yet, by due time."""
        self._deliver_due_messages()
        messages = self._background.submit(lambda session: list_matching(_store(session), EVERYTHING, _ALL)).result()
        return [WaitingMessage(self._original(each), each.destination, each.due) for each in messages]

    def _deliver_due_messages(self, previous: datetime | None = None) -> None:
        """Deliver what became due since ``previous``; ``None``: the clock has not moved since the last delivery."""
        since = self.now if previous is None else previous

        async def deliver(session: StoreSession) -> list[DelayedMessage]:
            claims = await session.store.claim_due(self.now + _INSTANT, _ALL)
            await session.store.finish(claims, Outcome.DELIVERED, self.now)
            return [claim.message for claim in claims]

        for each in self._background.submit(deliver).result():
            delivery = SentMessage(self._original(each), each.destination, max(each.due, since), each.headers)
            self._deliveries.append(delivery)

    def _original(self, message: DelayedMessage) -> object:
        return self._remembering_calls.originals.get((message.message_id, message.body), message.body)


def _store(session: StoreSession) -> AdministrableStore:
    assert isinstance(session.store, AdministrableStore)
    return session.store


class _LastingBackground(Background):
    """A background that is not closed with its client: a store in memory would end with it."""

    @override
    def close(self) -> None: ...

    def end(self) -> None:
        super().close()


class _RememberingCalls(ClientCalls):
    """Remembers messages as they were sent. Warns of no missing service and no missing queue: a test has neither."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        # By id and body: a message that is refused, because its id was used, leaves the first one as it was.
        self.originals: dict[tuple[str, bytes], object] = {}

    @override
    def create_message(self, message: object, options: SendOptions, clock: Clock) -> DelayedMessage:
        delayed = super().create_message(message, options, clock)
        self.originals[delayed.message_id, delayed.body] = message
        return delayed

    @override
    async def warn(self, session: StoreSession, destinations: frozenset[str]) -> None: ...
