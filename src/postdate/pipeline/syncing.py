"""Make what waits under a load equal to a table: compare, and change messages. Runs on executors.

Driver and executors compare by :data:`SIGNATURE`: due time, wall time, and a digest of all else. The comparison of the
whole table only finds the rows that may differ, and the messages that are not in the table. Each row that may differ is
compared again with what the store has at that moment, so a row that is sent to the store twice, or by two runs at the
same time, changes nothing more. Source: ADR 0064.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.clock import from_microseconds
from postdate.core import changes
from postdate.errors import PipelineError
from postdate.messages import DelayedMessage, Headers, decode_headers, format_timestamp
from postdate.pipeline.duplicates import find_conflicts, find_duplicate_ids, read_pending
from postdate.pipeline.load_names import load_of
from postdate.pipeline.loads import call_each, require_administrable, select_load
from postdate.pipeline.rows import MESSAGE_COLUMNS, messages_of, pc
from postdate.pipeline.stores import OpenStore
from postdate.ports import AdministrableStore, Answer, ReplacingStore

SIGNATURE: Final = pa.schema([("due_at", pa.int64()), ("wall_time_at", pa.string()), ("content", pa.binary())])
"""Due time in microseconds since 1970 UTC, wall time or null, and a digest of all else of a message."""

WAITING: Final = pa.schema([MESSAGE_COLUMNS.field("message_id"), MESSAGE_COLUMNS.field("destination"), *SIGNATURE])
"""A pending message of a load, without its body."""

CHANGED, UNCHANGED, REMOVED = "changed", "unchanged", "removed"
RESCHEDULED, REPLACED = "rescheduled", "replaced"

_DIGEST_BYTES: Final = 16


class Signature(NamedTuple):
    """The values of :data:`SIGNATURE` of one message."""

    due: int
    wall_time: str | None
    content: bytes


def check_syncable(store: OpenStore) -> None:
    """Raise PipelineError unless the messages of a store can be read in bulk, cancelled, rescheduled and replaced."""
    store.require_scannable()
    require_administrable(store)
    if not isinstance(store.store, ReplacingStore):
        raise PipelineError(
            f"{type(store.store).__name__} cannot replace its messages, which --sync needs: keep the load in SQLite, "
            f"PostgreSQL or MariaDB"
        )


# --- comparing --------------------------------------------------------------------------------------------------------


def signatures_of(batch: pa.RecordBatch) -> list[Signature]:
    """Return the signature of each message; ``batch`` has :data:`postdate.pipeline.rows.MESSAGE_COLUMNS`."""
    dues, expiries = (pc.cast(batch.column(name), pa.int64()).to_pylist() for name in ("due", "expires_at"))
    names = ("destination", "headers", "body")
    columns = [cast("list[str | bytes | None]", batch.column(name).to_pylist()) for name in names]
    return [_signature(*row) for row in zip(dues, expiries, *columns, strict=True)]


def _signature(due: int, expires_at: int | None, destination: str, headers_text: str, body: bytes | None) -> Signature:
    headers = decode_headers(headers_text)
    wall_time = headers.pop(Headers.WALL_TIME, None)
    # Rescheduling changes this header if it has the due time. Then it is a part of the due time, not of the content.
    if Headers.DELIVER_AT in headers and headers[Headers.DELIVER_AT] == format_timestamp(from_microseconds(due)):
        headers[Headers.DELIVER_AT] = ""
    # JSON has no NUL, so no two messages have the same bytes here.
    fields = msgspec.json.encode([destination, expires_at, sorted(headers.items())])
    digest = hashlib.blake2b(fields + b"\0" + (body or b""), digest_size=_DIGEST_BYTES).digest()
    return Signature(due, wall_time, digest)


def is_same_due(first: Signature, second: Signature) -> bool:
    """Return whether two due times are the same.

    Two messages with one wall time have one due time, although the rules of their zone may have changed since one of
    them was stored: services move that one.
    """
    has_same_wall_time = first.wall_time == second.wall_time
    return has_same_wall_time and (first.wall_time is not None or first.due == second.due)


def signature_columns(batch: pa.RecordBatch) -> list[pa.Array[Any]]:
    """Return :data:`SIGNATURE` of each message as arrays."""
    signatures = signatures_of(batch)
    return [pa.array([row[number] for row in signatures], field.type) for number, field in enumerate(SIGNATURE)]


def waiting_of_load(load: str, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the messages of a load as :data:`WAITING`, from scanned rows with all columns of a message."""
    batch, _ = select_load(batch, load)
    ids = [batch.column("message_id"), batch.column("destination")]
    return pa.record_batch([*ids, *signature_columns(batch)], schema=WAITING)


