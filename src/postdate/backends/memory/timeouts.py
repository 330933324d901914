"""Timeouts in memory, for tests and trials (row 104)."""

from __future__ import annotations

from datetime import datetime

from typing_extensions import override

from postdate.persistence.timeouts import checked, in_order, normal_id, normal_saga
from postdate.ports.timeouts import DueChunk, DueTimeout, Timeout, TimeoutClaim, TimeoutPersister


class MemoryTimeouts(TimeoutPersister):
    """Keeps timeouts in memory; they are lost with the process."""

    def __init__(self) -> None:
        self._timeouts: dict[str, Timeout] = {}
        self._claimed: set[str] = set()

    @override
    async def initialize(self, endpoint: str) -> None: ...

    @override
    async def setup(self) -> None: ...

    @override
    async def add(self, timeout: Timeout) -> bool:
        timeout = checked(timeout)
        return self._timeouts.setdefault(timeout.timeout_id, timeout) is timeout

    @override
    async def peek(self, timeout_id: str) -> Timeout | None:
        return self._timeouts.get(normal_id(timeout_id) or "")

    @override
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        found = await self.peek(timeout_id)
        if found is None or found.timeout_id in self._claimed:
            return None
        self._claimed.add(found.timeout_id)
        claim = _MemoryClaim(found, self, self._claimed)
        return TimeoutClaim(found, claim.remove, claim.release)

    @override
    async def try_remove(self, timeout_id: str) -> bool:
        return self._timeouts.pop(normal_id(timeout_id) or "", None) is not None

    @override
    async def remove_by_saga(self, saga_id: str) -> int:
        saga = normal_saga(saga_id)
        theirs = [each.timeout_id for each in self._timeouts.values() if saga is not None and each.saga_id == saga]
        for timeout_id in theirs:
            del self._timeouts[timeout_id]
        return len(theirs)

    @override
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        stored = [DueTimeout(each.timeout_id, each.due) for each in self._timeouts.values()]
        found = in_order(each for each in stored if start < each.due <= now)
        last = found[: max(limit, 1)][-1].due if found else now
        chunk = [each for each in found if each.due <= last]
        if len(chunk) < len(found):
            return DueChunk(chunk, now)
        return DueChunk(chunk, min((each.due for each in stored if each.due > now), default=None))

    @override
    async def close(self) -> None: ...


class _MemoryClaim:
    def __init__(self, timeout: Timeout, timeouts: MemoryTimeouts, claimed: set[str]) -> None:
        self.timeout, self._timeouts, self._claimed = timeout, timeouts, claimed

    async def remove(self) -> bool:
        await self.release()
        return await self._timeouts.try_remove(self.timeout.timeout_id)

    async def release(self) -> None:
        self._claimed.discard(self.timeout.timeout_id)
