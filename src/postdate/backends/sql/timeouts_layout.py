"""The tables of timeouts in the layout of upstream's SQL persistence: names, ids, headers, times.

Pure values, the same for every database. Timeout storage and migration use them. Source: ADR 0014.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from postdate.errors import InvalidHeaders, InvalidMessage, InvalidTimestamp
from postdate.messages import DESTINATION_LIMIT, aware_utc, check_headers, check_text, decode_headers
from postdate.ports.timeouts import DueTimeout, Timeout

SUFFIX: Final = "TimeoutData"
"""The end of every table's name."""

ID: Final = "Id"
DESTINATION: Final = "Destination"
SAGA_ID: Final = "SagaId"
STATE: Final = "State"
TIME: Final = "Time"
HEADERS: Final = "Headers"
PERSISTENCE_VERSION: Final = "PersistenceVersion"
COLUMNS: Final = (ID, DESTINATION, SAGA_ID, STATE, TIME, HEADERS, PERSISTENCE_VERSION)
"""The columns in the order of the table. Names are quoted, because some databases distinguish case."""

NO_SAGA: Final = "00000000-0000-0000-0000-000000000000"
"""The ``SagaId`` of a timeout without a saga."""

WRITTEN_VERSION: Final = "1.0.0.0"
"""Our value of ``PersistenceVersion``, which no program reads: four numbers, as in a .NET version."""

_TEXT_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d+))?")
_MICROSECOND: Final = timedelta(microseconds=1)


# --- names ------------------------------------------------------------------------------------------------------


def table_name(endpoint: str = "", *, prefix: str | None = None) -> str:
    """Return the name of the table of timeouts, not quoted; ``endpoint`` matters only without a ``prefix``.

    By default the prefix is the endpoint's name with underscores for points.
    """
    return (f"{endpoint.replace('.', '_')}_" if prefix is None else prefix) + SUFFIX


# --- ids --------------------------------------------------------------------------------------------------------


def normal_id(text: object) -> str | None:
    """Return a UUID in 36 characters, lower case, with hyphens; ``None`` if the text is no UUID in any notation."""
    try:
        return str(uuid.UUID(str(text).strip()))
    except ValueError:
        return None


def normal_saga(text: object) -> str | None:
    """Return the id of a saga as :func:`normal_id` does; ``None`` for the empty id, too."""
    saga_id = None if text is None else normal_id(text)
    return None if saga_id == NO_SAGA else saga_id


def spellings(timeout_id: str) -> tuple[str, str, str, str]:
    """Return the notations of a normal id in a text column: in upper and lower case, with and without braces."""
    upper = timeout_id.upper()
    return timeout_id, upper, f"{{{timeout_id}}}", f"{{{upper}}}"


# --- times ------------------------------------------------------------------------------------------------------


def round_up(due: datetime, digits: int) -> datetime:
    """Return ``due`` with so many digits of a second, never earlier, because a timeout must not be early."""
    step = 10 ** (6 - digits)
    if not (excess := due.microsecond % step):
        return due
    try:
        return due + (step - excess) * _MICROSECOND
    except OverflowError as error:
        raise InvalidMessage(
            f"a timeout cannot be due at {due.isoformat()}: rounded up it is past the year 9999"
        ) from error


def text_time(instant: datetime) -> str:
    """Return ``yyyy-MM-dd HH:mm:ss.ffffff`` in UTC. Its order as text is the order of time."""
    return instant.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


def read_time(value: object) -> datetime:
    """Return the instant of a column: a date-time, in UTC if it has no zone, or a text, rounded up to microseconds.

    Raises:
        InvalidTimestamp: the value is neither.
    """
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    match = _TEXT_TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InvalidTimestamp(f"{value!r} is not a time of the form 'yyyy-MM-dd HH:mm:ss.ffffff'")
    *whole, fraction = match.groups()
    digits = (fraction or "").ljust(6, "0")
    try:
        instant = datetime(*map(int, whole), microsecond=int(digits[:6]), tzinfo=UTC)
        return instant + _MICROSECOND if digits[6:].strip("0") else instant
    except (ValueError, OverflowError) as error:
        raise InvalidTimestamp(f"{value!r} names no existing instant: {error}") from error


# --- rows -------------------------------------------------------------------------------------------------------


