"""Entity group transactions: up to a hundred entities of one partition, all or none. Source: ADR 0013."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from azure.data.tables import UpdateMode

from postdate.backends.azure.errors import TABLES, code_of, creating, translated
from postdate.backends.azure.login import RequestAttempts, at_once, count_attempts
from postdate.errors import StoreNotSetUp, StoreUnreachable

if TYPE_CHECKING:
    from azure.data.tables.aio import TableClient

T = TypeVar("T")

_MOST: Final = 100
_LARGEST_BYTES: Final = 900 * 1024
"""Of one request: Azure takes four megabytes, but encoding these would block the event loop."""
_REFUSED: Final = frozenset({404, 409, 412})
"""Because of one entity; with any other status the table or the account is at fault."""
_NO_TABLE: Final = frozenset({"TableNotFound", "TableBeingDeleted"})
_OVERHEAD_BYTES: Final = 1_000


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of one entity; an ``etag`` is the version that must still be there.

    ``is_again``: an earlier request, of which no answer came, may have done it already.

    Its kinds: ``create``, ``delete``, ``upsert`` (add or replace), ``replace``, ``merge`` (add, or change the given
    columns), ``change`` (change the given columns).
    """

    kind: str
    entity: Mapping[str, Any]
    etag: str = ""
    is_again: bool = False

    def native(self) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
        """Return the operation as the SDK's tuple."""
        if self.kind == "merge":
            return "upsert", self.entity, {"mode": UpdateMode.MERGE}
        if self.kind == "upsert":
            return "upsert", self.entity, {"mode": UpdateMode.REPLACE}
        guard = {"etag": self.etag, "match_condition": MatchConditions.IfNotModified} if self.etag else {}
        if self.kind in {"replace", "change"}:
            mode = UpdateMode.REPLACE if self.kind == "replace" else UpdateMode.MERGE
            return "update", self.entity, {"mode": mode, **guard}
        return self.kind, self.entity, guard

    @property
    def size(self) -> int:
        """Upper estimate of its bytes in a request."""
        return _OVERHEAD_BYTES + sum(map(_encoded_size, self.entity.values()))


class Table:
    """One table. Requests raise `StoreNotSetUp` when it is missing, and `StoreUnavailable` without an answer."""

    def __init__(self, client: TableClient, place: str) -> None:
        self._client: Any = client  # the SDK leaves the types of its keyword arguments open
        self.what = f"table {client.table_name!r} of {place}"

    async def create(self) -> None:
        with translated(TABLES, self.what), creating("TableAlreadyExists"):
            await self._client.create_table()

    async def exists(self) -> bool:
        try:
            await self.get({"PartitionKey": "", "RowKey": ""})
        except StoreNotSetUp:
            return False
        return True

    async def get(self, keys: Mapping[str, str]) -> Mapping[str, Any] | None:
        with translated(TABLES, self.what):
            try:
                return await self._client.get_entity(keys["PartitionKey"], keys["RowKey"])
            except ResourceNotFoundError as error:
                if code_of(error) in _NO_TABLE:
                    raise
                return None

    async def query(
        self, where: str, select: Sequence[str] | None = None, at_once: int | None = None
    ) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield the entities that match an OData condition, in key order, ``at_once`` per answer."""
        columns = None if select is None else list(select)
        with translated(TABLES, self.what):
            async for entity in self._client.query_entities(where, select=columns, results_per_page=at_once):
                yield entity

    async def atomically(self, operations: Sequence[Operation]) -> bool:
        """Do all in one transaction; return ``False``, with nothing done, when an entity was not as expected.

        At most a hundred operations, of one partition, on different entities. Without an answer they may have been
        done.

        The refusal of a request that was made before proves nothing: the first one may have done what the second one
        finds done. Only here it is decided what such a refusal means: what the table has now tells.
        """
        attempts = RequestAttempts()
        with translated(TABLES, self.what), count_attempts(attempts):
            try:
                if len(operations) == 1 and operations[0].kind != "delete":
                    # Without a transaction, at half its cost. Not for deletions: the SDK hides their 404.
                    kind, entity, how = operations[0].native()
                    await getattr(self._client, f"{kind}_entity")(entity, **how)
                else:
                    await self._client.submit_transaction([operation.native() for operation in operations])
            except HttpResponseError as error:
                if error.status_code not in _REFUSED or code_of(error) in _NO_TABLE:
                    raise
            else:
                return True
        may_be_done = attempts.is_repeated or all(each.is_again for each in operations)
        return may_be_done and await self._are_done(operations)

    async def _are_done(self, operations: Sequence[Operation]) -> bool:
        """Return whether the table has what all these operations make."""
        outcomes: list[bool] = []

        async def look(operation: Operation) -> None:
            outcomes.append(_is_made(operation, await self.get(operation.entity)))

        await at_once([lambda o=operation: look(o) for operation in operations])
        return all(outcomes)

    async def each(self, operations: Sequence[Operation], outcomes: dict[int, bool] | None = None) -> list[bool]:
        """Do each operation, in as few transactions as possible; return which were done.

        An entity that was not as expected - present already, gone, changed - is skipped and stops no other. After an
        error some may be done; repeating all of them does no harm. ``outcomes`` then has those that are certain, by
        index.
        """
        done: dict[int, bool] = {} if outcomes is None else outcomes

        async def do_one(index: int) -> None:
            done[index] = await self.atomically([operations[index]])

        async def do(group: Sequence[int]) -> None:
            if await self.atomically([operations[index] for index in group]):
                done.update(dict.fromkeys(group, True))
            elif len(group) == 1:
                done[group[0]] = False
            else:
                await at_once([lambda i=index: do_one(i) for index in group])

        await at_once([lambda g=group: do(g) for group in _groups(operations)])
        return [done[index] for index in range(len(operations))]


class Rounds:
    """Batches the operations of several callers: while one batch is on its way, the next one gathers.

    A transaction of a hundred costs half of eight of a dozen. The first caller never waits for others.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._asked: list[_Asked] = []
        self._cut_off: StoreUnreachable | None = None
        self._task: asyncio.Task[None] | None = None

    async def each(self, operations: Sequence[Operation]) -> list[bool]:
        """As :meth:`Table.each`; a cancelled caller does not know whether its operations were done."""
        asked = _Asked(operations, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._go_round(), name="postdate-azure-rounds")
        return await asked.answer

    async def stop(self, until: float) -> None:
        """Wait for requests on their way until ``until`` of the loop's clock; then fail the callers that still wait."""
        if self._task is not None:
            _, on_its_way = await asyncio.wait([self._task], timeout=max(until - asyncio.get_running_loop().time(), 0))
            if on_its_way:
                self._cut_off = StoreUnreachable(f"{self._table.what} did not answer before the store was closed")
                self._task.cancel()
                await asyncio.wait([self._task])

    async def _go_round(self) -> None:
        while self._asked:
            now, self._asked = _apart(self._asked)
            try:
                done = await self._table.each([operation for asked in now for operation in asked.operations])
            except BaseException as error:
                for asked in now:
                    asked.fail(self._cut_off or error)
                if not isinstance(error, Exception):  # cancelled: the loop ends
                    for asked in self._asked:
                        asked.fail(self._cut_off or error)
                    raise
                continue
            results = iter(done)
            for asked in now:
                asked.succeed([next(results) for _ in asked.operations])


