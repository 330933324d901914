"""An envelope as the properties of an MSMQ message, and back.

The headers are the XML of NServiceBus in ``Extension``, so that endpoints of NServiceBus read them; the body
is an array of bytes. Id, due time and expiry, which MSMQ has no property for, are headers with the prefix
``Postdate.Queue.``, which our receivers remove. Source: docs/msmq.md.
"""

from __future__ import annotations

import base64
import logging
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final
from xml.etree import ElementTree

from postdate import messages
from postdate.backends.msmq import com as msmq_com
from postdate.backends.msmq.address import QueueAddress
from postdate.errors import InvalidHeaders, InvalidMessage, InvalidTimestamp, MessageTooLarge
from postdate.ports import ExpiryRules

log = logging.getLogger("postdate.msmq")

PREFIX: Final = "Postdate.Queue."
UNREADABLE: Final = PREFIX + "Unreadable"
"""Header of a message with undecodable headers or body, which it contains in base64."""
_MESSAGE_ID: Final = PREFIX + "MessageId"
_DUE: Final = PREFIX + "Due"
_EXPIRES_AT: Final = PREFIX + "ExpiresAt"
_SENDERS_PREFIX: Final = PREFIX + "Header."
"""Prefix for an application's header whose name looks like one of ours."""

LARGEST_NATIVE_BYTES: Final = 4 * 1024 * 1024 - 8 * 1024
"""The limit of MSMQ, 4 MB in all, without its own properties."""
LARGEST_MESSAGE_BYTES: Final = 4 * 1024 * 1024 - 512 * 1024
"""The largest message by default; it leaves room for headers in XML, and for an error copy's headers."""

