"""Saga instances in a table of an SQL database: everything but how its tables are made. Source: ADR 0016, 0030."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.dialect import Sessions, SqlDialect
from postdate.errors import SagaConflict, StoreNotSetUp
from postdate.ports import Correlation, SagaChange, SagaFate, SagaRecord, SagaStore, SagaStoreCapabilities, Work
from postdate.ports.endpoint import SET_UP

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
        held = f"WHERE {same} AND version = %(version)s"
        self._find = dialect.spelled(f"{read} {dialect.equal('saga_type', 'property', 'value')}")
        self._load = dialect.spelled(f"{read} {same}")
        self._create = dialect.insert(table, _COLUMNS, ("saga_type", "property", "value"))
        self._change = {
            SagaFate.UPDATED: dialect.spelled(f"UPDATE {table} SET {new} {held}"),
            SagaFate.COMPLETED: dialect.spelled(f"DELETE FROM {table} {held}"),
        }

    @override
    async def find(self, saga_type: str, correlation: Correlation) -> SagaRecord | None:
        place = {"saga_type": saga_type, "property": correlation.property, "value": correlation.value}
        return await self._read(self._find, place)

    @override
    async def load(self, saga_type: str, saga_id: str) -> SagaRecord | None:
        return await self._read(self._load, {"saga_type": saga_type, "saga_id": saga_id})

    async def _read(self, statement: Any, values: Mapping[str, Any]) -> SagaRecord | None:
        try:
            row = await self._sessions.look(lambda session: self._dialect.row(session, statement, values))
        except StoreNotSetUp as error:
            raise StoreNotSetUp(f"{self._sessions.where} has no table of sagas; {SET_UP}") from error
        if row is None:
            return None
        saga_id, kind, name, value, state, details, version = row
        return SagaRecord(saga_id, kind, Correlation(name, value), state, details, version)

    @override
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        await self._sessions.transaction(self.applying(changes))

    @override
    def applying(self, changes: Sequence[SagaChange]) -> Work:
        def apply(transaction: Any) -> None:
            for change in changes:
                if not self._applied(transaction, change):
                    record = change.record
                    raise SagaConflict(
                        f"{record.saga_type} {record.saga_id} was created, changed or completed meanwhile"
                    )

        return apply

    def _applied(self, transaction: Any, change: SagaChange) -> bool:
        record, place = change.record, change.record.correlation
        values = (record.saga_id, record.saga_type, place.property, place.value, record.state, record.details)
        if change.fate is SagaFate.CREATED:
            return self._dialect.insert_new(transaction, self._create, _row(*values, 1))
        row = _row(*values, record.version)
        return self._dialect.change(transaction, self._change[change.fate], row) == 1


def _row(*values: str | int) -> dict[str, Any]:
    return dict(zip(_COLUMNS, values, strict=True))
