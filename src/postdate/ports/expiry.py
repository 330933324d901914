"""How queues treat a time to be received: alone, in a transaction, and when it has run out.

Source: specification 2.2, 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from postdate.clock import to_microseconds
from postdate.errors import TimeToBeReceivedInTransaction
from postdate.messages import Envelope

_NEVER: Final = to_microseconds(datetime.max.replace(tzinfo=UTC))
_MICROSECOND: Final = timedelta(microseconds=1)


def end_in_queue(left: timedelta | None, now: datetime) -> int | None:
    """Return when a message expires in a queue that judges by a clock of its own.

    Args:
        left: :meth:`postdate.Envelope.time_left` by the clock of the sender. So a clock that is wrong, or a virtual
            one, neither loses messages nor keeps them alive.
        now: by the clock of the queue.

    Returns:
        Microseconds since 1970 UTC by the clock of the queue, after which the message is not received any more;
        ``None``: never, which is also what an end after the year 9999 means.
    """
    end = _NEVER if left is None else to_microseconds(now) + left // _MICROSECOND
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
