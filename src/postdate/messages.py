"""Messages, their headers, and the formats in which both travel.

Pure values: nothing here does I/O or reads a clock. Header names and formats are those of the specification
(section 1.5, rows 10-14), so that endpoints on either side of a queue understand each other.
"""

from __future__ import annotations

import enum
import os
import re
import time
import uuid
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Self

import msgspec

from postdate.errors import InvalidHeaders, InvalidMessage, InvalidTimestamp, MessageTooLarge, NotADelayedMessage

MESSAGE_ID_LIMIT = 250
"""Characters in a message id: what the narrowest supported store holds (specification 1.3)."""

_COPY_BYTES = 256 * 1024

DESTINATION_LIMIT = 200
"""Characters in a destination: what the narrowest supported store holds (specification 1.3)."""


class Headers:
    """Names of the headers that Postdate reads or writes."""

    MESSAGE_ID = "NServiceBus.MessageId"
    CORRELATION_ID = "NServiceBus.CorrelationId"
    CONVERSATION_ID = "NServiceBus.ConversationId"
    RELATED_TO = "NServiceBus.RelatedTo"
    ENCLOSED_MESSAGE_TYPES = "NServiceBus.EnclosedMessageTypes"
    CONTENT_TYPE = "NServiceBus.ContentType"
    MESSAGE_INTENT = "NServiceBus.MessageIntent"
    REPLY_TO_ADDRESS = "NServiceBus.ReplyToAddress"
    ORIGINATING_ENDPOINT = "NServiceBus.OriginatingEndpoint"
    ORIGINATING_MACHINE = "NServiceBus.OriginatingMachine"
    TIME_SENT = "NServiceBus.TimeSent"
    DELIVER_AT = "NServiceBus.DeliverAt"
    TIME_TO_BE_RECEIVED = "NServiceBus.TimeToBeReceived"
    EXPIRES_AT = "Postdate.ExpiresAt"
    WALL_TIME = "Postdate.WallTime"
    EDIT_OF = "Postdate.EditOf"
    EDITED_AS = "Postdate.EditedAs"
    TRACE_PARENT = "traceparent"
    START_NEW_TRACE = "NServiceBus.OpenTelemetry.StartNewTrace"
    MAY_REPEAT_SINCE = "Postdate.MayRepeatSince"
    DELAYED_RETRIES = "NServiceBus.Retries"
    DELAYED_RETRIES_TIMESTAMP = "NServiceBus.Retries.Timestamp"
    IMMEDIATE_RETRIES = "NServiceBus.FLRetries"
    FAILED_QUEUE = "NServiceBus.FailedQ"
    TIME_OF_FAILURE = "NServiceBus.TimeOfFailure"
    PROCESSING_MACHINE = "NServiceBus.ProcessingMachine"
    PROCESSING_ENDPOINT = "NServiceBus.ProcessingEndpoint"
    PROCESSING_STARTED = "NServiceBus.ProcessingStarted"
    PROCESSING_ENDED = "NServiceBus.ProcessingEnded"
    HOST_ID = "$.diagnostics.hostid"
    HOST_DISPLAY_NAME = "$.diagnostics.hostdisplayname"
    ERROR_CODE = "Postdate.ErrorCode"
    SAGA_ID = "NServiceBus.SagaId"
    SAGA_TYPE = "NServiceBus.SagaType"
    ORIGINATING_SAGA_ID = "NServiceBus.OriginatingSagaId"
    ORIGINATING_SAGA_TYPE = "NServiceBus.OriginatingSagaType"
    IS_SAGA_TIMEOUT_MESSAGE = "NServiceBus.IsSagaTimeoutMessage"

    EXCEPTION_TYPE = "NServiceBus.ExceptionInfo.ExceptionType"
    EXCEPTION_INNER_TYPE = "NServiceBus.ExceptionInfo.InnerExceptionType"
    EXCEPTION_HELP_LINK = "NServiceBus.ExceptionInfo.HelpLink"
    EXCEPTION_MESSAGE = "NServiceBus.ExceptionInfo.Message"
    EXCEPTION_SOURCE = "NServiceBus.ExceptionInfo.Source"
    EXCEPTION_STACK_TRACE = "NServiceBus.ExceptionInfo.StackTrace"
    EXCEPTION_DATA_PREFIX = "NServiceBus.ExceptionInfo.Data."

    TIMEOUT_PROPERTIES_PREFIX = "NServiceBus.Timeouts.Properties."
    TIMEOUT_DESTINATION = TIMEOUT_PROPERTIES_PREFIX + "NServiceBus.Timeout.Destination"
    TIMEOUT_EXPIRE = TIMEOUT_PROPERTIES_PREFIX + "NServiceBus.Timeout.Expire"
    TIMEOUT_DELAY = TIMEOUT_PROPERTIES_PREFIX + "DelayDeliveryFor"
    TIMEOUT_DELIVER_AT = TIMEOUT_PROPERTIES_PREFIX + "DeliverAt"

    # Of timeout managers (specification 4.3). Of these, the first two stay on a message when it is delivered.
    EXPIRE = "NServiceBus.Timeout.Expire"
    ROUTE_EXPIRED_TIMEOUT_TO = "NServiceBus.Timeout.RouteExpiredTimeoutTo"
    RELATED_TO_TIMEOUT_ID = "NServiceBus.RelatedToTimeoutId"
    TIMEOUT_ID = "Timeout.Id"
    CLEAR_TIMEOUTS = "NServiceBus.ClearTimeouts"
    CONTROL_MESSAGE = "NServiceBus.ControlMessage"


