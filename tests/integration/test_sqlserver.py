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

from postdate import SqlServer, TransactionMode, errors
from postdate.backends.sql.row_locks.names import mark_statement, newest_mark_query, part_steps, steps_of
from postdate.backends.sql.row_locks.parts import Conflict, MessageRow
from postdate.backends.sqlserver import schema
from postdate.backends.sqlserver.channel import DriverSocket
from postdate.backends.sqlserver.connection import SqlServerSession, translate, translate_errors
from postdate.backends.sqlserver.schema import SqlServerNames, check_name
from postdate.backends.sqlserver.statements import SqlServerStatements
from postdate.backends.sqlserver.store import SqlServerStore
from postdate.backends.sqlserver.tables import SqlServerTables, _content, _json_lists
from postdate.ports import Recording, Scan

NAMES = [
    SqlServerNames("dbo", "sales.timeouts"),
    SqlServerNames("po]st'%s -- ", "a]]b;\n DROP TABLE x -- %(id)s {name} 🕰"),
    SqlServerNames("/* ", '"quoted" [x] */'),
]
_OUTPUT = re.compile(r"^(DELETE p) OUTPUT (.+?)(?: INTO (\[.+?\) ))?\s*(FROM \[.+ AS p WITH .*)$", re.DOTALL)


_ALIASES = {"h", "i", "j", "l", "p", "r"}


def test_without_a_server_it_is_not_in_the_conformance_suite() -> None:
    assert ("SqlServerStore" in STORE_SUBJECTS) == bool(os.environ.get(VARIABLE))


# --- every statement parses -------------------------------------------------------------------------------------------


class _Values(dict[str, str]):
    """What the driver puts in the place of a parameter."""

    def __missing__(self, key: str) -> str:
        return "NULL" if self.get("null") else f"@P{len(key)}"


def _statements(names: SqlServerNames) -> Iterator[str]:
    sql = SqlServerStatements(names)
    yield from (value for value in vars(sql).values() if isinstance(value, str))
    yield from sql.bounds.values()
    for what in ("pending", "records"):
        given = {"message_ids": ("m",), "destinations": ("d",), "due_from": 1, "due_to": 2}
        yield sql.scan_statement(Scan(what, ("message_id", "due")), given)
        yield sql.scan_statement(Scan(what, ()), {"destinations": ()})
    yield schema.ACQUIRE_LOCK
    database = SqlServer("mssql://nobody@nowhere/shop", schema=names.schema)
    sagas, outbox = database.sagas, database.outbox
    yield from (*sagas._select_statements.values(), *sagas._statements.values())
    yield from (outbox._find, outbox._insert, outbox._mark, outbox._remove)


def _parsed(sql: str) -> list[expressions.Expr]:
    """Parse T-SQL. The parser does not know the OUTPUT of a DELETE, which is taken out and parsed as a SELECT."""
    deleted = _OUTPUT.match(sql)
    if deleted is not None:
        delete, output, into, rest = deleted.groups()
        sql = f"{delete} {rest}; SELECT {output} FROM deleted" + (f"; INSERT INTO {into} SELECT 1" if into else "")
    found = sqlglot.parse(sql, read="tsql")
    assert all(isinstance(each, expressions.Expr) for each in found)
    return [each for each in found if isinstance(each, expressions.Expr)]


@pytest.mark.parametrize("names", NAMES, ids=["plain", "hostile", "comment"])
@pytest.mark.parametrize("null", [False, True], ids=["values", "nulls"])
def test_every_statement_parses_whatever_the_names(names: SqlServerNames, null: bool) -> None:
    for template in _statements(names):
        values = _Values(null="yes") if null else _Values()
        statements = _parsed(template % values)
        assert not any(isinstance(each, expressions.Command) for each in statements), template
        assert not any(isinstance(each, expressions.Drop) for each in statements), template
        tables = {table.name for each in statements for table in each.find_all(expressions.Table)}
        strange = {name for name in tables if name and name != names.table and not name.startswith("postdate_")}
        assert strange <= {
            *_ALIASES,
            "deleted",
            "databases",
            "dm_exec_sessions",
            "OPENJSON",
            "locked",
            "sp_getapplock",
            "oldest",
        }, template


