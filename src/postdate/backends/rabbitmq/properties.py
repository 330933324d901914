"""An envelope as the properties of an AMQP message, and back.

Our headers are a table of long strings. Everything else in another program's message becomes headers too. So it
survives a store, and is put back in its place when the message is sent on:

``amqp.content_type``, ``amqp.correlation_id``, ``amqp.priority`` …
    A property; numbers in digits. ``amqp.NAME.base64`` where the property is not UTF-8. ``amqp.delivery_mode`` only
    where it is not 2 (persistent), ``amqp.message_id`` only where it cannot be ours; ``none`` for a message without.
``amqp.table``
    The table of headers, base64, where it has anything but text; ``none`` for a message without. Readable forms of
    its fields are headers, too; when these are changed or removed, so are the fields of the table.
``amqp.unreadable``
    All properties, base64, of a message whose properties cannot be decoded.
``amqp.bare``
    Set by a sender: nothing of ours is added to the table. Due time, expiry and values that AMQP cannot represent
    are lost.
``amqp.expiration.before``
    The time to live that another program's message had before it went to an error queue; it no longer expires.
``amqp.as_it_came``
    See :mod:`postdate.backends.rabbitmq.content`.

Our expiry and time to be received are the property ``expiration``, too: milliseconds, counted by the broker from the
arrival in the queue, rounded up. A field of ours beside it says so, and no receiver takes it for a header of the
sender. Source: ADR 0006.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class
from typing import Any, Final, NamedTuple

import msgspec

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.content import (
    BITS,
    NUMBER_BYTES,
    ORIGINAL_PROPERTIES,
    join_parts,
    unchanged_properties,
    values_of,
)
from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import InvalidMessage
from postdate.messages import MESSAGE_ID_LIMIT, Envelope, Headers, check_headers, check_text, new_message_id

PREFIX: Final = "amqp."
TABLE: Final = "amqp.table"
BARE: Final = "amqp.bare"
UNREADABLE: Final = "amqp.unreadable"
BASE64: Final = ".base64"
_EXPIRATION: Final = "amqp.expiration"
_EXPIRATION_BEFORE: Final = "amqp.expiration.before"
_NONE: Final = "none"

_OWN_PREFIX: Final = "x-postdate-"
_DUE: Final = b"x-postdate-due"
_EXPIRES_AT: Final = b"x-postdate-expires-at"
_TO_BE_RECEIVED: Final = b"x-postdate-time-to-be-received"
_ID: Final = b"x-postdate-id"
_HEADERS: Final = b"x-postdate-headers"
DELIVERY_COUNT: Final = b"x-delivery-count"
COUNTS: Final = frozenset({DELIVERY_COUNT, b"x-acquired-count"})
_READ_BY_THE_BROKER: Final = frozenset({"CC", "BCC"})
"""Names of headers to which RabbitMQ routes copies; it closes the channel when they contain text."""

_LONGEST_TIME_TO_LIVE: Final = timedelta(days=9 * 365)
"""The longest time to live; RabbitMQ refuses more than ten years."""

_NOTHING: Final = timedelta()
_MICROSECOND: Final = timedelta(microseconds=1)
_MILLISECOND: Final = timedelta(milliseconds=1)
_LONGEST_MILLISECONDS: Final = _LONGEST_TIME_TO_LIVE // _MILLISECOND

_PERSISTENT: Final = 2

_PLAIN: Final = (BITS["headers"] | BITS["delivery_mode"] | BITS["message_id"]).to_bytes(2, "big")
_EXPIRING: Final = (int.from_bytes(_PLAIN, "big") | BITS["expiration"]).to_bytes(2, "big")

_UINT32: Final = Struct(">I").pack
_UINT32_AT: Final = Struct(">I").unpack_from
_SHORT: Final = 1_024  # texts of headers below this length have their encoded length ready
_LENGTHS: Final = [_UINT32(number) for number in range(_SHORT)]
_INT64: Final = Struct(">q").pack
_DUE_FIELD: Final = wire.short_bytes(_DUE) + b"l"
_EXPIRES_AT_FIELD: Final = wire.short_bytes(_EXPIRES_AT) + b"l"
_TO_BE_RECEIVED_FIELD: Final = wire.short_bytes(_TO_BE_RECEIVED) + b"l"
_TIMES: Final = frozenset({_DUE, _EXPIRES_AT, _TO_BE_RECEIVED})

_MOST_NAMES = 10_000  # limits the memory, as other programs may choose names of headers
_names: dict[str, bytes] = {}
_NO_FIELD: Final = b""


# --- sending ----------------------------------------------------------------------------------------------------------


def properties_of(envelope: Envelope, now: datetime, user: str) -> bytes:
    """Return the encoded properties of a message; raise `InvalidHeaders` for headers that are not text.

    ``now`` is for the time to live, which AMQP counts from the arrival in the queue. ``user`` is the user of the
    connection: RabbitMQ refuses messages in another user's name.
    """
    parts: list[bytes] = []
    try:
        for name, value in envelope.headers.items():
            text = value.encode()
            if name in _names and len(text) < _SHORT:
                parts += (_names[name], _LENGTHS[len(text)], text)
            elif _encoded_name(name):
                parts += (_encoded_name(name), _UINT32(len(text)), text)
            else:
                return _special_properties(envelope, now, user)
        message_id = envelope.message_id.encode()
        if len(message_id) > wire.SHORT_TEXT_LIMIT:
            return _special_properties(envelope, now, user)
    except (AttributeError, UnicodeEncodeError):
        check_headers(envelope.headers)  # raises the precise error
        raise
    if envelope.due is not None:
        parts += (_DUE_FIELD, _INT64(to_microseconds(envelope.due)))
    present, expiration = _PLAIN, b""
    if envelope.expires_at is not None or envelope.time_to_be_received is not None:
        parts += _expiry_fields(envelope)
        if (time_to_live := _time_to_live(envelope, now)) is not None:
            present, expiration = _EXPIRING, wire.short_bytes(time_to_live)
    fields = b"".join(parts)
    return b"".join((present, _UINT32(len(fields)), fields, b"\x02", expiration, bytes((len(message_id),)), message_id))


def _encoded_name(name: str) -> bytes:
    """Return a header's encoded name and type; empty for a header that is no plain field."""
    if name in _names:
        return _names[name]
    check_headers({name: ""})
    if (
        name.startswith((PREFIX, _OWN_PREFIX))
        or name in _READ_BY_THE_BROKER
        or len(name.encode()) > wire.SHORT_TEXT_LIMIT
    ):
        return _NO_FIELD
    encoded = wire.short_text(name) + b"S"
    if len(_names) < _MOST_NAMES:
        _names[name] = encoded
    return encoded