@dataclass(eq=False, slots=True)
class _Asked:
    operations: Sequence[Operation]
    answer: asyncio.Future[list[bool]]

    @property
    def keys(self) -> set[tuple[str, str]]:
        return {(each.entity["PartitionKey"], each.entity["RowKey"]) for each in self.operations}

    def succeed(self, done: list[bool]) -> None:
        if not self.answer.done():
            self.answer.set_result(done)

    def fail(self, error: BaseException) -> None:
        if self.answer.done():
            return
        if isinstance(error, Exception):
            self.answer.set_exception(error)
        else:
            self.answer.cancel()


def _apart(asked: Sequence[_Asked]) -> tuple[list[_Asked], list[_Asked]]:
    """Split into one transaction and the rest: no transaction takes the same entity twice."""
    now: list[_Asked] = []
    later: list[_Asked] = []
    keys: set[tuple[str, str]] = set()
    for each in asked:
        if keys & each.keys:
            later.append(each)
        else:
            now.append(each)
            keys |= each.keys
    return now, later


def _is_made(operation: Operation, entity: Mapping[str, Any] | None) -> bool:
    """Return whether an entity, or its absence, is what an operation makes."""
    if operation.kind == "delete":
        return entity is None
    return entity is not None and all(entity.get(name) == value for name, value in operation.entity.items())


def _encoded_size(value: object) -> int:
    """Return the size in JSON: bytes in base64, non-ASCII characters as up to two escapes of six characters."""
    if isinstance(value, bytes):
        return len(value) * 4 // 3
    if isinstance(value, str):
        return len(value) * (1 if value.isascii() else 12)
    return 0


def _groups(operations: Sequence[Operation]) -> Iterable[list[int]]:
    """Yield the indexes of operations that fit into one transaction."""
    open_groups: dict[str, list[int]] = {}
    sizes: defaultdict[str, int] = defaultdict(int)
    for index, operation in enumerate(operations):
        partition = str(operation.entity["PartitionKey"])
        group = open_groups.setdefault(partition, [])
        if len(group) == _MOST or (group and sizes[partition] + operation.size > _LARGEST_BYTES):
            yield group
            group = open_groups[partition] = []
            sizes[partition] = 0
        group.append(index)
        sizes[partition] += operation.size
    yield from open_groups.values()