_SECOND: Final = timedelta(seconds=1)
_NATIVE_ID: Final = re.compile(r"([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})\\([0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class SendingRules:
    """How messages are sent; ``use_journal_queue``: keep a copy of sent messages in the journal of this machine."""

    expiry: ExpiryRules
    use_journal_queue: bool
    largest_message_bytes: int


@dataclass(frozen=True, slots=True)
class MessageProperties:
    """The properties of an outgoing message; the tools of Windows show its label.

    ``seconds_to_be_received`` is the time after which MSMQ discards the message; ``INFINITE``: never. ``journal`` has
    the flags of dead letter and journal. ``correlation_id`` has 20 bytes.
    """

    address: QueueAddress
    label: str
    extension: bytes
    body: bytes
    seconds_to_be_received: int
    journal: int
    correlation_id: bytes | None


def encode_message(
    envelope: messages.Envelope,
    address: QueueAddress,
    address_text: str,
    now: datetime,
    rules: SendingRules,
    *,
    in_transaction: bool,
) -> MessageProperties | None:
    """Return the properties of a message, or ``None`` when it has expired.

    ``address_text`` is the address as people write it. In a transaction (see :class:`postdate.ports.ExpiryRules`) an
    absolute expiry, which MSMQ does not have, is a header for the receiver.
    """
    headers = envelope.headers
    messages.check_headers(headers)
    if in_transaction and rules.expiry.one_per_transaction:
        headers = messages.headers_with_expiry(envelope)
    elif envelope.expires_at is not None:
        envelope = replace(envelope, time_to_be_received=envelope.time_left(now))
    native_expiry = rules.expiry.native_expiry(envelope, in_transaction=in_transaction, address=address_text)
    span = native_expiry.time_to_be_received
    # A dead letter is sent nevertheless.
    if span is not None and span <= timedelta(0) and not native_expiry.dead_letter:
        log.debug("message %s to %s is past its expiry: not sent", envelope.message_id, address_text)
        return None
    if size_error := messages.too_large_error(envelope, messages.encode_headers(headers), rules.largest_message_bytes):
        raise size_error
    extension = encode_headers_xml({**_rename_own_names(headers), **_own_headers(envelope)})
    if (size := len(extension) + len(envelope.body)) > LARGEST_NATIVE_BYTES:
        raise MessageTooLarge(
            f"message {envelope.message_id!r} to {address_text} has {size:,} bytes with its headers in XML, and MSMQ "
            f"takes "
            f"{LARGEST_NATIVE_BYTES:,}; keep large content elsewhere and send a reference"
        )
    return MessageProperties(
        address,
        envelope.message_id.encode("utf-16-le")[: 2 * msmq_com.LONGEST_LABEL].decode("utf-16-le", "ignore"),
        extension,
        envelope.body,
        _seconds(span),
        (msmq_com.MQMSG_DEADLETTER if native_expiry.dead_letter else 0)
        | (msmq_com.MQMSG_JOURNAL if rules.use_journal_queue else 0),
        to_native_id(headers.get(messages.Headers.CORRELATION_ID, "")),
    )


def _rename_own_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers, renamed if they look like ours; the receiver undoes it."""
    return {
        _SENDERS_PREFIX + name if name.startswith(PREFIX) and name != UNREADABLE else name: text
        for name, text in headers.items()
    }


def _own_headers(envelope: messages.Envelope) -> dict[str, str]:
    headers = {_MESSAGE_ID: envelope.message_id}
    if envelope.due is not None:
        headers[_DUE] = messages.format_timestamp(envelope.due)
    if envelope.expires_at is not None:
        headers[_EXPIRES_AT] = messages.format_timestamp(envelope.expires_at)
    return headers


def _seconds(span: timedelta | None) -> int:
    """Return whole seconds, rounded up: MSMQ has no fractions, and a message must not expire early."""
    if span is None:
        return msmq_com.INFINITE
    whole, fraction = divmod(span, _SECOND)
    seconds = max(1, whole + bool(fraction))
    return seconds if seconds <= msmq_com.LONGEST_SECONDS else msmq_com.INFINITE


# --- receiving --------------------------------------------------------------------------------------------------------


def decode_message(queue: str, message: msmq_com.Message) -> messages.Envelope:
    """Return the envelope of a message of any sender.

    A message that cannot be decoded is an envelope, too: it goes to the error queue, and does not block the messages
    behind it.
    """
    headers = _headers_of(message, queue)
    body = _body_of(message, headers)
    native_id = native_id_of(message)
    message_id = headers.pop(_MESSAGE_ID, native_id)
    due, expires_at = _pop_instant(headers, _DUE), _pop_instant(headers, _EXPIRES_AT)
    own_headers = {name.removeprefix(_SENDERS_PREFIX): text for name, text in headers.items()}
    return messages.Envelope(queue, _valid_id(message_id, native_id), own_headers, body, expires_at, due)


def id_of(message: msmq_com.Message, queue: str) -> str:
    """Return a message's id; its body may be unread."""
    native_id = native_id_of(message)
    return _valid_id(_headers_of(message, queue).get(_MESSAGE_ID, native_id), native_id)


def native_id_of(message: msmq_com.Message) -> str:
    """Return MSMQ's id of a message: a GUID, a backslash and a number."""
    return from_native_id(_as_bytes(message.Id))


def _headers_of(message: msmq_com.Message, queue: str) -> dict[str, str]:
    blob = _as_bytes(message.Extension).rstrip(b"\0")
    try:
        headers = decode_headers_xml(blob) if blob else {}
    except InvalidHeaders as error:
        log.error("the headers of message %s in %s cannot be read: %s", native_id_of(message), queue, error)
        return {UNREADABLE: base64.b64encode(blob).decode()}
    correlation = _as_bytes(message.CorrelationId)
    if messages.Headers.CORRELATION_ID not in headers and any(correlation) and not blob:
        headers[messages.Headers.CORRELATION_ID] = from_native_id(correlation)
    return headers


def _body_of(message: msmq_com.Message, headers: dict[str, str]) -> bytes:
    try:
        body = message.Body
        if isinstance(body, str):  # another program's text; MSMQ stores it as bytes
            return body.encode("utf-16-le")
        return _as_bytes(body)
    except Exception as error:
        # A number, a date, or a COM object of an unknown class: it must not block the messages behind it.
        log.exception("the body of message %s cannot be read", native_id_of(message))
        headers[UNREADABLE] = base64.b64encode(str(error).encode()).decode()
        return b""


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, int | float):  # bytes(5) would be five zeros
        raise TypeError(f"{value!r} is not an array of bytes")
    return b"" if value is None else bytes(value)


