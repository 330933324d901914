"""Check and store the rows of a table as Arrow batches. Runs on executors, without Spark."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from itertools import islice
from typing import Any, cast

import pyarrow as pa

from postdate.errors import PostdateError
from postdate.messages import Headers, decode_headers
from postdate.pipeline import rows as pipeline_rows
from postdate.pipeline.duplicates import find_conflicts, find_duplicate_ids
from postdate.pipeline.schedule.result import CONFLICTS_WITH_STORE
from postdate.pipeline.stores import OpenStore, StoreSpec, open_in_task
from postdate.ports.scanning import WRITTEN_COLUMNS

_SHOWN_COLUMNS = (*WRITTEN_COLUMNS, "row")
_TEXTS = ("reason", "detail", "file", *_SHOWN_COLUMNS)
_BYTES: pa.DataType = pa.map_(pa.string(), pa.binary())
OUTCOME_COLUMNS = pa.schema(
    [
        ("outcome", pa.string()),
        ("stored", pa.int64()),
        ("already_there", pa.int64()),
        *((name, pa.string()) for name in _TEXTS),
        ("line", pa.int64()),
        ("bytes", _BYTES),
    ]
)
REJECTED_COLUMNS = ("reason", "detail", "file", "line", *_SHOWN_COLUMNS, "bytes")
COUNTS, REJECTED, CONFLICTING, SAMPLE = "counts", "set_aside", "conflicting", "sample"
SAMPLE_ROWS = 10
BEGINNING_CHARACTERS = 1_000
TOO_LARGE = "message_too_large"


def store_all(
    spec: StoreSpec, now: datetime, batch_size: int | None, load: str | None, batches: pipeline_rows.Batches
) -> pipeline_rows.Batches:
    """Store the rows of a task. The task receives the address of a store, never a connection."""
    with open_in_task(spec) as store:
        rows_at_once = batch_size or store.rows_at_once
        for batch in batches:
            for start in range(0, batch.num_rows, rows_at_once):
                yield _store(store, batch.slice(start, rows_at_once), now, load)


def _store(store: OpenStore, batch: pa.RecordBatch, now: datetime, load: str | None) -> pa.RecordBatch:
    """Store one batch in one transaction. Return its counts in the first row, then the rows that were not stored."""
    good, messages, bad_rows, rejected = split_batch(batch, store.largest_message_bytes, load)
    report = store.store_batch(messages, now)
    conflicts = find_conflicts(store, messages, {*report.duplicate_ids})
    already_there = len(report.duplicate_ids) - len(conflicts)
    counts = {"outcome": COUNTS, "stored": report.stored, "already_there": already_there}
    rows = [counts, *rejected, *refused_rows(good, bad_rows), *_conflicting_rows(good, messages, conflicts)]
    return pa.RecordBatch.from_pylist(rows, schema=OUTCOME_COLUMNS)


def check_all(
    spec: StoreSpec | None, limit: int, load: str | None, batches: pipeline_rows.Batches
) -> pipeline_rows.Batches:
    """Check the rows of a task as :func:`store_all` does, and store nothing. ``spec``: ``None`` for an empty store."""
    with ExitStack() as stack:
        store = None if spec is None else stack.enter_context(open_in_task(spec))
        earlier_ids, samples = set[str](), SAMPLE_ROWS
        for batch in batches:
            good, messages, bad_rows, rejected = split_batch(batch, limit, load)
            duplicate_ids = set[str]() if store is None else find_duplicate_ids(store, messages)
            conflicts = {} if store is None else find_conflicts(store, messages, duplicate_ids)
            ids, new_positions = cast("list[str]", messages.column("message_id").to_pylist()), list[int]()
            for position, message_id in enumerate(ids):
                if message_id not in duplicate_ids and message_id not in earlier_ids:
                    new_positions.append(position)
                    earlier_ids.add(message_id)
            sample = [
                {"outcome": SAMPLE, **texts}
                for texts in pipeline_rows.texts_of(messages.take(pa.array(new_positions[:samples], pa.int64())))
            ]
            samples -= len(sample)
            already_there = messages.num_rows - len(new_positions) - len(conflicts)
            counts = {"outcome": COUNTS, "stored": len(new_positions), "already_there": already_there}
            conflicting = _conflicting_rows(good, messages, conflicts)
            rows = [counts, *sample, *rejected, *refused_rows(good, bad_rows), *conflicting]
            yield pa.RecordBatch.from_pylist(rows, schema=OUTCOME_COLUMNS)


def split_batch(
    batch: pa.RecordBatch, limit: int, load: str | None
) -> tuple[pa.RecordBatch, pa.RecordBatch, list[pipeline_rows.BadRow], list[dict[str, Any]]]:
    """Return the rows without a reason, the messages of them, the others of them, and the rows with a reason."""
    is_good = pipeline_rows.pc.is_null(batch.column("reason"))
    good = batch.filter(is_good)
    messages, bad_rows = pipeline_rows.split_columns(add_own_headers(good, load), limit)
    return good, messages, bad_rows, _rejected_rows(batch.filter(pipeline_rows.pc.invert(is_good)))


def add_own_headers(batch: pa.RecordBatch, load: str | None) -> pa.RecordBatch:
    """Return rows whose headers have the wall time of the row, if it has one, and the load, if there is one.

    Headers that are no object stay. A row that has the header of another load gets a second one, and is refused for it.
    """
    wall_times, headers = (cast("Any", batch.column(name)) for name in ("wall_time", "headers"))
    if load is not None:
        pair = f'"{Headers.LOAD}":{json.dumps(load, ensure_ascii=False)}'
        pairs = pipeline_rows.pc.if_else(pa.array(_has_load(headers, load), pa.bool_()), None, pair)
        headers = _add_pairs(headers, pairs)
    if wall_times.null_count < batch.num_rows:
        pairs = pipeline_rows.pc.binary_join_element_wise(f'"{Headers.WALL_TIME}":"', wall_times, '"', "")
        headers = _add_pairs(headers, pairs)
    return batch.set_column(batch.schema.get_field_index("headers"), "headers", headers)


def _has_load(headers: Any, load: str) -> list[bool]:
    """Return for each row whether its headers name this load already, as those of a row that was read from a store."""
    may_have_load = pipeline_rows.pc.match_substring(pipeline_rows.pc.fill_null(headers, ""), Headers.LOAD)
    has_load = [False] * len(headers)
    for position in cast("list[int]", pipeline_rows.pc.indices_nonzero(may_have_load).to_pylist()):
        with suppress(PostdateError):  # Such headers are refused later, with their row.
            has_load[position] = decode_headers(headers[position].as_buffer().to_pybytes()).get(Headers.LOAD) == load
    return has_load


def _add_pairs(headers: Any, pairs: Any) -> Any:
    """Return headers, as JSON objects, that begin with the given name and value; null pairs add nothing."""
    pc = pipeline_rows.pc
    objects = pc.replace_substring_regex(pc.fill_null(headers, "{}"), r"\A[ \t\r\n]*\{[ \t\r\n]*", "{")
    remainder = pc.binary_replace_slice(objects.cast(pa.binary()), 0, 1, b"").cast(pa.string())
    separator = pc.if_else(pc.starts_with(remainder, "}"), "", ",")
    joined = pc.binary_join_element_wise("{", pairs, separator, remainder, "")
    is_changed = pc.and_(pairs.is_valid(), pc.starts_with(objects, "{"))
    return pc.if_else(is_changed, joined, headers)


def _rejected_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows that have a reason from Spark SQL. Conflicting rows have no ``shown`` bytes."""
    rows = list[dict[str, Any]]()
    reasons = cast("list[str]", batch.column("reason").to_pylist())
    contents = cast("list[Any]", batch.column("shown").to_pylist())
    for position, (reason, shown, texts) in enumerate(
        zip(reasons, contents, pipeline_rows.texts_of(batch), strict=True)
    ):
        message_contents: Mapping[str, bytes | None] = shown or _message_bytes(batch, position)
        raw = {name: content for name, content in message_contents.items() if content is not None}
        origin = _origin_of(batch, position, raw)
        decoded = {name: content.decode("utf-8", "backslashreplace") for name, content in raw.items()}
        row = {
            "outcome": REJECTED,
            "reason": reason,
            "detail": _DETAILS.get(reason, ""),
            **texts,
            **decoded,
            **origin,
        }
        binary = _not_utf8_bytes(raw)
        if reason == TOO_LARGE and "body" in raw:
            row["body"] = f"{raw['body'][:BEGINNING_CHARACTERS].decode('utf-8', 'replace')}…"
            binary = {**binary, "body": raw["body"]}
        rows.append({**row, "bytes": [*binary.items()] or None})
    return rows


