"""Saga instances in a table of an SQL database: all except the creation of tables. Source: ADR 0016, 0058."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from typing_extensions import override

from postdate import ports
from postdate.backends.sql.dialect import Sessions, SqlDialect, Values
from postdate.errors import SagaConflict, StoreNotSetUp
from postdate.ports.endpoint import SET_UP
from postdate.runtime.threads import run_in_group

_COLUMNS: Final[Sequence[str]] = ("saga_id", "saga_type", "property", "value", "state", "details", "version")


class SqlSagaStore(ports.SagaStore, ABC):
    """Keeps saga instances in a table of an SQL database.

    Args:
        sessions: run its statements.
        dialect: of the database.
        table: its name in statements.
        identity: of the database; see :class:`postdate.ports.SagaStoreCapabilities`.
    """

    def __init__(self, sessions: Sessions, dialect: SqlDialect, table: str, identity: object) -> None:
        self._sessions, self._dialect = sessions, dialect
        self._capabilities = ports.SagaStoreCapabilities(durable=True, shared=True, database=identity)
        same, read = dialect.equality("saga_type", "saga_id"), f"SELECT {', '.join(_COLUMNS)} FROM {table} WHERE"
        new = (
            f"state = {dialect.placeholder('state')}, details = {dialect.placeholder('details')}, version = version + 1"
        )
        unchanged = f"WHERE {same} AND version = %(version)s"
        self._row_readers = {question: partial(self._read_rows, question) for question in ("find", "load")}
        self._select_statements = {
            "find": dialect.statement_of(f"{read} {dialect.equality('saga_type', 'property', 'value')}"),
            "load": dialect.statement_of(f"{read} {same}"),
        }
        # One condition for both would read the earlier rows of the type.
        next_ids = f"{dialect.equality('saga_type')} AND saga_id > {dialect.placeholder('saga_id')} ORDER BY saga_id"
        next_types = f"saga_type > {dialect.placeholder('saga_type')} ORDER BY saga_type, saga_id"
        self._pages = [dialect.statement_of(dialect.first_rows(f"{read} {each}")) for each in (next_ids, next_types)]
        self._statements = {
            ports.SagaChangeKind.COMPLETED: dialect.statement_of(f"DELETE FROM {table} {unchanged}"),
            ports.SagaChangeKind.SET_ASIDE: dialect.statement_of(
                f"UPDATE {table} SET property = saga_id, version = version + 1 {unchanged}"
            ),
            ports.SagaChangeKind.UPDATED: dialect.statement_of(f"UPDATE {table} SET {new} {unchanged}"),
            ports.SagaChangeKind.CREATED: dialect.insert_statement(table, _COLUMNS, ("saga_type", "property", "value")),
        }

    @override
    async def find(self, saga_type: str, correlation: ports.Correlation) -> ports.SagaRecord | None:
        key = {"saga_type": saga_type, "property": correlation.property, "value": correlation.value}
        return await self._read_record("find", key)

    @override
    async def load(self, saga_type: str, saga_id: str) -> ports.SagaRecord | None:
        return await self._read_record("load", {"saga_type": saga_type, "saga_id": saga_id})

    @override
    async def find_all(
        self, saga_type: str, correlations: Sequence[ports.Correlation]
    ) -> Sequence[ports.SagaRecord | None] | None:
        if not self._dialect.can_batch:
            return None
        keys = [{"saga_type": saga_type, "property": each.property, "value": each.value} for each in correlations]
        return await self._sessions.query(lambda session: list(map(_record, self.rows_of(session, "find", keys))))

    @override
    async def read_page(self, after: tuple[str, str], limit: int) -> Sequence[ports.SagaRecord]:
        saga_type, saga_id = after

        def read_rows(session: Any) -> list[tuple[Any, ...]]:
            rows = list[tuple[Any, ...]]()
            for statement in self._pages:
                values = {"saga_type": saga_type, "saga_id": saga_id, "limit": limit - len(rows)}
                rows += self._dialect.rows(session, statement, values)
            return rows

        return [each for row in await self._sessions.query(read_rows) if (each := _record(row))]

    async def _read_record(self, statement_name: str, key: Values) -> ports.SagaRecord | None:
        try:
            if self._dialect.can_batch:
                read_together = self._row_readers[statement_name]
                return _record(await run_in_group(read_together, read_together, key))
            statement = self._select_statements[statement_name]
            return _record(await self._sessions.query(lambda session: self._dialect.row(session, statement, key)))
        except StoreNotSetUp as error:
            raise StoreNotSetUp(f"{self._sessions.where} has no table of sagas; {SET_UP}") from error

    def _read_rows(self, statement_name: str, keys: Sequence[Values]) -> Sequence[tuple[Any, ...] | None]:
        return self._sessions.query_blocking(lambda session: self.rows_of(session, statement_name, keys))

    def rows_of(self, session: Any, statement_name: str, keys: Sequence[Values]) -> Sequence[tuple[Any, ...] | None]:
        """Return the row for each of the keys, in order."""
        return [self._dialect.row(session, self._select_statements[statement_name], place) for place in keys]

    @override
    async def apply(self, changes: Sequence[ports.SagaChange]) -> None:
        await self._sessions.transaction(self.applying_work(changes))

    @override
    def applying_work(self, changes: Sequence[ports.SagaChange]) -> ports.Work:
        return ports.BatchedWork(self._apply, changes)

    def _apply(self, transaction: Any, works: Sequence[Sequence[ports.SagaChange]]) -> None:
        """Apply the changes of messages.

        Completed and set-aside instances come first, because another instance may take their correlation.
        """
        changes = [change for work in works for change in work]
        changes.sort(key=lambda change: change.record.saga_id)  # processes wait for each other's rows in one order
        for fate in (
            ports.SagaChangeKind.COMPLETED,
            ports.SagaChangeKind.SET_ASIDE,
            ports.SagaChangeKind.UPDATED,
            ports.SagaChangeKind.CREATED,
        ):
            rows = [_row(change) for change in changes if change.kind is fate]
            if rows and self.change(transaction, fate, rows) < len(rows):
                instances = ", ".join(f"{each['saga_type']} {each['saga_id']}" for each in rows[:3])
                raise SagaConflict(f"{instances} was created, changed or completed meanwhile")

    def change(self, transaction: Any, fate: ports.SagaChangeKind, rows: Sequence[Values]) -> int:
        """Write instances that were not changed meanwhile; return how many."""
        change = self._dialect.insert_new if fate is ports.SagaChangeKind.CREATED else self._dialect.change
        return sum(change(transaction, self._statements[fate], row) for row in rows)


def _record(row: tuple[Any, ...] | None) -> ports.SagaRecord | None:
    if row is None:
        return None
    saga_id, kind, name, value, state, details, version = row
    return ports.SagaRecord(saga_id, kind, ports.Correlation(name, value), state, details, version)


def _row(change: ports.SagaChange) -> Values:
    record, correlation = change.record, change.record.correlation
    version = 1 if change.kind is ports.SagaChangeKind.CREATED else record.version
    values = (
        record.saga_id,
        record.saga_type,
        correlation.property,
        correlation.value,
        record.state,
        record.details,
        version,
    )
    return dict(zip(_COLUMNS, values, strict=True))
