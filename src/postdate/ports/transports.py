"""Transports, receivers, and the roles that only some queues have. Source: ADR 0003."""

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
    """The capabilities of a transport.

    Args:
        durable: messages in queues survive the process.
        transaction_modes: modes whose promise the transport keeps.
        database: identity of the database of its queues, if any; see :class:`StoreCapabilities`.
        largest_message_bytes: limit for headers and body together.
        largest_headers_bytes: limit for the headers alone, as :func:`postdate.messages.encode_headers` encodes them, in
            UTF-8. With larger headers, no queue accepts the message, or none accepts its brief error copy, so the
            message is refused before it is stored. ``None``: the limit of the whole message is the only one.
        expires_messages: the queue itself discards a message that is past its expiry: no receiver gets it.
        time_to_be_received_in_transactions: every message of one transaction may have a time to be received of its own.
            Without this, a send with a time to be received is refused in a transaction.
        time_to_be_received_precision: a time to be received is rounded up to a multiple of this.
        dead_letters: expired messages can be kept in a dead-letter queue.
        pipelines: one ``send`` accepts messages for any mixture of destinations, and a destination that does not answer
            does not delay the others. Without this, each destination gets calls of its own.
        queue_names_fold_case: queue names that differ only in the case of letters name one queue.
        queue_name_separator: text between the name of an endpoint and the rest of the name of a queue of its timeout
            manager.
        prefetches: a received message has no lease that runs out, and no count grows when it returns to the queue. So
            a receiver may have more messages than are handled at once.
        receives_by_id: a receiver can receive one message that is chosen by its id: :meth:`Receiver.receive_by_id`.
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
    receives_by_id: bool = False


SUSPECT_AFTER: Final = 3
"""A message is a suspect from so many processes on that died while they held it. Source: ADR 61."""


class Received(NamedTuple):
    """A message that this process has received and not yet acknowledged or rejected.

    Args:
        envelope: the message; ``destination`` is its queue.
        failures: how often handling the message failed before, as far as the transport knows.
        token: proves that this process still has the message.
        unanswered: how many of ``failures`` ended without an answer: the receiver ended, or lost its connection or its
            claim. The number includes rollbacks of other processes where the queue cannot tell them apart. It is 0
            where the queue does not count.
        is_dropped_if_returned: the queue drops the message when it comes back, or comes back twice. So the message is
            not handled.
        attempts: how often its step was asked about the message since it was received; not set by transports.
        is_suspect: several processes died while they held the message. It is handled while this process holds no other
            message of its queue. Queues set it that count such deaths exactly, in ``unanswered``; see
            :data:`SUSPECT_AFTER`.
    """

    envelope: Envelope
    failures: int
    token: object
    unanswered: int = 0
    is_dropped_if_returned: bool = False
    attempts: int = 0
    is_suspect: bool = False


def count_received_together(messages: Sequence[Received]) -> int:
    """Return how many of these, oldest first, one call to ``receive`` returns: a suspect is received alone."""
    for position, message in enumerate(messages):
        if message.is_suspect:
            return max(position, 1)
    return len(messages)


@dataclass(frozen=True, slots=True)
class Completion:
    """How the handling of a received message ended.

    Args:
        record: kind of the record for a message that had been delayed; ``None``: no record is written.
        detail: reason, for the record.
        outgoing: messages to send.
        work: work for the same transaction; only with a transport in the database of the work.
    """

    record: RecordKind | None = RecordKind.HANDLED
    detail: str = ""
    outgoing: Sequence[Envelope] = ()
    work: Sequence[Work] = ()


HANDLED = Completion()


class Settlement(NamedTuple):
    """A message whose handling ended, and how it ended.

    Args:
        received: the message, of the receiver that settles it.
        at: when its handling ended, UTC.
        completion: how its handling ended.
    """

    received: Received
    at: datetime
    completion: Completion


class Receiver(ABC):
    """A receiver of one queue."""

    @abstractmethod
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        """Wait until there is a message, then receive up to ``limit``, oldest first; a suspect alone.

        With ``wait=False``, return as soon as the server has answered, possibly without messages. A pump learns in this
        way that an outage is over. Otherwise the pump would report a lasting outage until the next message comes.

        A caller may cancel the wait; then no message is received.

        Guarantees:
            receiving.up_to_the_limit_is_received, receiving_waits_for_a_message, an_empty_queue_need_not_be_waited_for,
            a_held_message_is_hidden, a_cancelled_receive_loses_nothing, competing_receivers_share_the_messages.
        """

    @abstractmethod
    async def commit(self, received: Received, now: datetime, completion: Completion = HANDLED) -> None:
        """Acknowledge the message and do everything in ``completion``, in one transaction where the transport can.

        Raises:
            ClaimLost: another process has received the message meanwhile; nothing was sent or done.
            QueueNotFound: an outgoing message has no queue; nothing was sent or done.
            TimeToBeReceivedInTransaction: an outgoing message has a time to be received, which the transport cannot
                send in a transaction; nothing was sent or done.
            TransportUnavailable: transient; the message is not acknowledged, and still belongs to this receiver.

        Guarantees:
            receiving.a_committed_message_is_gone, a_lost_hold_is_noticed;
            transactions.outgoing_messages_leave_with_the_commit, one_bad_outgoing_message_undoes_the_commit,
            a_lost_hold_sends_nothing;
            expiry.a_received_message_is_no_longer_subject_to_it,
            in_a_transaction_each_has_its_own_or_all_is_refused.
        """

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Exception | None]:
        """Acknowledge several messages, each as :meth:`commit` does, in as few transactions as possible.

        A message that cannot be acknowledged does not prevent the others. This method raises no error of a message.

        Returns:
            One entry for each message, in order: ``None``, or the error that :meth:`commit` would have raised.

        Guarantees:
            receiving.several_end_at_once, one_that_cannot_end_keeps_no_other_from_it.
        """
        errors: list[Exception | None] = [None] * len(settlements)

        async def commit_one(position: int, settlement: Settlement) -> None:
            try:
                await self.commit(*settlement)
            except Exception as error:  # noqa: BLE001 - returned
                errors[position] = error
            except anyio.get_cancelled_exc_class():
                if anyio.current_effective_deadline() == -math.inf:  # a scope around this call is cancelled
                    raise
                # Otherwise the adapter has a fault. If this were raised, the task group would cancel the other endings
                # and raise nothing, so all messages would seem to be acknowledged.
                text = (
                    f"{type(self).__name__} raised a cancellation, although no scope was cancelled, while it "
                    f"acknowledged or rejected a message"
                )
                errors[position] = TransportUnreachable(text)

        async with anyio.create_task_group() as tasks:
            for position, ending in enumerate(settlements):
                tasks.start_soon(commit_one, position, ending)
        return errors

    @abstractmethod
    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        """Reject the message: it returns to its queue. With ``failed``, its failure count grows by one.

        Guarantees:
            receiving.a_message_rolled_back_is_received_again, a_message_rolled_back_wakes_others.
        """

    def stop(self) -> None:  # noqa: B027 - most receivers have nothing to do
        """Receive no more messages: from now on this receiver only settles the messages that it has. Returns at once.

        By default it does nothing. That is right for receivers to which a server sends only requested messages.

        Guarantees:
            receiving.nothing_more_comes_to_a_stopped_receiver.
        """

    @abstractmethod
    async def close(self) -> None:
        """Reject all messages that are not settled yet; they return to the queue.

        Guarantees:
            receiving.closing_gives_back_what_is_held.
        """

    async def receive_by_id(self, message_id: str) -> Received | None:
        """Receive one message, chosen by its id; return ``None`` if it is not in the queue, or is received already.

        Call it only if the capabilities of the transport say ``takes_by_id``.

        Raises:
            QueueNotFound: there is no such queue.

        Guarantees:
            receiving.a_message_is_taken_by_its_id.
        """
        raise NotSupported(f"{type(self).__name__} receives messages in their order only")


class Transport(Capable[TransportCapabilities], ABC):
    """A transport: it creates queues, sends to them, and makes receivers."""

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
        """Send each message durably, or return why it was not sent.

        Args:
            envelopes: in the order in which they are to arrive.
            now: time of sending.
            work: only with a transport in the database of the work. The work and all sends are one transaction: any
                failure rolls everything back and is raised.

        Returns:
            One entry for each envelope, in order: ``None`` when it was sent, else ``QueueNotFound``,
            ``MessageTooLarge``, ``TimeToBeReceivedInTransaction`` or ``TransportUnavailable``.

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
        """Return a receiver of ``queue``. The queue must exist when :meth:`Receiver.receive` is called.

        Guarantees:
            receiving.a_missing_queue_raises.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release the connections."""

    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int] | None:
        """Return the number of messages in each of the named queues; it may leave out messages that are received.

        The result has no entry for a queue that does not exist. ``None``: this transport cannot tell.

        Raises:
            TransportUnavailable: transient.
        """
        return None

    async def limits_of(self, names: Sequence[str]) -> Mapping[str, Mapping[str, int] | None] | None:
        """Return the limits at which messages are dropped silently, by queue and by the server's name for the limit.

        ``None``: this server has no such limits. ``None`` for a queue: its limits are not known yet.

        Raises:
            TransportError: the server does not tell.
        """
        return None

    def observer(self) -> Observer | None:
        """Return an observer of these queues, or ``None``; it uses the transport's connections and ends with it."""
        return None

    async def server_facts(self) -> ServerFacts | None:
        """Return what the server says of itself, or ``None`` without a server; changes nothing, needs no queues.

        Raises:
            TransportUnavailable: the server does not answer, or refuses; the message says which.
        """
        return None