class Origin(enum.Enum):
    """Why a message waits in a store."""

    APPLICATION = "application"
    """An application scheduled it."""

    RETRY = "retry"
    """It arrived, and its handler failed: it waits to be tried again."""

    SAGA_TIMEOUT = "saga-timeout"
    """A saga asked for it."""


def origin_of(headers: Mapping[str, str]) -> Origin:
    """Return why a message with these headers waits, or waited, in a store."""
    if Headers.DELAYED_RETRIES in headers:
        return Origin.RETRY
    is_timeout = headers.get(Headers.IS_SAGA_TIMEOUT_MESSAGE, "").lower() == "true"
    return Origin.SAGA_TIMEOUT if is_timeout else Origin.APPLICATION


def new_message_id() -> str:
    """Return a new id: a UUID whose leading 48 bits are the time in milliseconds (version 7).

    Ids made one after the other are neighbours in an index, which is what makes storing with a unique id cheap.
    """
    milliseconds = time.time_ns() // 1_000_000  # noqa: TID251 - for order in an index; nothing reads it as a time
    value = (milliseconds << 80) | int.from_bytes(os.urandom(10), "big")
    value = (value & ~(0xF << 76)) | (0x7 << 76)
    value = (value & ~(0x3 << 62)) | (0x2 << 62)
    return str(uuid.UUID(int=value))


# --- time on the wire -------------------------------------------------------------------------------------------


_TIMESTAMP = re.compile(r"([0-9]{4}).([0-9]{2}).([0-9]{2}).([0-9]{2}).([0-9]{2}).([0-9]{2}).([0-9]{6})..", re.DOTALL)
_TIME_SPAN = re.compile(
    r"\s*(?P<sign>-)?(?:(?P<days_only>[0-9]{1,8})"
    r"|(?:(?P<days>[0-9]{1,8})\.)?(?P<hours>[0-9]{1,2}):(?P<minutes>[0-9]{1,2})"
    r"(?::(?P<seconds>[0-9]{1,2})(?:\.(?P<fraction>[0-9]{1,7}))?)?)\s*",
    re.ASCII,
)


