"""The scripts that run in the server: each is one file of ``lua``, behind the functions that they share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

_FOLDER: Final = "lua"
_ALSO_WHEN_FULL: Final = "#!lua flags=allow-oom\n"
_NOT_WHEN_FULL: Final = "#!lua\n"
"""Refused before it begins. A script that says nothing of itself is let go on where it has removed something first."""

_MAKE_ROOM: Final = frozenset(
    {"aside", "discard", "finish", "move", "release", "remove", "roll_back", "settle", "undo"}
)
_LET_MAKE_ROOM: Final = frozenset({"beat", "claim", "little", "receive", "register", "retry", "unregister"})
"""Without these the others cannot be done. All else is refused by a server without memory."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and the digest by which a server knows it once it has run it.

    Args:
        text: in Lua.
        digest: SHA-1 of the text, in hexadecimal digits.
    """

    text: str
    digest: str


@cache
def script(name: str) -> Script:
    """Return the script of a file; ``settle`` is ``transact`` of what ends a message."""
    folder = files("postdate.backends.redis") / _FOLDER
    file = "transact" if name == "settle" else name
    parts = [(folder / f"{each}.lua").read_text(encoding="utf-8") for each in ("common", file)]
    also = _ALSO_WHEN_FULL if name in _MAKE_ROOM | _LET_MAKE_ROOM else _NOT_WHEN_FULL if name == "transact" else ""
    text = also + "\n".join(parts)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
