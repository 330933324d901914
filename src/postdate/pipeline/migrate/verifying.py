"""Compares source and target: every field of every message.

A checksum of all fields is looked up among those of all messages that wait in the target. A message not
found there is checked in detail: it may be delivered already, or written differently, or missing.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make arrays generic in a type that only the running program knows.

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from postdate.errors import PipelineError
from postdate.messages import DelayedMessage, decode_headers
from postdate.migrating.tables import MigrationSource
from postdate.pipeline.migrate.ends import TargetStore
from postdate.pipeline.migrate.results import Difference
from postdate.pipeline.rows import MESSAGE_COLUMNS, checked, pc, restored, to_columns
from postdate.ports import Record, RecordKind, ScanFilter
from postdate.ports.migrating import MOVED_AWAY, MigrationRun
from postdate.ports.scanning import ARCHIVED, TIMES, WRITTEN

_LOOKS: Final = 3
"""Looks at a missing message: a retried one may come back between looking at waiting messages and at its records."""

_MISSING: Final = "missing"
_MOVED_ON: Final = ""
_ENDED: Final = frozenset(RecordKind) - {RecordKind.SCHEDULED, RecordKind.RETRIED, RecordKind.RESCHEDULED}


Checksums = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of comparing one batch; ``moved_on`` were delivered, ended otherwise, or rescheduled by the target."""

    run_id: str
    verified: int
    moved_on: int
    differences: tuple[Difference, ...]


def expected(source: MigrationSource, run: MigrationRun, number: int) -> pa.RecordBatch:
    """Return a batch as it was given to the target."""
    # No limit here: the target's was checked when the batch was moved.
    messages, bad = checked(to_columns(source.read(run, number)), sys.maxsize, of_a_store=True)
    if bad:
        raise PipelineError(f"batch {number} of run {run.run_id} has changed since it was moved: {bad[0].detail}")
    return messages


def checksums(batch: pa.RecordBatch) -> Checksums:
    """Return for each message a checksum of its id and all other fields: 64 bits, the same on every machine."""
    times = [batch.column(name).cast(pa.int64()).cast(pa.string()) for name in WRITTEN if name in TIMES]
    headers = pc.utf8_rtrim(batch.column("headers").cast(pa.string()), characters=" \t")  # older versions left blanks
    texts = [batch.column("message_id"), batch.column("destination"), headers, batch.column("body")]
    others = [column.cast(pa.binary()) for column in texts]
    columns = [*(pc.fill_null(time, "").cast(pa.binary()) for time in times), *others]
    # No NUL is in any of the texts, and only the last is none, so nothing else is written like this.
    written = cast("list[bytes]", pc.binary_join_element_wise(*columns, b"\0").to_pylist())
    return np.frombuffer(b"".join(blake2b(each, digest_size=8).digest() for each in written), np.int64)


def are_among(some: Checksums, sorted_ones: Checksums) -> npt.NDArray[np.bool_]:
    """Return which of ``some`` are in ``sorted_ones``, like ``numpy.isin``, but without sorting again."""
    if not len(sorted_ones):
        return np.zeros(len(some), np.bool_)
    return sorted_ones[np.minimum(np.searchsorted(sorted_ones, some), len(sorted_ones) - 1)] == some


def verify_all(
    source: MigrationSource, target: TargetStore, run: MigrationRun, numbers: Sequence[int], since: datetime
) -> Iterable[Verified]:
    """Compare batches with the target, one by one, without Spark; ``since`` is the earliest due time in them."""
    there = [checksums(batch) for part in target.parts(1) for batch in target.part(part, ScanFilter(due_from=since))]
    waiting = np.unique(np.concatenate([np.empty(0, np.int64), *there]))
    for number in numbers:
        batch = expected(source, run, number)
        doubtful = batch.filter(pa.array(~are_among(checksums(batch), waiting)))
        yield look_closer(target, run.run_id, doubtful, batch.num_rows - doubtful.num_rows)