@pytest.mark.parametrize("names", NAMES, ids=["plain", "hostile", "comment"])
def test_the_set_up_parses_whatever_the_names(names: SqlServerNames) -> None:
    wanted = [*steps_of(names), *part_steps(names, "sagas"), *part_steps(names, "outbox")]
    statements = [*schema.foundation(names), *(sql for step in wanted for sql in step.statements)]
    for statement in statements:
        parsed = _parsed(statement)
        assert len(parsed) == 1, statement
        assert not isinstance(parsed[0], expressions.Drop), statement
    whole = schema.setup_statements(names, wanted)
    assert all(statement.strip() in whole for statement in statements)


def test_a_claim_skips_what_others_have_locked() -> None:
    claim = SqlServerStatements(NAMES[0]).claim
    for word in ("UPDLOCK", "READPAST", "ROWLOCK", "TOP (%(limit)s)", "ORDER BY p.attempt_at, p.number"):
        assert word in claim


def test_what_is_changed_by_number_is_found_by_its_key() -> None:
    """A scan would wait for the rows that others have locked; a change must lock rows, and never pages."""
    sql = SqlServerStatements(NAMES[0])
    for name in ("finish", "lease", "release_some_leases", "retry", "release", "reschedule"):
        assert "WITH (FORCESEEK, ROWLOCK)" in getattr(sql, name), name
    assert "WITH (FORCESEEK ([attempt] ([attempt_at])), ROWLOCK)" in sql.release_leases
    assert "WITH (FORCESEEK, ROWLOCK)" in SqlServerStatements(NAMES[0]).drop_holders


def test_a_look_does_not_parse_what_is_held_for_every_row() -> None:
    look = SqlServerStatements(NAMES[0]).next_attempt_except
    assert "NOT IN" not in look
    assert look.index("OPENJSON") < look.index("SELECT TOP (1)"), "once, before the look"


def test_bulk_writers_lock_ids_in_one_order() -> None:
    """In the order of their lists they would deadlock; numbers are given out in the order of the list all the same."""
    sent = list[list[dict[str, object]]]()

    class Session:
        def rows(self, sql: str, values: dict[str, object]) -> list[tuple[object, ...]]:
            if "OPENJSON" not in sql:
                return [(1,)]
            sent.append(json.loads(str(values["rows"])))
            return [(key["position"], key["message_id"]) for key in sent[-1]]

        def change(self, _sql: str, _values: object) -> int:
            return 1

    rows = [MessageRow(message_id, 1, "queue", None, 0, "{}", b"") for message_id in ("c", "a", "b")]
    tables = SqlServerTables(NAMES[0], Recording.ALL)
    tables.insert(cast("SqlServerSession", Session()), rows, 1)
    assert [(key["message_id"], key["position"]) for key in sent[0]] == [("a", 1), ("b", 2), ("c", 0)]
    assert "ORDER BY i.position" in SqlServerStatements(NAMES[0]).insert_records


def test_the_administrators_script_sets_what_filtered_indexes_need() -> None:
    """sqlcmd has QUOTED_IDENTIFIER off unless it is told, and the server refuses filtered indexes then (1934)."""
    assert schema.setup_statements(NAMES[0], steps_of(NAMES[0])).startswith("SET QUOTED_IDENTIFIER, ANSI_NULLS,")


def test_the_administrators_script_runs_each_statement_only_as_part_of_the_next_migration() -> None:
    names = NAMES[0]
    script = schema.setup_statements(names, steps_of(names))
    for step in steps_of(names):
        newest = newest_mark_query(names, step.subject)
        condition = f"IF {newest} IS NULL" if step.is_initial else f"IF {newest} = {step.version - 1}"
        for statement in (*step.statements, mark_statement(names, step)):
            assert f"\n\n{condition}\n{statement};\n\n" in script
    refusals = [statement for statement in script.split(";\n\n") if "THROW" in statement]
    assert len(refusals) == 1
    assert refusals[0].startswith(f"IF {newest_mark_query(names, '')} < 2\nTHROW 50000, N'schema ")


def test_who_leases_keeps_its_number_until_the_transaction_ends() -> None:
    assert "REPEATABLEREAD" in SqlServerStatements(NAMES[0]).lock_holder


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
    tables, sql = SqlServerTables(NAMES[0], Recording.ALL), SqlServerStatements(NAMES[0])
    buried, alive = _Rows(sql.lock_holder), _Rows("")
    with pytest.raises(errors.StoreUnreachable, match="number 7"):
        tables.lease(cast("SqlServerSession", buried), [1], 7)
    tables.lease(cast("SqlServerSession", alive), [1], 7)
    assert (buried.changes, alive.changes) == ([], [sql.lease])
    assert tables.find_unknown_holders(cast("SqlServerSession", alive)) == [7]


