"""What an administrator runs by hand: harmless when it is run again, or for another endpoint."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from postdate.postgres.names import Step, foundation, literal, quoted, steps


def tables_script(schema: str, table: str | None) -> str:
    """Return the SQL that makes what is missing of a schema and, if given, of a store's table in it."""
    parts = [foundation(schema), *(_guarded(step, schema) for step in steps(schema, table)), _rights(schema)]
    return _transaction(parts)


def queues_script(schema: str, queues: Sequence[str]) -> str:
    """Return the SQL that makes those queues that are missing; the tables must be there."""
    rows = ", ".join(f"({literal(name)})" for name in queues)
    insert = f"INSERT INTO {quoted(schema)}.queue (name)\nVALUES {rows} ON CONFLICT (name) DO NOTHING;"
    return _transaction([insert])


def _transaction(parts: Sequence[str]) -> str:
    return "\n\n".join(["BEGIN;", *parts, "COMMIT;"]) + "\n"


def _guarded(step: Step, schema: str) -> str:
    """Return a migration that is done once; names may have anything in them, the mark of the text's end, too."""
    tag = "$postdate$"
    while tag in step.sql + step.mark(schema):
        tag = f"{tag[:-1]}_$"
    return (
        f"DO {tag}\nBEGIN\n"
        f"IF NOT EXISTS (SELECT FROM {quoted(schema)}.migration "
        f"WHERE subject = {literal(step.subject)} AND version = {step.version}) THEN\n"
        f"{step.sql}\n{step.mark(schema)};\nEND IF;\nEND\n{tag};"
    )


def _rights(schema: str) -> str:
    name = quoted(schema)
    text = (
        f"What a role needs that runs Postdate and may not create tables:\n"
        f"GRANT USAGE ON SCHEMA {name} TO the_role;\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {name} TO the_role;\n"
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {name} TO the_role;"
    )
    return textwrap.indent(text, "-- ", lambda line: True)
