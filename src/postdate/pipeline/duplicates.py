"""Compare rows whose ids a store knows with what the store has. Runs on executors.

A pending message is compared as a whole: due time, destination, expiry, headers and body. Of a message that is not
pending any more, the store has only its records: due time and destination are compared. A message that was rescheduled
since is compared with each of its due times, and a row with the same wall time as the message has the same due time.

The store finds the ids by its index of *scheduled* records, in one query a batch. Rows that are equal to pending
messages, which are nearly all, are compared by columns. A store that cannot be read in bulk is asked for each message.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import anyio
import pyarrow as pa

from postdate.clock import to_microseconds
from postdate.messages import DelayedMessage, Headers
from postdate.pipeline.rows import MESSAGE_COLUMNS, arrow_schema, messages_of, pc, to_columns
from postdate.pipeline.stores import OpenStore
from postdate.ports import AdministrableStore, RecordKind, Scan, ScanFilter, ScannableStore

_RECORD_COLUMNS: Final = ("message_id", "kind", "due", "destination")
_KINDS_WITH_DUE: Final = frozenset({RecordKind.SCHEDULED.name.lower(), RecordKind.RESCHEDULED.name.lower()})
_CALLS_AT_ONCE: Final = 16
_DUE_HEADERS: Final = frozenset({Headers.WALL_TIME, Headers.DELIVER_AT})
"""Headers that change with the due time."""


@dataclass(slots=True)
class _StoredMessages:
    """What a store has of some ids.

    Args:
        pending: pending messages, with :data:`postdate.pipeline.rows.MESSAGE_COLUMNS`.
        due: microseconds since 1970 by id: all due times that the store has recorded.
        destinations: recorded destinations by id.
    """

    pending: pa.Table
    due: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    destinations: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def add_record(self, message_id: str, due: int | None, destination: str | None) -> None:
        self.due.setdefault(message_id, set()).update(() if due is None else (due,))
        self.destinations.setdefault(message_id, set()).update(() if destination is None else (destination,))


def can_compare(store: object) -> bool:
    """Return whether a store can show the messages whose ids it knows."""
    return isinstance(store, ScannableStore | AdministrableStore)


def find_conflicts(store: OpenStore, messages: pa.RecordBatch, ids: Collection[str]) -> dict[int, str]:
    """Return the messages that differ from what the store has under their ids: their positions, and the differences.

    Args:
        store: store with the ids.
        messages: valid messages.
        ids: ids that the store knows; only messages with these ids are compared.
    """
    if not ids or not can_compare(store.store):
        return {}
    is_duplicate = pc.is_in(messages.column("message_id"), value_set=pa.array([*ids], pa.string()))
    positions = cast("list[int]", pc.indices_nonzero(is_duplicate).to_pylist())
    rows = messages.filter(is_duplicate)
    pending = read_pending(store, ids)
    doubtful = cast("list[int]", pc.indices_nonzero(pc.invert(_equal_mask(rows, pending))).to_pylist())
    if not doubtful:
        return {}
    doubtful_rows = rows.take(pa.array(doubtful))
    stored = _StoredMessages(pending)
    _read_records(store, set(cast("list[str]", doubtful_rows.column("message_id").to_pylist())), stored)
    differences = _differences(messages_of(doubtful_rows), stored)
    return {positions[doubtful[number]]: text for number, text in differences.items()}


def find_duplicate_ids(store: OpenStore, messages: pa.RecordBatch) -> set[str]:
    """Return the ids of messages that the store knows. A store that cannot be read knows none."""
    ids = set(cast("list[str]", messages.column("message_id").to_pylist()))
    if not ids or not can_compare(store.store):
        return set()
    stored = _StoredMessages(MESSAGE_COLUMNS.empty_table())
    _read_records(store, ids, stored)
    return {*stored.due}


# --- reading ----------------------------------------------------------------------------------------------------------


def read_pending(store: OpenStore, ids: Collection[str]) -> pa.Table:
    """Return the pending messages with the given ids, with :data:`postdate.pipeline.rows.MESSAGE_COLUMNS`."""
    if not isinstance(store.store, ScannableStore):
        return pa.Table.from_batches([to_columns(_call_each(store, "get", ids))], MESSAGE_COLUMNS)
    scan = Scan("pending", tuple(MESSAGE_COLUMNS.names), ScanFilter(message_ids=tuple(ids)))
    return pa.Table.from_batches(_scan(store, scan, MESSAGE_COLUMNS), MESSAGE_COLUMNS)


def _read_records(store: OpenStore, ids: Collection[str], stored: _StoredMessages) -> None:
    """Add the due times and destinations that were recorded of the given ids."""
    if not isinstance(store.store, ScannableStore):
        for history in _call_each(store, "history", ids):
            for record in history:
                if record.kind in {RecordKind.SCHEDULED, RecordKind.RESCHEDULED}:
                    due = None if record.due is None else to_microseconds(record.due)
                    stored.add_record(record.message_id, due, record.destination)
        return
    schema = arrow_schema("records", _RECORD_COLUMNS)
    scan = Scan("records", _RECORD_COLUMNS, ScanFilter(message_ids=tuple(ids)))
    for batch in _scan(store, scan, schema):
        columns = [batch.column(name) for name in ("message_id", "kind", "destination")]
        dues = pc.cast(batch.column("due"), pa.int64()).to_pylist()
        for message_id, kind, destination, due in zip(*(each.to_pylist() for each in columns), dues, strict=True):
            if kind in _KINDS_WITH_DUE:
                stored.add_record(message_id, due, destination)


def _scan(store: OpenStore, scan: Scan, schema: pa.Schema) -> Iterable[pa.RecordBatch]:
    return [
        batch
        for part in store.require_scannable().scan_parts(scan.row_kind, 1)
        for batch in store.scan(scan, part, schema)
    ]


def _call_each(store: OpenStore, method: str, ids: Collection[str]) -> list[Any]:
    """Call a method of an administrable store for each id, and return the answers that are not ``None``."""
    answers = list[Any]()

    async def call_each(adapter: Any) -> None:
        limiter = anyio.CapacityLimiter(_CALLS_AT_ONCE)

        async def call(message_id: str) -> None:
            async with limiter:
                answer = await getattr(adapter, method)(message_id)
            if answer is not None:
                answers.append(answer)

        async with anyio.create_task_group() as group:
            for message_id in ids:
                group.start_soon(call, message_id)

    store.call(call_each)
    return answers


# --- comparing --------------------------------------------------------------------------------------------------------


def _equal_mask(rows: pa.RecordBatch, pending: pa.Table) -> Any:
    """Return a mask of rows that are equal to the pending message with their id, in every column."""
    places = pc.index_in(rows.column("message_id"), value_set=pending.column("message_id").combine_chunks())
    stored = pending.take(places)
    mask = places.is_valid()
    for name in MESSAGE_COLUMNS.names:
        row_values, stored_values = rows.column(name), stored.column(name).combine_chunks()
        both_null = pc.and_(row_values.is_null(), stored_values.is_null())
        mask = pc.and_(mask, pc.or_(both_null, pc.fill_null(pc.equal(row_values, stored_values), fill_value=False)))
    return mask


def _differences(messages: Sequence[DelayedMessage], stored: _StoredMessages) -> dict[int, str]:
    pending = {message.message_id: message for batch in stored.pending.to_batches() for message in messages_of(batch)}
    differences = dict[int, str]()
    for number, message in enumerate(messages):
        waiting = pending.get(message.message_id)
        due = stored.due.get(message.message_id, set[int]())
        if waiting is not None:
            names = _names_of_differences(message, waiting, due)
        else:
            destinations = stored.destinations.get(message.message_id, set[str]())
            is_other_due = bool(due) and to_microseconds(message.due) not in due
            is_other_destination = bool(destinations) and message.destination not in destinations
            names = [
                *(["due time"] if is_other_due else []),
                *(["destination"] if is_other_destination else []),
            ]
        if names:
            differences[number] = f"the store has this id with another {' and '.join(names)}, and keeps what it has"
    return differences


def _names_of_differences(message: DelayedMessage, waiting: DelayedMessage, due: Collection[int]) -> list[str]:
    is_same_instant = message.due == waiting.due
    wall_time = message.headers.get(Headers.WALL_TIME)
    is_same_due = (
        is_same_instant
        or to_microseconds(message.due) in due
        or (wall_time is not None and wall_time == waiting.headers.get(Headers.WALL_TIME))
    )
    ignored = frozenset[str]() if is_same_instant or not is_same_due else _DUE_HEADERS
    differs: Mapping[str, bool] = {
        "due time": not is_same_due,
        "destination": message.destination != waiting.destination,
        "expiry": message.expires_at != waiting.expires_at,
        "header": _without(message.headers, ignored) != _without(waiting.headers, ignored),
        "body": message.body != waiting.body,
    }
    return [name for name, is_different in differs.items() if is_different]


def _without(headers: Mapping[str, str], ignored: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in ignored}