def aware_utc(instant: datetime, what: str = "the time") -> datetime:
    """Return ``instant`` in UTC.

    Raises:
        InvalidTimestamp: it is not a date-time or has no time zone.
    """
    if not isinstance(instant, datetime):  # pyright: ignore[reportUnnecessaryIsInstance] - callers without types
        raise InvalidTimestamp(f"{what} must be a datetime with a time zone, not {type(instant).__name__} {instant!r}")
    if instant.tzinfo is None or instant.utcoffset() is None:
        raise InvalidTimestamp(
            f"{what} {instant.isoformat()} has no time zone; pass an aware datetime, for example "
            f"datetime(..., tzinfo=UTC) or datetime(..., tzinfo=ZoneInfo('Europe/Paris'))"
        )
    try:
        return instant.astimezone(UTC)
    except OverflowError as error:
        raise InvalidTimestamp(f"{what} {instant!r} is outside the years 1 to 9999 in UTC") from error


def format_timestamp(instant: datetime) -> str:
    """Return the wire form ``yyyy-MM-dd HH:mm:ss:ffffff Z``: 28 characters, UTC, microseconds after a colon.

    Source: specification 1.5, row 14.
    """
    utc = aware_utc(instant)
    return (
        f"{utc.year:04d}-{utc.month:02d}-{utc.day:02d} "
        f"{utc.hour:02d}:{utc.minute:02d}:{utc.second:02d}:{utc.microsecond:06d} Z"
    )


def parse_timestamp(text: str) -> datetime:
    """Return the aware UTC instant of a wire timestamp, to the microsecond.

    As specified, the length and the digits are checked and the separators are not.

    Raises:
        InvalidTimestamp: the text is blank, not 28 characters long, has no digit where one must be, or names no
            existing date.
    """
    if not isinstance(text, str) or not text.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidTimestamp("a timestamp is blank; expected 'yyyy-MM-dd HH:mm:ss:ffffff Z'")
    if (match := _TIMESTAMP.fullmatch(text)) is None:
        raise InvalidTimestamp(f"{text!r} is not a timestamp of the form 'yyyy-MM-dd HH:mm:ss:ffffff Z'")
    try:
        return datetime(*(int(digits) for digits in match.groups()), tzinfo=UTC)
    except ValueError as error:
        raise InvalidTimestamp(f"{text!r} names no existing instant: {error}") from error


def format_time_span(span: timedelta) -> str:
    """Return ``[-][d.]hh:mm:ss[.fffffff]``, the constant time-span form, for example ``31.00:00:01``."""
    microseconds = span // timedelta(microseconds=1)
    sign, microseconds = ("-", -microseconds) if microseconds < 0 else ("", microseconds)
    seconds, fraction = divmod(microseconds, 1_000_000)
    days, seconds = divmod(seconds, 86_400)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{sign}{f'{days}.' if days else ''}{text}{f'.{fraction:06d}0' if fraction else ''}"


def parse_time_span(text: str) -> timedelta | None:
    """Return the duration of a time-span text, or ``None`` when it is not one.

    A bare whole number counts days; hours, minutes and seconds must be in their ranges; digits below a
    microsecond are dropped. Source: specification 2.4.
    """
    if (match := _TIME_SPAN.fullmatch(text)) is None:
        return None
    part = match.groupdict()
    if part["days_only"] is not None:
        span = _days(int(part["days_only"]))
        return -span if span is not None and part["sign"] else span
    hours, minutes, seconds = int(part["hours"]), int(part["minutes"]), int(part["seconds"] or 0)
    whole_days = _days(int(part["days"] or 0))
    if hours > 23 or minutes > 59 or seconds > 59 or whole_days is None:
        return None
    microseconds = int((part["fraction"] or "0").ljust(7, "0")[:6])
    span = whole_days + timedelta(hours=hours, minutes=minutes, seconds=seconds, microseconds=microseconds)
    return -span if part["sign"] else span


_LONGEST_SPAN_DAYS = 10_675_198
"""Days in the longest time span of the wire format (64 bits of 100 ns)."""

LONGEST_TIME_TO_BE_RECEIVED = timedelta(days=1_000_000)
"""So that it ends before the year 9999, which no receiver's calendar goes beyond."""


