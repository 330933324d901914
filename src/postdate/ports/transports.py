"""Queues: transports, and receivers of one queue. Source: specification 6; ADR 0003."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

import anyio

from postdate.errors import NotSupported, PostdateError, TransportUnreachable, UnsupportedTransactionMode
from postdate.messages import Envelope
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
    """

    envelope: Envelope
    failures: int
    token: object
    unanswered: int = 0
    is_last: bool = False
    tries: int = 0


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
    async def receive(self, limit: int) -> Sequence[Received]:
        """Wait until there is a message, then hold up to ``limit``, oldest first.

        Empty only in the first answer after it has raised, to say that the server answers again: a pump that waited for
        the next message instead would take the outage for a lasting one.

        The wait may be cancelled; nothing is held then.

        Guarantees:
            receiving.up_to_the_limit_is_received, receiving_waits_for_a_message, a_held_message_is_hidden,
            a_cancelled_receive_loses_nothing, competing_receivers_share_the_messages.
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
