"""Names in SQL: quoted as the server requires, and refused where it would refuse or change them."""

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
        quoted: returns a name as SQL.
        literal: returns a text as SQL.
        check: ``(name, kind of name)``; raises ``ConfigurationError`` for one that the server cannot have.
    """

    room: str
    quoted: Callable[[str], str]
    literal: Callable[[str], str]
    check: Callable[[str, str], object]


def check_not_ours(name: str, what: str) -> str:
    """Return ``name``; raise `ConfigurationError` for a table whose name begins as those of Postdate."""
    if what == "table" and name.lower().startswith(_OURS):
        raise ConfigurationError(f"table {name!r} would stand among Postdate's own: names with {_OURS!r} are taken")
    return name


@dataclass(frozen=True, slots=True)
class RowLockNames:
    """The names of one store in SQL; those of statements with parameters have a ``%`` doubled.

    ``schema`` is a database in MariaDB; ``table`` is that of the waiting messages.
    """

    spelling: ClassVar[Spelling]

    schema: str
    table: str

    def __post_init__(self) -> None:
        self.spelling.check(self.schema, "schema")
        self.spelling.check(self.table, "table")

    def plain(self, name: str) -> str:
        """Return a name in the schema, for a statement without parameters."""
        return f"{self.spelling.quoted(self.schema)}.{self.spelling.quoted(name)}"

    def of(self, name: str) -> str:
        """Return one of Postdate's own names, for a statement with parameters."""
        return self.plain(_OURS + name).replace("%", "%%")

    @property
    def pending(self) -> str:
        """The table of waiting messages, for a statement with parameters."""
        return self.plain(self.table).replace("%", "%%")

    @property
    def in_statements(self) -> Mapping[str, str]:
        ours = ("record", "store", "holder", "quarantine")
        return {"{pending}": self.pending, **{f"{{{name}}}": self.of(name) for name in ours}}

    @property
    def in_migrations(self) -> Mapping[str, str]:
        return {
            "{schema}": self.spelling.quoted(self.schema),
            "{table}": self.plain(self.table),
            "{name}": self.spelling.literal(self.table),
        }

    def lock(self, what: str) -> str:
        """Return the name of a server lock: 64 characters at most, different for each schema."""
        digest = hashlib.md5(self.schema.encode(), usedforsecurity=False).hexdigest()
        return f"postdate {digest[:16]} {what}"
