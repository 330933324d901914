"""From the name of a queue, as endpoints write it, to one that Azure takes. Source: specification 3.1.

Azure takes 3 to 63 lower-case letters, digits and dashes, with no dash at either end and no two in a row. Names are put
into lower case; what happens to the rest is a choice that everyone who shares the queues must make alike:

``strict``
    Nothing. What Azure does not take is refused. Only the queues that an endpoint has beside its own are called
    ``sales-timeouts`` and ``sales-timeoutsdispatcher``, as upstream calls them, since their dots are not the user's.
``dashes``
    Dots become dashes, so that ``sales.timeouts`` is ``sales-timeouts``, as upstream calls that queue; a name without
    dots is what it is under ``strict``.
``legacy``
    As version 7 of upstream: whatever Azure does not take becomes a dash, runs of dashes one, and a name that is too
    long is cut and gets a number made from all of it.
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
    """Return what a choice by name means.

    Raises:
        ConfigurationError: there is no such choice.
    """
    if callable(choice):
        return choice
    if choice not in SANITIZERS:
        raise ConfigurationError(f"sanitizer must be one of {', '.join(SANITIZERS)}, or a function, not {choice!r}")
    return SANITIZERS[choice]


def queue_name(name: str, sanitizer: Sanitizer) -> str:
    """Return the name of the queue in Azure.

    Args:
        name: as endpoints write it.
        sanitizer: gets it in lower case.

    Raises:
        ConfigurationError: Azure takes no such name, or the sanitizer raised.
    """
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
    """Say what to do about a name that Azure does not take."""
    for choice in ("dashes", "legacy"):
        clean = SANITIZERS[choice](name.lower())
        if _is_taken(clean):
            return f"choose another, or sanitizer={choice!r}, which makes {clean!r} of it"
    return "choose another"


def _is_taken(name: str) -> bool:
    return SHORTEST <= len(name) <= LONGEST and _NAME.fullmatch(name) is not None
