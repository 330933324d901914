"""Names in MariaDB: quoted, and refused where the server would refuse or change them."""

from __future__ import annotations

from typing import Final

from postdate.backends.rowlocks.names import RowLockNames, Spelling, check_not_ours
from postdate.errors import ConfigurationError

LONGEST_NAME: Final = 64


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """Return a text literal that is safe whatever the server makes of backslashes."""
    return f"CONVERT(X'{text.encode().hex()}' USING utf8mb4)" if "\\" in text else "'" + text.replace("'", "''") + "'"


def check_name(name: str, what: str) -> str:
    """Return ``name`` if MariaDB can have it.

    Raises:
        ConfigurationError: blank, over 64 characters, with a NUL, a space at its end, or a character outside the basic
            plane (emoji and the like), or it could be mistaken for one of Postdate's own tables.
    """
    if not name.strip() or "\0" in name or name.endswith(" "):
        raise ConfigurationError(f"{what} must not be blank, end in a space or have NUL characters: {name!r}")
    if len(name) > LONGEST_NAME:
        raise ConfigurationError(
            f"{what} {name!r} has {len(name)} characters; MariaDB takes {LONGEST_NAME}: choose a shorter one "
            f"(table=... for a store)"
        )
    beyond = [character for character in name if ord(character) > 0xFFFF or 0xD800 <= ord(character) < 0xE000]
    if beyond:
        raise ConfigurationError(f"{what} {name!r} has {beyond[0]!r}, which MariaDB does not take in names")
    return check_not_ours(name, what)


class MariaDbNames(RowLockNames):
    """The names of one store; its schema is a database, and names of locks are server-wide."""

    spelling = Spelling("postdate.backends.mariadb", quoted, literal, check_name)
