"""Queues: transports, receivers of one, and what some queues can do besides. Source: specification 6; ADR 0003."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import anyio

from postdate.clock import to_microseconds
from postdate.errors import (
    ConfigurationError,
    NotSupported,
    PostdateError,
    TimeToBeReceivedInTransaction,
    TransportUnreachable,
    UnsupportedTransactionMode,
)
from postdate.messages import DelayedMessage, Envelope
from postdate.ports.common import Capable, RecordKind, TransactionMode, Work
from postdate.ports.observation import Observer, ServerFacts


@dataclass(frozen=True, slots=True)
class TransportCapabilities:
    """What a transport can do.

    Args:
        durable: messages in queues survive the process.
        transaction_modes: modes whose promise it keeps.
        database: identity of the database of its queues, if any; see :class:`StoreCapabilities`.
        largest_message_bytes: headers and body together.
        largest_headers_bytes: headers alone, as :func:`postdate.messages.encode_headers` has them, in UTF-8: with more,
            no queue takes the message, or none takes its brief error copy, so it is refused before it is stored.
            ``None``: the limit of the whole message is the only one.
        expires_messages: a message past its expiry is discarded by the queue itself: it is never received.
        time_to_be_received_in_transactions: every message of one transaction may have a time to be received of its own;
            without it, sends with one are refused in a transaction (specification 2.2).
        time_to_be_received_precision: a time to be received counts as the next multiple of this.
        dead_letters: expired messages can be kept in a dead-letter queue.
        pipelines: one ``send`` takes messages for any mixture of destinations, and a destination that does not answer
            holds up none of the others; without it, each destination gets calls of its own.
        queue_names_fold_case: names of queues that differ in the case of letters only are one queue.
        queue_name_separator: stands in the names of a timeout manager's queues, after that of its endpoint
            (specification 4.2).
        prefetches: received messages are held without a lease that runs out or a count that grows when they are given
            back: so more may be received than are handled at once.
        takes_by_id: a receiver can pick one message out of its queue: :meth:`Receiver.take`.
    """

    durable: bool
    transaction_modes: frozenset[TransactionMode]
    database: object | None = None
    largest_message_bytes: int = 16 * 1024 * 1024
    largest_headers_bytes: int | None = None
    expires_messages: bool = False
    time_to_be_received_in_transactions: bool = True
    time_to_be_received_precision: timedelta = timedelta(milliseconds=1)
    dead_letters: bool = False
    pipelines: bool = False
    queue_names_fold_case: bool = False
    queue_name_separator: str = "."
    prefetches: bool = False
    takes_by_id: bool = False


SUSPECT_AFTER: Final = 3
"""A message is a suspect from so many processes on that died while they held it. Source: ADR 61."""


class Received(NamedTuple):
    """A message taken from a queue and held by this process.

    Args:
        envelope: the message; ``destination`` is the queue it was in.
        failures: how often handling it failed before, as far as the transport knows.
        token: fences the hold.
        unanswered: of these, how often it came back without an answer: its receiver ended, or lost connection or claim.
            Rollbacks of other processes are included where the queue cannot tell them apart; 0 where it does not count.
        is_last: the queue drops it when it comes back, or comes back twice: so it is not handled.
        tries: how often its step was asked about it while it has been held; not set by transports.
        is_suspect: several processes died while they held it: it is handled while this process holds no other message
            of its queue. Set by queues that count such deaths exactly, in ``unanswered``; see :data:`SUSPECT_AFTER`.
    """

    envelope: Envelope
    failures: int
    token: object
    unanswered: int = 0
    is_last: bool = False
    tries: int = 0
    is_suspect: bool = False


def count_received_together(messages: Sequence[Received]) -> int:
    """Return how many of these, oldest first, one call to ``receive`` returns: a suspect is received alone."""
    for position, message in enumerate(messages):
        if message.is_suspect:
            return max(position, 1)
    return len(messages)


@dataclass(frozen=True, slots=True)
class End:
    """How handling of a received message ended.

    Args:
        record: kind of the record of a message that had been delayed; ``None``: none is written.
        detail: reason, for the record.
        outgoing: messages to send.
        work: to be done in the same transaction; only with a transport in the database of the work.
    """

    record: RecordKind | None = RecordKind.HANDLED
    detail: str = ""
    outgoing: Sequence[Envelope] = ()
    work: Sequence[Work] = ()


HANDLED = End()


class Ending(NamedTuple):
    """A message that ends, and how.

    Args:
        received: the message, held by the receiver that is to end it.
        at: when it ended, UTC.
        end: how.
    """

    received: Received
    at: datetime
    end: End


class Receiver(ABC):
    """One queue being received from."""

    @abstractmethod
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        """Wait until there is a message, then hold up to ``limit``, oldest first; a suspect alone.

        Without ``wait``: return as soon as the server has answered, maybe with nothing. So a pump learns that an outage
        is over, and need not take it for a lasting one until the next message comes.

        The wait may be cancelled; nothing is held then.

        Guarantees:
            receiving.up_to_the_limit_is_received, receiving_waits_for_a_message, an_empty_queue_need_not_be_waited_for,
            a_held_message_is_hidden, a_cancelled_receive_loses_nothing, competing_receivers_share_the_messages.
        """

    @abstractmethod
    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        """Take the message off the queue for good, with everything in ``end``: one transaction where it can be.

        Raises:
            ClaimLost: another process took the message over; nothing was sent or done.
            QueueNotFound: an outgoing message has no queue; nothing was sent or done.
            TimeToBeReceivedInTransaction: an outgoing message has a time to be received, and the transport cannot have
                that in a transaction; nothing was sent or done.
            TransportUnavailable: transient; the message is still held.

        Guarantees:
            receiving.a_committed_message_is_gone, a_lost_hold_is_noticed;
            transactions.outgoing_messages_leave_with_the_commit, one_bad_outgoing_message_undoes_the_commit,
            a_lost_hold_sends_nothing;
            expiry.a_received_message_is_no_longer_subject_to_it,
            in_a_transaction_each_has_its_own_or_all_is_refused.
        """

    async def settle(self, endings: Sequence[Ending]) -> Sequence[Exception | None]:
        """End several messages, each as :meth:`commit` does, in as few transactions as can be.

        A message that cannot end does not keep others from it. Nothing is raised.

        Returns:
            An entry a message, in order: ``None``, or what :meth:`commit` would have raised.

        Guarantees:
            receiving.several_end_at_once, one_that_cannot_end_keeps_no_other_from_it.
        """
        errors: list[Exception | None] = [None] * len(endings)

        async def end(position: int, ending: Ending) -> None:
            try:
                await self.commit(*ending)
            except Exception as error:  # noqa: BLE001 - returned
                errors[position] = error
            except anyio.get_cancelled_exc_class():
                if anyio.current_effective_deadline() == -math.inf:
                    raise
                text = f"{type(self).__name__} was cancelled by nobody while it ended a message"
                errors[position] = TransportUnreachable(text)

        async with anyio.create_task_group() as tasks:
            for position, ending in enumerate(endings):
                tasks.start_soon(end, position, ending)
        return errors

    @abstractmethod
    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        """Give the message back to its queue; with ``failed`` its failure count grows by one.

        Guarantees:
            receiving.a_message_rolled_back_is_received_again, a_message_rolled_back_wakes_others.
        """

    def stop(self) -> None:  # noqa: B027 - most receivers have nothing to do
        """Take no more messages: from now on this receiver only ends those that it holds. Returns at once.

        By default it does nothing, for receivers to which a server sends only messages that were asked for.

        Guarantees:
            receiving.nothing_more_comes_to_a_stopped_receiver.
        """

    @abstractmethod
    async def close(self) -> None:
        """Give back all messages still held.

        Guarantees:
            receiving.closing_gives_back_what_is_held.
        """

    async def take(self, message_id: str) -> Received | None:
        """Hold one message, chosen by its id, or return ``None``: it is not in the queue, or held already.

        Only of a transport whose capabilities say ``takes_by_id``.

        Raises:
            QueueNotFound: there is no such queue.

        Guarantees:
            receiving.a_message_is_taken_by_its_id.
        """
        raise NotSupported(f"{type(self).__name__} receives messages in their order only")


class Transport(Capable[TransportCapabilities], ABC):
    """Queues, to create, to send to, and to receive from."""

    @abstractmethod
    async def create_queues(self, names: Sequence[str]) -> None:
        """Create the queues that do not exist yet; idempotent.

        Guarantees:
            sending.creating_a_queue_again_keeps_its_messages.
        """

    @abstractmethod
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        """Send each message durably, or say why not.

        Args:
            envelopes: in the order in which they are to arrive.
            now: time of sending.
            work: only with a transport that lives in the database of the work: one transaction with all the sends, in
                which any failure rolls back everything and is raised.

        Returns:
            One entry an envelope, in order: ``None`` when it was sent, else ``QueueNotFound``, ``MessageTooLarge``,
            ``TimeToBeReceivedInTransaction`` or ``TransportUnavailable``.

        Guarantees:
            sending.order_is_kept, headers_and_body_are_unchanged, unicode_survives,
            expiry_and_due_time_are_carried, a_missing_queue_is_a_value, too_large_is_a_value,
            headers_at_their_limit_and_a_copy_of_them_are_sent, headers_with_reserved_names_are_unchanged;
            expiry.within_its_time_a_message_is_received, past_its_time_a_message_is_never_received,
            the_clock_of_the_sender_does_not_count, an_expired_message_leaves_the_queue_without_a_receiver;
            capabilities.work_of_a_database_is_done_or_refused.
        """

    @abstractmethod
    def receiver(self, queue: str) -> Receiver:
        """Return a receiver on ``queue``, which must exist when :meth:`Receiver.receive` is called.

        Guarantees:
            receiving.a_missing_queue_raises.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release connections."""

    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int] | None:
        """Return how many messages each of the named queues holds, at least those that no receiver has in hand.

        Queues that do not exist are left out. ``None``: this transport cannot tell.

        Raises:
            TransportUnavailable: transient.
        """
        return None

    async def limits_of(self, names: Sequence[str]) -> Mapping[str, Mapping[str, int] | None] | None:
        """Return limits at which messages are dropped silently, by queue and by the server's name for the limit.

        ``None``: this server has none; for a queue: not known yet. Raises ``TransportError`` if the server does not
        tell.
        """
        return None

    def observer(self) -> Observer | None:
        """Return an observer of these queues, or ``None``; it uses the transport's connections and ends with it."""
        return None

    async def server_facts(self) -> ServerFacts | None:
        """Ask the server about itself; changes nothing, and needs no queues. ``None``: there is no server.

        Raises:
            TransportUnavailable: it does not answer, or refuses; the message says which.
        """
        return None


