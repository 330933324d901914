"""Names in PostgreSQL: any characters, quoted; refused where the server would cut them off in silence."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from postdate.errors import ConfigurationError
from postdate.migrations import Migration, migrations

LONGEST_NAME_BYTES = 63
DEFAULT_SCHEMA = "postdate"


def quoted(name: str) -> str:
    """Return a name as SQL, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def check_name(name: str, what: str) -> str:
    """Return ``name`` if PostgreSQL can have it.

    Raises:
        ConfigurationError: it is blank, has a NUL character, or is longer than 63 bytes of UTF-8.
    """
    if not name.strip() or "\0" in name:
        raise ConfigurationError(f"{what} must not be blank or have NUL characters: {name!r}")
    size = len(name.encode())
    if size > LONGEST_NAME_BYTES:
        raise ConfigurationError(
            f"{what} {name!r} has {size} bytes; PostgreSQL takes {LONGEST_NAME_BYTES} and would cut off the rest: "
            f"choose a shorter one (table=... for a store)"
        )
    return name


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one schema, as they stand in SQL with parameters (a ``%`` doubled)."""

    schema: str

    def __post_init__(self) -> None:
        check_name(self.schema, "schema")

    def of(self, name: str) -> str:
        """Return a name in the schema for a statement with parameters."""
        return f"{quoted(self.schema)}.{quoted(name)}".replace("%", "%%")

    @property
    def channel(self) -> str:
        """The channel of notifications: the schema's name may be as long as a channel's."""
        return "postdate_" + hashlib.md5(self.schema.encode(), usedforsecurity=False).hexdigest()

    @property
    def lock_class(self) -> int:
        """The first key of the advisory locks that say who lives."""
        digest = hashlib.md5(b"postdate " + self.schema.encode(), usedforsecurity=False).digest()
        return int.from_bytes(digest[:4], "big", signed=True)


@dataclass(frozen=True, slots=True)
class Step:
    """One migration of a schema, or of the table of one store in it.

    Args:
        subject: empty for the schema, else the name of the table.
        version: number.
        name: what it does.
        sql: its statements, without parameters.
    """

    subject: str
    version: int
    name: str
    sql: str

    def mark(self, schema: str) -> str:
        """Return the statement that says it was done."""
        return (
            f"INSERT INTO {quoted(schema)}.migration (subject, version, name) "
            f"VALUES ({literal(self.subject)}, {self.version}, {literal(self.name)})"
        )


def foundation(schema: str) -> str:
    """Return the statements that come before every migration."""
    return (
        f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)};\n"
        f"CREATE TABLE IF NOT EXISTS {quoted(schema)}.migration (\n"
        f"    subject text, version integer, name text NOT NULL, PRIMARY KEY (subject, version)\n);"
    )


def steps(schema: str, table: str | None) -> tuple[Step, ...]:
    """Return the migrations of a schema and, if given, of a store's table in it; in order."""
    check_name(schema, "schema")
    replacements = {
        "{schema}": quoted(schema),
        "{schema_in_text}": quoted(schema).replace("'", "''"),
    }
    found = [_step("", each, replacements) for each in migrations("postgres")]
    if table is not None:
        check_name(table, "table")
        replacements |= {"{table}": f"{quoted(schema)}.{quoted(table)}", "{name}": literal(table)}
        found += [_step(table, each, replacements) for each in migrations("postgres_store")]
    return tuple(found)


def _step(subject: str, migration: Migration, replacements: dict[str, str]) -> Step:
    sql = re.sub(r"\{\w+\}", lambda found: replacements[found[0]], _without_comments(migration.sql))
    return Step(subject, migration.version, migration.name, sql)


def _without_comments(sql: str) -> str:
    return "\n".join(
        line.partition(" -- ")[0].rstrip() for line in sql.splitlines() if not line.startswith("--")
    ).strip()


def literal(text: str) -> str:
    """Return a text as SQL."""
    return "'" + text.replace("'", "''") + "'"


def sql(text: str) -> bytes:
    """Return a statement as the driver takes it from programs that put names into it themselves, quoted."""
    return text.encode()


def array(numbers: Iterable[int]) -> str:
    """Return numbers as PostgreSQL writes an array: far quicker than the driver's way with a list."""
    return "{" + ",".join(map(str, numbers)) + "}"
