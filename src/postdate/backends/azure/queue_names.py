"""Names of queues as Azure takes them. Source: specification 3.1.

Azure takes 3 to 63 lower-case letters, digits and dashes, with no dash at either end and no two in a row. Names are
lower-cased; all endpoints that share queues must choose the same sanitizer for the rest:

``strict``
    Refuses other characters. Only the dots in the names of an endpoint's own queues, which are not the user's, become
    dashes as with upstream: ``sales-timeouts``, ``sales-timeoutsdispatcher``.
``dashes``
    Dots become dashes: ``sales.timeouts`` is ``sales-timeouts``, as with upstream. Otherwise like ``strict``.
``legacy``
    As version 7 of upstream: every other character becomes a dash, runs of dashes become one, and a name that is too
    long is cut and gets a hash of all of it.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Final

from postdate.errors import ConfigurationError

Sanitizer = Callable[[str], str]
"""From a name in lower case to the name of the queue."""

SHORTEST, LONGEST = 3, 63
_NAME: Final = re.compile(r"[a-z0-9](?:-?[a-z0-9])*")
_NOT_TAKEN: Final = re.compile(r"[^a-z0-9-]")
_DASHES: Final = re.compile(r"-{2,}")
_NUMBER_LENGTH: Final = 36
_OWN_QUEUE: Final = re.compile(r"\.(timeouts|timeoutsdispatcher)$")


def _strict(name: str) -> str:
    return _OWN_QUEUE.sub(r"-\1", name)


def _dashes(name: str) -> str:
    return name.replace(".", "-")


def _legacy(name: str) -> str:
    clean = _DASHES.sub("-", _NOT_TAKEN.sub("-", name))
    if len(clean) <= LONGEST:
        return clean
    # Upstream makes a GUID of the digest: its first three parts are numbers, lowest byte first.
    digest = hashlib.md5(name.encode(), usedforsecurity=False).digest()
    return f"{clean[: LONGEST - _NUMBER_LENGTH - 1]}-{uuid.UUID(bytes_le=digest)}"


SANITIZERS: Final[Mapping[str, Sanitizer]] = {"strict": _strict, "dashes": _dashes, "legacy": _legacy}


def sanitizer_of(choice: str | Sanitizer) -> Sanitizer:
    if callable(choice):
        return choice
    if choice not in SANITIZERS:
        raise ConfigurationError(f"sanitizer must be one of {', '.join(SANITIZERS)}, or a function, not {choice!r}")
    return SANITIZERS[choice]


def queue_name(name: str, sanitizer: Sanitizer) -> str:
    """Return Azure's name of a queue; raises `ConfigurationError` for a name that Azure does not take."""
    try:
        clean = sanitizer(name.lower())
    except Exception as error:
        raise ConfigurationError(f"the sanitizer of queue names failed for {name!r}: {error}") from error
    if _is_taken(clean):
        return clean
    shown = repr(name) if clean == name else f"{name!r}, which becomes {clean!r},"
    raise ConfigurationError(
        f"{shown} cannot be the name of a queue in Azure: {SHORTEST} to {LONGEST} letters, digits and single dashes, "
        f"beginning and ending with a letter or digit; {_mending(name)}"
    )


def _mending(name: str) -> str:
    """Return advice for a name that Azure does not take."""
    for choice in ("dashes", "legacy"):
        clean = SANITIZERS[choice](name.lower())
        if _is_taken(clean):
            return f"choose another, or sanitizer={choice!r}, which makes {clean!r} of it"
    return "choose another"


def _is_taken(name: str) -> bool:
    return SHORTEST <= len(name) <= LONGEST and _NAME.fullmatch(name) is not None
