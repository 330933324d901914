"""Messages as values: the delayed message in a store, the envelope for a queue, and values that no message may have."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, Self

from postdate.errors import InvalidHeaders, InvalidMessage, MessageTooLarge
from postdate.messages.headers import (
    Headers,
    Origin,
    check_headers,
    decode_headers,
    encode_headers,
    origin_of,
    size_in_bytes,
)
from postdate.messages.times import aware_utc, format_timestamp

MESSAGE_ID_LIMIT = 250
"""Characters in a message id: the limit of the narrowest supported store."""

DESTINATION_LIMIT = 200
"""Characters in a destination: the limit of the narrowest supported store."""

_COPY_BYTES = 256 * 1024
"""Extra bytes that copies for the error and the audit queue may have, for the headers that are added to them."""


def new_message_id() -> str:
    """Return a new id: a UUID whose leading 48 bits are the time in milliseconds (version 7).

    Ids that are made one after the other are neighbours in an index. So storing with a unique id is cheap.
    """
    milliseconds = time.time_ns() // 1_000_000  # noqa: TID251 - for order in an index; nothing reads it as a time
    value = (milliseconds << 80) | int.from_bytes(os.urandom(10), "big")
    value = (value & ~(0xF << 76)) | (0x7 << 76)
    value = (value & ~(0x3 << 62)) | (0x2 << 62)
    return str(uuid.UUID(int=value))


def encode_for_store(message: DelayedMessage, largest_message_bytes: int) -> str:
    """Return the headers of a message in the form in which a store keeps them.

    Raises:
        MessageTooLarge: headers and body together have more bytes than the store accepts.
    """
    headers = encode_headers(message.headers)
    if (size := size_in_bytes(headers, message.body)) > largest_message_bytes:
        raise _too_large(message, "", size, "store", largest_message_bytes)
    return headers


def too_large_error(envelope: Envelope, headers: str, largest_message_bytes: int) -> MessageTooLarge | None:
    """Return the error for a message that is too large for queues, or ``None``; ``headers`` are its encoded ones.

    Headers that are added to copies for the error or the audit queue do not count.
    """
    size, limit = size_in_bytes(headers, envelope.body), largest_message_bytes
    if Headers.FAILED_QUEUE in envelope.headers or Headers.PROCESSING_ENDED in envelope.headers:
        limit += _COPY_BYTES
    return _too_large(envelope, f" to {envelope.destination!r}", size, "transport", limit) if size > limit else None


def _too_large(message: DelayedMessage | Envelope, target: str, size: int, role: str, limit: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"message {message.message_id!r}{target} has {size:,} bytes, this {role} takes {limit:,}; keep large content "
        f"elsewhere and send a reference, or raise largest_message_bytes"
    )


def check_text(value: str, name: str, limit: int) -> None:
    """Refuse an id or address that is not text, is blank, or is longer than ``limit`` characters.

    Raises:
        InvalidMessage: shows the value and the limit.
    """
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidMessage(f"{name} must be str, not {type(value).__name__}")
    if not value.strip():
        raise InvalidMessage(f"{name} is blank")
    if len(value) > limit:
        raise InvalidMessage(f"{name} has {len(value)} characters, at most {limit} are allowed: {value[:60]!r}…")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"{name} has text that UTF-8 cannot encode: {error}") from error
    if "\0" in value:
        raise InvalidMessage(f"{name} has a NUL character: {value!r}")


OWN_PREFIX: Final = "postdate~"
"""Prefix of the ids of messages that a store keeps for itself, such as the rules of time zones (ADR 33)."""


MARKERS: Final = "postdate.zones"
"""Destination of the messages in which a store keeps time zones. It is no queue: nothing delivers them. ADR 33."""

INTENTS: Final = "postdate.migration"
"""Destination of the batches that a move between stores of earlier versions is moving. It is no queue. ADR 44."""

OF_THE_STORE: Final = frozenset({MARKERS, INTENTS})
"""Destinations of the messages that belong to the store: no list contains them, and no filter matches them."""


def check_destination(value: str) -> None:
    """Refuse a destination that :func:`check_text` refuses, or that the store uses for its own messages.

    Raises:
        InvalidMessage: shows the value.
    """
    check_text(value, "destination", DESTINATION_LIMIT)
    if value in OF_THE_STORE:
        raise InvalidMessage(f"destination {value!r} is a name for the store's own messages: name a queue of yours")


def check_id(value: str, name: str = "message id", limit: int = MESSAGE_ID_LIMIT) -> None:
    """Refuse an id, or a key, that :func:`check_text` refuses, or that the store uses for its own messages.

    Raises:
        InvalidMessage: shows the value.
    """
    check_text(value, name, limit)
    if value.startswith(OWN_PREFIX):
        raise InvalidMessage(
            f"{name} {value!r} begins with {OWN_PREFIX!r}: such messages are the store's own, and only the "
            f"store may send, change or cancel them"
        )


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that waits until it is due.

    Args:
        message_id: key of this delayed send, unique in a store; 1 to 250 characters. It is the id of the message in
            its queue, not the ``NServiceBus.MessageId`` header, which a retried message keeps.
        due: instant from which the message may be delivered; aware, stored in UTC to the microsecond.
        destination: address of the queue for the message; 1 to 200 characters.
        headers: text to text; delivered unchanged.
        body: bytes, delivered unchanged.
        expires_at: instant after which the message is useless: then it is recorded as expired and not delivered;
            ``None`` means never. Not before ``due``.
        number_of_failures: failed dispatch attempts so far; written by stores only.
        cursor: place in a list directly behind this message: ``client.list(…, after=message.cursor)``. The cursor stays
            valid when the message is gone. Only stores set it, for lists. It is ignored when messages are compared.

    Raises:
        InvalidMessage, InvalidTimestamp, InvalidHeaders: when built from wrong values.

    Source: docs/specification-rows.md, rows 10-14.
    """

    message_id: str
    due: datetime
    destination: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    expires_at: datetime | None = None
    number_of_failures: int = 0
    cursor: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        check_text(self.message_id, "message id", MESSAGE_ID_LIMIT)
        check_text(self.destination, "destination", DESTINATION_LIMIT)
        check_headers(self.headers)
        if not isinstance(self.body, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidMessage(
                f"the body of message {self.message_id!r} must be bytes, not {type(self.body).__name__}"
            )
        object.__setattr__(self, "due", aware_utc(self.due, f"the due time of message {self.message_id!r}"))
        if self.expires_at is not None:
            expires_at = aware_utc(self.expires_at, f"the expiry of message {self.message_id!r}")
            if expires_at < self.due:
                raise InvalidMessage(
                    f"message {self.message_id!r} would expire at {expires_at.isoformat()}, "
                    f"before it is due at {self.due.isoformat()}"
                )
            object.__setattr__(self, "expires_at", expires_at)

    def __hash__(self) -> int:
        return hash((self.message_id, self.due, self.destination, self.body))

    @property
    def origin(self) -> Origin:
        """Why the message waits: an application scheduled it, it is a retry, or a saga asked for it."""
        return origin_of(self.headers)

    @classmethod
    def from_store(  # noqa: PLR0913 - the fields
        cls,
        message_id: str,
        due: datetime,
        destination: str,
        headers: Mapping[str, str],
        body: bytes,
        expires_at: datetime | None,
        number_of_failures: int,
    ) -> Self:
        """Return a message that was checked before it was stored; times are aware and UTC. For stores only.

        Only a blank id or destination is refused. A row may have one after it was changed by hand.

        Raises:
            InvalidMessage: the id or the destination is blank.
        """
        if not (message_id.strip() and destination.strip()):
            raise InvalidMessage(f"message id {message_id!r} or destination {destination!r} is blank")
        message = object.__new__(cls)
        set_field = object.__setattr__
        set_field(message, "message_id", message_id)
        set_field(message, "due", due)
        set_field(message, "destination", destination)
        set_field(message, "headers", headers)
        set_field(message, "body", body)
        set_field(message, "expires_at", expires_at)
        set_field(message, "number_of_failures", number_of_failures)
        set_field(message, "cursor", "")
        return message

    def set_cursor(self, cursor: str) -> Self:
        """Set the cursor and return this message. For stores only, on messages that they have just restored."""
        object.__setattr__(self, "cursor", cursor)
        return self


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message as it is sent to a queue.

    Args:
        destination: address of the queue.
        message_id: id of this message in the queue (its native id); 1 to 250 characters.
        headers: text to text.
        body: bytes.
        expires_at: the message is discarded if it is not received by then; ``None`` means never.
        due: due time of a delayed message; its lateness is measured from it.
        time_to_be_received: the queue itself discards the message if it is not received so long after the transport got
            it, so only the clock of the queue counts; ``None`` means never. The header of the same name is for the
            receiver.
        use_dead_letter_queue: whether the queue keeps the message among its dead letters when it expires; ``None``: the
            setting of the transport. Only transports with dead letters use it.
    """

    destination: str
    message_id: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    expires_at: datetime | None = None
    due: datetime | None = None
    time_to_be_received: timedelta | None = None
    use_dead_letter_queue: bool | None = None

    def __post_init__(self) -> None:
        check_text(self.message_id, "message id", MESSAGE_ID_LIMIT)
        check_text(self.destination, "destination", DESTINATION_LIMIT)

    def __hash__(self) -> int:
        return hash((self.message_id, self.destination, self.body))

    def time_left(self, now: datetime) -> timedelta | None:
        """Return how long the message may wait in its queue from ``now`` on; ``None``: for ever.

        The earlier of ``expires_at`` and ``time_to_be_received`` counts.
        """
        if self.expires_at is None:
            return self.time_to_be_received
        remaining, limit = self.expires_at - now, self.time_to_be_received
        return remaining if limit is None else min(remaining, limit)

    @classmethod
    def from_queue(
        cls,
        destination: str,
        message_id: str,
        headers: Mapping[str, str],
        body: bytes,
        expires_at: datetime | None,
        due: datetime | None,
    ) -> Self:
        """Return an envelope that was checked before, as :meth:`DelayedMessage.from_store` does.

        For transports only.
        """
        if not message_id.strip():
            raise InvalidMessage("message id is blank")
        envelope = object.__new__(cls)
        set_field = object.__setattr__
        set_field(envelope, "destination", destination)
        set_field(envelope, "message_id", message_id)
        set_field(envelope, "headers", headers)
        set_field(envelope, "body", body)
        set_field(envelope, "expires_at", expires_at)
        set_field(envelope, "due", due)
        set_field(envelope, "time_to_be_received", None)
        set_field(envelope, "use_dead_letter_queue", None)
        return envelope

    @classmethod
    def of(cls, message: DelayedMessage, headers: Mapping[str, str]) -> Self:
        """Return the envelope of a message with these headers; the message's fields were checked already."""
        return cls.from_queue(
            message.destination, message.message_id, headers, message.body, message.expires_at, message.due
        )


def check_reschedule(message_id: str, due: datetime, expires_at: datetime | None) -> None:
    """Refuse another due time that is later than the expiry. Raises `InvalidMessage`."""
    if expires_at is not None and due > expires_at:
        raise InvalidMessage(f"message {message_id!r} expires at {expires_at.isoformat()}, before that")


def headers_with_due(
    headers: Mapping[str, str], previous_due: datetime | None, due: datetime, wall_time: str | None
) -> Mapping[str, str]:
    """Return the headers of a message with another due time.

    The header with the due time changes, if it has the old due time; a header that the sender set to another time
    stays. The header of a wall time exists exactly while the message follows the clocks of a zone: without
    ``wall_time``, it is removed.

    Args:
        headers: of the message.
        previous_due: the old due time; ``None``: outside the calendar, so that no header can have it.
        due: the new due time.
        wall_time: the wall time at ``due``, as the header has it.
    """
    new_headers = {name: value for name, value in headers.items() if name != Headers.WALL_TIME}
    if previous_due is not None and headers.get(Headers.DELIVER_AT) == format_timestamp(previous_due):
        new_headers[Headers.DELIVER_AT] = format_timestamp(due)
    return new_headers if wall_time is None else {**new_headers, Headers.WALL_TIME: wall_time}


def text_with_due(text: str | bytes, previous_due: datetime | None, due: datetime, wall_time: str | None) -> str | None:
    """Return :func:`headers_with_due` of encoded headers, encoded; ``None`` for unreadable headers."""
    try:
        headers = decode_headers(text)
    except InvalidHeaders:
        return None
    return encode_headers(headers_with_due(headers, previous_due, due, wall_time))


def copy_with_due(message: DelayedMessage, due: datetime, wall_time: str | None = None) -> DelayedMessage:
    """Return the message with another due time: see :func:`headers_with_due`.

    Its failure count starts again at zero, so the message has all its retries.

    Raises:
        InvalidMessage: the message expires before the new due time.
    """
    check_reschedule(message.message_id, due, message.expires_at)
    headers = headers_with_due(message.headers, message.due, due, wall_time)
    return _copy_with(message, due=aware_utc(due), headers=headers, number_of_failures=0)


def copy_with_failures(message: DelayedMessage, number_of_failures: int) -> DelayedMessage:
    """Return the message with another count of failed dispatch attempts."""
    return _copy_with(message, number_of_failures=number_of_failures)


def _copy_with(message: DelayedMessage, **changes: object) -> DelayedMessage:
    """Return a changed copy without checking its fields again."""
    new_message = copy(message)
    for name, value in changes.items():
        object.__setattr__(new_message, name, value)
    return new_message
