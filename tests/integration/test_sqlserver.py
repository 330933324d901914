"""SQL Server as far as it can be tested without one: its SQL is parsed, its steps are counted, its refusals refuse."""

import json
import os
import re
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import sqlglot
from sqlglot import expressions
from tests.conftest import STORE_SUBJECTS
from tests.sqlserver_subjects import VARIABLE

from postdate import TransactionMode
from postdate.errors import (
    ConfigurationError,
    StoreError,
    StoreNotSetUp,
    StoreUnavailable,
    StoreUnreachable,
    UnsupportedTransactionMode,
)
from postdate.locking import Conflict, Row
from postdate.migrations import migrations
from postdate.ports import Recording
from postdate.sqlserver import setup
from postdate.sqlserver.connection import SqlServerSession
from postdate.sqlserver.errors import translate, translated
from postdate.sqlserver.names import Names, check_name
from postdate.sqlserver.statements import Statements
from postdate.sqlserver.tables import SqlServerTables, _content, _json_lists
from postdate.stores.sqlserver import SqlServerStore

NAMES = [
    Names("dbo", "sales.timeouts"),
    Names("po]st'%s -- ", "a]]b;\n DROP TABLE x -- %(id)s {name} 🕰"),
    Names("/* ", '"quoted" [x] */'),
]
_OUTPUT = re.compile(r"^(DELETE FROM .+?) OUTPUT (.+?)(?: INTO (\[.+?\) ))?\s*(WHERE number IN .*)$", re.DOTALL)


def test_without_a_server_it_is_not_in_the_conformance_suite() -> None:
    assert ("SqlServerStore" in STORE_SUBJECTS) == bool(os.environ.get(VARIABLE))


# --- every statement parses -------------------------------------------------------------------------------------------


class _Values(dict[str, str]):
    """What the driver puts in the place of a parameter."""

    def __missing__(self, key: str) -> str:
        return "NULL" if self.get("null") else f"@P{len(key)}"


def _statements(names: Names) -> Iterator[str]:
    sql = Statements(names)
    for name, value in vars(sql).items():
        if name == "scan":
            yield from (f"SELECT t.number{end}" for end in value.values())
        elif isinstance(value, str):
            yield value
        elif name == "bounds":
            yield from value.values()
    yield setup.TAKE_TURN


def _parsed(sql: str) -> list[expressions.Expr]:
    """Parse T-SQL. The parser does not know the OUTPUT of a DELETE, which is taken out and parsed as a SELECT."""
    deleted = _OUTPUT.match(sql)
    if deleted is not None:
        delete, output, into, where = deleted.groups()
        sql = f"{delete} {where}; SELECT {output} FROM deleted" + (f"; INSERT INTO {into} SELECT 1" if into else "")
    found = sqlglot.parse(sql, read="tsql")
    assert all(isinstance(each, expressions.Expr) for each in found)
    return [each for each in found if isinstance(each, expressions.Expr)]


@pytest.mark.parametrize("names", NAMES, ids=["plain", "hostile", "comment"])
@pytest.mark.parametrize("null", [False, True], ids=["values", "nulls"])
def test_every_statement_parses_whatever_the_names(names: Names, null: bool) -> None:
    for template in _statements(names):
        values = _Values(null="yes") if null else _Values()
        statements = _parsed(template % values)
        assert not any(isinstance(each, expressions.Command) for each in statements), template
        assert not any(isinstance(each, expressions.Drop) for each in statements), template
        tables = {table.name for each in statements for table in each.find_all(expressions.Table)}
        strange = {name for name in tables if name and name != names.table and not name.startswith("postdate_")}
        assert strange <= {"deleted", "databases", "OPENJSON", "j", "i", "sp_getapplock"}, template


@pytest.mark.parametrize("names", NAMES, ids=["plain", "hostile", "comment"])
def test_the_set_up_parses_whatever_the_names(names: Names) -> None:
    statements = [*setup.foundation(names), *(sql for step in setup.steps(names) for sql in step.statements)]
    for statement in statements:
        parsed = _parsed(statement)
        assert len(parsed) == 1, statement
        assert not isinstance(parsed[0], expressions.Drop), statement
    whole = setup.setup_statements(names)
    assert all(statement.strip() in whole for statement in statements)


def test_a_claim_skips_what_others_have_locked() -> None:
    claim = Statements(NAMES[0]).claim
    for word in ("UPDLOCK", "READPAST", "ROWLOCK", "TOP (%(limit)s)", "ORDER BY p.attempt_at, p.number"):
        assert word in claim


def test_who_leases_keeps_its_number_until_the_transaction_ends() -> None:
    assert "REPEATABLEREAD" in Statements(NAMES[0]).keep_holder