def check_no_work(work: Sequence[Work], queues: str) -> None:
    """Raise `UnsupportedTransactionMode` if there is work; for queues that are in no database.

    Args:
        work: work that a caller wants in one transaction with a send or an acknowledgement.
        queues: description of the queues, for the text of the error.
    """
    if work:
        raise UnsupportedTransactionMode(f"queues {queues} cannot share a transaction with a database")


# --- how queues treat a time to be received ---------------------------------------------------------------------------


_LATEST_EXPIRY: Final = to_microseconds(datetime.max.replace(tzinfo=UTC))
_MICROSECOND: Final = timedelta(microseconds=1)


def expiry_in_queue(lifetime: timedelta | None, now: datetime) -> int | None:
    """Return when a message expires in a queue that uses a clock of its own.

    Args:
        lifetime: :meth:`postdate.Envelope.time_left` by the clock of the sender. Only a duration passes from one clock
            to the other, so a wrong or virtual clock of the sender neither loses messages nor keeps them alive.
        now: by the clock of the queue.

    Returns:
        Microseconds since 1970 UTC by the clock of the queue, after which the message is not received any more.
        ``None``: the message never expires. An end after the year 9999 also counts as never.
    """
    expiry = _LATEST_EXPIRY if lifetime is None else to_microseconds(now) + lifetime // _MICROSECOND
    return expiry if expiry < _LATEST_EXPIRY else None


