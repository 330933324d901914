"""An envelope as the text of a message in Azure, and back: upstream's JSON object, in base64.

``Id``, ``Headers`` and ``Body`` (base64) hold the message. ``CorrelationId``, ``ReplyToAddress``, ``MessageIntent``,
``IdForCorrelation``, ``Recoverable`` and ``TimeToBeReceived`` repeat headers for other readers. Fields that upstream
lacks are under ``Postdate``, which other readers ignore: due time and expiry in microseconds, and the number of returns
to the queue. Source: ADR 0028.

A received object may lack base64, have other names, or lack all fields but ``Body``. Any other text becomes the body of
a message whose header ``azure.unreadable`` gives the reason. No endpoint handles it, so it ends in the error queue.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar, cast

import msgspec

from postdate import messages
from postdate.errors import InvalidMessage, InvalidTimestamp, MessageTooLarge, PostdateError

LARGEST_TEXT_BYTES: Final = 64 * 1024
"""Azure's limit of one message."""

_OVERHEAD_BYTES: Final = 2_560
"""The most bytes of JSON besides headers and body: the longest id, two short copies of headers, names."""

LARGEST_MESSAGE_BYTES: Final = (LARGEST_TEXT_BYTES * 3 // 4 - _OVERHEAD_BYTES) * 3 // 4
"""The size of headers and body that always fits, whichever of them is larger: base64 adds a third to a body, twice."""

UNREADABLE: Final = "azure.unreadable"

_OWN_KEY: Final = "Postdate"
_FAILURE_COUNTS: Final = "GivenBack"
_Value = TypeVar("_Value")

_INTENTS: Final = {"Send": 1, "Publish": 2, "Subscribe": 3, "Unsubscribe": 4, "Reply": 5}
_COPIED_BYTES: Final = 256  # a longer header is not copied beside the headers; see `_OVERHEAD_BYTES`
_BOM: Final = "\ufeff"
_ERROR_TEXT_LIMIT: Final = 1_000  # characters of the exception's message that a too large error copy keeps
_FAULT: Final = re.compile(r"NServiceBus\.ExceptionInfo\.|\$\.diagnostics\.|NServiceBus\.Processing")
_LONG_FAULT: Final = re.compile(
    f"{re.escape(messages.Headers.EXCEPTION_STACK_TRACE)}$|{re.escape(messages.Headers.EXCEPTION_DATA_PREFIX)}"
)
_OTHER_FAULTS: Final = frozenset(
    {messages.Headers.FAILED_QUEUE, messages.Headers.TIME_OF_FAILURE, messages.Headers.ERROR_CODE}
)


# --- sending ----------------------------------------------------------------------------------------------------------


def to_text(envelope: messages.Envelope) -> str:
    """Return the text of a message; raise `MessageTooLarge`.

    An error copy that is too large loses its headers about the failure, the longest first. If that is not enough, it is
    sent without base64, because it may have arrived without base64.
    """
    size = 0
    for text in _text_forms(envelope):
        if (size := len(text.encode())) <= LARGEST_TEXT_BYTES:
            return text
    raise MessageTooLarge(
        f"message {envelope.message_id!r} to {envelope.destination} is {size:,} bytes in the encoding of Azure "
        f"Storage Queues, where {LARGEST_TEXT_BYTES:,} are allowed; headers and body of {LARGEST_MESSAGE_BYTES:,} "
        f"bytes "
        f"always fit: keep large content elsewhere and send a reference"
    )


def _text_forms(envelope: messages.Envelope) -> Iterator[str]:
    """Yield the forms in which a message may be sent, beginning with the complete one."""
    yield base64.b64encode(_encode_json(envelope)).decode("ascii")
    if messages.Headers.FAILED_QUEUE not in envelope.headers:
        return
    for headers in _shortened_headers(envelope.headers):
        yield base64.b64encode(_encode_json(replace(envelope, headers=headers))).decode("ascii")
    if UNREADABLE in envelope.headers:
        yield envelope.body.decode(errors="replace")
    else:
        yield _encode_json(replace(envelope, headers=_strip_failure_headers(envelope.headers))).decode()


def _shortened_headers(headers: Mapping[str, str]) -> Iterator[dict[str, str]]:
    brief = {key: value for key, value in headers.items() if not _LONG_FAULT.match(key)}
    if messages.Headers.EXCEPTION_MESSAGE in brief:
        brief[messages.Headers.EXCEPTION_MESSAGE] = brief[messages.Headers.EXCEPTION_MESSAGE][:_ERROR_TEXT_LIMIT]
    yield brief
    names = {messages.Headers.FAILED_QUEUE, messages.Headers.EXCEPTION_TYPE}
    yield {**_strip_failure_headers(headers), **{key: headers[key] for key in names if key in headers}}
    yield _strip_failure_headers(headers)


def _strip_failure_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key not in _OTHER_FAULTS and not _FAULT.match(key)}


def _encode_json(envelope: messages.Envelope) -> bytes:
    messages.check_headers(envelope.headers)
    headers = envelope.headers
    wrapper: dict[str, Any] = {
        "IdForCorrelation": None,
        "Id": envelope.message_id,
        "MessageIntent": _INTENTS.get(headers.get(messages.Headers.MESSAGE_INTENT, ""), 1),
        "ReplyToAddress": _short_copy(headers.get(messages.Headers.REPLY_TO_ADDRESS)),
        "TimeToBeReceived": messages.format_time_span(envelope.time_to_be_received or timedelta(0)),
        "Headers": dict(headers),
        "Body": envelope.body,
        "CorrelationId": _short_copy(headers.get(messages.Headers.CORRELATION_ID)),
        "Recoverable": True,
    }
    times = {"Due": envelope.due, "ExpiresAt": envelope.expires_at}
    if own_times := {
        name: messages.format_timestamp(instant) for name, instant in times.items() if instant is not None
    }:
        wrapper[_OWN_KEY] = own_times
    return msgspec.json.encode(wrapper)


