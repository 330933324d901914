"""Names in PostgreSQL: any characters, quoted; a name that the server would silently cut is refused.

Also the migrations of a schema, and SQL for administrators, which is harmless when it is run again.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from postdate.backends.sql.migrations import (
    Step,
    fill_placeholders,
    migrations,
    oldest_versions,
    strip_comments,
    too_old_advice,
)
from postdate.errors import ConfigurationError
from postdate.ports.scanning import can_store_text

LONGEST_NAME_BYTES = 63  # PostgreSQL cuts longer names
DEFAULT_SCHEMA = "postdate"


def quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def check_name(name: str, what: str) -> str:
    """Return ``name``; raise `ConfigurationError` if it is blank, is no UTF-8, or is longer than 63 bytes of it."""
    if not name.strip() or not can_store_text(name):
        raise ConfigurationError(f"{what} must not be blank or have NUL characters or halves of characters: {name!r}")
    if (size := len(name.encode())) > LONGEST_NAME_BYTES:
        raise ConfigurationError(
            f"{what} {name!r} has {size} bytes; PostgreSQL allows at most {LONGEST_NAME_BYTES} and would cut off "
            f"the rest: "
            f"choose a shorter one (table=... for a store)"
        )
    return name


@dataclass(frozen=True, slots=True)
class SchemaNames:
    """The names of one schema in SQL.

    ``name_of`` is for statements with parameters, in which ``%`` is doubled; ``qualified_name`` is for other
    statements.
    """

    schema: str

    def __post_init__(self) -> None:
        check_name(self.schema, "schema")

    def name_of(self, name: str) -> str:
        return self.qualified_name(name).replace("%", "%%")

    def qualified_name(self, name: str) -> str:
        return f"{quote_name(self.schema)}.{quote_name(name)}"

    def script(self, required: Sequence[Step]) -> str:
        """Return migrations as SQL for an administrator."""
        refusals = [_refusal(self.schema, *each) for each in oldest_versions(required).items()]
        guarded = [_guarded_migration(step, self.schema) for step in required]
        return _transaction([foundation(self.schema), *refusals, *guarded, _rights(self.schema)])

    @property
    def channel(self) -> str:
        """The channel of notifications; a schema's name is never too long for one."""
        return "postdate_" + hashlib.md5(self.schema.encode(), usedforsecurity=False).hexdigest()

    @property
    def lock_class(self) -> int:
        """The first key of the advisory locks that processes have on their numbers."""
        digest = hashlib.md5(b"postdate " + self.schema.encode(), usedforsecurity=False).digest()
        return int.from_bytes(digest[:4], "big", signed=True)


def mark_statement(schema: str, step: Step) -> str:
    return (
        f"INSERT INTO {quote_name(schema)}.migration (subject, version, name) "
        f"VALUES ({literal(step.subject)}, {step.version}, {literal(step.name)})"
    )


def foundation(schema: str) -> str:
    return (
        f"CREATE SCHEMA IF NOT EXISTS {quote_name(schema)};\n"
        f"CREATE TABLE IF NOT EXISTS {quote_name(schema)}.migration (\n"
        f"    subject text, version integer, name text NOT NULL, PRIMARY KEY (subject, version)\n);"
    )


def steps(schema: str, table: str | None) -> tuple[Step, ...]:
    """Return the migrations of a schema and, if given, of a store's table in it; in order."""
    check_name(schema, "schema")
    replacements = {
        "{schema}": quote_name(schema),
        "{schema_in_text}": quote_name(schema).replace("'", "''"),
    }
    migrations = _steps("", "database", replacements)
    if table is not None:
        check_name(table, "table")
        replacements |= {"{table}": f"{quote_name(schema)}.{quote_name(table)}", "{name}": literal(table)}
        migrations += _steps(table, "store", replacements)
    return migrations


def part_steps(schema: str, part: str, table: str) -> tuple[Step, ...]:
    """Return the migrations of a part (``sagas``, ``outbox``) with a table of its own, whose name identifies them."""
    return tuple(  # With comments, which are for administrators.
        Step(
            table, each.version, each.name, (each.sql.replace("{schema}", quote_name(schema)).strip(),), each.is_initial
        )
        for each in migrations("postdate.backends.postgres", part)
    )


def _steps(subject: str, part: str, replacements: Mapping[str, str]) -> tuple[Step, ...]:
    return tuple(
        Step(
            subject,
            each.version,
            each.name,
            (fill_placeholders(strip_comments(each.sql), replacements),),
            each.is_initial,
        )
        for each in migrations("postdate.backends.postgres", part)
    )


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def sql(text: str) -> bytes:
    """Return a statement for the driver, which accepts only bytes and literal strings.

    Names in it are quoted already.
    """
    return text.encode()


