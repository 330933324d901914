"""The SQL of migrations from SQL Server, as far as it can be tested without one: every statement parses."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlglot
from sqlglot import expressions
from tests.integration.migration_places import new_run

from postdate.backends.sql.timeouts_layout import COLUMNS
from postdate.backends.sql.timeouts_migration.dialect import STATE_COLUMNS, HideRequest
from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.backends.sqlserver.timeouts_source import PlainSession, SqlServerDialect
from postdate.errors import StoreUnavailable
from postdate.ports.migrating import BatchStatus, MigrationStatus

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LIVE = "Sales]%s'_TimeoutData"
SCHEMAS = ["dbo", "po]st'%s -- "]
_KNOWN = (
    "SET LOCK_TIMEOUT",
    "DECLARE @granted int; EXEC @granted = sp_getapplock",
    "BEGIN",
    "COMMIT",
    "IF @@TRANCOUNT",
)


class _Driver:
    """Answers as a server would on which a run of one batch of three timeouts is on its way; notes every statement."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> Sequence[tuple[Any, ...]]:
        self._note(sql, values)
        kept = ("r" * 32, "Sales", 0, "{}", 0, NOW, NOW, None, 0, LIVE, LIVE)
        answers = {
            "sys.tables": [(LIVE,)],
            "sys.columns": [(name,) for name in (STATE_COLUMNS if "State" in str(values) else COLUMNS)],
            "SYSUTCDATETIME": [(NOW,)],
            "sp_getapplock": [(0,)],
            "[OngoingTable] =": [],
            "COUNT(*)": [(7,)],
            "[EarliestTime]": [(1, 0, 3, NOW)],
            "[RunParameters]": [kept],
            "[State]": [("0B5B3D86-8F6F-4E5C-9E6B-3F4B1E7E0B11", "Sales", None, NOW, "{}")],
            "[Status]": [(1,)],
        }
        return next(answer for mark, answer in answers.items() if mark in sql)

    def change(self, sql: str, values: Mapping[str, Any] | None = None) -> int:
        self._note(sql, values)
        return 3

    def pages(self, sql: str, values: Mapping[str, Any], page: int) -> Any:
        self._note(sql, values)
        yield [("0B5B3D86-8F6F-4E5C-9E6B-3F4B1E7E0B11", "Sales", NOW, "{}", 5)][:page]

    def begin(self) -> None:
        self.said.append("BEGIN TRANSACTION")

    def commit(self) -> None:
        self.said.append("COMMIT TRANSACTION")

    def rollback(self) -> None:
        self.said.append("ROLLBACK TRANSACTION")

    def close(self) -> None:
        self.said.append("-- closed")

    def _note(self, sql: str, values: Mapping[str, Any] | None) -> None:
        self.said.append(sql % {name: f"@{name}" for name in values} if values else sql)


@pytest.fixture(params=SCHEMAS, ids=["plain", "hostile"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[MigrationSource, _Driver]:
    """Return a source whose connection is the driver beside it."""
    driver = _Driver()
    dialect = SqlServerDialect("mssql://user:secret@127.0.0.1:1/x", request.param)
    monkeypatch.setattr(dialect, "connect", lambda: PlainSession(driver))  # pyright: ignore[reportArgumentType]
    return MigrationSource(dialect, {"Sales": "Sales]%s'_"}), driver


def test_every_statement_parses_whatever_the_names(driver: tuple[MigrationSource, _Driver]) -> None:
    source, said = driver
    run, margin = new_run("Sales"), timedelta(minutes=10)
    assert source.endpoints() == ["Sales"]
    seen = source.preview("Sales", NOW)
    assert (seen.count, seen.count_before_cutoff, seen.largest_bytes) == (1, 7, 7)
    assert [each.run_id for each in source.history()] == ["r" * 32]
    source.start_run(run)
    assert [batch.count for batch in source.hide(run, 3, 1, margin)] == [3]
    assert [message.destination for message in source.read_batch(run, 1)] == ["Sales"]
    assert source.advance(run, 1, BatchStatus.PENDING, BatchStatus.STAGED)
    assert source.return_batch(run, 1) == 3
    source.set_status(run, MigrationStatus.PREPARED, NOW)
    for statement in said.said:
        parsed = sqlglot.parse(statement, read="tsql")
        assert all(parsed), statement
        commands = [each for each in parsed if isinstance(each, expressions.Command)]
        assert not commands or statement.startswith(_KNOWN), statement
        assert not any(each.find(expressions.Drop) for each in parsed if each), statement
    assert len(said.said) > 30


@pytest.mark.parametrize("schema", SCHEMAS, ids=["plain", "hostile"])
def test_the_tables_of_a_migration_parse(schema: str) -> None:
    driver, dialect = _Driver(), SqlServerDialect("mssql://user:secret@127.0.0.1:1/x", schema)
    for statement in dialect.state_table_statements():
        PlainSession(driver).change(statement, {})  # pyright: ignore[reportArgumentType]
    found = [each for statement in driver.said for each in sqlglot.parse(statement, read="tsql")]
    assert [type(each) for each in found] == [expressions.IfBlock] * 3
    assert [each.find(expressions.Create) is not None for each in found if each] == [True] * 3
    assert "WHERE [OngoingTable] IS NOT NULL" in driver.said[1]


def test_what_is_hidden_is_locked_row_by_row_and_what_is_locked_is_skipped() -> None:
    dialect = SqlServerDialect("mssql://user:secret@127.0.0.1:1/x", None)
    driver = _Driver()
    hiding = HideRequest("Sales_TimeoutData", "TimeoutData_migration_x", COLUMNS, 5, 1024, 4096)
    assert dialect.hide(PlainSession(driver), hiding, NOW) == 3  # pyright: ignore[reportArgumentType]
    copying, removing = driver.said
    assert "SELECT TOP (4096)" in copying
    assert (
        "[dbo].[Sales_TimeoutData] WITH (UPDLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK) WHERE [Time] >= @floor "
        "ORDER BY [Time]" in copying
    )
    assert "5 + (ROW_NUMBER() OVER (ORDER BY [Time], [Id]) - 1) / 1024" in copying
    assert removing.startswith("DELETE t FROM [dbo].[Sales_TimeoutData] AS t JOIN")


def test_a_timeout_that_was_copied_and_not_taken_out_ends_the_transaction(
    driver: tuple[MigrationSource, _Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, said = driver
    note = said.change
    monkeypatch.setattr(said, "change", lambda sql, values=None: note(sql, values) - sql.startswith("DELETE"))
    with pytest.raises(StoreUnavailable, match="3 timeouts were copied"):
        source.hide(new_run("Sales"), 3, 1, timedelta(minutes=10))
    assert "ROLLBACK TRANSACTION" in said.said
    assert "COMMIT TRANSACTION" not in said.said
