"""The records of a store as a stream in micro-batches: each record once, and none is left out.

Source: ADR 0011, point 5. The reader lives as long as the query, in one Python process of Spark on the driver. Copies
of it read on executors.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from postdate.clock import steady_seconds
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.errors import PipelineError
from postdate.pipeline.rows import to_batch
from postdate.pipeline.source.options import DEFAULT_PARTITIONS, DEFAULT_ROWS_PER_BATCH, LATEST, RECORDS, SourceOptions
from postdate.pipeline.source.reading import columns_of_schema
from postdate.pipeline.stores import PAGE_ROWS, StoreSpec
from postdate.ports import Recording
from postdate.ports.scanning import RecordStreamStore
from postdate.wiring.sources import open_record_stream

WRITER_TIMEOUT_SECONDS: Final = 10.0
"""How long a run over the available records waits for transactions that were open when the run began."""

_LAST_WITHIN_NUMBERS: Final = 100
"""The last record that was read is looked for among so many numbers. Numbers may have gaps."""

_POLL_SECONDS: Final = 0.02
_FEWEST_NUMBERS_IN_A_SHARE: Final = 1_000

log = logging.getLogger("postdate.pipeline")


def open_stream(spec: StoreSpec) -> RecordStreamStore:
    """Return the stream of a store's records; the caller must close it.

    Raise NotSupported if the store has no stream.
    """
    return open_record_stream(
        spec.address,
        schema=spec.schema,
        table=spec.table or timeouts_queue(spec.endpoint),
        synchronous=spec.synchronous,
        recording=Recording(spec.recording),
    )


@dataclass(frozen=True, slots=True)
class FollowPlan:
    """The records to follow, as a value that is sent to executors."""

    spec: StoreSpec
    schema: pa.Schema
    partitions: int
    starts_at_end: bool
    rows_per_batch: int

    @classmethod
    def of(cls, options: SourceOptions, schema: StructType) -> FollowPlan:
        """Return the records that the options choose, in the columns of the schema.

        Raise PipelineError for other rows.
        """
        if options.get("what") != RECORDS:
            raise PipelineError("only records can be followed as a stream: write .option('what', 'records')")
        return cls(
            spec=options.existing_spec(),
            schema=columns_of_schema(options, schema),
            partitions=options.get("partitions", DEFAULT_PARTITIONS),
            starts_at_end=options.get("startingAt") == LATEST,
            rows_per_batch=options.get("maxRowsPerBatch", DEFAULT_ROWS_PER_BATCH),
        )


def split_range(first: int, end: int, most_shares: int) -> list[tuple[int, int]]:
    """Return at most ``most_shares`` ranges of about equal size. A small range is not worth a second task."""
    shares = min(most_shares, -(-(end - first) // _FEWEST_NUMBERS_IN_A_SHARE))
    step = max(-(-(end - first) // max(shares, 1)), 1)
    return [(at, min(at + step, end)) for at in range(first, end, step)]


def wait_for_safe_end(stream: RecordStreamStore) -> int:
    """Return a number below which no record will be written any more, if possible above every record that exists.

    This waits for open transactions for a while. The number is below the records that these may still commit, even if
    other transactions committed higher numbers long before.
    """
    deadline, pause = steady_seconds() + WRITER_TIMEOUT_SECONDS, threading.Event()
    end = stream.next_number()
    target = stream.safe_end()
    while target < end and steady_seconds() < deadline:
        pause.wait(_POLL_SECONDS)  # There is no event for the end of another client's transaction.
        target = stream.safe_end()
    if target < end:
        log.warning(
            "a transaction that writes to %s has been open for more than %g s; records from number %d on are left "
            "to the next run",
            stream.location,
            WRITER_TIMEOUT_SECONDS,
            target,
        )
    return min(target, end)


# --- is it still the store that was read before? ----------------------------------------------------------------------

LastRecord = tuple[int, str] | None
"""The last record that a reader has read: its number and a fingerprint. ``None``: unknown.

