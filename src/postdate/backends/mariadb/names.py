"""Names in MariaDB: quoted, and refused where the server would refuse or change them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from postdate.errors import ConfigurationError

LONGEST_NAME = 64
_OURS = "postdate_"


def quoted(name: str) -> str:
    """Return a name as SQL, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """Return a text as SQL, whatever the server thinks of backslashes."""
    return f"CONVERT(X'{text.encode().hex()}' USING utf8mb4)" if "\\" in text else "'" + text.replace("'", "''") + "'"


def check_name(name: str, what: str) -> str:
    """Return ``name`` if MariaDB can have it.

    Raises:
        ConfigurationError: blank, over 64 characters, with a NUL, a space at its end, or a character that MariaDB
            keeps out of names (emoji and the like), or a table that would be mistaken for one of Postdate's own.
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
    if what == "table" and name.lower().startswith(_OURS):
        raise ConfigurationError(f"table {name!r} would stand among Postdate's own: names with {_OURS!r} are taken")
    return name


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one store, as they stand in SQL with parameters (a ``%`` doubled).

    Args:
        schema: the database that the tables are in.
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
        """Return the name of a lock; locks have names for the whole server, of at most 64 characters."""
        digest = hashlib.md5(self.schema.encode(), usedforsecurity=False).hexdigest()
        return f"postdate {digest[:16]} {what}"
