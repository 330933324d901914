"""Headers of messages: their names, and the form in which stores and queues keep them.

Names and forms are those of NServiceBus (docs/specification-rows.md, rows 10-14), so that endpoints on either side of a
queue understand each other.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from postdate.errors import InvalidHeaders


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
    LOAD = "Postdate.Load"
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

    # Headers of timeout managers. The first two stay on a message when it is delivered.
    EXPIRE = "NServiceBus.Timeout.Expire"
    ROUTE_EXPIRED_TIMEOUT_TO = "NServiceBus.Timeout.RouteExpiredTimeoutTo"
    RELATED_TO_TIMEOUT_ID = "NServiceBus.RelatedToTimeoutId"
    TIMEOUT_ID = "Timeout.Id"
    CLEAR_TIMEOUTS = "NServiceBus.ClearTimeouts"
    CONTROL_MESSAGE = "NServiceBus.ControlMessage"


class Origin(enum.Enum):
    """Why a message waits in a store."""

    APPLICATION = "application"
    """An application scheduled the message."""

    RETRY = "retry"
    """The message arrived, and its handler failed: it waits for another attempt."""

    SAGA_TIMEOUT = "saga-timeout"
    """A saga asked for the message."""


def origin_of(headers: Mapping[str, str]) -> Origin:
    """Return why a message with these headers waits, or waited, in a store."""
    if Headers.DELAYED_RETRIES in headers:
        return Origin.RETRY
    return Origin.SAGA_TIMEOUT if is_saga_timeout(headers) else Origin.APPLICATION


def is_saga_timeout(headers: Mapping[str, str]) -> bool:
    """Return whether a saga asked for the message, as a timeout."""
    return headers.get(Headers.IS_SAGA_TIMEOUT_MESSAGE, "").lower() == "true"


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
    """Return the headers as a compact JSON object: the form in which Postdate's stores and queues keep them."""
    return msgspec.json.encode(dict(headers)).decode()


def size_in_bytes(headers: str, body: bytes) -> int:
    """Return the size of a message that limits refer to: its encoded headers, in UTF-8, plus its body."""
    return len(body) + (len(headers) if headers.isascii() else len(headers.encode()))


_DECODE_HEADERS = msgspec.json.Decoder(dict[str, str]).decode


def decode_headers(text: str | bytes) -> dict[str, str]:
    """Return the headers from the text of a JSON object.

    Raises:
        InvalidHeaders: the text is no JSON object, a value is no text, or a name is empty.
    """
    try:
        headers = _DECODE_HEADERS(text)
    except (msgspec.MsgspecError, ValueError) as error:
        content = text if isinstance(text, str) else text.decode(errors="replace")
        raise InvalidHeaders(f"headers must be a JSON object of texts, not {content[:80]!r}: {error}") from error
    if "" in headers:
        raise InvalidHeaders("a header has an empty name")
    return headers