The identity of a store stays the same when a backup is put in its place. But then the numbers begin again at those of
the backup, so the same number is soon another record.
"""


def read_last_record(stream: RecordStreamStore, end: int) -> LastRecord:
    """Return the last record below ``end``, which is at most the safe end; ``None`` if none is near."""
    return max(_fingerprints(stream, max(end - _LAST_WITHIN_NUMBERS, 0), end).items(), default=None)


def find_restore(stream: RecordStreamStore, end: int, last: LastRecord) -> str | None:
    """Return what shows that the store is not the one whose records below ``end`` were read; ``None``: nothing does.

    A record that retention has removed shows nothing.
    """
    if end > stream.next_number():
        return "the store has none so high"
    if last is not None and _fingerprints(stream, last[0], last[0] + 1).get(last[0], last[1]) != last[1]:
        return f"number {last[0]} is another record now"
    return None


def last_record_of(saved: Mapping[str, Any]) -> LastRecord:
    """Return the last record of an offset, or of another object of JSON that has it as ``last``."""
    last = saved.get("last")
    return last and (last[0], last[1])


def _fingerprints(stream: RecordStreamStore, first: int, end: int) -> dict[int, str]:
    pages = stream.read_records(first, end, ("number", "kind", "message_id", "at"), PAGE_ROWS)
    return {
        number: hashlib.sha256(repr(content).encode()).hexdigest()[:16] for page in pages for number, *content in page
    }


class RecordStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows the records by their numbers.

    An offset is ``{"store": identity, "where": text for people, "next": number, "last": LastRecord}``: lower numbers
    have been read.
    """

    def __init__(self, plan: FollowPlan) -> None:
        self._plan = plan
        # The stream is opened at first use, because Spark pickles the reader before.
        self._stream: RecordStreamStore | None = None
        self._target: int | None = None

    def _open_stream(self) -> RecordStreamStore:
        if self._stream is None:
            self._stream = open_stream(self._plan.spec)
        return self._stream

    def initialOffset(self) -> dict[str, Any]:
        return self._offset(self._open_stream().next_number() if self._plan.starts_at_end else 0)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._plan.rows_per_batch)

    def prepareForTriggerAvailableNow(self) -> None:
        """Set the end of this run before any record that is written from now on."""
        self._target = wait_for_safe_end(self._open_stream())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch, or ``start`` itself if there is nothing new."""
        first = self._number_of(start)
        end = max(self._open_stream().safe_end() if self._target is None else self._target, first)
        if isinstance(limit, ReadMaxRows):  # Numbers may have gaps, so a range has at most as many rows as numbers.
            end = min(end, first + limit.max_rows)
        if end == first:
            return start
        # Where other stores of the schema use most numbers, the last record may be one that was read long before.
        return self._offset(end, read_last_record(self._open_stream(), end) or last_record_of(start))

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the end of all numbers in use. The progress of the query uses it to show how much is unread."""
        return self._offset(self._open_stream().next_number())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        ranges = split_range(self._number_of(start), self._number_of(end), self._plan.partitions)
        return [InputPartition(numbers) for numbers in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range of numbers. This runs on executors, once a task."""
        (first, end), schema = partition.value, self._plan.schema
        with closing(open_stream(self._plan.spec)) as stream:
            for page in stream.read_records(first, end, schema.names, PAGE_ROWS):
                yield to_batch(page, schema)

    def stop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _offset(self, number: int, last: LastRecord = None) -> dict[str, Any]:
        stream = self._open_stream()
        return {"store": stream.identity, "where": stream.location, "next": number, "last": last and [*last]}

    def _number_of(self, offset: Mapping[str, Any]) -> int:
        """Return the number of an offset, which may come from a checkpoint.

        Raises PipelineError for a checkpoint of another store, or if the store lost records that the query had read.
        """
        stream = self._open_stream()
        if not {"store", "where", "next"} <= offset.keys():
            raise PipelineError(
                f"the checkpoint of this query holds no offset of the format postdate: {dict(offset)}; "
                f"give the query a checkpoint of its own"
            )
        if offset["store"] != stream.identity:
            raise PipelineError(
                f"the checkpoint of this query is of another store ({offset['where']}) than the options name "
                f"({stream.location}), or the store was made anew or restored since; name that store, or give the "
                f"query a "
                f"new checkpoint, with which it begins at startingAt"
            )
        number = int(offset["next"])
        if restore := find_restore(stream, number, last_record_of(offset)):
            raise PipelineError(
                f"the query has read the records of {stream.location} up to number {number - 1}, and {restore}: the "
                f"store was made anew, restored, or its records were removed; give the query a new checkpoint, with "
                f"which it begins at startingAt"
            )
        return number
