"""Saga instances in a schema of PostgreSQL, beside the delayed messages and queues there: one transaction for all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from typing_extensions import override

from postdate.backends.postgres.access import Access, Connection, OpenDatabase
from postdate.backends.postgres.names import part_steps, sql
from postdate.backends.postgres.scripts import part_script
from postdate.errors import SagaConflict, StoreNotSetUp
from postdate.ports import (
    Correlation,
    SagaChange,
    SagaFate,
    SagaRecord,
    SagaStore,
    SagaStoreCapabilities,
    Scripted,
    Work,
)
from postdate.ports.sagas import SET_UP
from postdate.runtime.threads import in_thread

_TABLE: Final = "saga"

_COLUMNS: Final = "saga_id, saga_type, property, value, state, details, version"
_SAME: Final = "saga_type = %s AND saga_id = %s AND version = %s"


class PostgresSagaStore(SagaStore, Scripted):
    """Keeps saga instances in PostgreSQL; several processes may use it at once.

    Args:
        database: ``postgresql://user:password@host:port/database``, any connection string of libpq, or a
            :class:`postdate.Postgres` that others use, too.
        schema: where the table is; store and queues in the same one share their transactions with it. ``None``: that of
            the database, which is ``postdate``.
        answers_within: after so long a silence of the server a connection is given up; above 0. ``None``: as the
            database says, or 20 seconds.

    Raises:
        ConfigurationError: the address, the schema or the duration cannot be.
    """

    def __init__(
        self, database: str | OpenDatabase, *, schema: str | None = None, answers_within: timedelta | None = None
    ) -> None:
        self.database = Access(database, schema, answers_within=answers_within)
        table = self.database.names.of(_TABLE)
        self._find = f"SELECT {_COLUMNS} FROM {table} WHERE saga_type = %s AND property = %s AND value = %s"
        self._load = f"SELECT {_COLUMNS} FROM {table} WHERE saga_type = %s AND saga_id = %s"
        self._create = f"INSERT INTO {table} ({_COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, 1) ON CONFLICT DO NOTHING"
        self._update = f"UPDATE {table} SET state = %s, details = %s, version = version + 1 WHERE {_SAME}"
        self._complete = f"DELETE FROM {table} WHERE {_SAME}"

    @property
    @override
    def capabilities(self) -> SagaStoreCapabilities:
        return SagaStoreCapabilities(durable=True, shared=True, database=self.database.identity)

    @override
    def setup_statements(self, endpoint: str) -> str:
        """Return the SQL that makes what :meth:`setup` does, for a database administrator; may be run again."""
        schema = self.database.names.schema
        return part_script(schema, part_steps(schema, "sagas", _TABLE), with_queues=True)

    @override
    async def setup(self) -> None:
        await in_thread(self._set_up)

    def _set_up(self) -> None:
        self.database.setup_blocking(part=part_steps(self.database.names.schema, "sagas", _TABLE))

    @override
    async def find(self, saga_type: str, correlation: Correlation) -> SagaRecord | None:
        return await self._read(self._find, (saga_type, correlation.property, correlation.value))

    @override
    async def load(self, saga_type: str, saga_id: str) -> SagaRecord | None:
        return await self._read(self._load, (saga_type, saga_id))

    async def _read(self, statement: str, values: Sequence[str]) -> SagaRecord | None:
        try:
            row = await self.database.run(lambda c: c.execute(sql(statement), values, prepare=True).fetchone())
        except StoreNotSetUp as error:
            raise StoreNotSetUp(f"{self.database.where} has no table of sagas; {SET_UP}") from error
        return None if row is None else _record(row)

    @override
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        await self.database.transaction(self.applying(changes))

    @override
    def applying(self, changes: Sequence[SagaChange]) -> Work:
        steps = [(*self._statement(change), change.record) for change in changes]

        def apply(connection: Connection) -> None:
            for statement, values, record in steps:
                if connection.execute(sql(statement), values, prepare=True).rowcount != 1:
                    raise SagaConflict(
                        f"{record.saga_type} {record.saga_id} was created, changed or completed meanwhile"
                    )

        return apply

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

    @override
    async def close(self) -> None:
        """Close every connection; a second time without effect."""
        await in_thread(self.database.close_blocking)


def _record(row: tuple[Any, ...]) -> SagaRecord:
    saga_id, saga_type, name, value, state, details, version = row
    return SagaRecord(saga_id, saga_type, Correlation(name, value), state, details, version)
