"""By what the sessions of this process are found on a server: a mark at the end of the name of their application.

One for all adapters of a process: whichever of them shows life shows it for all, and when the process is ended for its
silence the sessions of those that show none, as of an outbox and of timeouts, end with it. Source: ADR 0007.
"""

from __future__ import annotations

import os
import secrets
from functools import cache
from typing import Final

from postdate.backends.postgres.names import LONGEST_NAME_BYTES

_MARK_BYTES: Final = 8


def mark() -> str:
    """Return the mark of this process, lower-case hexadecimal; after a fork there are two."""
    return _mark_of(os.getpid())


@cache
def _mark_of(pid: int) -> str:
    return secrets.token_hex(_MARK_BYTES)


def session_name(given: str) -> str:
    """Return the name of a session: the given one, cut where need be, and ours, which tells an operator who it is."""
    ours = f"postdate {os.getpid()} {mark()}"  # the server cuts long names off at their end
    kept = given.encode()[: LONGEST_NAME_BYTES - 1 - len(ours)].decode(errors="ignore")
    return f"{kept} {ours}".strip()


def carries(name: str, wanted: str) -> str:
    """Return the condition that the name of a session ends with a mark; what is no mark, no session carries.

    Args:
        name: expression of the name.
        wanted: expression of the mark; it may come from a table that others write to.
    """
    digits = 2 * _MARK_BYTES
    return f"({wanted} ~ '^[0-9a-f]{{{digits}}}$' AND right({name}, {digits}) = {wanted})"