def _days(days: int) -> timedelta | None:
    return timedelta(days=days) if days <= _LONGEST_SPAN_DAYS else None


# --- headers on the wire ----------------------------------------------------------------------------------------


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse headers that cannot be carried unchanged.

    Raises:
        InvalidHeaders: a key or value is not text, a key is empty, or a text has a lone surrogate.
    """
    for key, value in headers.items():
        if not isinstance(key, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidHeaders(
                f"header {key!r} is {type(value).__name__} {value!r}; keys and values of headers must be str"
            )
        if not key:
            raise InvalidHeaders("a header has an empty name")
        if not (key.isascii() and value.isascii()):
            try:
                (key + value).encode()
            except UnicodeEncodeError as error:
                raise InvalidHeaders(f"header {key!r} has text that UTF-8 cannot encode: {error}") from error


def encode_headers(headers: Mapping[str, str]) -> str:
    """Return the headers as a compact JSON object: the form in which our stores and queues keep them."""
    return msgspec.json.encode(dict(headers)).decode()


def size_in_bytes(headers: str, body: bytes) -> int:
    """Return how much a message counts against a limit: its encoded headers, in UTF-8, and its body."""
    return len(body) + (len(headers) if headers.isascii() else len(headers.encode()))


_DECODE_HEADERS = msgspec.json.Decoder(dict[str, str]).decode


def decode_headers(text: str | bytes) -> dict[str, str]:
    """Return the headers of a JSON object of texts.

    Raises:
        InvalidHeaders: not JSON, not an object, a value that is no text, or an empty name.
    """
    try:
        found = _DECODE_HEADERS(text)
    except (msgspec.MsgspecError, ValueError) as error:
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        raise InvalidHeaders(f"headers must be a JSON object of texts, not {shown[:80]!r}: {error}") from error
    if "" in found:
        raise InvalidHeaders("a header has an empty name")
    return found


def stored_headers(message: DelayedMessage, largest_message_bytes: int) -> str:
    """Return the headers of a message as a store keeps them.

    Raises:
        MessageTooLarge: headers and body have more bytes together than the store takes.
    """
    headers = encode_headers(message.headers)
    if (size := size_in_bytes(headers, message.body)) > largest_message_bytes:
        raise _too_large(message, "", size, "store", largest_message_bytes)
    return headers


def why_too_large(envelope: Envelope, headers: str, largest_message_bytes: int) -> MessageTooLarge | None:
    """Return the error for a message that is too large for queues, or ``None``; ``headers`` are its encoded ones.

    Headers that are added to copies for the error or the audit queue do not count.
    """
    size, limit = size_in_bytes(headers, envelope.body), largest_message_bytes
    if Headers.FAILED_QUEUE in envelope.headers or Headers.PROCESSING_ENDED in envelope.headers:
        limit += _COPY_BYTES
    return _too_large(envelope, f" to {envelope.destination!r}", size, "transport", limit) if size > limit else None


def _too_large(message: DelayedMessage | Envelope, where: str, size: int, taker: str, limit: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"message {message.message_id!r}{where} has {size:,} bytes, this {taker} takes {limit:,}; keep large content "
        f"elsewhere and send a reference, or raise largest_message_bytes"
    )


# --- messages ---------------------------------------------------------------------------------------------------


def check_text(value: str, what: str, limit: int) -> None:
    """Refuse an id or address that is not text, is blank, or is longer than ``limit`` characters.

    Raises:
        InvalidMessage: with the value and the limit.
    """
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidMessage(f"{what} must be str, not {type(value).__name__}")
    if not value.strip():
        raise InvalidMessage(f"{what} is blank")
    if len(value) > limit:
        raise InvalidMessage(f"{what} has {len(value)} characters, at most {limit} are allowed: {value[:60]!r}…")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"{what} has text that UTF-8 cannot encode: {error}") from error
    if "\0" in value:
        raise InvalidMessage(f"{what} has a NUL character: {value!r}")


OWN_PREFIX: Final = "postdate~"
"""How the ids of messages begin that a store keeps for itself, such as the rules of time zones (ADR 33)."""


MARKERS: Final = "postdate.zones"
"""The destination of the messages by which a store keeps time zones: no queue, for nothing delivers them. ADR 33."""

INTENTS: Final = "postdate.migration"
"""Likewise of the batches that a move between stores of earlier versions has on their way. ADR 44."""

OF_THE_STORE: Final = frozenset({MARKERS, INTENTS})
"""The destinations of messages that are nobody's: no list has them, and no filter matches them."""


