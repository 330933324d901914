"""A delayed message as an entity: keys, columns, size limits.

Keys and four columns are upstream's, so that both kinds of endpoint can use one table. Microseconds, expiry and failed
attempts are in columns that upstream does not read. Source: ADR 0013.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from postdate.clock import from_microseconds, later, to_microseconds
from postdate.errors import InvalidMessage, MessageError, MessageTooLarge
from postdate.messages import (
    DelayedMessage,
    copy_with_due,
    copy_with_failures,
    decode_headers,
    encode_headers,
    size_in_bytes,
)

LARGEST_BODY: Final = 64 * 1024
LARGEST_TEXT: Final = 32 * 1024
"""The longest text, in units of UTF-16, which Azure counts. The emulator does not check it, so the store must."""

LONGEST_NOTE: Final = 30_000
"""The longest reason or detail in the same units, which leaves room for its prefix; a longer one is cut."""

KEY_COLUMNS: Final = ("PartitionKey", "RowKey", "MessageId", "Due")
"""Columns for a message's id and times, without its content."""

UNREADABLE: Final = "unreadable"
"""The partition of entities that cannot be read. It sorts after the partitions of all times."""

_SECOND: Final = timedelta(seconds=1)
_MICROSECOND: Final = timedelta(microseconds=1)
_ROW: Final = re.compile(r"[0-9]{14}(_.*)?", re.ASCII | re.DOTALL)
_LONGEST_KEY: Final = 512
"""In characters: Azure's limit of a key."""

_PARTITION_LENGTH: Final = 10
_TIME_LENGTH: Final = 14
_GUID_BEGINS: Final = _TIME_LENGTH + 1
_MICROSECOND_DIGITS: Final = 5
_TAIL_DIGITS: Final = 27


def second_key(instant: datetime) -> str:
    """Return ``yyyyMMddHHmmss`` in UTC, of the whole second."""
    utc_instant = instant.astimezone(UTC)
    day = f"{utc_instant.year:04}{utc_instant.month:02}{utc_instant.day:02}"
    return f"{day}{utc_instant.hour:02}{utc_instant.minute:02}{utc_instant.second:02}"


def partition_of(row: str) -> str:
    return row[:_PARTITION_LENGTH]


def id_hash(message_id: str) -> str:
    return hashlib.sha256(message_id.encode()).hexdigest()


def row_key(message_id: str, attempt_at: datetime) -> str:
    """Return the row key: the second, and 32 digits that upstream reads as a GUID.

    The first five digits are the microsecond, so that keys sort as times do. The others are from the id's hash, so that
    storing a message a second time finds the first one.
    """
    microsecond = f"{attempt_at.microsecond:0{_MICROSECOND_DIGITS}x}"
    return f"{second_key(attempt_at)}_{microsecond}{id_hash(message_id)[:_TAIL_DIGITS]}"


def is_row_key(text: str) -> bool:
    """Return whether a text has the form of a message's row key."""
    return len(text) <= _LONGEST_KEY and _ROW.fullmatch(text) is not None


def attempt_of(row: str, *, is_own: bool) -> datetime:
    """Return the time from which on the message at a row key may be attempted; raise `InvalidMessage` for other keys.

    Upstream's keys have seconds only, so its messages wait until the second ends, as they do in upstream. A key without
    a GUID is the exact time.
    """
    if not _ROW.fullmatch(row):
        raise InvalidMessage(f"the row key {row!r} is not yyyyMMddHHmmss_GUID")
    try:
        second = datetime.strptime(row[:_TIME_LENGTH] + "+0000", "%Y%m%d%H%M%S%z")
        if len(row) == _TIME_LENGTH:
            return second
        if is_own:
            return second + int(row[_GUID_BEGINS : _GUID_BEGINS + _MICROSECOND_DIGITS], 16) * _MICROSECOND
    except (ValueError, OverflowError) as error:
        raise InvalidMessage(f"the row key {row!r} is not a time: {error}") from error
    return later(second, _SECOND - _MICROSECOND)


