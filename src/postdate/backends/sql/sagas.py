"""Saga instances in a table of an SQL database: everything but how its tables are made. Source: ADR 0016, 0058."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.dialect import Sessions, SqlDialect, Values
from postdate.errors import SagaConflict, StoreNotSetUp
from postdate.ports import (
    BatchedWork,
    Correlation,
    SagaChange,
    SagaFate,
    SagaRecord,
    SagaStore,
    SagaStoreCapabilities,
    Work,
)
from postdate.ports.endpoint import SET_UP
from postdate.runtime.threads import together

_COLUMNS: Final[Sequence[str]] = ("saga_id", "saga_type", "property", "value", "state", "details", "version")


class SqlSagaStore(SagaStore, ABC):
    """Keeps saga instances in a table of an SQL database.

    Args:
        sessions: run its statements.
        dialect: of the database.
        table: its name in statements.
        identity: of the database; see :class:`postdate.ports.SagaStoreCapabilities`.
    """

    def __init__(self, sessions: Sessions, dialect: SqlDialect, table: str, identity: object) -> None:
        self._sessions, self._dialect = sessions, dialect
        self._capabilities = SagaStoreCapabilities(durable=True, shared=True, database=identity)
        same, read = dialect.equal("saga_type", "saga_id"), f"SELECT {', '.join(_COLUMNS)} FROM {table} WHERE"
        new = f"state = {dialect.value('state')}, details = {dialect.value('details')}, version = version + 1"
        unchanged = f"WHERE {same} AND version = %(version)s"
        self._rows = {question: partial(self._read_rows, question) for question in ("find", "load")}
        self._questions = {
            "find": dialect.spelled(f"{read} {dialect.equal('saga_type', 'property', 'value')}"),
            "load": dialect.spelled(f"{read} {same}"),
        }
        # One condition for both would read what comes before in the type.
        next_ids = f"{dialect.equal('saga_type')} AND saga_id > {dialect.value('saga_id')} ORDER BY saga_id"
        next_types = f"saga_type > {dialect.value('saga_type')} ORDER BY saga_type, saga_id"
        self._pages = [dialect.spelled(dialect.first_rows(f"{read} {each}")) for each in (next_ids, next_types)]
        self._statements = {
            SagaFate.COMPLETED: dialect.spelled(f"DELETE FROM {table} {unchanged}"),
            SagaFate.SET_ASIDE: dialect.spelled(
                f"UPDATE {table} SET property = saga_id, version = version + 1 {unchanged}"
            ),
            SagaFate.UPDATED: dialect.spelled(f"UPDATE {table} SET {new} {unchanged}"),
            SagaFate.CREATED: dialect.insert(table, _COLUMNS, ("saga_type", "property", "value")),
        }

    @override
    async def find(self, saga_type: str, correlation: Correlation) -> SagaRecord | None:
        place = {"saga_type": saga_type, "property": correlation.property, "value": correlation.value}
        return await self._read("find", place)

    @override
    async def load(self, saga_type: str, saga_id: str) -> SagaRecord | None:
        return await self._read("load", {"saga_type": saga_type, "saga_id": saga_id})

    @override
    async def find_all(self, saga_type: str, correlations: Sequence[Correlation]) -> Sequence[SagaRecord | None] | None:
        if not self._dialect.batches:
            return None
        places = [{"saga_type": saga_type, "property": each.property, "value": each.value} for each in correlations]
        return await self._sessions.look(lambda session: list(map(_record, self.rows_of(session, "find", places))))

    @override
    async def page(self, after: tuple[str, str], limit: int) -> Sequence[SagaRecord]:
        saga_type, saga_id = after

        def look(session: Any) -> list[tuple[Any, ...]]:
            rows = list[tuple[Any, ...]]()
            for statement in self._pages:
                values = {"saga_type": saga_type, "saga_id": saga_id, "limit": limit - len(rows)}
                rows += self._dialect.rows(session, statement, values)
            return rows

        return [each for row in await self._sessions.look(look) if (each := _record(row))]

    async def _read(self, question: str, place: Values) -> SagaRecord | None:
        try:
            if self._dialect.batches:
                do = self._rows[question]
                return _record(await together(do, do, place))
            statement = self._questions[question]
            return _record(await self._sessions.look(lambda session: self._dialect.row(session, statement, place)))
        except StoreNotSetUp as error:
            raise StoreNotSetUp(f"{self._sessions.where} has no table of sagas; {SET_UP}") from error

    def _read_rows(self, question: str, places: Sequence[Values]) -> Sequence[tuple[Any, ...] | None]:
        return self._sessions.look_blocking(lambda session: self.rows_of(session, question, places))

    def rows_of(self, session: Any, question: str, places: Sequence[Values]) -> Sequence[tuple[Any, ...] | None]:
        """Return the row of each place, in order."""
        return [self._dialect.row(session, self._questions[question], place) for place in places]

    @override
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        await self._sessions.transaction(self.applying(changes))

    @override
    def applying(self, changes: Sequence[SagaChange]) -> Work:
        return BatchedWork(self._apply, changes)

    def _apply(self, transaction: Any, works: Sequence[Sequence[SagaChange]]) -> None:
        """Apply the changes of messages; first what is completed or set aside, as another may take its correlation."""
        changes = [change for work in works for change in work]
        changes.sort(key=lambda change: change.record.saga_id)  # processes wait for each other's rows in one order
        for fate in (SagaFate.COMPLETED, SagaFate.SET_ASIDE, SagaFate.UPDATED, SagaFate.CREATED):
            rows = [_row(change) for change in changes if change.fate is fate]
            if rows and self.change(transaction, fate, rows) < len(rows):
                instances = ", ".join(f"{each['saga_type']} {each['saga_id']}" for each in rows[:3])
                raise SagaConflict(f"{instances} was created, changed or completed meanwhile")

    def change(self, transaction: Any, fate: SagaFate, rows: Sequence[Values]) -> int:
        """Write instances, each of which was not changed meanwhile; return how many."""
        change = self._dialect.insert_new if fate is SagaFate.CREATED else self._dialect.change
        return sum(change(transaction, self._statements[fate], row) for row in rows)


def _record(row: tuple[Any, ...] | None) -> SagaRecord | None:
    if row is None:
        return None
    saga_id, kind, name, value, state, details, version = row
    return SagaRecord(saga_id, kind, Correlation(name, value), state, details, version)


def _row(change: SagaChange) -> Values:
    record, place = change.record, change.record.correlation
    version = 1 if change.fate is SagaFate.CREATED else record.version
    values = (record.saga_id, record.saga_type, place.property, place.value, record.state, record.details, version)
    return dict(zip(_COLUMNS, values, strict=True))