def array(numbers: Iterable[int]) -> str:
    """Return numbers in the text form of an array, which is far faster than the driver's conversion of a list."""
    return "{" + ",".join(map(str, numbers)) + "}"


def lookup_join(columns: str, table: str, condition: str, name: str) -> str:
    """Return a join that reads one row of ``table`` by a unique index for each row on its left.

    ``condition`` equates all columns of the index with values, or with columns on its left. OFFSET 0 prevents any other
    order of the planner. If the planner believes that a table is empty, it would read the whole table once, and would
    keep that plan when the table has a million rows. Names in ``condition`` are those of the table.
    """
    return f"CROSS JOIN LATERAL (SELECT {columns} FROM {table} WHERE {condition} OFFSET 0) AS {name}"


def ctids_of(keys: str, table: str, condition: str) -> str:
    """Return an array of the places (``ctid``) of the rows that :func:`lookup_join` finds for ``keys``.

    UPDATE and DELETE ``WHERE ctid = ANY (…)`` touch only these rows, whatever the planner believes. A row that another
    transaction changes meanwhile is found in its old place and checked in its new version. Therefore a condition on
    values that others may change stands in the UPDATE or DELETE itself.
    """
    return f"ARRAY(SELECT place FROM {keys} {lookup_join('ctid AS place', table, condition, 'target')})"


def own_table_script(schema: str, table: str, statements: Sequence[str]) -> str:
    """Return the SQL for one table without numbered migrations; the first statement creates the table."""
    name = f"{quote_name(schema)}.{quote_name(table)}"
    body = ";\n".join(statements)
    tag = _tag(body)
    create_table = f"DO {tag}\nBEGIN\nIF to_regclass({literal(name)}) IS NULL THEN\n{body};\nEND IF;\nEND\n{tag};"
    create_schema = (
        f"DO {tag}\nBEGIN\nIF to_regnamespace({literal(quote_name(schema))}) IS NULL THEN\n"
        f"CREATE SCHEMA {quote_name(schema)};\nEND IF;\nEND\n{tag};"
    )
    rights = _comment(
        f"What a role needs that runs Postdate and may not create tables:\n"
        f"GRANT USAGE ON SCHEMA {quote_name(schema)} TO the_role;\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name} TO the_role;"
    )
    return _transaction([create_schema, create_table, rights])


def queues_script(schema: str, queues: Sequence[str]) -> str:
    rows = ", ".join(f"({literal(name)})" for name in queues)
    return _transaction(
        [f"INSERT INTO {quote_name(schema)}.queue (name)\nVALUES {rows} ON CONFLICT (name) DO NOTHING;"]
    )


def _transaction(parts: Sequence[str]) -> str:
    return "\n\n".join(["BEGIN;", *parts, "COMMIT;"]) + "\n"


def _guarded_migration(step: Step, schema: str) -> str:
    """Return a migration that runs only as the next one."""
    is_next = "IS NULL" if step.is_initial else f"= {step.version - 1}"
    body = "\n".join([*step.statements, f"{mark_statement(schema, step)};"])
    return _if_block(f"{_newest_mark_query(schema, step.subject)} {is_next}", body)


def _refusal(schema: str, subject: str, oldest: int) -> str:
    """Return a statement that fails in a schema that is too old."""
    text = f"schema {schema!r} is too old: {too_old_advice(oldest)}"
    body = f"RAISE EXCEPTION USING MESSAGE = {literal(text)};"
    return _if_block(f"{_newest_mark_query(schema, subject)} < {oldest}", body)


def _newest_mark_query(schema: str, subject: str) -> str:
    return f"(SELECT max(version) FROM {quote_name(schema)}.migration WHERE subject = {literal(subject)})"


def _if_block(condition: str, body: str) -> str:
    """Return a DO block whose quoting suits any name in it."""
    tag = _tag(condition + body)
    return f"DO {tag}\nBEGIN\nIF {condition} THEN\n{body}\nEND IF;\nEND\n{tag};"


def _tag(body: str) -> str:
    tag = "$postdate$"
    while tag in body:
        tag = f"{tag[:-1]}_$"
    return tag


def _rights(schema: str) -> str:
    name = quote_name(schema)
    return _comment(
        f"What a role needs that runs Postdate and may not create tables:\n"
        f"GRANT USAGE ON SCHEMA {name} TO the_role;\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {name} TO the_role;\n"
        f"GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA {name} TO the_role;\n"
        f"And on the database, if it was revoked from PUBLIC: GRANT TEMPORARY ON DATABASE ... TO the_role;"
    )


def _comment(text: str) -> str:
    return textwrap.indent(text, "-- ", lambda line: True)
