"""Saga instances in one SQLite file, beside the delayed messages and queues there: one transaction for all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sqlite.file import SqliteFile, Transaction
from postdate.backends.sqlite.setup import SAGA_MARKS, bring_up_to_date, steps
from postdate.errors import SagaConflict, StoreNotSetUp
from postdate.ports import (
    Correlation,
    Recording,
    SagaChange,
    SagaFate,
    SagaRecord,
    SagaStore,
    SagaStoreCapabilities,
    Work,
)
from postdate.ports.sagas import SET_UP

_COLUMNS: Final = "saga_id, saga_type, property, value, state, details, version"
_FIND: Final = f"SELECT {_COLUMNS} FROM saga WHERE saga_type = ? AND property = ? AND value = ?"
_LOAD: Final = f"SELECT {_COLUMNS} FROM saga WHERE saga_type = ? AND saga_id = ?"
_CREATE: Final = f"INSERT INTO saga ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, 1) ON CONFLICT DO NOTHING"
_UPDATE: Final = (
    "UPDATE saga SET state = ?, details = ?, version = version + 1 WHERE saga_type = ? AND saga_id = ? AND version = ?"
)
_COMPLETE: Final = "DELETE FROM saga WHERE saga_type = ? AND saga_id = ? AND version = ?"


class SqliteSagaStore(SagaStore):
    """Keeps saga instances in an SQLite file; several processes may use it at once.

    Args:
        path: of the file; created by :meth:`setup` or at first use unless ``create`` is false.
        synchronous: see :class:`postdate.SqliteStore`; whatever is on the same file needs the same.
        recording: likewise.
        create: create the file when it is missing.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
        create: bool = True,
    ) -> None:
        self.file = SqliteFile.open(path, synchronous=synchronous, recording=recording, create=create)
        self._closed = False

    @property
    @override
    def capabilities(self) -> SagaStoreCapabilities:
        return SagaStoreCapabilities(durable=True, shared=True, database=("sqlite", str(self.file.path)))

    @override
    async def setup(self) -> None:
        await self.file.setup()
        await self.file.write(self._set_up)

    def _set_up(self, tx: Transaction) -> None:
        bring_up_to_date(tx.execute, steps("sagas"), SAGA_MARKS, f"the sagas in {self.file.path}")

    @override
    async def find(self, saga_type: str, correlation: Correlation) -> SagaRecord | None:
        return await self._read(_FIND, (saga_type, correlation.property, correlation.value))

    @override
    async def load(self, saga_type: str, saga_id: str) -> SagaRecord | None:
        return await self._read(_LOAD, (saga_type, saga_id))

    async def _read(self, sql: str, values: Sequence[str]) -> SagaRecord | None:
        try:
            row: tuple[Any, ...] | None = await self.file.read(lambda c: c.execute(sql, values).fetchone())
        except StoreNotSetUp as error:
            raise StoreNotSetUp(f"{self.file.path} has no table of sagas; {SET_UP}") from error
        return None if row is None else _record(row)

    @override
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        await self.file.write(self.applying(changes))

    @override
    def applying(self, changes: Sequence[SagaChange]) -> Work:
        steps = [(*_statement(change), change.record) for change in changes]

        def apply(tx: Transaction) -> None:
            for sql, values, record in steps:
                if tx.execute(sql, values).rowcount != 1:
                    raise SagaConflict(
                        f"{record.saga_type} {record.saga_id} was created, changed or completed meanwhile"
                    )

        return apply

    @override
    async def close(self) -> None:
        """Give the file back; a second time without effect."""
        closed, self._closed = self._closed, True
        if not closed:
            self.file.close()


def _record(row: tuple[Any, ...]) -> SagaRecord:
    saga_id, saga_type, name, value, state, details, version = row
    return SagaRecord(saga_id, saga_type, Correlation(name, value), state, details, version)


def _statement(change: SagaChange) -> tuple[str, tuple[Any, ...]]:
    record, place = change.record, change.record.correlation
    match change.fate:
        case SagaFate.CREATED:
            key = (record.saga_id, record.saga_type, place.property, place.value)
            return _CREATE, (*key, record.state, record.details)
        case SagaFate.UPDATED:
            return _UPDATE, (record.state, record.details, record.saga_type, record.saga_id, record.version)
        case SagaFate.COMPLETED:
            return _COMPLETE, (record.saga_type, record.saga_id, record.version)