def refuse_work(work: Sequence[Work], queues: str) -> None:
    """Refuse what is to be done in a database in one transaction with a send or an end; ``queues``: for the text."""
    if work:
        raise UnsupportedTransactionMode(f"queues {queues} cannot share a transaction with a database")


# --- how queues treat a time to be received (specification 2.2, 2.3) --------------------------------------------------


_NEVER: Final = to_microseconds(datetime.max.replace(tzinfo=UTC))
_MICROSECOND: Final = timedelta(microseconds=1)


def end_in_queue(lifetime: timedelta | None, now: datetime) -> int | None:
    """Return when a message expires in a queue that judges by a clock of its own.

    Args:
        lifetime: :meth:`postdate.Envelope.time_left` by the clock of the sender. So a clock that is wrong, or a virtual
            one, neither loses messages nor keeps them alive.
        now: by the clock of the queue.

    Returns:
        Microseconds since 1970 UTC by the clock of the queue, after which the message is not received any more;
        ``None``: never, which is also what an end after the year 9999 means.
    """
    end = _NEVER if lifetime is None else to_microseconds(now) + lifetime // _MICROSECOND
    return end if end < _NEVER else None


@dataclass(frozen=True, slots=True)
class NativeExpiry:
    """How a queue is to expire one message.

    Args:
        time_to_be_received: after which the queue discards it; ``None``: never.
        dead_letter: whether the queue then keeps it among its dead letters.
    """

    time_to_be_received: timedelta | None
    dead_letter: bool