class _Silent:
    """A session in which another process was found silent; which of its sessions are seen depends on our rights."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.changes = numbers, list[str]()

    def rows(self, sql: str, _values: object = None) -> list[tuple[object, ...]]:
        if "dm_exec_sessions" in sql:
            return [(number,) for number in self.numbers]
        return [(7, 123, "machine")] if "seen_at <" in sql else [(1,)]

    def change(self, sql: str, _values: object = None) -> int:
        self.changes.append(sql)
        return 1


def test_a_process_that_shows_no_life_is_ended_where_we_may(caplog: pytest.LogCaptureFixture) -> None:
    with_rights, without = _Silent([51, 52]), _Silent([])
    for session, looks in ((with_rights, 1), (without, 2)):
        tables = SqlServerTables(NAMES[0], Recording.ALL)
        for _ in range(looks):
            tables._heartbeat_at -= 60
            tables.find_dead_holders(cast("SqlServerSession", session))
    assert with_rights.changes[1:] == ["KILL 51", "KILL 52"]
    assert "seen_at =" in with_rights.changes[0]
    assert all("KILL" not in change for change in without.changes)
    said = [record.message for record in caplog.records]
    assert len(said) == 1, "once"
    assert "process 123 on machine has sent no heartbeat for 60 s" in said[0]


# --- what goes to the server ------------------------------------------------------------------------------------------


def test_messages_travel_as_json_with_the_body_in_base64() -> None:
    row = MessageRow("id 🕰", 1, "queue", None, 0, '{"a":"é"}', b"\0\xff'")
    (text,) = _json_lists([_content(7, row)])
    assert json.loads(text) == [
        {
            "number": 7,
            "due": 1,
            "expires_at": None,
            "failures": 0,
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
        is_count = self.description is None
        self.description = ["granted"]
        return is_count

    def fetchall(self) -> list[list[int]]:
        assert self.description
        return [[0]]

    def close(self) -> None:
        self.description = None


def test_the_rows_of_a_statement_are_found_behind_the_counts_of_a_procedure() -> None:
    cursor = _Cursor()
    session = SqlServerSession(SimpleNamespace(cursor=lambda: cursor), cast("DriverSocket", None), "here")
    assert session.rows("EXEC p; SELECT %(x)s", {"x": 1}) == [(0,)]
    assert cursor.executed == ("EXEC p; SELECT %(x)s", {"x": 1})


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t" * 129, "🕰" * 65, "", " ", "nul\0", "\ud800", "postdate_record"])
def test_tables_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(errors.ConfigurationError):
        check_name(name, "table")


@pytest.mark.parametrize("url", ["mssql://host", "mssql://host:port/d", "mariadb://host/d", "mssql://host/d?trust=1"])
def test_addresses_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(errors.ConfigurationError):
        SqlServerStore(url)


async def test_transaction_scope_is_refused() -> None:
    store = SqlServerStore("mssql://user@localhost/database")
    with pytest.raises(errors.UnsupportedTransactionMode):
        await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    await store.close()


@pytest.mark.parametrize("error", [AssertionError("cut short"), IndexError(), struct.error("cut short")])
def test_a_packet_that_cannot_be_read_is_a_lost_connection(error: Exception) -> None:
    with pytest.raises(errors.StoreUnreachable, match="cannot be read"), translate_errors("here"):
        raise error


async def test_a_server_that_does_not_answer_is_unavailable_and_the_password_stays_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The driver tries on until then.
    monkeypatch.setattr("postdate.backends.sqlserver.connection.CONNECT_WITHIN_SECONDS", 0.5)
    store = SqlServerStore("mssql://user:secret-secret@127.0.0.1:1/database", table="t")
    with pytest.raises(errors.StoreUnavailable) as caught:
        await store.next_due()
    assert "secret-secret" not in str(caught.value)
    await store.close()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1205, Conflict),
        (1222, Conflict),
        (208, errors.StoreNotSetUp),
        (1105, errors.StoreFull),
        (40613, errors.StoreUnreachable),
        (8152, errors.StoreError),
    ],
)
def test_errors_of_the_server_are_translated(number: int, expected: type[errors.StoreError]) -> None:
    from pytds import DatabaseError

    error = DatabaseError("said by the server")
    error.number = number
    found = translate(error, "SQL Server here")
    assert type(found) is expected
    assert str(found).startswith("SQL Server here")
    assert "said by the server" in str(found)