def look_closer(target: TargetStore, run_id: str, doubtful: pa.RecordBatch, verified: int) -> Verified:
    """Check messages that do not wait in the target as they were, or did not when it was looked at.

    A waiting message is compared in every field. The records of any other tell its due time and destination when
    it was stored, and its end. ``verified`` counts the other messages of the batch, which wait as they were.
    """
    left, moved_on, wrong = doubtful, 0, dict[str, str]()
    for _ in range(_LOOKS):
        if not left.num_rows:
            break
        doubts = compare(left, target.waiting(_ids(left)))
        judged = judge(doubts, restored(only(left, doubts)), target.recorded(list(doubts)))
        moved_on += sum(what == _MOVED_ON for what in judged.values())
        wrong |= {message_id: what for message_id, what in judged.items() if what not in {_MOVED_ON, _MISSING}}
        left = only(left, [message_id for message_id, what in judged.items() if what == _MISSING])
    wrong |= dict.fromkeys(_ids(left), _MISSING)
    same = doubtful.num_rows - moved_on - len(wrong)
    return Verified(run_id, verified + same, moved_on, tuple(Difference(*each) for each in sorted(wrong.items())))


def compare(wanted: pa.RecordBatch, found: pa.Table) -> dict[str, str]:
    """Return the ids of messages that differ from ``wanted``, with the names of the differing fields."""
    places = pc.index_in(wanted.column("message_id"), value_set=found.column("message_id").combine_chunks())
    doubts = dict.fromkeys(_ids(wanted.filter(pc.is_null(places))), _MISSING)
    there, given = wanted.filter(pc.is_valid(places)), found.take(pc.drop_null(places))
    named = defaultdict[int, list[str]](list)
    for name in MESSAGE_COLUMNS.names:
        for row in _differing(name, there.column(name), given.column(name).combine_chunks()):
            named[row].append(name)
    ids = there.column("message_id")
    return doubts | {cast("str", ids[row].as_py()): ", ".join(names) for row, names in named.items()}


def _differing(name: str, wanted: pa.Array[Any], given: pa.Array[Any]) -> list[int]:
    same = pc.or_(
        pc.fill_null(pc.equal(wanted, given), fill_value=False), pc.and_(pc.is_null(wanted), pc.is_null(given))
    )
    rows = cast("list[int]", pc.indices_nonzero(pc.invert(same)).to_pylist())
    if name != "headers":
        return rows
    # The same headers may be written in more than one way.
    return [row for row in rows if decode_headers(str(wanted[row])) != decode_headers(str(given[row]))]


def judge(doubts: Mapping[str, str], messages: Sequence[DelayedMessage], records: Iterable[Record]) -> dict[str, str]:
    """Return the difference of each message in ``doubts``; ``_MOVED_ON`` when the target ended or rescheduled it."""
    of_each = defaultdict[str, list[Record]](list)
    for record in records:
        of_each[record.message_id].append(record)
    return {
        message.message_id: _judged(message, doubts[message.message_id], of_each[message.message_id])
        for message in messages
    }


def _judged(message: DelayedMessage, doubt: str, records: Sequence[Record]) -> str:
    scheduled = next((record for record in records if record.kind is RecordKind.SCHEDULED), None)
    if scheduled is None:
        return _MISSING
    was = {"due": scheduled.due == message.due, "destination": scheduled.destination == message.destination}
    if not all(was.values()):
        return ", ".join(name for name, same in was.items() if not same)
    has_ended = any(record.kind in _ENDED and not record.detail.startswith(MOVED_AWAY) for record in records)
    # Of an archived message there is no other record.
    is_archived = scheduled.detail == ARCHIVED
    is_rescheduled = doubt == "due" and any(record.kind is RecordKind.RESCHEDULED for record in records)
    return _MOVED_ON if has_ended or is_archived or is_rescheduled else doubt


def only(batch: pa.RecordBatch, ids: Iterable[str]) -> pa.RecordBatch:
    return batch.filter(pc.is_in(batch.column("message_id"), value_set=pa.array(list(ids), pa.string())))


def _ids(batch: pa.RecordBatch) -> list[str]:
    return cast("list[str]", batch.column("message_id").to_pylist())