@dataclass(frozen=True, slots=True)
class ExpiryRules:
    """The rules of MSMQ, where the first message of a transaction sets the time to be received of all its messages.

    A send with a time to be received in a transaction would so lose messages that should live: it is refused, or, with
    ``disable_native_time_to_be_received_in_transactions``, sent without a native one. The header is always kept.

    Args:
        one_per_transaction: whether that limit holds here.
        disable_native_time_to_be_received_in_transactions: rather leave it to the receiver than refuse.
        use_dead_letter_queue: keep messages that cannot be received among the dead letters.
        use_dead_letter_queue_for_messages_with_time_to_be_received: the same for messages with a native time to be
            received, which are meant to vanish.
    """

    one_per_transaction: bool = True
    disable_native_time_to_be_received_in_transactions: bool = False
    use_dead_letter_queue: bool = True
    use_dead_letter_queue_for_messages_with_time_to_be_received: bool = False

    def native(self, envelope: Envelope, *, in_transaction: bool, address: str | None = None) -> NativeExpiry:
        """Return how the queue is to expire a message.

        Args:
            envelope: to be sent.
            in_transaction: the send is part of a native transaction: a handler's in the atomic modes, or the caller's.
            address: of the queue as its users write it; default: the destination of the envelope.

        Raises:
            TimeToBeReceivedInTransaction: see the class; nothing is to be sent.
        """
        span = envelope.time_to_be_received
        if span is not None and in_transaction and self.one_per_transaction:
            if not self.disable_native_time_to_be_received_in_transactions:
                raise TimeToBeReceivedInTransaction(
                    f"failed to send message {envelope.message_id!r} to {address or envelope.destination}: it has a "
                    f"time to be received of {span}; send it isolated or in another transaction mode, or set "
                    f"disable_native_time_to_be_received_in_transactions. "
                    f"Sending messages with a custom TimeToBeReceived is not supported on transactional MSMQ."
                )
            span = None
        return NativeExpiry(span, self.keeps(envelope, expires=span is not None))

    def keeps(self, envelope: Envelope, *, expires: bool) -> bool:
        """Return whether the queue is to keep a message among its dead letters.

        Args:
            envelope: to be sent; its own setting wins.
            expires: the queue itself expires it.
        """
        if envelope.use_dead_letter_queue is not None:
            return envelope.use_dead_letter_queue
        if expires:
            return self.use_dead_letter_queue_for_messages_with_time_to_be_received
        return self.use_dead_letter_queue