def _short_copy(value: str | None) -> str | None:
    """Return the copy of a header that is an address or an id.

    The result is ``None`` for a longer value, which stays in the headers only.
    """
    return value if value is None or len(value.encode()) <= _COPIED_BYTES else None


# --- receiving --------------------------------------------------------------------------------------------------------


def from_text(queue: str, native_id: str, text: str) -> messages.Envelope:
    """Return the envelope of a message; never raise because of the text of another sender."""
    try:
        return _decode_envelope(queue, native_id, text)
    except (ValueError, PostdateError, RecursionError) as error:
        reason = f"not a message in the envelope of Azure Storage Queues: {error}"
        return messages.Envelope(queue, native_id, {UNREADABLE: reason}, text.encode(errors="replace"))


def _decode_envelope(queue: str, native_id: str, text: str) -> messages.Envelope:
    wrapper = _parse_wrapper(text)
    body = wrapper.get("Body")
    if body is None and "Headers" not in wrapper:
        raise InvalidMessage("the JSON object has neither Headers nor Body")
    headers = _headers(wrapper)
    times = _own_values(wrapper)
    return messages.Envelope(
        queue,
        _id(wrapper.get("Id"), native_id),
        headers,
        _body(body),
        expires_at=_instant(times.get("ExpiresAt")),
        due=_instant(times.get("Due")),
    )


def add_failure_counts(text: str, times_received: int, failures: int, unanswered: int) -> str | None:
    """Return the text with the number of the message's returns in it, in base64 if the text was in base64.

    Returns ``None`` when it would be too long: then this return counts as one without an answer. See
    :func:`read_failure_counts`.
    """
    times = {name: each for name, each in _own_values(_parse_wrapper(text)).items() if isinstance(each, str)}
    own_values = {**times, _FAILURE_COUNTS: (times_received, failures, unanswered)}
    raw_wrapper = _parse_wrapper(text, msgspec.Raw)  # Raw values, so that numbers and nesting stay unchanged.
    encoded = msgspec.json.encode({**raw_wrapper, _OWN_KEY: own_values})
    encoded = encoded if _is_plain(text) else base64.b64encode(encoded)
    return encoded.decode() if len(encoded) <= LARGEST_TEXT_BYTES else None


def read_failure_counts(text: str, times_received: int) -> tuple[int, int]:
    """Return how often handling has failed, and how many of these attempts ended without an answer.

    Azure counts deliveries (``times_received``), but not their outcomes. Therefore the receiver that returns a message
    writes the outcome into the text.
    """
    counted_receives = failures = unanswered = 0
    with suppress(ValueError, PostdateError, RecursionError):
        stored_counts = msgspec.convert(_own_values(_parse_wrapper(text)).get(_FAILURE_COUNTS), tuple[int, int, int])
        if stored_counts[0] <= times_received:  # otherwise the count of another message, copied with its text
            counted_receives, failures, unanswered = stored_counts
    return failures + times_received - counted_receives, unanswered + times_received - counted_receives


def _own_values(wrapper: Mapping[str, object]) -> Mapping[str, object]:
    own_values = wrapper.get(_OWN_KEY)
    return cast("dict[str, object]", own_values) if isinstance(own_values, dict) else {}


def _is_plain(text: str) -> bool:
    return text.lstrip(_BOM).lstrip().startswith("{")


def _parse_wrapper(text: str, values: type[_Value] = object) -> Mapping[str, _Value]:
    """Return the JSON object in a text, with or without base64 around it."""
    plain = text.lstrip(_BOM)
    if not _is_plain(plain):
        try:
            plain = base64.b64decode(plain.strip(), validate=True).decode("utf-8-sig")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise InvalidMessage(f"neither JSON nor UTF-8 in base64 ({error})") from error
    try:
        return msgspec.json.decode(plain, type=dict[str, values])
    except msgspec.DecodeError as error:
        raise InvalidMessage(f"not a JSON object ({error})") from error


def _headers(wrapper: Mapping[str, object]) -> dict[str, str]:
    headers = wrapper.get("Headers")
    if headers is not None and not isinstance(headers, dict):
        raise InvalidMessage("Headers is not a JSON object")
    header_values = cast("Mapping[str, object]", headers or {})
    texts = cast("dict[str, str]", {key: "" if value is None else value for key, value in header_values.items()})
    messages.check_headers(texts)
    for name, key in (
        ("ReplyToAddress", messages.Headers.REPLY_TO_ADDRESS),
        ("CorrelationId", messages.Headers.CORRELATION_ID),
    ):
        value = wrapper.get(name)
        if isinstance(value, str) and value:
            texts.setdefault(key, value)
    return texts


def _body(value: object) -> bytes:
    if value is None:
        return b""
    if not isinstance(value, str):
        raise InvalidMessage("Body is not text")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise InvalidMessage(f"Body is not base64 ({error})") from error


def _id(value: object, native_id: str) -> str:
    """Return the sender's id; Azure's own id if the sender's is missing or cannot be stored."""
    if not isinstance(value, str):
        return native_id
    try:
        messages.check_text(value, "message id", messages.MESSAGE_ID_LIMIT)
    except InvalidMessage:
        return native_id
    return value


def _instant(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        return messages.parse_timestamp(value)
    except InvalidTimestamp:  # the receiver needs only the headers
        return None