def plan_changes(table: DataFrame, waiting: DataFrame) -> DataFrame:
    """Compare a table with what waits under its load.

    Args:
        table: ``message_id`` and :data:`SIGNATURE`, each id once.
        waiting: :data:`WAITING`, each id once.

    Returns:
        For each id an ``action`` (``changed``, ``unchanged`` or ``removed``), ``was_waiting``, and of what waits
        ``due_at`` and ``destination``.
    """
    table, waiting = table.alias("t"), waiting.alias("w")
    same_wall_time = F.col("t.wall_time_at").eqNullSafe(F.col("w.wall_time_at"))
    same_due: Column = same_wall_time & (F.col("t.wall_time_at").isNotNull() | (F.col("t.due_at") == F.col("w.due_at")))
    is_equal = same_due & (F.col("t.content") == F.col("w.content"))
    was_waiting = F.col("w.message_id").isNotNull()
    action = F.when(F.col("t.message_id").isNull(), REMOVED).when(was_waiting & is_equal, UNCHANGED).otherwise(CHANGED)
    return table.join(waiting, F.col("t.message_id") == F.col("w.message_id"), "full_outer").select(
        F.coalesce("t.message_id", "w.message_id").alias("message_id"),
        action.alias("action"),
        was_waiting.alias("was_waiting"),
        F.col("w.due_at").alias("due_at"),
        F.col("w.destination").alias("destination"),
    )


# --- changing ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Changes:
    """What became of a batch of messages, as positions in the batch.

    Args:
        stored: new messages.
        already_there: known messages that are not pending any more, and do not differ from their records.
        unchanged: pending messages that are equal by now.
        rescheduled: pending messages of which only the due time differed.
        replaced: pending messages of which anything else differed.
        delivered_meanwhile: messages that were pending when the job began, and that a service has claimed or delivered.
        conflicts: messages of other loads or of none, and messages that have ended and differ from their records; with
            the difference.
    """

    stored: list[int] = field(default_factory=list[int])
    already_there: list[int] = field(default_factory=list[int])
    unchanged: list[int] = field(default_factory=list[int])
    rescheduled: list[int] = field(default_factory=list[int])
    replaced: list[int] = field(default_factory=list[int])
    delivered_meanwhile: list[int] = field(default_factory=list[int])
    conflicts: dict[int, str] = field(default_factory=dict[int, str])