def check_destination(value: str) -> None:
    """Refuse a destination that no application's message can have: as :func:`check_text`, and one of the store's own.

    Raises:
        InvalidMessage: with the value.
    """
    check_text(value, "destination", DESTINATION_LIMIT)
    if value in OF_THE_STORE:
        raise InvalidMessage(f"destination {value!r} is a name for the store's own messages: name a queue of yours")


def check_id(value: str, what: str = "message id", limit: int = MESSAGE_ID_LIMIT) -> None:
    """Refuse an id, or a key, that an application may not have: as :func:`check_text`, and one of the store's own.

    Raises:
        InvalidMessage: with the value.
    """
    check_text(value, what, limit)
    if value.startswith(OWN_PREFIX):
        raise InvalidMessage(
            f"{what} {value!r} begins with {OWN_PREFIX!r}: such messages are the store's own, and only the "
            f"store may send, change or cancel them"
        )


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A message that waits until it is due.

    Args:
        message_id: key of this delayed send, unique in a store; 1 to 250 characters. It is the id of the message in
            its queue, not the ``NServiceBus.MessageId`` header, which a retried message keeps.
        due: instant from which it may be delivered; aware, stored in UTC to the microsecond.
        destination: address of the queue it is meant for; 1 to 200 characters.
        headers: text to text; delivered unchanged.
        body: bytes, delivered unchanged.
        expires_at: instant after which it is no longer wanted: then it is recorded as expired and not delivered;
            ``None`` means never. Not before ``due``.
        number_of_failures: failed dispatch attempts so far; written by stores only.
        cursor: where a list goes on behind this message: ``client.list(…, after=message.cursor)``. It stays right when
            the message has gone. Written by stores only, for lists; no part of what makes two messages equal.

    Raises:
        InvalidMessage, InvalidTimestamp, InvalidHeaders: when built from wrong values.

    Source: specification 1.2.
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
        """Why it waits: scheduled by an application, to be tried again, or for a saga."""
        return origin_of(self.headers)

    @classmethod
    def restored(  # noqa: PLR0913 - the fields
        cls,
        message_id: str,
        due: datetime,
        destination: str,
        headers: Mapping[str, str],
        body: bytes,
        expires_at: datetime | None,
        number_of_failures: int,
    ) -> Self:
        """Return a message that was checked before a store kept it; times are aware and UTC. For stores only.

        Only a blank id or destination is refused, as a row may have after it was changed by hand.
        """
        if not (message_id.strip() and destination.strip()):
            raise InvalidMessage(f"message id {message_id!r} or destination {destination!r} is blank")
        message = object.__new__(cls)
        put = object.__setattr__
        put(message, "message_id", message_id)
        put(message, "due", due)
        put(message, "destination", destination)
        put(message, "headers", headers)
        put(message, "body", body)
        put(message, "expires_at", expires_at)
        put(message, "number_of_failures", number_of_failures)
        put(message, "cursor", "")
        return message

    def listed(self, cursor: str) -> Self:
        """Note where a list goes on behind this message, and return it. For stores only, of what they have restored."""
        object.__setattr__(self, "cursor", cursor)
        return self


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message on its way to a queue.

    Args:
        destination: address of the queue.
        message_id: id of this message in the queue (its native id); 1 to 250 characters.
        headers: text to text.
        body: bytes.
        expires_at: discard it if not received by then; ``None`` means never.
        due: of a delayed message that has become due; its lateness is measured against it.
        time_to_be_received: to be discarded by the queue itself when it was not received this long after it was handed
            to the transport, so that no clock but the queue's counts; ``None`` means never. The header of the same name
            is for the receiver.
        use_dead_letter_queue: whether the queue keeps it, when it expires, among its dead letters; ``None``: as the
            transport is set. Only transports that have dead letters look at it.
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
        """Return how long it may wait in its queue from ``now`` on, by the earlier of its ends; ``None``: for ever."""
        if self.expires_at is None:
            return self.time_to_be_received
        left, span = self.expires_at - now, self.time_to_be_received
        return left if span is None else min(left, span)

    @classmethod
    def restored(
        cls,
        destination: str,
        message_id: str,
        headers: Mapping[str, str],
        body: bytes,
        expires_at: datetime | None,
        due: datetime | None,
    ) -> Self:
        """Do the same as :meth:`DelayedMessage.restored` for a queue. For transports only."""
        if not message_id.strip():
            raise InvalidMessage("message id is blank")
        envelope = object.__new__(cls)
        put = object.__setattr__
        put(envelope, "destination", destination)
        put(envelope, "message_id", message_id)
        put(envelope, "headers", headers)
        put(envelope, "body", body)
        put(envelope, "expires_at", expires_at)
        put(envelope, "due", due)
        put(envelope, "time_to_be_received", None)
        put(envelope, "use_dead_letter_queue", None)
        return envelope

    @classmethod
    def of(cls, message: DelayedMessage, headers: Mapping[str, str]) -> Self:
        """Return the envelope of a message with these headers; the message's fields were checked already."""
        return cls.restored(
            message.destination, message.message_id, headers, message.body, message.expires_at, message.due
        )


