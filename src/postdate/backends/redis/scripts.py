"""The scripts that run in the server: each is one file of ``lua``, behind the functions that they share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

_FOLDER: Final = "lua"


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
    """Return the script of a file."""
    folder = files("postdate.backends.redis") / _FOLDER
    parts = [(folder / f"{each}.lua").read_text(encoding="utf-8") for each in ("common", name)]
    text = "\n".join(parts)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
