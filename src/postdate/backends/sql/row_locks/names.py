"""Names in SQL, quoted as the server requires; a name that the server would refuse or change is an error.

Also the numbered migrations: those of the tables that all stores of a schema share, and those of one store's table.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from postdate.backends.sql.migrations import Step, fill_placeholders, migrations, run_migrations, strip_comments
from postdate.errors import ConfigurationError

_PREFIX: Final = "postdate_"


@dataclass(frozen=True, slots=True)
class Spelling:
    """The way in which a server writes names and texts.

    Args:
        package: package of the backend, which has the migrations.
        quote_name: returns a name as SQL.
        literal: returns a text as SQL.
        check: ``(name, kind of name)``; raises ``ConfigurationError`` for a name that the server cannot have.
    """

    package: str
    quote_name: Callable[[str], str]
    literal: Callable[[str], str]
    check: Callable[[str, str], object]


def check_not_reserved(name: str, what: str) -> str:
    """Return ``name``; raise `ConfigurationError` for a table whose name begins like those of Postdate."""
    if what == "table" and name.lower().startswith(_PREFIX):
        raise ConfigurationError(
            f"table {name!r} has a name of Postdate's own tables: names with {_PREFIX!r} are reserved"
        )
    return name


@dataclass(frozen=True, slots=True)
class RowLockNames:
    """The names of one store in SQL. Names for statements with parameters have a doubled ``%``.

    ``schema`` is a database in MariaDB; ``table`` is the table of the pending messages.
    """

    spelling: ClassVar[Spelling]

    schema: str
    table: str

    def __post_init__(self) -> None:
        self.spelling.check(self.schema, "schema")
        self.spelling.check(self.table, "table")

    def qualified_name(self, name: str) -> str:
        """Return a name in the schema, for a statement without parameters."""
        return f"{self.spelling.quote_name(self.schema)}.{self.spelling.quote_name(name)}"

    def name_of(self, name: str) -> str:
        """Return one of Postdate's own names, for a statement with parameters."""
        return self.qualified_name(_PREFIX + name).replace("%", "%%")

    @property
    def pending(self) -> str:
        """The table of pending messages, for a statement with parameters."""
        return self.qualified_name(self.table).replace("%", "%%")

    @property
    def statement_replacements(self) -> Mapping[str, str]:
        shared_tables = ("record", "store", "holder")
        return {
            "{pending}": self.pending,
            "{limits}": self.name_of("destination_limit"),
            **{f"{{{name}}}": self.name_of(name) for name in shared_tables},
        }

    @property
    def migration_replacements(self) -> Mapping[str, str]:
        texts = {
            "schema": self.spelling.quote_name(self.schema),
            "table": self.qualified_name(self.table),
            "name": self.spelling.literal(self.table),
        }
        return {
            "{schema}": self.spelling.quote_name(self.schema),
            "{table}": self.qualified_name(self.table),
            "{name}": self.spelling.literal(self.table),
            # For the tables of unreadable rows of older versions, and for EXEC.
            "{drop_quarantine}": self.spelling.literal(f"DROP TABLE {self.qualified_name('postdate_quarantine')}"),
            **{f"{{{name}_in_text}}": text.replace("'", "''") for name, text in texts.items()},
        }

    def lock_name(self, purpose: str) -> str:
        """Return the name of a server lock: 64 characters at most, different for each schema."""
        digest = hashlib.md5(self.schema.encode(), usedforsecurity=False).hexdigest()
        return f"postdate {digest[:16]} {purpose}"


def steps_of(names: RowLockNames) -> tuple[Step, ...]:
    """Return the migrations of a schema and one of its stores, in order, statement by statement."""
    return (*_steps(names, "", "database"), *_steps(names, names.table, "store"))


def part_steps(names: RowLockNames, part: str) -> tuple[Step, ...]:
    """Return the migrations of a part (``sagas``, ``outbox``) with a table of its own, whose name identifies them."""
    return _steps(names, f"postdate_{names.table}", part)


def _steps(names: RowLockNames, subject: str, part: str) -> tuple[Step, ...]:
    def statements(sql: str) -> tuple[str, ...]:
        return tuple(
            fill_placeholders(each, names.migration_replacements).strip()
            for each in strip_comments(sql).removesuffix(";").split(";\n")
        )

    return tuple(
        Step(subject, each.version, each.name, statements(each.sql), each.is_initial)
        for each in migrations(names.spelling.package, part)
    )


def read_marks(session: Any, names: RowLockNames) -> Sequence[tuple[Any, ...]]:
    """Return subject and version of each applied migration."""
    return session.rows(f"SELECT subject, version FROM {names.name_of('migration')}", {})


def mark_statement(names: RowLockNames, step: Step, insert: str = "INSERT") -> str:
    literal = names.spelling.literal
    return (
        f"{insert} INTO {names.qualified_name('postdate_migration')} (subject, version, name) "
        f"VALUES ({literal(step.subject)}, {step.version}, {literal(step.name)})"
    )


def newest_mark_query(names: RowLockNames, subject: str) -> str:
    """Return the query for the newest mark of a subject; its result is NULL without one."""
    marks = names.qualified_name("postdate_migration")
    return f"(SELECT MAX(version) FROM {marks} WHERE subject = {names.spelling.literal(subject)})"


def migrate(session: Any, names: RowLockNames, required: Sequence[Step], where: str, insert: str = "INSERT") -> None:
    """Apply the missing migrations of ``required``; the caller locks out others. Raise like `find_missing_steps`."""
    run_migrations(
        required, read_marks(session, names), where, session.change, lambda step: mark_statement(names, step, insert)
    )


def rights_comment(names: RowLockNames, where: str) -> str:
    """Return a comment for the administrator's script: the rights of a user who may not create tables."""
    rights = (
        f"What a user needs that runs Postdate and may not create tables:\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {where} TO the_user;\n"
    )
    return textwrap.indent(rights, "-- ", lambda line: True)
