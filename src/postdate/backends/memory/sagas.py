"""Saga instances in memory, for tests and trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from postdate.errors import SagaConflict
from postdate.ports import Correlation, SagaChange, SagaFate, SagaRecord, SagaStore, SagaStoreCapabilities


class MemorySagaStore(SagaStore):
    """Keeps saga instances in memory; they are lost with the process."""

    _capabilities = SagaStoreCapabilities(durable=False, shared=False)

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], SagaRecord] = {}

    @override
    async def setup(self) -> None: ...

    @override
    async def find(self, saga_type: str, correlation: Correlation) -> SagaRecord | None:
        return _found(self._records, saga_type, correlation)

    @override
    async def load(self, saga_type: str, saga_id: str) -> SagaRecord | None:
        return self._records.get((saga_type, saga_id))

    @override
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        records = dict(self._records)
        for change in changes:
            _apply(records, change)
        self._records = records

    @override
    async def close(self) -> None: ...


def _found(records: dict[tuple[str, str], SagaRecord], saga_type: str, correlation: Correlation) -> SagaRecord | None:
    for record in records.values():
        if (record.saga_type, record.correlation) == (saga_type, correlation):
            return record
    return None


def _apply(records: dict[tuple[str, str], SagaRecord], change: SagaChange) -> None:
    given = change.record
    key = (given.saga_type, given.saga_id)
    if change.fate is SagaFate.CREATED:
        is_right = key not in records and _found(records, given.saga_type, given.correlation) is None
    else:
        is_right = key in records and records[key].version == given.version
    if not is_right:
        raise SagaConflict(f"{given.saga_type} {given.saga_id} was created, changed or completed meanwhile")
    if change.fate is SagaFate.COMPLETED:
        del records[key]
    else:
        records[key] = replace(given, version=given.version + 1)
