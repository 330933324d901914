"""Names in SQL Server: quoted by brackets, and refused where the server would refuse them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from postdate.errors import ConfigurationError

LONGEST_NAME = 128
_OURS = "postdate_"


def quoted(name: str) -> str:
    """Return a name as SQL, whatever is in it."""
    return "[" + name.replace("]", "]]") + "]"


def literal(text: str) -> str:
    """Return a text as SQL."""
    return "N'" + text.replace("'", "''") + "'"


def check_name(name: str, what: str) -> str:
    """Return ``name`` if SQL Server can have it.

    Raises:
        ConfigurationError: blank, over 128 UTF-16 units, with a NUL character or a lone surrogate, or a table that
            would be mistaken for one of Postdate's own.
    """
    if not name.strip() or any(character == "\0" or 0xD800 <= ord(character) < 0xE000 for character in name):
        raise ConfigurationError(f"{what} must not be blank or have NUL characters or lone surrogates: {name!r}")
    units = len(name.encode("utf-16-le")) // 2
    if units > LONGEST_NAME:
        raise ConfigurationError(
            f"{what} {name!r} has {units} UTF-16 units; SQL Server takes {LONGEST_NAME}: choose a shorter one "
            f"(table=... for a store)"
        )
    if what == "table" and name.lower().startswith(_OURS):
        raise ConfigurationError(f"table {name!r} would stand among Postdate's own: names with {_OURS!r} are taken")
    return name


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one store, as they stand in SQL with parameters (a ``%`` doubled).

    Args:
        schema: that the tables are in.
        table: of the waiting messages.
    """

    schema: str
    table: str

    def __post_init__(self) -> None:
        check_name(self.schema, "schema")
        check_name(self.table, "table")

    def plain(self, name: str) -> str:
        """Return a name in the schema for a statement without parameters."""
        return f"{quoted(self.schema)}.{quoted(name)}"

    def of(self, name: str) -> str:
        """Return one of Postdate's own names for a statement with parameters."""
        return self.plain(_OURS + name).replace("%", "%%")

    @property
    def pending(self) -> str:
        """The table of waiting messages for a statement with parameters."""
        return self.plain(self.table).replace("%", "%%")

    def lock(self, what: str) -> str:
        """Return the name of an application lock; they are compared without regard to case beyond 32 characters."""
        digest = hashlib.md5(self.schema.encode(), usedforsecurity=False).hexdigest()
        return f"postdate {digest[:16]} {what}"
