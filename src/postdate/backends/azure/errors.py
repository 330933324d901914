"""Translates errors of Azure Storage.

Every answer is an outage, retried later and never counted against a message, unless Azure's list of error codes says
that it is about the content of the message or entity. Source: ADR 50.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, cast

from aiohttp import ClientError
from azure.core.exceptions import AzureError, HttpResponseError

from postdate.errors import (
    ClaimLost,
    DestinationUnavailable,
    DuplicateMessage,
    MessageTooLarge,
    PostdateError,
    QueueNotFound,
    StoreError,
    StoreNotSetUp,
    StoreTroubled,
    StoreUnreachable,
    TransportError,
    TransportUnreachable,
    first_line,
)

_LONGEST_RETRY_AFTER: Final = timedelta(minutes=5)
_RETRY_AFTER: Final = {"Retry-After": timedelta(seconds=1), "x-ms-retry-after-ms": timedelta(milliseconds=1)}
_TOO_LARGE: Final = frozenset(
    {"RequestBodyTooLarge", "EntityTooLarge", "PropertyValueTooLarge", "MessageTooLarge", "ContentLengthExceeded"}
)
_ABOUT_CONTENT: Final = frozenset(
    {
        "DuplicatePropertiesSpecified",
        "InvalidDuplicateRow",
        "InvalidInput",
        "InvalidValueType",
        "InvalidXmlDocument",
        "InvalidXmlNodeValue",
        "OutOfRangeInput",
        "PropertiesNeedValue",
        "PropertyNameInvalid",
        "PropertyNameTooLong",
        "TooManyProperties",
        "UnsupportedXmlNode",
    }
)
_EXISTS: Final = frozenset(
    {"EntityAlreadyExists", "QueueAlreadyExists", "TableAlreadyExists", "ContainerAlreadyExists", "BlobAlreadyExists"}
)
_TO_CREATE: Final = {"QueueNotFound": "postdate setup --queue NAME", "TableNotFound": "postdate setup"}


@dataclass(frozen=True, slots=True)
class ErrorTypes:
    """Which errors the answers of one service become: ``missing`` 404, ``exists`` 409, ``too_large`` 413.

    ``unreachable``: no answer, throttling, or refused credentials; ``unavailable``: it refuses this request, and not
    because of its content; ``other``: it refuses the content;
    ``changed``: 412, or a pop receipt that is not the latest, since another was faster.
    """

    unreachable: type[PostdateError]
    unavailable: type[PostdateError]
    missing: type[PostdateError]
    exists: type[PostdateError]
    other: type[PostdateError]
    changed: type[PostdateError] = ClaimLost
    too_large: type[PostdateError] = MessageTooLarge


QUEUES: Final = ErrorTypes(
    TransportUnreachable, DestinationUnavailable, missing=QueueNotFound, exists=TransportError, other=TransportError
)
TABLES: Final = ErrorTypes(
    StoreUnreachable, StoreTroubled, missing=StoreNotSetUp, exists=DuplicateMessage, other=StoreError
)


def code_of(error: AzureError) -> str:
    """Return the service's error code, such as ``QueueNotFound``; empty without an answer."""
    code: object = getattr(error, "error_code", None) or _headers(error).get("x-ms-error-code", "")
    return str(getattr(code, "value", code))


def _headers(error: BaseException | None) -> Mapping[str, str]:
    return cast("Mapping[str, str]", getattr(getattr(error, "response", None), "headers", {}))


def retry_after(error: BaseException | None) -> timedelta | None:
    """Return the pause that the service asked for, at most five minutes; reads our errors' ``__cause__``."""
    headers = _headers(error.__cause__ if isinstance(error, PostdateError) else error)
    for name, unit in _RETRY_AFTER.items():
        text = headers.get(name, "")
        if text.isascii() and text.isdigit():
            return min(int(text[:9]) * unit, _LONGEST_RETRY_AFTER)
    return None


def translate(error: AzureError, error_types: ErrorTypes, target: str) -> PostdateError:
    """Return the error for an answer.

    ``target`` names the target without secrets: ``queue 'a' of Azure account 'b'``.
    """
    if not isinstance(error, HttpResponseError) or (error.status_code or 0) < 400:
        return error_types.unreachable(f"{target} cannot be reached: {first_line(error)}")
    status, code = error.status_code or 0, code_of(error)
    answer = f"{status} {code or error.reason or 'without a reason'}"
    if status in {401, 403}:
        return error_types.unreachable(
            f"{target} refuses us ({answer}): check the name of the account, its key or signature, and the clock of "
            f"this "
            f"machine, which must be right to 15 minutes"
        )
    if status in {408, 429} or status >= 500:
        state = "is throttled" if status in {429, 503} else "cannot answer now"
        pause = retry_after(error)
        pause_text = "" if pause is None else f"; it asks to be left alone for {pause.total_seconds():g} s"
        return error_types.unreachable(f"{target} {state} ({answer}){pause_text}")
    if code in _TO_CREATE:
        return error_types.missing(f"{target} does not exist ({answer}); create it: {_TO_CREATE[code]}")
    return _refusal(error_types, code, status, f"{target}: {answer}: {first_line(error)}")


def _refusal(error_types: ErrorTypes, code: str, status: int, text: str) -> PostdateError:
    """Return the error for an answer between 400 and 499; one that no list names is an outage of its target."""
    by_code = {
        **dict.fromkeys(_TOO_LARGE, error_types.too_large),
        **dict.fromkeys(_ABOUT_CONTENT, error_types.other),
        **dict.fromkeys(_EXISTS, error_types.exists),
        "PopReceiptMismatch": error_types.changed,
    }
    by_status = {404: error_types.missing, 412: error_types.changed, 413: error_types.too_large}
    return by_code.get(code, by_status.get(status, error_types.unavailable))(text)


@contextmanager
def suppress_error_code(code: str) -> Generator[None]:
    """Let it pass when what is created is there already: the service says so with the code ``code``."""
    try:
        yield
    except HttpResponseError as error:
        if code_of(error) != code:
            raise


@contextmanager
def translate_errors(error_types: ErrorTypes, target: str) -> Generator[None]:
    """Translate errors of the SDK and of its connections; see :func:`translate`."""
    try:
        yield
    except AzureError as error:
        raise translate(error, error_types, target) from error
    except (ClientError, OSError) as error:  # the SDK lets some of these through, such as a body that is cut short
        raise error_types.unreachable(f"{target} cannot be reached: {first_line(error)}") from error