def normalize_timeout(timeout: Timeout) -> Timeout:
    """Return the timeout in a form that every storage can keep: normal ids, due time in UTC.

    Raises:
        InvalidMessage: an id is no UUID, or the destination is blank or longer than 200 characters.
        InvalidTimestamp, InvalidHeaders: as for every message.
    """
    if (timeout_id := normal_id(timeout.timeout_id)) is None:
        raise InvalidMessage(f"the id of a timeout must be a UUID, not {timeout.timeout_id!r}")
    if timeout.saga_id is not None and normal_id(timeout.saga_id) is None:
        raise InvalidMessage(f"timeout {timeout_id} names saga {timeout.saga_id!r}, which is not a UUID")
    check_text(timeout.destination, f"the destination of timeout {timeout_id}", DESTINATION_LIMIT)
    check_headers(timeout.headers)
    due = aware_utc(timeout.due, f"the due time of timeout {timeout_id}")
    return replace(timeout, timeout_id=timeout_id, saga_id=normal_saga(timeout.saga_id), due=due)


def encode(timeout: Timeout) -> dict[str, Any]:
    """Return the values of a row, by column, for a timeout of :func:`normalize_timeout`.

    They are texts, except that ``State`` is bytes. ``Time`` is an aware date-time, to be rounded up to the column's
    precision.
    """
    return {
        ID: timeout.timeout_id,
        DESTINATION: timeout.destination,
        SAGA_ID: timeout.saga_id or NO_SAGA,
        STATE: timeout.body,
        TIME: timeout.due,
        HEADERS: encode_headers(timeout.headers),
        PERSISTENCE_VERSION: WRITTEN_VERSION,
    }


def encode_headers(headers: Mapping[str, str]) -> str:
    """Return the headers as a JSON object of ASCII, because a .NET endpoint's column may be in any character set."""
    return json.dumps(dict(headers), separators=(",", ":"))


def decode(  # noqa: PLR0913 - the columns
    timeout_id: object, destination: str, saga_id: object, state: object, time: object, headers: object, owner: str
) -> Timeout:
    """Return the timeout of a row that Postdate or a .NET endpoint has written.

    Ids are UUIDs or their texts; the empty id and ``None`` mean no saga. Blank ``headers`` and a ``state`` of ``None``
    are empty. ``owner`` is the endpoint of the table, because no column has it.

    Raises:
        InvalidMessage: the id is no UUID.
        InvalidHeaders, InvalidTimestamp: name the id.
    """
    normal = row_id(timeout_id)
    body = b"" if state is None else bytes(state)  # pyright: ignore[reportArgumentType] - what drivers have for bytes
    due = row_time(normal, time)
    return Timeout(normal, due, destination, normal_saga(saga_id), owner, row_headers(normal, headers), body)


def decode_due(timeout_id: object, time: object) -> DueTimeout:
    """Return the poller's part of a row; see :func:`decode`."""
    normal = row_id(timeout_id)
    return DueTimeout(normal, row_time(normal, time))


def row_id(value: object) -> str:
    """Return a row's normal id; raise `InvalidMessage` when it is no UUID."""
    if (normal := normal_id(value)) is None:
        raise InvalidMessage(f"a timeout is stored under {value!r}, which is not a UUID")
    return normal


def row_time(timeout_id: str, value: object) -> datetime:
    """Return a row's due time; see :func:`read_time`."""
    try:
        return read_time(value)
    except InvalidTimestamp as error:
        raise InvalidTimestamp(f"timeout {timeout_id}: {error}") from error


def row_headers(timeout_id: str, headers: object) -> Mapping[str, str]:
    """Return a row's headers; see :func:`decode`."""
    text = headers if isinstance(headers, (str, bytes)) else "" if headers is None else str(headers)
    if not text.strip():
        return {}
    try:
        return decode_headers(text)
    except InvalidHeaders as error:
        if (headers_without_nulls := _decode_with_nulls(text)) is None:
            raise InvalidHeaders(f"timeout {timeout_id}: {error}") from error
        return headers_without_nulls


def _decode_with_nulls(text: str | bytes) -> Mapping[str, str] | None:
    """Return headers, with empty texts for nulls: .NET endpoints write null for headers without text."""
    try:
        headers = msgspec.json.decode(text, type=dict[str, str | None])
    except (msgspec.MsgspecError, ValueError):
        return None
    return {key: value or "" for key, value in headers.items()}


def sort_by_due(due: Iterable[DueTimeout]) -> list[DueTimeout]:
    """Return timeouts by due time, and by id if that is equal."""
    return sorted(due, key=lambda each: (each.due, each.timeout_id))