def to_envelope(message: DelayedMessage) -> Envelope:
    """Return what is sent when ``message`` is due: same id and headers, without the internal delay headers (row 11)."""
    headers = headers_with_expiry(message)
    if Headers.TIMEOUT_PROPERTIES_PREFIX in "\n".join(headers):  # seldom, and one search is quicker than a look at each
        headers = without_delay_headers(headers)
    return Envelope.of(message, headers)


def headers_with_expiry(message: DelayedMessage | Envelope) -> Mapping[str, str]:
    """Return the headers with the absolute expiry, which so survives queues that have no place for it."""
    if message.expires_at is None or Headers.EXPIRES_AT in message.headers:
        return message.headers
    return {**message.headers, Headers.EXPIRES_AT: format_timestamp(message.expires_at)}


def without_delay_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without those that only steer delayed delivery."""
    prefix = Headers.TIMEOUT_PROPERTIES_PREFIX
    return {key: value for key, value in headers.items() if not key.startswith(prefix)}


def check_not_reserved(headers: Mapping[str, str]) -> None:
    """Refuse headers with the prefix of those that only steer delayed delivery, on whatever way a message goes.

    Raises:
        InvalidHeaders: names the header.
    """
    prefix = Headers.TIMEOUT_PROPERTIES_PREFIX
    if (clash := next((key for key in headers if key.startswith(prefix)), None)) is not None:
        raise InvalidHeaders(f"header {clash!r} has the prefix {prefix!r}, which is reserved for delayed delivery")


def delay_headers(message: DelayedMessage) -> dict[str, str]:
    """Return the headers that carry destination and due time through a timeouts queue (specification 1.5).

    Raises:
        InvalidHeaders: the message already has a header with the reserved prefix.
    """
    check_not_reserved(message.headers)
    due = format_timestamp(message.due)
    headers = {
        **message.headers,
        Headers.TIMEOUT_DESTINATION: message.destination,
        Headers.TIMEOUT_EXPIRE: due,
        Headers.TIMEOUT_DELIVER_AT: due,
    }
    if message.expires_at is not None:
        headers[Headers.EXPIRES_AT] = format_timestamp(message.expires_at)
    return headers


def from_delay_headers(message_id: str, headers: Mapping[str, str], body: bytes) -> DelayedMessage:
    """Return the delayed message that arrived at a timeouts queue.

    Raises:
        InvalidMessage: its id or destination is one of the store's own, so that it would pass for one of those.
        NotADelayedMessage: destination or due time is missing from the headers.
        InvalidTimestamp: the due time is malformed.
    """
    destination, due = headers.get(Headers.TIMEOUT_DESTINATION), headers.get(Headers.TIMEOUT_EXPIRE)
    if not destination or not due:
        missing = Headers.TIMEOUT_EXPIRE if destination else Headers.TIMEOUT_DESTINATION
        raise NotADelayedMessage(f"message {message_id!r} is no delayed message: header {missing!r} is missing")
    check_id(message_id)
    check_destination(destination)
    due_at, expires_at = parse_timestamp(due), expires_at_of(headers)
    if expires_at is not None and expires_at < due_at:
        expires_at = None  # the header stays: whoever receives it decides
    return DelayedMessage(message_id, due_at, destination, without_delay_headers(headers), body, expires_at)


def expires_at_of(headers: Mapping[str, str]) -> datetime | None:
    """Return the instant of the absolute expiry header, or ``None`` without one."""
    text = headers.get(Headers.EXPIRES_AT)
    return None if text is None else parse_timestamp(text)


def check_reschedule(message_id: str, due: datetime, expires_at: datetime | None) -> None:
    """Refuse another due time that lies after the expiry. Raises `InvalidMessage`."""
    if expires_at is not None and due > expires_at:
        raise InvalidMessage(f"message {message_id!r} expires at {expires_at.isoformat()}, before that")


def rescheduled_headers(
    headers: Mapping[str, str], before: datetime | None, due: datetime, wall_time: str | None
) -> Mapping[str, str]:
    """Return the headers of a message with another due time.

    The header that says when it is due follows; one of the sender's own stays. The header of a wall time is there
    exactly while the message follows the clocks of a zone: without ``wall_time``, it goes.

    Args:
        headers: of the message.
        before: when it was due; ``None``: outside the calendar, so that no header says it.
        due: when it is due now.
        wall_time: what clocks show then, as the header says it.
    """
    changed = {name: value for name, value in headers.items() if name != Headers.WALL_TIME}
    if before is not None and headers.get(Headers.DELIVER_AT) == format_timestamp(before):
        changed[Headers.DELIVER_AT] = format_timestamp(due)
    return changed if wall_time is None else {**changed, Headers.WALL_TIME: wall_time}


def rescheduled_text(text: str | bytes, before: datetime | None, due: datetime, wall_time: str | None) -> str | None:
    """Do :func:`rescheduled_headers` with encoded headers; return ``None`` for headers that cannot be read."""
    try:
        headers = decode_headers(text)
    except InvalidHeaders:
        return None
    return encode_headers(rescheduled_headers(headers, before, due, wall_time))


def rescheduled(message: DelayedMessage, due: datetime, wall_time: str | None = None) -> DelayedMessage:
    """Return the message with another due time: see :func:`rescheduled_headers`.

    It begins anew: attempts to deliver it that failed before count no more, so it has all its retries.

    Raises:
        InvalidMessage: the message expires before that.
    """
    check_reschedule(message.message_id, due, message.expires_at)
    headers = rescheduled_headers(message.headers, message.due, due, wall_time)
    return _changed(message, due=aware_utc(due), headers=headers, number_of_failures=0)


def with_failures(message: DelayedMessage, number_of_failures: int) -> DelayedMessage:
    """Return the message with another count of failed dispatch attempts."""
    return _changed(message, number_of_failures=number_of_failures)


def _changed(message: DelayedMessage, **changes: object) -> DelayedMessage:
    """Return a changed copy; what was checked once is not checked again."""
    changed = copy(message)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed
