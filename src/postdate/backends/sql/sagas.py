"""Saga instances in a table, by SQL that the databases have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from typing_extensions import override

from postdate.errors import SagaConflict, StoreNotSetUp
from postdate.ports import Correlation, SagaChange, SagaFate, SagaRecord, SagaStore, Work
from postdate.ports.sagas import SET_UP

_COLUMNS: Final = "saga_id, saga_type, property, value, state, details, version"


class SqlSagaStore(SagaStore):
    """Keeps saga instances in a table of an SQL database.

    Args:
        where: the database in words, without secrets.
        table: as SQL.
        value: what stands for a value in a statement.
    """

    def __init__(self, where: str, table: str, value: str) -> None:
        self._where = where
        same = f"saga_type = {value} AND saga_id = {value}"
        held = f"{same} AND version = {value}"
        self._find = (
            f"SELECT {_COLUMNS} FROM {table} WHERE saga_type = {value} AND property = {value} AND value = {value}"
        )
        self._load = f"SELECT {_COLUMNS} FROM {table} WHERE {same}"
        self._create = f"INSERT INTO {table} ({_COLUMNS}) VALUES ({f'{value}, ' * 6}1) ON CONFLICT DO NOTHING"
        self._update = f"UPDATE {table} SET state = {value}, details = {value}, version = version + 1 WHERE {held}"
        self._complete = f"DELETE FROM {table} WHERE {held}"

    @override
    async def find(self, saga_type: str, correlation: Correlation) -> SagaRecord | None:
        return await self._read(self._find, (saga_type, correlation.property, correlation.value))

    @override
    async def load(self, saga_type: str, saga_id: str) -> SagaRecord | None:
        return await self._read(self._load, (saga_type, saga_id))

    async def _read(self, statement: str, values: Sequence[str]) -> SagaRecord | None:
        try:
            row = await self._row(statement, values)
        except StoreNotSetUp as error:
            raise StoreNotSetUp(f"{self._where} has no table of sagas; {SET_UP}") from error
        if row is None:
            return None
        saga_id, kind, name, value, state, details, version = row
        return SagaRecord(saga_id, kind, Correlation(name, value), state, details, version)

    @abstractmethod
    async def _row(self, statement: str, values: Sequence[str]) -> tuple[Any, ...] | None:
        """Return the only row of a statement."""

    @override
    def applying(self, changes: Sequence[SagaChange]) -> Work:
        steps = [(*self._statement(change), change.record) for change in changes]

        def apply(transaction: Any) -> None:
            for statement, values, record in steps:
                if self._change(transaction, statement, values) != 1:
                    raise SagaConflict(
                        f"{record.saga_type} {record.saga_id} was created, changed or completed meanwhile"
                    )

        return apply

    @staticmethod
    @abstractmethod
    def _change(transaction: Any, statement: str, values: Sequence[Any]) -> int:
        """Run a statement in a transaction; return how many rows it changed."""

    def _statement(self, change: SagaChange) -> tuple[str, tuple[Any, ...]]:
        record, place = change.record, change.record.correlation
        match change.fate:
            case SagaFate.CREATED:
                key = (record.saga_id, record.saga_type, place.property, place.value)
                return self._create, (*key, record.state, record.details)
            case SagaFate.UPDATED:
                return self._update, (record.state, record.details, record.saga_type, record.saga_id, record.version)
            case SagaFate.COMPLETED:
                return self._complete, (record.saga_type, record.saga_id, record.version)
