"""What the numbers of servers' errors mean, and what is said then, for every server alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from postdate.errors import (
    MessageTooLarge,
    PostdateError,
    StoreFull,
    StoreNotSetUp,
    StoreNotWritable,
)

Meaning = type[PostdateError]

_SAID: Final[Mapping[type[PostdateError], str]] = {
    StoreNotSetUp: "{where} lacks tables of Postdate ({said}); run `postdate setup`",
    StoreFull: "{where} has no room ({said}); nothing was written; make room and go on",
    StoreNotWritable: "{where} refuses ({said}); check user, password and grants",
    MessageTooLarge: "{where} refuses ({said}); raise the server's max_allowed_packet",
}


def meaning_of(number: int, said: str, where: str, meanings: Mapping[Meaning, frozenset[int]]) -> PostdateError | None:
    """Return the error for a number; ``None``: it is in none of ``meanings``."""
    for meaning, numbers in meanings.items():
        if number in numbers:
            return meaning(_SAID.get(meaning, "{where}: {said}").format(where=where, said=said))
    return None