def _pop_instant(headers: dict[str, str], name: str) -> datetime | None:
    try:
        instant = None if name not in headers else messages.parse_timestamp(headers[name])
    except InvalidTimestamp:  # It is not ours, so it stays a header.
        return None
    headers.pop(name, None)
    return instant


def _valid_id(message_id: str, native_id: str) -> str:
    try:
        messages.check_text(message_id, "message id", messages.MESSAGE_ID_LIMIT)
    except InvalidMessage:
        return native_id
    return message_id


# --- native ids -------------------------------------------------------------------------------------------------------


def from_native_id(native: bytes) -> str:
    """Return 20 bytes in the text form of MSMQ: a UUID, a backslash and a number."""
    guid, number = uuid.UUID(bytes_le=native[:16]), int.from_bytes(native[16 : msmq_com.ID_BYTES], "little")
    return f"{guid}\\{number}"


def to_native_id(text: str) -> bytes | None:
    """Return the bytes of an id, the reverse of :func:`from_native_id`; ``None`` for other texts."""
    match = _NATIVE_ID.fullmatch(text)
    if match is None or int(match[2]) > 0xFFFFFFFF:
        return None
    return uuid.UUID(match[1]).bytes_le + int(match[2]).to_bytes(4, "little")


# --- headers as XML -------------------------------------------------------------------------------------------------


_XML_ROOT = "ArrayOfHeaderInfo"
_XML_END = re.compile(rb"</ArrayOfHeaderInfo\s*>|<ArrayOfHeaderInfo[^<>]*/>")
_NOT_XML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def encode_headers_xml(headers: Mapping[str, str]) -> bytes:
    """Return the headers as the XML blob of MSMQ messages: ``ArrayOfHeaderInfo`` of ``Key`` and ``Value``, UTF-8.

    Raises:
        InvalidHeaders: a character that XML 1.0 cannot represent.

    Source: docs/msmq.md.
    """
    root = ElementTree.Element(_XML_ROOT)
    for key, value in headers.items():
        if _NOT_XML.search(key) or _NOT_XML.search(value):
            raise InvalidHeaders(f"header {key!r} has a character that XML cannot carry")
        info = ElementTree.SubElement(root, "HeaderInfo")
        ElementTree.SubElement(info, "Key").text = key
        ElementTree.SubElement(info, "Value").text = value
    # Parsers turn a bare carriage return into a line feed; the reference survives. '\r' occurs only in texts here.
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True).replace(b"\r", b"&#13;")


def decode_headers_xml(blob: bytes) -> dict[str, str]:
    """Return the headers of an ``ArrayOfHeaderInfo`` blob; bytes after its end are ignored.

    Some senders have the blob in a longer buffer, with zeros or old content after it.

    Raises:
        InvalidHeaders: not XML, another root, a document type declaration (never part of the format, and a way to make
            a parser expand without end), or a key twice.
    """
    end = _XML_END.search(blob)
    blob = blob if end is None else blob[: end.end()]
    if b"<!DOCTYPE" in blob or b"<!ENTITY" in blob:
        raise InvalidHeaders("the header blob declares a document type, which the format does not have")
    try:
        root = ElementTree.fromstring(blob)  # noqa: S314 - declarations are refused above
    except ElementTree.ParseError as error:
        raise InvalidHeaders(f"the header blob is not XML: {error}") from error
    if root.tag != _XML_ROOT:
        raise InvalidHeaders(f"the header blob has root {root.tag!r} instead of {_XML_ROOT}")
    headers: dict[str, str] = {}
    for info in root:
        key = info.findtext("Key") or ""
        if not key or key in headers:
            raise InvalidHeaders(f"header {key!r} is empty or occurs twice in the blob")
        headers[key] = info.findtext("Value") or ""
    return headers