@dataclass(frozen=True, slots=True)
class DelayedEntity:
    """A message as it is in the table, to be attempted from ``attempt_at`` (UTC) on.

    ``records`` counts its records besides the one of its scheduling and the one of its outcome. ``etag`` is empty for a
    new entity.
    """

    message: DelayedMessage
    row: str
    attempt_at: datetime
    records: int = 0
    etag: str = ""

    @classmethod
    def new(cls, message: DelayedMessage, records: int = 0) -> DelayedEntity:
        return cls(copy_with_failures(message, 0), row_key(message.message_id, message.due), message.due, records)

    @property
    def partition(self) -> str:
        return partition_of(self.row)

    @property
    def keys(self) -> dict[str, str]:
        return {"PartitionKey": self.partition, "RowKey": self.row}

    def copy_for_retry(self, attempt_at: datetime, records: int) -> DelayedEntity:
        failed_message = copy_with_failures(self.message, self.message.number_of_failures + 1)
        return DelayedEntity(failed_message, row_key(failed_message.message_id, attempt_at), attempt_at, records)

    def copy_for_reschedule(self, due: datetime, wall_time: str | None, records: int) -> DelayedEntity:
        rescheduled_message = copy_with_due(self.message, due, wall_time)
        return DelayedEntity(
            rescheduled_message,
            row_key(rescheduled_message.message_id, rescheduled_message.due),
            rescheduled_message.due,
            records,
        )

    def entity(self) -> dict[str, Any]:
        message = self.message
        entity: dict[str, Any] = {
            **self.keys,
            "Destination": message.destination,
            "Body": message.body,
            "MessageId": message.message_id,
            "Headers": encode_headers(message.headers),
            "Due": text_of(message.due),
        }
        if message.expires_at is not None:
            entity["ExpiresAt"] = text_of(message.expires_at)
        if message.number_of_failures:
            entity["Failures"] = message.number_of_failures
        if self.records:
            entity["Records"] = self.records
        return entity


def read_entity(entity: Mapping[str, Any]) -> DelayedEntity:
    """Return the message in an entity of ours or of upstream's; raise `MessageError` for any other entity."""
    row, due_text = entity["RowKey"], entity.get("Due")
    is_own = due_text is not None
    try:
        attempt_at = attempt_of(row, is_own=is_own)
        expires_at = entity.get("ExpiresAt")
        headers, body = entity.get("Headers"), entity.get("Body")
        if is_own and (headers is None or body is None):
            raise InvalidMessage("the content is gone")
        message = DelayedMessage.from_store(
            _text(entity, "MessageId"),
            instant_of(due_text) if due_text is not None else attempt_at,
            _text(entity, "Destination"),
            decode_headers(headers or "{}"),
            _bytes(body or b""),
            None if expires_at is None else instant_of(expires_at),
            int(entity.get("Failures") or 0),
        )
        records = int(entity.get("Records") or 0)
    except KeyError as error:
        raise InvalidMessage(f"the entity {row!r} has no column {error}") from error
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, MessageError):
            raise
        raise InvalidMessage(f"the entity {row!r} has a column that cannot be read: {error}") from error
    return DelayedEntity(message, row, attempt_at, records, etag_of(entity))


def _text(entity: Mapping[str, Any], name: str) -> str:
    """Return a column that must be non-empty text; the length was checked when it was stored."""
    value = entity[name]
    if not isinstance(value, str) or not value.strip():
        raise InvalidMessage(f"column {name} of the entity {entity['RowKey']!r} is {value!r:.80}")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidMessage(f"the body is not bytes: {value!r:.80}")
    return value


def etag_of(entity: Mapping[str, Any]) -> str:
    metadata: Mapping[str, Any] = getattr(entity, "metadata", {})
    return str(metadata.get("etag", ""))


def changed_at(entity: Mapping[str, Any]) -> datetime:
    """Return the time of an entity's last write, by the server's clock."""
    metadata: Mapping[str, Any] = getattr(entity, "metadata", {})
    timestamp = metadata.get("timestamp")
    if not isinstance(timestamp, datetime):
        raise InvalidMessage(f"the entity {entity['RowKey']!r} came without its timestamp")
    # A plain datetime, because encoders reject the SDK's subclass.
    return from_microseconds(to_microseconds(timestamp))


def text_of(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat(timespec="microseconds")


def instant_of(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def shorten_note(note: str) -> str:
    """Return a reason or detail, cut to the length of a column."""
    if len(note) * 2 <= LONGEST_NOTE:
        return note
    return note.encode("utf-16-le", "surrogatepass")[: 2 * LONGEST_NOTE].decode("utf-16-le", "ignore")


def check_size(message: DelayedMessage, largest_message_bytes: int) -> None:
    """Raise `MessageTooLarge` if a message exceeds our limit, or Azure's limit of a column."""
    headers = encode_headers(message.headers)
    units = len(headers) if headers.isascii() else len(headers.encode("utf-16-le")) // 2
    for size, limit, what in (
        (size_in_bytes(headers, message.body), largest_message_bytes, "bytes, this store takes"),
        (len(message.body), LARGEST_BODY, "bytes in its body, a column of an Azure table takes"),
        (units, LARGEST_TEXT, "characters in its headers, a column of an Azure table takes"),
    ):
        if size > limit:
            raise MessageTooLarge(
                f"message {message.message_id!r} has {size:,} {what} {limit:,}; keep large content elsewhere and send "
                f"a reference"
            )
