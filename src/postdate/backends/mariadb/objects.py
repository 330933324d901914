"""The tables and indexes that the migrations create, and those of them that a database lacks.

A database may be restored without some of them, while the marks of its migrations are there. Without an index every
statement still works, and reads the whole table. So the catalogue is compared with the text of the migrations.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from postdate.backends.sql.migrations import migrations, missing_tables_error, strip_comments
from postdate.backends.sql.row_locks.names import RowLockNames

log = logging.getLogger("postdate.stores")

_TABLE: Final = re.compile(r"CREATE TABLE IF NOT EXISTS (\S+) \((.*?)\n\)", re.DOTALL)
_KEY: Final = re.compile(r"(PRIMARY KEY|UNIQUE KEY \w+|KEY \w+) \(([\w, ]+)\)")
_COLUMN_KEY: Final = re.compile(r"(\w+) .*\b(PRIMARY KEY|UNIQUE)\b")
_TABLES: Final = "SELECT table_name FROM information_schema.tables WHERE table_schema = %(schema)s"
_INDEXES: Final = """
    SELECT table_name, non_unique, GROUP_CONCAT(column_name ORDER BY seq_in_index SEPARATOR ', ')
    FROM information_schema.statistics WHERE table_schema = %(schema)s GROUP BY table_name, index_name, non_unique"""


@dataclass(frozen=True, slots=True)
class MariaDbIndex:
    """An index; ``definition`` is the part of a statement that adds it to its table."""

    table: str
    columns: str
    is_unique: bool
    definition: str

    def __str__(self) -> str:
        return f"the index of {self.table!r} on ({self.columns})"


def find_missing_objects(session: Any, names: RowLockNames) -> tuple[Sequence[str], Sequence[MariaDbIndex]]:
    """Return the missing tables and indexes of the database and of one store, whose migrations were applied."""
    values = {"schema": names.schema}
    # In lower case, as some servers keep all names of tables (lower_case_table_names).
    tables = {name.lower() for (name,) in session.rows(_TABLES, values)}
    indexes = {
        (table.lower(), columns, not int(non_unique)) for table, non_unique, columns in session.rows(_INDEXES, values)
    }
    missing_tables, missing_indexes = dict[str, None](), list[MariaDbIndex]()
    for each in (*_required_indexes("database", ""), *_required_indexes("store", names.table)):
        table = each.table.lower()
        if table not in tables:
            missing_tables[each.table] = None
        elif (table, each.columns, each.is_unique) not in indexes:
            missing_indexes.append(each)
    return list(missing_tables), missing_indexes


@cache
def _required_indexes(part: str, store_table: str) -> Sequence[MariaDbIndex]:
    """Return the indexes of a part in a new database. Every table has one, that of its primary key."""
    files = migrations("postdate.backends.mariadb", part)
    (first,) = (number for number, each in enumerate(files) if each.is_initial)

    def indexes() -> Iterator[MariaDbIndex]:
        for place, body in _TABLE.findall("\n".join(strip_comments(each.sql) for each in files[first:])):
            table = store_table if place == "{table}" else place.removeprefix("{schema}.").strip("`")
            for line in body.splitlines():
                if (key := _KEY.match(line.strip())) is not None:
                    kind, columns = key.groups()
                elif (of_column := _COLUMN_KEY.match(line.strip())) is not None:
                    columns, kind = of_column.groups()
                else:
                    continue
                yield MariaDbIndex(table, columns, not kind.startswith("KEY"), f"{kind} ({columns})")

    return tuple(indexes())


def restore_indexes(session: Any, names: RowLockNames, where: str) -> None:
    """Create missing indexes again.

    Raises:
        StoreNotSetUp: a table is missing although its migration was applied. An empty one would hide that its rows are
            lost.
    """
    tables, indexes = find_missing_objects(session, names)
    if tables:
        raise missing_tables_error(where, tables)
    for each in indexes:
        log.warning("%s lacks %s: creating it again", where, each)
        session.change(f"ALTER TABLE {names.qualified_name(each.table)} ADD {each.definition}")
