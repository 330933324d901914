"""The scripts that run in the server: files of ``lua``, each after the functions of ``common.lua``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

_FOLDER: Final = "lua"
_ALSO_WHEN_FULL: Final = "#!lua flags=allow-oom\n"
_NOT_WHEN_FULL: Final = "#!lua\n"
"""Refused before it begins when the memory is full. A script without flags goes on if it removes something first."""

_MAKE_ROOM: Final = frozenset(
    {"aside", "discard", "finish", "move", "release", "remove", "roll_back", "settle", "undo"}
)
_LET_MAKE_ROOM: Final = frozenset({"beat", "claim", "little", "receive", "register", "retry", "unregister"})
"""The others need these first. When the memory is full, the server refuses every other script."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and its SHA-1 in hexadecimal digits, by which a server knows it after its first run."""

    text: str
    digest: str


@cache
def script(name: str) -> Script:
    """Return a script; ``settle`` is ``transact`` for ending messages, which is allowed when the memory is full."""
    folder = files("postdate.backends.redis") / _FOLDER
    file = "transact" if name == "settle" else name
    parts = [(folder / f"{each}.lua").read_text(encoding="utf-8") for each in ("common", file)]
    also = _ALSO_WHEN_FULL if name in _MAKE_ROOM | _LET_MAKE_ROOM else _NOT_WHEN_FULL if name == "transact" else ""
    text = also + "\n".join(parts)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
