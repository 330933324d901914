"""SQL for administrators: harmless when it is run again, or for another endpoint."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from postdate.backends.postgres.names import foundation, literal, mark_done, quoted, steps
from postdate.persistence.migrations import Step


def tables_script(schema: str, table: str | None) -> str:
    parts = [foundation(schema), *(_guarded(step, schema) for step in steps(schema, table)), _rights(schema)]
    return _transaction(parts)


def part_script(schema: str, part: Sequence[Step], *, with_queues: bool) -> str:
    """Return the SQL for a part (its migrations) with tables of its own.

    ``with_queues``: first the tables of the queues, whose transactions it shares.
    """
    before = steps(schema, None) if with_queues else ()
    guarded = [_guarded(step, schema) for step in (*before, *part)]
    return _transaction([foundation(schema), *guarded, _rights(schema)])


def own_table_script(schema: str, table: str, statements: Sequence[str]) -> str:
    """Return the SQL for one table without numbered migrations; the first statement makes the table."""
    name = f"{quoted(schema)}.{quoted(table)}"
    body = ";\n".join(statements)
    tag = _tag(body)
    make = f"DO {tag}\nBEGIN\nIF to_regclass({literal(name)}) IS NULL THEN\n{body};\nEND IF;\nEND\n{tag};"
    schema_too = (
        f"DO {tag}\nBEGIN\nIF to_regnamespace({literal(quoted(schema))}) IS NULL THEN\n"
        f"CREATE SCHEMA {quoted(schema)};\nEND IF;\nEND\n{tag};"
    )
    rights = _comment(
        f"What a role needs that runs Postdate and may not create tables:\n"
        f"GRANT USAGE ON SCHEMA {quoted(schema)} TO the_role;\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name} TO the_role;"
    )
    return _transaction([schema_too, make, rights])


def queues_script(schema: str, queues: Sequence[str]) -> str:
    rows = ", ".join(f"({literal(name)})" for name in queues)
    insert = f"INSERT INTO {quoted(schema)}.queue (name)\nVALUES {rows} ON CONFLICT (name) DO NOTHING;"
    return _transaction([insert])


def _transaction(parts: Sequence[str]) -> str:
    return "\n\n".join(["BEGIN;", *parts, "COMMIT;"]) + "\n"


def _guarded(step: Step, schema: str) -> str:
    """Return a migration that runs once, in a DO block whose quoting suits any name in it."""
    body = "\n".join([*step.statements, f"{mark_done(schema, step)};"])
    tag = _tag(body)
    return (
        f"DO {tag}\nBEGIN\n"
        f"IF NOT EXISTS (SELECT FROM {quoted(schema)}.migration "
        f"WHERE subject = {literal(step.subject)} AND version = {step.version}) THEN\n"
        f"{body}\nEND IF;\nEND\n{tag};"
    )


def _tag(body: str) -> str:
    tag = "$postdate$"
    while tag in body:
        tag = f"{tag[:-1]}_$"
    return tag


def _rights(schema: str) -> str:
    name = quoted(schema)
    return _comment(
        f"What a role needs that runs Postdate and may not create tables:\n"
        f"GRANT USAGE ON SCHEMA {name} TO the_role;\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {name} TO the_role;\n"
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {name} TO the_role;"
    )


def _comment(text: str) -> str:
    return textwrap.indent(text, "-- ", lambda line: True)