# --- queues through which programs without Postdate delay messages (ADR 0009) -----------------------------------------


_LONGEST_NAME: Final = 150
"""Characters; so that there is room for a routing key beside it in a destination."""

DUE_EXCHANGE_TYPES: Final = ("topic", "direct", "fanout", "headers")

Read = Callable[[Envelope, datetime], DelayedMessage]
"""Returns the delayed message to be stored for an envelope that arrived at this instant; raises ``MessageError`` if
there is none."""


@dataclass(frozen=True, slots=True)
class DelayExchange:
    """An exchange to which any program publishes messages to be delayed.

    Args:
        name: of the exchange; beside it there are a queue ``{name}.intake`` and an exchange ``{name}.due``.
        due_type: type of ``{name}.due``: one of :data:`DUE_EXCHANGE_TYPES`. One that exists must be of it, unless it is
            of the type of a plugin, which is left as it is.

    Raises:
        ConfigurationError: the name or the type is not allowed.
    """

    name: str = "postdate"
    due_type: str = "topic"

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name) > _LONGEST_NAME or self.name.startswith("amq."):
            raise ConfigurationError(
                f"the name of an exchange must have 1 to {_LONGEST_NAME} characters and not begin with 'amq.', "
                f"not be {self.name[:60]!r}"
            )
        if self.due_type not in DUE_EXCHANGE_TYPES:
            raise ConfigurationError(
                f"due_type must be one of {', '.join(DUE_EXCHANGE_TYPES)}, not {self.due_type!r}; to use another type, "
                f"declare the exchange {self.name + '.due'!r} yourself: one that exists is left as it is"
            )


@dataclass(frozen=True, slots=True)
class IntakeQueue:
    """A queue of messages to be delayed.

    Args:
        name: of the queue, to which messages that could not be stored can be returned.
        receiver: of the queue.
        read: see :data:`Read`; pure.
    """

    name: str
    receiver: Receiver
    read: Read


def bound_to_intake(exchange: str, bindings: Sequence[str]) -> str:
    """Return the text of an error about :meth:`ForeignIntake.foreign_bindings`."""
    return (
        f"{', '.join(bindings)}: bound to exchange {exchange!r}, so each message arrives there at once, and again when "
        f"it is due; bind it to {exchange + '.due'!r} and unbind it from {exchange!r}"
    )


class ForeignIntake(ABC):
    """A transport through which programs without Postdate delay messages."""

    @abstractmethod
    async def create_intake(self, exchange: DelayExchange) -> None:
        """Create what does not exist yet: exchanges, queues and bindings; idempotent.

        Raises:
            ConfigurationError: there is something else of that name, or an application has bound a queue to the
                exchange; says what to do.
            TransportError: permission is missing.
            TransportUnavailable: transient.
        """

    @abstractmethod
    def intake_queues(self, exchange: DelayExchange) -> Sequence[IntakeQueue]:
        """Return the queues to be received from; they must exist when that begins. Connects to nothing."""

    @abstractmethod
    async def foreign_bindings(self, exchange: DelayExchange) -> Sequence[str]:
        """Return what applications have bound to the exchange, in words; empty: nothing, as it is to be.

        The server delivers each message to such a queue at once, and Postdate delivers it again when it is due.

        Raises:
            TransportError: the server does not tell.
            TransportUnavailable: transient.
        """


# --- queues that can publish ------------------------------------------------------------------------------------------


class PublishingTransport(ABC):
    """Queues whose server delivers one message to all its subscribers."""

    @abstractmethod
    def event_address(self, event: str) -> str:
        """Return the destination that stands for all subscribers of these events, of which there may be none.

        Args:
            event: name of a message type.

        Raises:
            ConfigurationError: no address can have this name.

        Guarantees:
            integration/test_publishing.py::test_what_nobody_wants_is_published_all_the_same.
        """

    @abstractmethod
    async def subscribe(self, queue: str, events: Sequence[str]) -> None:
        """Subscribe a queue, which must exist, to events; idempotent. It lasts until it is undone on the server.

        Guarantees:
            integration/test_publishing.py::test_all_subscribers_receive_an_event_and_nobody_else.
        """
