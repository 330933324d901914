"""Translates errors of Azure Storage.

Every answer is an outage, which is retried later and never counted against a message. The exceptions are the error
codes that are about the content of the message or entity, according to Azure's list. Source: ADR 50.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, cast

from aiohttp import ClientError
from azure.core.exceptions import AzureError, HttpResponseError

from postdate import errors

_LONGEST_RETRY_AFTER: Final = timedelta(minutes=5)  # a longer pause that the service asks for is cut
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
    """The types of errors that the answers of one service become.

    ``missing`` is status 404, ``exists`` 409, ``too_large`` 413, and ``changed`` 412 or an old pop receipt, when
    another process was faster. ``unreachable`` means no answer, throttling, or refused credentials. ``unavailable``
    means that the service refuses this request, and not because of its content. ``other`` means that it refuses the
    content.
    """

    unreachable: type[errors.PostdateError]
    unavailable: type[errors.PostdateError]
    missing: type[errors.PostdateError]
    exists: type[errors.PostdateError]
    other: type[errors.PostdateError]
    changed: type[errors.PostdateError] = errors.ClaimLost
    too_large: type[errors.PostdateError] = errors.MessageTooLarge


QUEUES: Final = ErrorTypes(
    errors.TransportUnreachable,
    errors.DestinationUnavailable,
    missing=errors.QueueNotFound,
    exists=errors.TransportError,
    other=errors.TransportError,
)
TABLES: Final = ErrorTypes(
    errors.StoreUnreachable,
    errors.StoreTroubled,
    missing=errors.StoreNotSetUp,
    exists=errors.DuplicateMessage,
    other=errors.StoreError,
)


def code_of(error: AzureError) -> str:
    """Return the service's error code, such as ``QueueNotFound``; empty without an answer."""
    code: object = getattr(error, "error_code", None) or _headers(error).get("x-ms-error-code", "")
    return str(getattr(code, "value", code))


def _headers(error: BaseException | None) -> Mapping[str, str]:
    return cast("Mapping[str, str]", getattr(getattr(error, "response", None), "headers", {}))


def retry_after(error: BaseException | None) -> timedelta | None:
    """Return the pause that the service asked for, at most five minutes.

    It is read from the ``__cause__`` of our errors.
    """
    headers = _headers(error.__cause__ if isinstance(error, errors.PostdateError) else error)
    for name, unit in _RETRY_AFTER.items():
        text = headers.get(name, "")
        if text.isascii() and text.isdigit():
            return min(int(text[:9]) * unit, _LONGEST_RETRY_AFTER)
    return None


def translate(error: AzureError, error_types: ErrorTypes, target: str) -> errors.PostdateError:
    """Return the error for an answer.

    ``target`` names the target without secrets: ``queue 'a' of Azure account 'b'``.
    """
    if not isinstance(error, HttpResponseError) or (error.status_code or 0) < 400:
        return error_types.unreachable(f"{target} cannot be reached: {errors.first_line(error)}")
    status, code = error.status_code or 0, code_of(error)
    answer = f"{status} {code or error.reason or 'without a reason'}"
    if status in {401, 403}:
        return error_types.unreachable(
            f"{target} refuses this client ({answer}): check the name of the account, its key or signature, and the "
            f"clock of "
            f"this "
            f"machine, which must be right to 15 minutes"
        )
    if status in {408, 429} or status >= 500:
        state = "is throttled" if status in {429, 503} else "cannot answer now"
        pause = retry_after(error)
        pause_text = "" if pause is None else f"; it asks for a pause of {pause.total_seconds():g} s"
        return error_types.unreachable(f"{target} {state} ({answer}){pause_text}")
    if code in _TO_CREATE:
        return error_types.missing(f"{target} does not exist ({answer}); create it: {_TO_CREATE[code]}")
    return _refusal(error_types, code, status, f"{target}: {answer}: {errors.first_line(error)}")


def _refusal(error_types: ErrorTypes, code: str, status: int, text: str) -> errors.PostdateError:
    """Return the error for a status between 400 and 499. A code that is in no list is an outage of the target."""
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
    """Suppress the error with the code ``code``, by which the service says that the thing to create exists already."""
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
    # The SDK does not translate some of these errors, such as that of a body that is cut short.
    except (ClientError, OSError) as error:
        raise error_types.unreachable(f"{target} cannot be reached: {errors.first_line(error)}") from error
