"""Timeouts in SQL Server as far as they can be tested without one: its SQL is parsed, times and values are checked."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import sqlglot
from sqlglot import expressions

from postdate.backends.sql.timeouts_layout import decode, encode, read_time
from postdate.backends.sqlserver.connection import SqlServerSession
from postdate.backends.sqlserver.timeouts import EARLIEST, SqlServerTable, round_up_to_datetime, time_bound
from postdate.errors import InvalidMessage, StoreUnavailable
from postdate.ports.timeouts import Timeout

TABLES = [
    ("dbo", "Sales_TimeoutData"),
    ("po]st'%s -- ", "a]]b;\n DROP TABLE x -- %(Id)s {name} 🕰TimeoutData"),
    ("/* ", '"quoted" [x] */TimeoutData'),
]
NOW = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)
TIMEOUT = Timeout("0ab14c4e-36c7-4b1e-9a10-aa7e00c5b001", NOW, "queue", None, "Sales", {"a": "é"}, b"\0\xff'")


class _Values(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return f"@P{len(key)}"


def _statements(table: SqlServerTable) -> Iterator[str]:
    yield from (statement % _Values() for statement in table.sql)
    yield from table.create


@pytest.mark.parametrize("place", TABLES, ids=["plain", "hostile", "comment"])
def test_every_statement_on_timeouts_parses_whatever_the_names(place: tuple[str, str]) -> None:
    statements = list(_statements(SqlServerTable(*place)))
    assert len(statements) == 7 + 2
    for statement in statements:
        parsed = sqlglot.parse(statement, read="tsql")
        assert len(parsed) == 1, statement
        (found,) = parsed
        assert found is not None
        assert not isinstance(found, (expressions.Command, expressions.Drop)), statement
        assert {table.name for table in found.find_all(expressions.Table)} <= {place[1]}, statement


def test_looks_lock_nothing_and_wait_for_nobody() -> None:
    table = SqlServerTable(*TABLES[0])
    for statement in (table.sql.peek, table.sql.due, table.sql.first):
        assert "WITH (READPAST, READCOMMITTEDLOCK)" in statement
    assert "WITH (UPDLOCK, HOLDLOCK)" in table.sql.insert


def test_a_claim_locks_its_row_alone_and_waits_for_nobody() -> None:
    assert "WITH (UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK)" in SqlServerTable(*TABLES[0]).sql.claim


# --- times in 300ths of a second --------------------------------------------------------------------------------------


def ticks() -> list[datetime]:
    """Return the times that a ``datetime`` has in ten milliseconds and a bit, as SQL Server shows them."""
    return [NOW + milliseconds * MILLISECOND for milliseconds in (0, 3, 7, 10, 13)]


@pytest.mark.parametrize("microseconds", [0, 1, 999, 2_999, 3_000, 3_001, 3_334, 6_999, 7_001, 9_999, 10_000])
def test_a_due_time_is_rounded_up_to_a_tick_and_bounds_down(microseconds: int) -> None:
    instant = NOW + timedelta(microseconds=microseconds)
    assert round_up_to_datetime(instant) == min(tick for tick in ticks() if tick >= instant)
    assert read_time(time_bound(instant)) == max(tick for tick in ticks() if tick <= instant)


def test_a_tick_that_was_read_bounds_itself() -> None:
    for tick in ticks():
        assert round_up_to_datetime(tick) == read_time(time_bound(tick)) == tick


def test_times_at_the_ends_of_the_calendar_of_sql_server() -> None:
    end = datetime(9999, 12, 31, 23, 59, 59, 997_000, tzinfo=UTC)
    assert time_bound(datetime.min.replace(tzinfo=UTC)) == time_bound(EARLIEST) == "1753-01-01T00:00:00.000"
    assert time_bound(datetime.max.replace(tzinfo=UTC)) == "9999-12-31T23:59:59.997"
    assert round_up_to_datetime(datetime(1700, 1, 1, tzinfo=UTC)) == EARLIEST
    assert round_up_to_datetime(NOW.replace(microsecond=999_001)) == NOW + timedelta(seconds=1)
    assert round_up_to_datetime(end) == end
    with pytest.raises(InvalidMessage):
        round_up_to_datetime(end + timedelta(microseconds=1))


# --- what goes to the server ------------------------------------------------------------------------------------------


class _Session:
    """Notes what is asked, and answers as it is told to."""

    def __init__(self, answer: object = 1) -> None:
        self.answer, self.asked = answer, list[tuple[str, Any]]()

    def change(self, sql: str, values: object = None) -> int:
        self.asked.append((sql, values))
        return cast("int", self.answer)

    def rows(self, sql: str, values: object = None) -> list[tuple[object]]:
        self.asked.append((sql, values))
        return [(self.answer,)]

    def begin(self) -> None:
        self.asked.append(("begin", None))

    def commit(self) -> None:
        self.asked.append(("commit", None))

    def rollback(self) -> None:
        self.asked.append(("rollback", None))


def test_a_row_travels_in_texts() -> None:
    table, session = SqlServerTable(*TABLES[0]), _Session()
    due = NOW + timedelta(microseconds=1)
    assert table.insert(cast("SqlServerSession", session), encode(replace(TIMEOUT, due=due)))
    ((sql, values),) = session.asked
    assert sql == table.sql.insert
    assert (values["State"], values["Time"]) == ("0x00ff27", "2026-01-31T12:00:05.003")
    assert (values["SagaId"], values["Headers"]) == ("00000000-0000-0000-0000-000000000000", '{"a":"\\u00e9"}')
    assert not table.insert(cast("SqlServerSession", _Session(0)), encode(TIMEOUT)), "its id is there"


def test_a_destination_is_measured_in_utf_16() -> None:
    table, session = SqlServerTable(*TABLES[0]), _Session()
    with pytest.raises(InvalidMessage, match="202 UTF-16 units"):
        table.insert(cast("SqlServerSession", session), encode(replace(TIMEOUT, destination="🕰" * 101)))
    assert session.asked == []


def test_a_row_as_a_dotnet_endpoint_writes_it_is_read() -> None:
    row = (
        TIMEOUT.timeout_id.upper(),
        "queue",
        "0" * 8 + "-0000-0000-0000-" + "0" * 12,
        None,
        "2026-01-31 12:00:05.003",
    )
    found = decode(*row, '{"a":"é"}', owner="Sales")
    assert found == replace(TIMEOUT, due=NOW + 3 * MILLISECOND, body=b"")


def test_the_set_up_takes_its_turn_and_is_undone_when_it_fails() -> None:
    table = SqlServerTable(*TABLES[0])
    session, refused = _Session(0), _Session(-1)
    table.setup(cast("SqlServerSession", session))
    assert [sql for sql, _ in session.asked][2:] == [*table.create, "commit"]
    with pytest.raises(StoreUnavailable):
        table.setup(cast("SqlServerSession", refused))
    assert [sql for sql, _ in refused.asked][-1] == "rollback"
