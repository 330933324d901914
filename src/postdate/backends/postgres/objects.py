"""The tables, sequences and indexes that the migrations create, and those of them that a schema lacks.

A database may be restored without its indexes, or without a table, while the marks of its migrations are there. Without
an index every statement still works, and reads the whole table. So the catalogue is compared with the text of the
migrations. Indexes are compared by what they index and not by their names, because some have none in the migrations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import psycopg

from postdate.backends.postgres.names import quote_name, sql
from postdate.backends.sql.migrations import fill_placeholders, migrations, strip_comments

_PARTS: Final = {"": "database", "saga": "sagas", "outbox": "outbox"}
"""The folder of the migrations of a subject. Any other subject is the table of a store."""

_RELATION: Final = re.compile(r"CREATE (?:TABLE|SEQUENCE) (\S+)")
_TABLE: Final = re.compile(r"CREATE TABLE (\S+) \((.*?)\n\)", re.DOTALL)
_INDEX: Final = re.compile(r"CREATE (UNIQUE )?INDEX (?:\w+ )?ON (\S+)(?: USING (\w+))? \(([\w, ]+)\)([^;]*)")
_CONSTRAINT: Final = re.compile(r"(PRIMARY KEY|UNIQUE) \(([\w, ]+)\)")
_COLUMN_CONSTRAINT: Final = re.compile(r"(\w+) .*\b(PRIMARY KEY|UNIQUE)\b")

_RELATIONS: Final = b"""
    SELECT relname FROM pg_class
    WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = %(schema)s) AND relkind IN ('r', 'p', 'S')"""
_INDEXES: Final = b"""
    SELECT t.relname, x.indisunique, m.amname, x.indpred IS NOT NULL, ARRAY(
        SELECT a.attname::text FROM unnest(x.indkey::smallint[]) WITH ORDINALITY AS key (number, position)
        JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = key.number ORDER BY position)
    FROM pg_index AS x
    JOIN pg_class AS t ON t.oid = x.indrelid
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_am AS m ON m.oid = i.relam
    WHERE t.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = %(schema)s) AND x.indisvalid"""


@dataclass(frozen=True, slots=True)
class PostgresIndex:
    """An index, also that of a primary key or of a unique constraint; ``statement`` creates it again."""

    table: str
    columns: tuple[str, ...]
    is_unique: bool
    method: str = "btree"
    is_partial: bool = False
    statement: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"the index of {self.table!r} on ({', '.join(self.columns)})"


@dataclass(frozen=True, slots=True)
class MissingObjects:
    """What a schema lacks. Indexes can be created again; the rows of a table cannot."""

    relations: Sequence[str]
    indexes: Sequence[PostgresIndex]

    def texts(self) -> list[str]:
        return [*(f"the table or sequence {name!r}" for name in self.relations), *map(str, self.indexes)]


def find_missing_objects(connection: psycopg.Connection[Any], schema: str, subjects: Iterable[str]) -> MissingObjects:
    """Return what a schema lacks of the objects of some parts. It reads the catalogue only.

    ``subjects`` are those of migrations that were applied, up to the newest one.
    """
    values = {"schema": schema}
    relations = {name for (name,) in connection.execute(_RELATIONS, values)}
    indexes = {
        PostgresIndex(table, tuple(columns), is_unique, method, is_partial)
        for table, is_unique, method, is_partial, columns in connection.execute(_INDEXES, values)
    }
    missing_relations, missing_indexes = list[str](), list[PostgresIndex]()
    for subject in subjects:
        required_relations, required_indexes = _required_objects(schema, subject)
        missing_relations += [each for each in required_relations if each not in relations]
        missing_indexes += [each for each in required_indexes if each not in indexes]
    # The indexes of a missing table are missing with it.
    return MissingObjects(missing_relations, [each for each in missing_indexes if each.table not in missing_relations])


@cache
def _required_objects(schema: str, subject: str) -> tuple[Sequence[str], Sequence[PostgresIndex]]:
    """Return the tables and sequences, and the indexes, of a subject in a new database."""
    part = _PARTS.get(subject, "store")
    files = migrations("postdate.backends.postgres", part)
    (first,) = (number for number, each in enumerate(files) if each.is_initial)
    text = "\n".join(strip_comments(each.sql) for each in files[first:])
    names = {"{schema}": quote_name(schema), "{table}": f"{quote_name(schema)}.{quote_name(subject)}"}

    def name_of(placeholder: str) -> str:
        return subject if placeholder == "{table}" else placeholder.removeprefix("{schema}.").removesuffix(";")

    def indexes() -> Iterator[PostgresIndex]:
        for match in _INDEX.finditer(text):
            unique, table, method, columns, remainder = match.groups()
            statement = fill_placeholders(match[0], names)
            is_partial = "WHERE" in remainder
            yield PostgresIndex(
                name_of(table), _columns(columns), bool(unique), method or "btree", is_partial, statement
            )
        for table, body in _TABLE.findall(text):
            for line in body.splitlines():
                constraint = _CONSTRAINT.match(line.strip())
                if constraint is not None:
                    kind, columns = constraint.groups()
                elif (of_column := _COLUMN_CONSTRAINT.match(line.strip())) is not None:
                    columns, kind = of_column.groups()
                else:
                    continue
                statement = fill_placeholders(f"ALTER TABLE {table} ADD {kind} ({columns})", names)
                yield PostgresIndex(name_of(table), _columns(columns), is_unique=True, statement=statement)

    return tuple(name_of(match[1]) for match in _RELATION.finditer(text)), tuple(indexes())


def _columns(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


def restore_indexes(connection: psycopg.Connection[Any], missing: MissingObjects) -> None:
    """Create the missing indexes, in the open transaction. Writers of a table wait until its index is complete."""
    for each in missing.indexes:
        connection.execute(sql(each.statement))