@dataclass(frozen=True, slots=True)
class NativeExpiry:
    """The settings with which a queue is to expire one message.

    Args:
        time_to_be_received: duration after which the queue discards the message; ``None``: never.
        dead_letter: whether the queue then keeps the message among its dead letters.
    """

    time_to_be_received: timedelta | None
    dead_letter: bool


@dataclass(frozen=True, slots=True)
class ExpiryRules:
    """The rules of MSMQ, where the first message of a transaction sets the time to be received of all its messages.

    So a send with a time to be received in a transaction would lose messages that should live. Such a send is refused.
    With ``disable_native_time_to_be_received_in_transactions`` it is sent without a native time to be received
    instead. The header is always kept.

    Args:
        one_per_transaction: whether that limit holds here.
        disable_native_time_to_be_received_in_transactions: do not refuse the send; leave the expiry to the receiver.
        use_dead_letter_queue: keep messages that cannot be received among the dead letters.
        use_dead_letter_queue_for_messages_with_time_to_be_received: the same for messages with a native time to be
            received, which are meant to vanish.
    """

    one_per_transaction: bool = True
    disable_native_time_to_be_received_in_transactions: bool = False
    use_dead_letter_queue: bool = True
    use_dead_letter_queue_for_messages_with_time_to_be_received: bool = False

    def native_expiry(self, envelope: Envelope, *, in_transaction: bool, address: str | None = None) -> NativeExpiry:
        """Return the settings with which the queue is to expire a message.

        Args:
            envelope: the message to be sent.
            in_transaction: the send is part of a native transaction: of a handler in the atomic modes, or of the
                caller.
            address: address of the queue as users write it; default: the destination of the envelope.

        Raises:
            TimeToBeReceivedInTransaction: see the class; the caller must not send anything.
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
        return NativeExpiry(span, self.uses_dead_letters(envelope, expires=span is not None))

    def uses_dead_letters(self, envelope: Envelope, *, expires: bool) -> bool:
        """Return whether the queue is to keep a message among its dead letters.

        Args:
            envelope: the message to be sent; its own setting has priority.
            expires: the queue itself expires the message.
        """
        if envelope.use_dead_letter_queue is not None:
            return envelope.use_dead_letter_queue
        if expires:
            return self.use_dead_letter_queue_for_messages_with_time_to_be_received
        return self.use_dead_letter_queue


# --- queues through which programs without Postdate delay messages (ADR 0009) -----------------------------------------


_LONGEST_NAME: Final = 150
"""Characters; leaves space for a routing key beside the name in a destination."""

DUE_EXCHANGE_TYPES: Final = ("topic", "direct", "fanout", "headers")

Read = Callable[[Envelope, datetime], DelayedMessage]
"""Returns the delayed message to store for an envelope that arrived at this instant. Raises ``MessageError`` if the
envelope makes no delayed message."""


@dataclass(frozen=True, slots=True)
class DelayExchange:
    """An exchange to which any program publishes messages to be delayed.

    Args:
        name: of the exchange; beside it there are a queue ``{name}.intake`` and an exchange ``{name}.due``.
        due_type: type of ``{name}.due``: one of :data:`DUE_EXCHANGE_TYPES`. An existing exchange must have this type.
            An existing exchange with a type of a plugin is accepted and left as it is.

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
                f"declare the exchange {self.name + '.due'!r} yourself: an existing exchange is not changed"
            )


