"""The names of loads, which are headers of their messages. Source: ADR 0064."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from postdate.messages import Headers, Origin, check_text, origin_of

LOAD_LIMIT: Final = 200
"""Characters in the name of a load."""


def check_load(name: str) -> None:
    """Refuse a name that no load can have: blank, longer than 200 characters, or no valid text.

    Raises:
        InvalidMessage: shows the name.
    """
    check_text(name, "the name of the load", LOAD_LIMIT)


def load_of(headers: Mapping[str, str]) -> str | None:
    """Return the load of a message with these headers; ``None`` for a message that belongs to none."""
    return headers.get(Headers.LOAD) if origin_of(headers) is Origin.APPLICATION else None
