"""The meanings of servers' errors, by number or class, with the same texts for every server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from postdate.errors import (
    MessageTooLarge,
    PostdateError,
    StoreFull,
    StoreNotSetUp,
    StoreNotWritable,
    StoreReadOnly,
)

Meaning = type[PostdateError]
Meanings = Mapping[Meaning, Collection[int | str]]
"""Our error for each number or class of a server's errors; a number goes before its class."""

_SAID: Final[Mapping[Meaning, str]] = {
    StoreNotSetUp: "{where} lacks tables of Postdate ({said}); run `postdate setup`",
    StoreFull: "{where} has no room ({said}); nothing was written; make room and go on",
    StoreNotWritable: "{where} refuses ({said}); check user, password and grants",
    StoreReadOnly: "{where} is read-only ({said}): after a fail-over it is a replica now, or somebody has set it so; "
    "the address must lead to the server that takes writes",
    MessageTooLarge: "{where} refuses ({said}); raise the server's max_allowed_packet",
}


def told(meaning: Meaning, said: str, where: str) -> PostdateError:
    """Return the error for a meaning, with the server's own text; ``where``: the address without the password."""
    return meaning(_SAID.get(meaning, "{where}: {said}").format(where=where, said=said))


def meaning_of(keys: Iterable[int | str], meanings: Meanings) -> Meaning | None:
    """Return the meaning of the first known key; ``None``: all are unknown."""
    return next((meaning for key in keys for meaning, known in meanings.items() if key in known), None)