def _message_bytes(batch: pa.RecordBatch, position: int) -> dict[str, bytes | None]:
    return {"body": cast("bytes | None", batch.column("body")[position].as_py())}


def refused_rows(batch: pa.RecordBatch, bad_rows: list[pipeline_rows.BadRow]) -> list[dict[str, Any]]:
    return [row_of(batch, row.position, REJECTED, row.code, row.detail) for row in bad_rows]


def _conflicting_rows(
    good: pa.RecordBatch, messages: pa.RecordBatch, conflicts: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the rows that conflict with the store, as they are in the input."""
    if not conflicts:
        return []
    ids = cast("list[str]", messages.column("message_id").to_pylist())
    positions = defaultdict[str, deque[int]](deque)  # Rows with one id and different content were set aside before.
    for position, message_id in enumerate(cast("list[str]", good.column("message_id").to_pylist())):
        positions[message_id].append(position)
    return [
        row_of(good, positions[ids[position]].popleft(), CONFLICTING, CONFLICTS_WITH_STORE, detail)
        for position, detail in conflicts.items()
    ]


def row_of(batch: pa.RecordBatch, position: int, outcome: str, reason: str, detail: str) -> dict[str, Any]:
    raw = {name: content for name, content in _message_bytes(batch, position).items() if content is not None}
    origin = _origin_of(batch, position, raw)
    texts = pipeline_rows.texts_of(batch.slice(position, 1))[0]
    binary = _not_utf8_bytes(raw)
    return {
        "outcome": outcome,
        "reason": reason,
        "detail": detail,
        **texts,
        **origin,
        "bytes": [*binary.items()] or None,
    }


def _origin_of(batch: pa.RecordBatch, position: int, raw: dict[str, bytes]) -> dict[str, Any]:
    """Return file, line and text of a row, with what makes it malformed, and add its bytes to ``raw``."""
    origin = cast("dict[str, Any] | None", batch.column("origin")[position].as_py())
    if origin is None:
        return {}
    detail = {} if origin["detail"] is None else {"detail": origin["detail"]}
    if origin["content"] is not None:
        raw["row"] = origin["content"]
        detail["row"] = origin["content"].decode("utf-8", "backslashreplace")
    return {"file": origin["file"], "line": origin["line"], **detail}


def shorten_samples(rows: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the first rows, without empty columns; of long texts the beginning."""
    samples = list[Mapping[str, Any]]()
    for row in islice(rows, SAMPLE_ROWS):
        values = {name: value for name, value in row.items() if value is not None}
        samples.append(
            {
                name: f"{value[:BEGINNING_CHARACTERS]}…"
                if isinstance(value, str) and len(value) > BEGINNING_CHARACTERS
                else value
                for name, value in values.items()
            }
        )
    return tuple(samples)


def _not_utf8_bytes(contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the contents that are not UTF-8, which a text cannot hold."""
    undecodable = dict[str, bytes]()
    for name, content in contents.items():
        try:
            content.decode()
        except UnicodeDecodeError:
            undecodable[name] = content
    return undecodable


_DETAILS_OF_TIMES: Mapping[str, str] = {
    "malformed_time": "is not ISO 8601, or no such time exists",
    "time_without_zone": "has no offset from UTC; give it one, or name the zone of such times",
    "time_out_of_range": "is outside the years 1 to 9999 of UTC; give a time in them",
    "nonexistent_local_time": "is one that clocks never showed: they were set forward over it",
    "ambiguous_local_time": "is one that clocks showed twice: they were set back over it",
}
_DETAILS: Mapping[str, str] = {
    **{reason: f"the due time {detail}" for reason, detail in _DETAILS_OF_TIMES.items()},
    **{f"expiry_{reason}": f"the expiry {detail}" for reason, detail in _DETAILS_OF_TIMES.items()},
    "missing_id": "the message id is missing or blank",
    "missing_due": "the due time is missing or blank",
    "missing_destination": "the destination is missing or blank",
    "conflicting_rows": "this id stands in the input with differing content",
    pipeline_rows.NOT_UTF8: (
        "a text of the row is not UTF-8; the column bytes has its bytes. Name the encoding of the file, or correct the "
        "row"
    ),
    "lapses_before_due": "its time to be received, which counts from its time sent, ends before it is due",
    "message_too_large": "the body is larger than the store takes; keep it elsewhere and send a reference",
}