@dataclass(frozen=True, slots=True)
class IntakeQueue:
    """A queue of messages to be delayed.

    Args:
        name: of the queue; messages that could not be stored can be returned to it.
        receiver: of the queue.
        read: see :data:`Read`; pure.
    """

    name: str
    receiver: Receiver
    read: Read


def foreign_bindings_text(exchange: str, bindings: Sequence[str]) -> str:
    """Return the text of an error about :meth:`ForeignIntake.foreign_bindings`."""
    return (
        f"{', '.join(bindings)}: bound to exchange {exchange!r}, so each message arrives there at once, and again when "
        f"it is due; bind it to {exchange + '.due'!r} and unbind it from {exchange!r}"
    )


class ForeignIntake(ABC):
    """A transport through which programs without Postdate delay messages."""

    @abstractmethod
    async def create_intake(self, exchange: DelayExchange) -> None:
        """Create missing exchanges, queues and bindings; idempotent.

        Raises:
            ConfigurationError: something else has that name, or an application has bound a queue to the exchange; the
                text says what to do.
            TransportError: permission is missing.
            TransportUnavailable: transient.
        """

    @abstractmethod
    def intake_queues(self, exchange: DelayExchange) -> Sequence[IntakeQueue]:
        """Return the queues to receive from. They must exist when receiving begins. Connects to nothing."""

    @abstractmethod
    async def foreign_bindings(self, exchange: DelayExchange) -> Sequence[str]:
        """Return descriptions of the bindings that applications have made to the exchange; there should be none.

        The server delivers each message to a bound queue at once, and Postdate delivers the message again when it is
        due.

        Raises:
            TransportError: the server does not tell.
            TransportUnavailable: transient.
        """


# --- queues that can publish ------------------------------------------------------------------------------------------


class PublishingTransport(ABC):
    """A transport whose server delivers one message to all its subscribers."""

    @abstractmethod
    def event_address(self, event: str) -> str:
        """Return the destination that stands for all subscribers of an event; there may be no subscribers.

        Args:
            event: name of a message type.

        Raises:
            ConfigurationError: no address can have this name.

        Guarantees:
            integration/test_publishing.py::test_what_nobody_wants_is_published_all_the_same.
        """

    @abstractmethod
    async def subscribe(self, queue: str, events: Sequence[str]) -> None:
        """Subscribe an existing queue to events; idempotent. The subscription lasts until it is undone on the server.

        Guarantees:
            integration/test_publishing.py::test_all_subscribers_receive_an_event_and_nobody_else.
        """
