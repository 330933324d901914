"""Entity group transactions: up to a hundred entities of one partition, all changed or none. Source: ADR 0013."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from azure.data.tables import UpdateMode

from postdate.backends.azure.errors import TABLES, code_of, suppress_error_code, translate_errors
from postdate.backends.azure.login import RequestAttempts, run_concurrently, track_attempts
from postdate.errors import StoreNotSetUp, StoreUnreachable

if TYPE_CHECKING:
    from azure.data.tables.aio import TableClient

T = TypeVar("T")

_MOST_OPERATIONS: Final = 100  # Azure's limit of one transaction
_LARGEST_BYTES: Final = 900 * 1024
"""The most bytes of one request. Azure accepts four megabytes, but encoding these would block the event loop."""
_REFUSED_STATUSES: Final = frozenset({404, 409, 412})
"""Statuses of a refusal because of one entity; any other status is about the table or the account."""
_NO_TABLE_CODES: Final = frozenset({"TableNotFound", "TableBeingDeleted"})
_OVERHEAD_BYTES: Final = 1_000  # of one operation, besides the values of its columns


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of one entity; an ``etag`` is the version that must still be stored.

    ``is_repeated``: an earlier request that was not answered may have made this change already.

    The kinds are ``create``, ``delete``, ``upsert`` (add or replace), ``replace``, ``merge`` (add, or change the given
    columns) and ``change`` (change the given columns).
    """

    kind: str
    entity: Mapping[str, Any]
    etag: str = ""
    is_repeated: bool = False

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
        """Upper estimate of its number of bytes in a request."""
        return _OVERHEAD_BYTES + sum(map(_encoded_size, self.entity.values()))


class Table:
    """One table. Requests raise `StoreNotSetUp` when it is missing, and `StoreUnavailable` without an answer."""

    def __init__(self, client: TableClient, account_description: str) -> None:
        self._client: Any = client  # the SDK leaves the types of its keyword arguments open
        self.description = f"table {client.table_name!r} of {account_description}"

    async def create(self) -> None:
        with translate_errors(TABLES, self.description), suppress_error_code("TableAlreadyExists"):
            await self._client.create_table()

    async def exists(self) -> bool:
        try:
            await self.get({"PartitionKey": "", "RowKey": ""})
        except StoreNotSetUp:
            return False
        return True

    async def get(self, keys: Mapping[str, str]) -> Mapping[str, Any] | None:
        with translate_errors(TABLES, self.description):
            try:
                return await self._client.get_entity(keys["PartitionKey"], keys["RowKey"])
            except ResourceNotFoundError as error:
                if code_of(error) in _NO_TABLE_CODES:
                    raise
                return None

    async def query(
        self, condition: str, select: Sequence[str] | None = None, page_size: int | None = None
    ) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield the entities that match an OData condition, in key order, ``page_size`` per answer."""
        columns = None if select is None else list(select)
        with translate_errors(TABLES, self.description):
            async for entity in self._client.query_entities(condition, select=columns, results_per_page=page_size):
                yield entity

    async def apply_atomically(self, operations: Sequence[Operation]) -> bool:
        """Apply all operations in one transaction.

        Return ``False``, with nothing changed, if an entity was not as expected.

        At most a hundred operations, of one partition, on different entities. After an error the operations may have
        been applied.

        If a request is repeated, its refusal proves nothing: the first request may have made the very change that the
        second one finds. Only this method decides what such a refusal means, by reading the entities.
        """
        attempts = RequestAttempts()
        with translate_errors(TABLES, self.description), track_attempts(attempts):
            try:
                if len(operations) == 1 and operations[0].kind != "delete":
                    # A single operation needs no transaction, which costs twice as much. Deletions do: the SDK hides
                    # their 404.
                    kind, entity, options = operations[0].native()
                    await getattr(self._client, f"{kind}_entity")(entity, **options)
                else:
                    await self._client.submit_transaction([operation.native() for operation in operations])
            except HttpResponseError as error:
                if error.status_code not in _REFUSED_STATUSES or code_of(error) in _NO_TABLE_CODES:
                    raise
            else:
                return True
        may_be_applied = attempts.is_repeated or all(each.is_repeated for each in operations)
        return may_be_applied and await self._has_applied(operations)

    async def _has_applied(self, operations: Sequence[Operation]) -> bool:
        """Return whether the table is as all these operations leave it."""
        outcomes: list[bool] = []

        async def read_outcome(operation: Operation) -> None:
            outcomes.append(_is_applied(operation, await self.get(operation.entity)))

        await run_concurrently([lambda o=operation: read_outcome(o) for operation in operations])
        return all(outcomes)

    async def apply_each(self, operations: Sequence[Operation], outcomes: dict[int, bool] | None = None) -> list[bool]:
        """Apply each operation, in as few transactions as possible; return for each whether it was applied.

        An entity that was not as expected (present already, missing, changed) is skipped and stops no other. After an
        error some operations may have been applied; repeating all of them does no harm. ``outcomes`` then has the
        certain outcomes, by index.
        """
        outcome_by_index: dict[int, bool] = {} if outcomes is None else outcomes

        async def apply_one(index: int) -> None:
            outcome_by_index[index] = await self.apply_atomically([operations[index]])

        async def apply_group(group: Sequence[int]) -> None:
            if await self.apply_atomically([operations[index] for index in group]):
                outcome_by_index.update(dict.fromkeys(group, True))
            elif len(group) == 1:
                outcome_by_index[group[0]] = False
            else:
                await run_concurrently([lambda i=index: apply_one(i) for index in group])

        await run_concurrently([lambda g=group: apply_group(g) for group in _transaction_groups(operations)])
        return [outcome_by_index[index] for index in range(len(operations))]


class OperationBatcher:
    """Batches the operations of several callers: while one batch is in flight, it collects the next one.

    One transaction of a hundred costs half as much as eight of a dozen. The first caller never waits for others.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._requests: list[_Request] = []
        self._stop_error: StoreUnreachable | None = None
        self._task: asyncio.Task[None] | None = None

    async def apply_each(self, operations: Sequence[Operation]) -> list[bool]:
        """Apply operations as :meth:`Table.apply_each`; a cancelled caller does not know whether they were applied."""
        request = _Request(operations, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run_batches(), name="postdate-azure-rounds")
        return await request.answer

    async def stop(self, deadline: float) -> None:
        """Wait for requests in flight until ``deadline`` (loop's clock), then fail the callers that still wait."""
        if self._task is not None:
            _, unfinished_tasks = await asyncio.wait(
                [self._task], timeout=max(deadline - asyncio.get_running_loop().time(), 0)
            )
            if unfinished_tasks:
                self._stop_error = StoreUnreachable(
                    f"{self._table.description} did not answer before the store was closed"
                )
                self._task.cancel()
                await asyncio.wait([self._task])

    async def _run_batches(self) -> None:
        while self._requests:
            batch, self._requests = _split_batch(self._requests)
            try:
                outcomes = await self._table.apply_each(
                    [operation for asked in batch for operation in asked.operations]
                )
            except BaseException as error:
                for request in batch:
                    request.fail(self._stop_error or error)
                if not isinstance(error, Exception):  # cancelled, because the loop ends
                    for request in self._requests:
                        request.fail(self._stop_error or error)
                    raise
                continue
            results = iter(outcomes)
            for request in batch:
                request.succeed([next(results) for _ in request.operations])


