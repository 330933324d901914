"""Names of tables in SQL: quoted as the server has it, and refused where it would refuse or change them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from postdate.errors import ConfigurationError

_OURS: Final = "postdate_"


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a server writes names and texts.

    Args:
        room: package of the backend, which has the migrations.
        quoted: returns a name as SQL, whatever is in it.
        literal: returns a text as SQL.
        check: raises ``ConfigurationError`` for a name that the server cannot have; called with the name and with
            what it names.
    """

    room: str
    quoted: Callable[[str], str]
    literal: Callable[[str], str]
    check: Callable[[str, str], object]


def check_not_ours(name: str, what: str) -> str:
    """Return ``name``, unless it is the name of a table that would be mistaken for one of Postdate's own.

    Raises:
        ConfigurationError: it begins as they do.
    """
    if what == "table" and name.lower().startswith(_OURS):
        raise ConfigurationError(f"table {name!r} would stand among Postdate's own: names with {_OURS!r} are taken")
    return name


@dataclass(frozen=True, slots=True)
class RowLockNames:
    """The names of one store, as they stand in SQL with parameters (a ``%`` doubled).

    Args:
        schema: that the tables are in; in MariaDB it is the database.
        table: of the waiting messages.
    """

    spelling: ClassVar[Spelling]

    schema: str
    table: str

    def __post_init__(self) -> None:
        self.spelling.check(self.schema, "schema")
        self.spelling.check(self.table, "table")

    def plain(self, name: str) -> str:
        """Return a name in the schema for a statement without parameters."""
        return f"{self.spelling.quoted(self.schema)}.{self.spelling.quoted(name)}"

    def of(self, name: str) -> str:
        """Return one of Postdate's own names for a statement with parameters."""
        return self.plain(_OURS + name).replace("%", "%%")

    @property
    def pending(self) -> str:
        """The table of waiting messages for a statement with parameters."""
        return self.plain(self.table).replace("%", "%%")

    @property
    def in_statements(self) -> Mapping[str, str]:
        """What stands for the tables in templates of statements."""
        ours = ("record", "store", "holder", "quarantine")
        return {"{pending}": self.pending, **{f"{{{name}}}": self.of(name) for name in ours}}

    @property
    def in_migrations(self) -> Mapping[str, str]:
        """What stands for the names in numbered SQL."""
        return {
            "{schema}": self.spelling.quoted(self.schema),
            "{table}": self.plain(self.table),
            "{name}": self.spelling.literal(self.table),
        }

    def lock(self, what: str) -> str:
        """Return the name of a lock of the server: it has 64 characters at most, and tells schemas apart."""
        digest = hashlib.md5(self.schema.encode(), usedforsecurity=False).hexdigest()
        return f"postdate {digest[:16]} {what}"