class _Rows:
    """A session in which one statement finds nothing; notes the others."""

    def __init__(self, empty: str) -> None:
        self.empty, self.changes = empty, list[str]()

    def rows(self, sql: str, _values: object = None) -> list[tuple[int]]:
        return [] if sql == self.empty else [(7,)]

    def change(self, sql: str, _values: object = None) -> int:
        self.changes.append(sql)
        return 1


def test_nothing_is_leased_under_a_buried_number() -> None:
    tables, sql = SqlServerTables(NAMES[0], Recording.ALL), Statements(NAMES[0])
    buried, alive = _Rows(sql.keep_holder), _Rows("")
    with pytest.raises(StoreUnreachable, match="number 7"):
        tables.lease(cast("SqlServerSession", buried), [1], 7)
    tables.lease(cast("SqlServerSession", alive), [1], 7)
    assert (buried.changes, alive.changes) == ([], [sql.lease])
    assert tables.unknown(cast("SqlServerSession", alive)) == [7]


def test_the_migrations_have_the_numbers_and_names_of_every_other_dialect() -> None:
    """Those with queues have steps of their own: what is only in queues needs no step elsewhere."""
    for ours, theirs in (("sqlserver", "mariadb"), ("sqlserver_store", "mariadb_store"), ("postgres", "sqlite")):
        assert [(m.version, m.name) for m in migrations(ours)] == [(m.version, m.name) for m in migrations(theirs)]


# --- what goes to the server ------------------------------------------------------------------------------------------


def test_messages_travel_as_json_with_the_body_in_base64() -> None:
    row = Row("id 🕰", 1, "queue", None, 0, '{"a":"é"}', b"\0\xff'")
    (text,) = _json_lists([_content(7, row)])
    assert json.loads(text) == [
        {
            "number": 7,
            "due": 1,
            "expires_at": None,
            "message_id": "id 🕰",
            "destination": "queue",
            "headers": '{"a":"é"}',
            "body": "AP8n",
        }
    ]


def test_long_lists_are_split() -> None:
    rows = [{"n": number, "text": "x" * 1_000_000} for number in range(5)]
    parts = [json.loads(part) for part in _json_lists(rows)]
    assert [row["n"] for part in parts for row in part] == list(range(5))
    assert len(parts) == 5 // 2 + 1
    assert list(_json_lists([])) == []


class _Cursor:
    """A driver's cursor whose first result is a count, and whose second has rows."""

    def __init__(self) -> None:
        self.description: list[str] | None = None
        self.executed: tuple[str, object] | None = None

    def execute(self, sql: str, values: object) -> None:
        self.executed = (sql, values)

    def nextset(self) -> bool:
        self.description = ["granted"]
        return True

    def fetchall(self) -> list[list[int]]:
        assert self.description
        return [[0]]

    def close(self) -> None:
        self.description = None


def test_the_rows_of_a_statement_are_found_behind_the_counts_of_a_procedure() -> None:
    cursor = _Cursor()
    session = SqlServerSession(SimpleNamespace(cursor=lambda: cursor), "here")
    assert session.rows("EXEC p; SELECT %(x)s", {"x": 1}) == [(0,)]
    assert cursor.executed == ("EXEC p; SELECT %(x)s", {"x": 1})


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t" * 129, "🕰" * 65, "", " ", "nul\0", "\ud800", "postdate_record"])
def test_tables_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        check_name(name, "table")


@pytest.mark.parametrize("url", ["mssql://host", "mssql://host:port/d", "mariadb://host/d", "mssql://host/d?trust=1"])
def test_addresses_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        SqlServerStore(url)


async def test_transaction_scope_is_refused() -> None:
    store = SqlServerStore("mssql://user@localhost/database")
    with pytest.raises(UnsupportedTransactionMode):
        await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    await store.close()


@pytest.mark.parametrize("error", [AssertionError("cut short"), IndexError(), struct.error("cut short")])
def test_a_packet_that_cannot_be_read_is_a_lost_connection(error: Exception) -> None:
    with pytest.raises(StoreUnreachable, match="cannot be read"), translated("here"):
        raise error


async def test_a_server_that_does_not_answer_is_unavailable_and_the_password_stays_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("postdate.sqlserver.connection._CONNECT_WITHIN_SECONDS", 0.5)  # the driver tries on until then
    store = SqlServerStore("mssql://user:secret-secret@127.0.0.1:1/database", table="t")
    with pytest.raises(StoreUnavailable) as caught:
        await store.next_due()
    assert "secret-secret" not in str(caught.value)
    await store.close()


@pytest.mark.parametrize(
    ("number", "expected"),
    [(1205, Conflict), (1222, Conflict), (208, StoreNotSetUp), (40613, StoreUnreachable), (8152, StoreError)],
)
def test_errors_of_the_server_are_translated(number: int, expected: type[StoreError]) -> None:
    from pytds import DatabaseError

    error = DatabaseError("said by the server")
    error.number = number
    found = translate(error, "SQL Server here")
    assert type(found) is expected
    assert str(found).startswith("SQL Server here")
    assert "said by the server" in str(found)
