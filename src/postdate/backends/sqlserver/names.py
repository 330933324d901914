"""Names in SQL Server: quoted by brackets, and refused where the server would refuse them."""

from __future__ import annotations

from typing import Final

from postdate.backends.rowlocks.names import RowLockNames, Spelling, check_not_ours
from postdate.errors import ConfigurationError

LONGEST_NAME: Final = 128


def quoted(name: str) -> str:
    return "[" + name.replace("]", "]]") + "]"


def literal(text: str) -> str:
    return "N'" + text.replace("'", "''") + "'"


def check_name(name: str, what: str) -> str:
    """Return ``name`` if SQL Server can have it.

    Raises:
        ConfigurationError: blank, over 128 UTF-16 units, with a NUL or a lone surrogate, or it could be mistaken for
            one of Postdate's own tables.
    """
    if not name.strip() or any(character == "\0" or 0xD800 <= ord(character) < 0xE000 for character in name):
        raise ConfigurationError(f"{what} must not be blank or have NUL characters or lone surrogates: {name!r}")
    units = len(name.encode("utf-16-le")) // 2
    if units > LONGEST_NAME:
        raise ConfigurationError(
            f"{what} {name!r} has {units} UTF-16 units; SQL Server takes {LONGEST_NAME}: choose a shorter one "
            f"(table=... for a store)"
        )
    return check_not_ours(name, what)


class SqlServerNames(RowLockNames):
    """The names of one store; those of locks are compared without regard to case beyond 32 characters."""

    spelling = Spelling("postdate.backends.sqlserver", quoted, literal, check_name)
