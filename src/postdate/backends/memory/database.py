"""The memory of this process as one object, for tests and trials; its sagas and timeouts. Source: ADR 0021."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property

from typing_extensions import override

from postdate import ports
from postdate.backends.memory.store import MemoryStore
from postdate.backends.memory.transport import MemoryTransport
from postdate.backends.sql.timeouts_layout import normal_id, normal_saga, normalize_timeout, sort_by_due
from postdate.clock import Clock
from postdate.errors import SagaConflict
from postdate.ports.backends import DatabaseObject
from postdate.ports.timeouts import DueChunk, DueTimeout, Timeout, TimeoutClaim, TimeoutPersister


class MemorySagaStore(ports.SagaStore):
    """Keeps saga instances in memory; they are lost with the process."""

    _capabilities = ports.SagaStoreCapabilities(durable=False, shared=False)

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], ports.SagaRecord] = {}

    @override
    async def setup(self) -> None: ...

    @override
    async def find(self, saga_type: str, correlation: ports.Correlation) -> ports.SagaRecord | None:
        return _find_saga(self._records, saga_type, correlation)

    @override
    async def load(self, saga_type: str, saga_id: str) -> ports.SagaRecord | None:
        return self._records.get((saga_type, saga_id))

    @override
    async def read_page(self, after: tuple[str, str], limit: int) -> Sequence[ports.SagaRecord]:
        return [record for key, record in sorted(self._records.items()) if key > after][:limit]

    @override
    async def apply(self, changes: Sequence[ports.SagaChange]) -> None:
        records = dict(self._records)
        for change in changes:
            _apply(records, change)
        self._records = records

    @override
    async def close(self) -> None: ...


def _find_saga(
    records: dict[tuple[str, str], ports.SagaRecord], saga_type: str, correlation: ports.Correlation
) -> ports.SagaRecord | None:
    key = (saga_type, correlation)
    return next((each for each in records.values() if (each.saga_type, each.correlation) == key), None)


def _apply(records: dict[tuple[str, str], ports.SagaRecord], change: ports.SagaChange) -> None:
    record = change.record
    key = (record.saga_type, record.saga_id)
    if change.kind is ports.SagaChangeKind.CREATED:
        can_apply = key not in records and _find_saga(records, record.saga_type, record.correlation) is None
    else:
        can_apply = key in records and records[key].version == record.version
    if not can_apply:
        raise SagaConflict(f"{record.saga_type} {record.saga_id} was created, changed or completed meanwhile")
    if change.kind is ports.SagaChangeKind.COMPLETED:
        del records[key]
    elif change.kind is ports.SagaChangeKind.SET_ASIDE:
        stored_record = records[key]
        new_correlation = replace(stored_record.correlation, property=stored_record.saga_id)
        records[key] = replace(stored_record, correlation=new_correlation, version=stored_record.version + 1)
    else:
        records[key] = replace(record, version=record.version + 1)


class MemoryTimeouts(TimeoutPersister):
    """Keeps timeouts in memory; they are lost with the process."""

    def __init__(self) -> None:
        self._timeouts: dict[str, Timeout] = {}
        self._claimed_ids: set[str] = set()

    @override
    async def initialize(self, endpoint: str) -> None: ...

    @override
    async def setup(self) -> None: ...

    @override
    async def add(self, timeout: Timeout) -> bool:
        timeout = normalize_timeout(timeout)
        return self._timeouts.setdefault(timeout.timeout_id, timeout) is timeout

    @override
    async def peek(self, timeout_id: str) -> Timeout | None:
        return self._timeouts.get(normal_id(timeout_id) or "")

    @override
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        timeout = await self.peek(timeout_id)
        if timeout is None or timeout.timeout_id in self._claimed_ids:
            return None
        self._claimed_ids.add(timeout.timeout_id)

        async def remove() -> bool:
            await release()
            return await self.try_remove(timeout.timeout_id)

        async def release() -> None:
            self._claimed_ids.discard(timeout.timeout_id)

        return TimeoutClaim(timeout, remove, release)

    @override
    async def try_remove(self, timeout_id: str) -> bool:
        return self._timeouts.pop(normal_id(timeout_id) or "", None) is not None

    @override
    async def remove_by_saga(self, saga_id: str) -> int:
        saga = normal_saga(saga_id)
        timeout_ids = [each.timeout_id for each in self._timeouts.values() if saga is not None and each.saga_id == saga]
        for timeout_id in timeout_ids:
            del self._timeouts[timeout_id]
        return len(timeout_ids)

    @override
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        timeouts = [DueTimeout(each.timeout_id, each.due) for each in self._timeouts.values()]
        due_timeouts = sort_by_due(each for each in timeouts if start < each.due <= now)
        last_due = due_timeouts[: max(limit, 1)][-1].due if due_timeouts else now
        chunk = [each for each in due_timeouts if each.due <= last_due]
        if len(chunk) < len(due_timeouts):
            return DueChunk(chunk, now)
        return DueChunk(chunk, min((each.due for each in timeouts if each.due > now), default=None))

    @override
    async def close(self) -> None: ...


class Memory(DatabaseObject):
    """Store, queues, sagas and timeouts in memory. Each is created once, at first use, and lost with the process.

    They share no transactions, and there is no outbox.

    Args:
        recording: how much is kept for audits.
        clock: the clock by which messages expire in queues; ``None``: the machine's clock.
    """

    def __init__(self, *, recording: ports.Recording = ports.Recording.ALL, clock: Clock | None = None) -> None:
        super().__init__()
        self._recording, self._clock = recording, clock

    @cached_property
    def store(self) -> MemoryStore:
        """The store of delayed messages."""
        return self.register_adapter(MemoryStore(recording=self._recording))

    @cached_property
    def queues(self) -> MemoryTransport:
        """The transport."""
        return self.register_adapter(MemoryTransport() if self._clock is None else MemoryTransport(clock=self._clock))

    @cached_property
    def sagas(self) -> MemorySagaStore:
        """The saga store."""
        return self.register_adapter(MemorySagaStore())

    @cached_property
    def timeouts(self) -> MemoryTimeouts:
        """The timeouts of a timeout manager."""
        return self.register_adapter(MemoryTimeouts())