@dataclass(eq=False, slots=True)
class _Request:
    operations: Sequence[Operation]
    answer: asyncio.Future[list[bool]]

    @property
    def keys(self) -> set[tuple[str, str]]:
        return {(each.entity["PartitionKey"], each.entity["RowKey"]) for each in self.operations}

    def succeed(self, outcomes: list[bool]) -> None:
        if not self.answer.done():
            self.answer.set_result(outcomes)

    def fail(self, error: BaseException) -> None:
        if self.answer.done():
            return
        if isinstance(error, Exception):
            self.answer.set_exception(error)
        else:
            self.answer.cancel()


def _split_batch(requests: Sequence[_Request]) -> tuple[list[_Request], list[_Request]]:
    """Return the requests of one transaction, and the remaining ones: no transaction accepts the same entity twice."""
    batch: list[_Request] = []
    remaining: list[_Request] = []
    keys: set[tuple[str, str]] = set()
    for each in requests:
        if keys & each.keys:
            remaining.append(each)
        else:
            batch.append(each)
            keys |= each.keys
    return batch, remaining


def _is_applied(operation: Operation, entity: Mapping[str, Any] | None) -> bool:
    """Return whether an entity, or its absence, is the result of an operation."""
    if operation.kind == "delete":
        return entity is None
    return entity is not None and all(entity.get(name) == value for name, value in operation.entity.items())


def _encoded_size(value: object) -> int:
    """Return the size in JSON: bytes in base64, and non-ASCII characters as up to two escapes of six characters."""
    if isinstance(value, bytes):
        return len(value) * 4 // 3
    if isinstance(value, str):
        return len(value) * (1 if value.isascii() else 12)
    return 0


def _transaction_groups(operations: Sequence[Operation]) -> Iterable[list[int]]:
    """Yield the indexes of operations that fit into one transaction."""
    open_groups: dict[str, list[int]] = {}
    sizes: defaultdict[str, int] = defaultdict(int)
    for index, operation in enumerate(operations):
        partition = str(operation.entity["PartitionKey"])
        group = open_groups.setdefault(partition, [])
        if len(group) == _MOST_OPERATIONS or (group and sizes[partition] + operation.size > _LARGEST_BYTES):
            yield group
            group = open_groups[partition] = []
            sizes[partition] = 0
        group.append(index)
        sizes[partition] += operation.size
    yield from open_groups.values()