def _expiry_fields(envelope: Envelope) -> list[bytes]:
    """Return the table's fields for expiry and time to be received, to the microsecond."""
    fields: list[bytes] = []
    if envelope.expires_at is not None:
        fields.append(_EXPIRES_AT_FIELD + _INT64(to_microseconds(envelope.expires_at)))
    span = envelope.time_to_be_received
    if span is not None and span <= _LONGEST_TIME_TO_LIVE:
        fields.append(_TO_BE_RECEIVED_FIELD + _INT64(max(span, _NOTHING) // _MICROSECOND))
    return fields


def _time_to_live(envelope: Envelope, now: datetime) -> bytes | None:
    """Return the milliseconds until the earlier of expiry and time to be received, rounded up.

    ``None`` for more than RabbitMQ accepts, which is left to the receiver, and in the error queue, where no message
    expires.
    """
    lifetime = envelope.time_left(now)
    if lifetime is None or lifetime > _LONGEST_TIME_TO_LIVE or Headers.FAILED_QUEUE in envelope.headers:
        return None
    return b"%d" % -(-max(lifetime, _NOTHING) // _MILLISECOND)


def _special_properties(envelope: Envelope, now: datetime, user: str) -> bytes:
    check_headers(envelope.headers)
    if (original_properties := unchanged_properties(envelope, user)) is not None:
        return original_properties
    table_headers, overflow, values = _split_headers(envelope, user)
    is_bare = envelope.headers.get(BARE) is not None
    own_fields: list[bytes] = []
    message_id = envelope.message_id.encode()
    if "message_id" in values or len(message_id) > wire.SHORT_TEXT_LIMIT:
        own_fields.append(wire.short_bytes(_ID) + b"S" + wire.long_bytes(message_id))
    values.setdefault("message_id", wire.short_bytes(_truncate_text(message_id, wire.SHORT_TEXT_LIMIT)))
    if envelope.due is not None:
        own_fields.append(_DUE_FIELD + _INT64(to_microseconds(envelope.due)))
    expiry_fields = _expiry_fields(envelope)
    own_fields += expiry_fields
    if (time_to_live := _time_to_live(envelope, now)) is not None:
        expiration = values.get("expiration")  # It is encoded already.
        earliest = time_to_live if expiration is None else min(expiration[1:], time_to_live, key=int)
        values["expiration"] = wire.short_bytes(earliest)
    has_table = values.get("table", b"") is not None
    merged = _merge_fields(table_headers, values.pop("table", None))
    overflow.update(table_headers)
    if expiry_fields and _EXPIRATION in envelope.headers:
        overflow[_EXPIRATION] = envelope.headers[_EXPIRATION]
    if not has_table and (merged or own_fields or overflow):
        overflow[TABLE] = _NONE
    if overflow:
        own_fields.append(wire.short_bytes(_HEADERS) + b"S" + wire.long_bytes(msgspec.json.encode(overflow)))
    fields = b"".join([*merged, *([] if is_bare else own_fields)])
    if fields or has_table:
        values["headers"] = wire.long_bytes(fields)
    values.setdefault("delivery_mode", bytes((_PERSISTENT,)))
    return join_parts({name: value for name, value in values.items() if value is not None})


def _truncate_text(text: bytes, count: int) -> bytes:
    return text[:count].decode(errors="ignore").encode()


def _split_headers(envelope: Envelope, user: str) -> tuple[dict[str, str], dict[str, str], dict[str, bytes | None]]:
    """Split headers into table fields, other headers with a property's name, and properties.

    A property that is ``None`` is to be omitted.
    """
    table_headers: dict[str, str] = {}
    overflow: dict[str, str] = {}
    values: dict[str, bytes | None] = {}
    for name, text in envelope.headers.items():
        if name == BARE:
            continue
        if name == _EXPIRATION and Headers.FAILED_QUEUE in envelope.headers:
            # In the error queue, and after the return from it, the message must not expire before anybody sees it. A
            # message that leaves as it came has not reached its destination, where its time to live begins.
            overflow[name if ORIGINAL_PROPERTIES in envelope.headers else _EXPIRATION_BEFORE] = text
        elif name.startswith(PREFIX):
            try:
                values.update(_encode_property(name.removeprefix(PREFIX), text, envelope.message_id, user, values))
            except ValueError:
                overflow[name] = text
        else:
            table_headers[name] = text
    return table_headers, overflow, values


def _encode_property(
    name: str, text: str, message_id: str, user: str, properties: Mapping[str, bytes | None]
) -> dict[str, bytes | None]:
    """Return a header's encoded property; raise `ValueError` when it is none or would not come back the same."""
    if name in {"table", "delivery_mode", "message_id"} and text == _NONE:
        return {name: None}
    if name == "table":
        content = base64.b64decode(text, validate=True)
        try:
            wire.fields_of(content)
        except Exception as error:
            raise ValueError("not a table") from error
        return {name: content}
    if name in NUMBER_BYTES:
        return {
            name: _encode_number(
                text, NUMBER_BYTES[name], forbidden_number=_PERSISTENT if name == "delivery_mode" else -1
            )
        }
    content = text.encode()
    if name.endswith(BASE64):
        name, content = name.removesuffix(BASE64), base64.b64decode(text, validate=True)
        if content.decode(errors="replace").encode() == content:
            raise ValueError(text)
    if name not in BITS or name == "headers" or name in NUMBER_BYTES or name in properties:
        raise ValueError(name)
    if (name == "user_id" and text != user) or (name == "message_id" and text == message_id):
        raise ValueError(text)
    if name == "expiration" and not (text.isascii() and text.isdigit() and int(text) <= _LONGEST_MILLISECONDS):
        raise ValueError(text)
    return {name: wire.short_bytes(content)}


def _encode_number(text: str, count: int, forbidden_number: int) -> bytes:
    number = int(text)
    if str(number) != text or number == forbidden_number:
        raise ValueError(text)
    try:
        return number.to_bytes(count, "big")
    except OverflowError as error:
        raise ValueError(text) from error


def _merge_fields(table_headers: dict[str, str], content: bytes | None) -> list[bytes]:
    """Return a table's original fields, updated from ``table_headers``.

    Headers that became fields are removed from ``table_headers``; headers that cannot be fields remain in it.
    """
    fields: list[bytes] = []
    for field, name, text in _fields_as_text(wire.fields_of(content or b"")):
        if name is None or table_headers.get(name) == text:
            fields.append(wire.short_bytes(field.name) + field.raw)
            table_headers.pop(name or "", None)
        elif name in table_headers and _encoded_name(name):
            fields.append(wire.short_bytes(field.name) + b"S" + wire.long_bytes(table_headers.pop(name).encode()))
    for name in list(table_headers):
        encoded = _encoded_name(name)
        if encoded:
            fields.append(encoded + wire.long_bytes(table_headers.pop(name).encode()))
    return fields


# --- receiving --------------------------------------------------------------------------------------------------------


class DecodedMessage(NamedTuple):
    """A received message, decoded. A message without an id of its own gets a new one at every arrival.

    ``returns``: how often it returned to a quorum queue; ``None``: the queue does not report it. ``counted_returns``:
    the returns that count for the queue's delivery limit. From RabbitMQ 4.3 on only returns without an answer count.
    """

    envelope: Envelope
    returns: int | None
    has_id: bool
    counted_returns: int = 0


def decode_message(queue: str, properties: bytes, body: bytes, *, redelivered: bool) -> DecodedMessage:
    """Return the message of any sender; a message that cannot be decoded has its properties in a header."""
    if (message := _decode_plain(queue, properties, body)) is not None:
        return message
    try:
        return _decode_special(queue, properties, body, redelivered=redelivered)
    except wire.MalformedFrame:
        return unreadable_message(queue, properties, body)


def unreadable_message(queue: str, properties: bytes, body: bytes) -> DecodedMessage:
    """Return an undecodable message with its properties in a header: it ends in the error queue."""
    headers = {UNREADABLE: base64.b64encode(properties).decode()}
    return DecodedMessage(Envelope(queue, new_message_id(), headers, body), None, has_id=False)


def _length_at(content: bytes, position: int) -> int:
    return _UINT32_AT(content, position)[0]


def _decode_plain(  # noqa: PLR0911 - each return is one way of being special
    queue: str, properties: bytes, body: bytes
) -> DecodedMessage | None:
    """Return a message of ours that has only the usual properties; ``None`` for any other."""
    if (present := properties[:2]) not in {_PLAIN, _EXPIRING}:
        return None
    headers: dict[str, str] = {}
    times: dict[bytes, datetime] = {}
    try:
        position, end = 6, 6 + _length_at(properties, 2)
        while position < end:
            name_end = position + 1 + properties[position]
            name, kind = properties[position + 1 : name_end], properties[name_end]
            if kind == ord("S"):
                start = name_end + 5
                position = start + _length_at(properties, name_end + 1)
                key = name.decode()
                if key in headers or not (key in _names or _encoded_name(key)):
                    return None
                headers[key] = properties[start:position].decode()
            elif kind == ord("l") and name in _TIMES:
                position = name_end + 9
                times[name] = from_microseconds(int.from_bytes(properties[name_end + 1 : position], "big", signed=True))
            else:
                return None
        if properties[end] != _PERSISTENT:
            return None
        position = end + 1
        if present == _EXPIRING:
            if _EXPIRES_AT not in times and _TO_BE_RECEIVED not in times:
                return None
            position += 1 + properties[position]
        message_id = properties[position + 1 :].decode()
        envelope = Envelope(queue, message_id, headers, body, times.get(_EXPIRES_AT), times.get(_DUE))
    except (ValueError, OverflowError, IndexError, StructError):  # not UTF-8, no id or name of ours, or no table at all
        return None
    return DecodedMessage(envelope, None, has_id=True)


def _decode_special(queue: str, properties: bytes, body: bytes, *, redelivered: bool) -> DecodedMessage:
    values = values_of(properties)
    table: bytes | None = values.pop("headers", None)
    own, foreign, counts = _split_fields(wire.fields_of(table or b""), redelivered=redelivered)
    headers = _foreign_headers(foreign)
    if table is None:
        headers[TABLE] = _NONE
    expires_at = _instant(own, _EXPIRES_AT)
    if expires_at is not None or _TO_BE_RECEIVED in own:
        values.pop("expiration", None)
    text = _id_of(own.get(_ID, values.get("message_id")))
    has_id = text is not None
    if has_id and (_ID not in own or values.get("message_id") == _truncate_text(own[_ID], wire.SHORT_TEXT_LIMIT)):
        del values["message_id"]
    else:
        values.setdefault("message_id", None)
    if values.setdefault("delivery_mode", None) == _PERSISTENT:
        del values["delivery_mode"]
    headers.update(_property_header(name, value) for name, value in values.items())
    if _HEADERS in own:
        headers.update(msgspec.json.decode(own[_HEADERS], type=dict[str, str]))
    envelope = Envelope(queue, text or new_message_id(), headers, body, expires_at, _instant(own, _DUE))
    return DecodedMessage(envelope, max(counts.values(), default=None), has_id, counts.get(DELIVERY_COUNT, 0))


def _split_fields(
    fields: list[wire.Field], *, redelivered: bool
) -> tuple[dict[bytes, Any], list[wire.Field], dict[bytes, int]]:
    """Split a table's fields: ours, those of other programs, and a quorum queue's counters."""
    kinds = {_ID: b"S", _HEADERS: b"S", **dict.fromkeys(_TIMES, b"l")}
    own: dict[bytes, Any] = {}
    foreign: list[wire.Field] = []
    counts: dict[bytes, int] = {}
    for field in fields:
        if kinds.get(field.name) == field.kind and field.name not in own and _is_valid(field):
            own[field.name] = field.value
        elif redelivered and field.name in COUNTS and isinstance(field.value, int):
            counts[field.name] = field.value
        else:
            foreign.append(field)
    return own, foreign, counts


def _is_valid(field: wire.Field) -> bool:
    """Return whether a field with a name of ours has content that we write."""
    try:
        match field.name:
            case b"x-postdate-id":
                return _id_of(field.value) is not None
            case b"x-postdate-headers":
                check_headers(msgspec.json.decode(field.value, type=dict[str, str]))
            case _:
                from_microseconds(field.value)
    except (ValueError, OverflowError, msgspec.DecodeError):
        return False
    return True


def _instant(own: dict[bytes, Any], name: bytes) -> datetime | None:
    return from_microseconds(own[name]) if name in own else None


def _id_of(content: bytes | None) -> str | None:
    """Return bytes as a message id; ``None`` when they cannot be one."""
    try:
        text = (content or b"").decode()
        check_text(text, "message id", MESSAGE_ID_LIMIT)
    except (UnicodeDecodeError, InvalidMessage):
        return None
    return text


def _property_header(name: str, value: Any) -> tuple[str, str]:
    if value is None or isinstance(value, int):
        return PREFIX + name, _NONE if value is None else str(value)
    return header_of(PREFIX + name, value)


def header_of(name: str, content: bytes) -> tuple[str, str]:
    """Return a header with a text; bytes that are not UTF-8 become base64, and the name says so."""
    try:
        return name, content.decode()
    except UnicodeDecodeError:
        return name + BASE64, base64.b64encode(content).decode()


def seconds_to_live(properties: bytes) -> float:
    """Return how long the broker keeps a message after its arrival in a queue."""
    with suppress(wire.MalformedFrame, KeyError, ValueError):
        return int(values_of(properties)["expiration"]) / 1_000
    return float("inf")


def readable_headers(properties: bytes) -> dict[str, str]:
    """Return the properties and the table of a message as headers for people to read, as far as they are text."""
    values = values_of(properties)
    headers = _foreign_headers(wire.fields_of(values.pop("headers", b"")))
    headers.pop(TABLE, None)
    headers.update(_property_header(name, value) for name, value in values.items())
    return headers


def _foreign_headers(fields: list[wire.Field]) -> dict[str, str]:
    """Return the fields of other programs as headers, with the encoded table unless the texts are complete."""
    headers: dict[str, str] = {}
    is_text_only = True
    for field, name, text in _fields_as_text(fields):
        if name is not None:
            headers[name] = text
        is_text_only = is_text_only and name is not None and field.kind == b"S" and field.value == text.encode()
    if not is_text_only:
        content = b"".join(wire.short_bytes(field.name) + field.raw for field in fields)
        headers[TABLE] = base64.b64encode(content).decode()
    return headers


def _fields_as_text(fields: Iterable[wire.Field]) -> Iterable[tuple[wire.Field, str | None, str]]:
    """Yield each field with name and value as text; ``None`` for a name that cannot be a header's name."""
    names: set[str] = set()
    for field in fields:
        name = field.name.decode(errors="replace")
        is_usable = name.encode() == field.name and name and name not in names
        if is_usable and not name.startswith((PREFIX, _OWN_PREFIX)):
            names.add(name)
            yield field, name, _text_of(field.value)
        else:
            yield field, None, ""


def _text_of(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case bytes():
            return header_of("", value)[1]
        case dict() | list():
            return msgspec.json.encode(_json_value(value)).decode()
        case datetime():
            return value.isoformat()
        case _:
            return str(value)


def _json_value(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _json_value(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list():
            return [_json_value(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
        case bool() | int() | float() | None:
            return value
        case _:
            return _text_of(value)
