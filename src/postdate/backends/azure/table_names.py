"""Names of the table, of its leased container, and of the table of records. Source: ADR 0013."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from postdate.errors import ConfigurationError

LONGEST_NAME: Final = 63
_PATTERN: Final = "^[A-Za-z][A-Za-z0-9]{2,62}$"
_NAME: Final = re.compile(_PATTERN.removesuffix("$"), re.ASCII)


def default_table(endpoint: str) -> str:
    return "delays" + _hash(endpoint)


def normalize_table(name: str) -> str:
    """Return a table's name in lower case, because the leased container has the same name (row 77)."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} cannot be the name of an Azure table; it must match {_PATTERN}: a letter, then letters and "
            f"digits, 3 to {LONGEST_NAME} in all"
        )
    return name.lower()


def records_table(table: str) -> str:
    name = f"{table}records"
    return name if len(name) <= LONGEST_NAME else f"records{_hash(table)}"


def _hash(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