def change_messages(
    store: OpenStore | None,
    messages: pa.RecordBatch,
    was_waiting: Sequence[bool],
    now: datetime,
    *,
    dry_run: bool,
) -> Changes:
    """Store new messages, and make known ones that wait under the same load equal to the given ones.

    Each message is changed in a transaction of its own, and new ones are stored in one.

    Args:
        store: ``None`` for a store that does not exist yet; only with ``dry_run``.
        messages: :data:`postdate.pipeline.rows.MESSAGE_COLUMNS`, each id once, with the header of their load.
        was_waiting: whether the message was pending under the load when the job began.
        now: for the records; aware.
        dry_run: only count.
    """
    ids = cast("list[str]", messages.column("message_id").to_pylist())
    duplicate_ids = _store_new(store, messages, now, dry_run=dry_run)
    result = Changes(stored=[position for position, id_ in enumerate(ids) if id_ not in duplicate_ids])
    if store is None or not duplicate_ids:
        return result
    pending, different = _read_signatures(store, duplicate_ids), dict[int, str]()
    own_signatures, ended = signatures_of(messages), list[int]()
    for position, id_ in enumerate(ids):
        if id_ not in duplicate_ids:
            continue
        own_load = load_of(decode_headers(cast("str", messages.column("headers")[position].as_py())))
        match pending.get(id_):
            case None if was_waiting[position]:
                result.delivered_meanwhile.append(position)
            case None:
                ended.append(position)
            case (load, _) if load != own_load:
                where = "without a load" if load is None else f"under the load {load!r}"
                result.conflicts[position] = f"the store has this id {where}, and keeps what it has"
            case (_, signature) if signature.content != own_signatures[position].content:
                different[position] = REPLACED
            case (_, signature) if not is_same_due(signature, own_signatures[position]):
                different[position] = RESCHEDULED
            case _:
                result.unchanged.append(position)
    conflicts = find_conflicts(store, messages, {ids[position] for position in ended})
    result.conflicts |= conflicts
    result.already_there += [position for position in ended if position not in conflicts]
    _change_pending(store, messages, different, now, result, dry_run=dry_run)
    return result


def _store_new(store: OpenStore | None, messages: pa.RecordBatch, now: datetime, *, dry_run: bool) -> set[str]:
    """Store messages with new ids, unless it is a dry run; return the ids that the store knew."""
    if store is None:
        return set()
    if dry_run:
        return find_duplicate_ids(store, messages)
    return {*store.store_batch(messages, now).duplicate_ids}


def _read_signatures(store: OpenStore, ids: set[str]) -> dict[str, tuple[str | None, Signature]]:
    """Return load and signature of the pending messages with these ids."""
    signatures = dict[str, tuple[str | None, Signature]]()
    for batch in read_pending(store, ids).to_batches():
        names = (cast("list[str]", batch.column(name).to_pylist()) for name in ("message_id", "headers"))
        for id_, headers, signature in zip(*names, signatures_of(batch), strict=True):
            signatures[id_] = load_of(decode_headers(headers)), signature
    return signatures


def _change_pending(
    store: OpenStore,
    messages: pa.RecordBatch,
    different: dict[int, str],
    now: datetime,
    result: Changes,
    *,
    dry_run: bool,
) -> None:
    """Reschedule or replace pending messages, and add what became of them to ``result``.

    ``different`` has the positions of the messages, with ``rescheduled`` or ``replaced``.
    """
    positions = list(different)
    new_messages = messages_of(messages.take(pa.array(positions, pa.int64()))) if positions else []
    changed = list(zip(new_messages, different.values(), strict=True))
    answers = [Answer.DONE] * len(changed) if dry_run else call_each(store, changed, _ChangeCall(now))
    for position, (_, action), answer in zip(positions, changed, answers, strict=True):
        if not answer:
            result.delivered_meanwhile.append(position)
        elif action == RESCHEDULED:
            result.rescheduled.append(position)
        else:
            result.replaced.append(position)


@dataclass(frozen=True, slots=True)
class _ChangeCall:
    """Changes one message; the answer says whether that was done. ``now`` is the time of the record."""

    now: datetime

    async def __call__(self, store: AdministrableStore, change: tuple[DelayedMessage, str]) -> Answer:
        message, action = change
        if action == RESCHEDULED:
            wall_time = message.headers.get(Headers.WALL_TIME)
            return await changes.reschedule(store, message.message_id, message.due, self.now, wall_time)
        assert isinstance(store, ReplacingStore)
        if await store.replace_pending(message, self.now):
            return Answer.DONE
        return await changes.find_refusal(store, message.message_id)
