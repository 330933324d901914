"""The audit of one store in this process: :func:`postdate.pipeline.audit.audit` without Spark.

The store is read in the order that :mod:`postdate.pipeline.audit.reading` explains, so that the picture is consistent
although services work meanwhile.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from postdate.clock import to_microseconds
from postdate.messages import OWN_PREFIX, aware_utc
from postdate.pipeline.audit import stores, summaries
from postdate.pipeline.audit.results import FINDINGS, AuditResult
from postdate.pipeline.forecast_rates import round_width
from postdate.pipeline.local import totals
from postdate.pipeline.local.folders import LocalFolder, check_local_folder
from postdate.pipeline.local.judging import AuditEvent, AuditVerdict, collect_messages, judge_messages
from postdate.pipeline.local.scanning import ScanBudget, scan_rows
from postdate.pipeline.rows import INSTANT, LEDGER_ARROW, pc
from postdate.pipeline.stores import OpenStore, StoreSpec, open_spec
from postdate.ports import ScanFilter, ScanPart
from postdate.ports.migrating import RETURNED_BY_MIGRATION
from postdate.ports.scanning import ARCHIVED, PrunableStore

_FINDING_COLUMNS = pa.schema(
    [
        ("finding", pa.string()),
        ("message_id", pa.string()),
        ("destination", pa.string()),
        ("due", INSTANT),
        ("detail", pa.string()),
        ("endpoint", pa.string()),
    ]
)
_PERCENTILE_NAMES = ("p50_seconds", "p95_seconds", "p99_seconds", "max_seconds")
_DESTINATION_COLUMNS = pa.schema(
    [
        ("destination", pa.string()),
        *((name, pa.int64()) for name in summaries.COUNTS),
        *((name, pa.float64()) for name in _PERCENTILE_NAMES),
    ]
)


def audit(
    store: StoreSpec,
    now: datetime,
    *,
    late_after: timedelta = timedelta(seconds=1),
    findings_to: str | Path | None = None,
    destinations_to: str | Path | None = None,
    most_records: int | None = None,
) -> AuditResult:
    """Compare scheduled messages with their outcomes.

    Args:
        store: one store; several stores, records in Parquet and states are audited on Spark.
        now: the instant against which overdue is measured; aware.
        late_after: a delivery that is later than this counts as late.
        findings_to: a new folder of this machine for every finding; see :func:`postdate.pipeline.audit.audit`.
        destinations_to: a new folder of this machine for every destination; see there.
        most_records: from how many records and messages on Spark does the job; ``None``: never.

    Raises:
        StoreError: the store is missing or unreachable.
        NeedsSpark: the store has more than ``most_records``, or a folder is not on this machine.
        PipelineError: the store cannot be read in bulk, or a folder exists or cannot be written.
    """
    started = time.perf_counter()
    as_of = aware_utc(now, "now")
    (endpoint,) = stores.name_stores([store])
    findings = None if findings_to is None else check_local_folder(findings_to, "the findings")
    destinations = None if destinations_to is None else check_local_folder(destinations_to, "the destinations")
    with open_spec(store) as opened:
        reading = _LocalReading(opened, ScanBudget(most_records))
        messages = collect_messages(reading.read_events())
        pruned = stores.read_pruned_counts((endpoint,))
        pruned_before = None if pruned.before is None else to_microseconds(pruned.before)
        late_microseconds = late_after // timedelta(microseconds=1)
        verdicts = judge_messages(messages, to_microseconds(as_of), late_microseconds, pruned_before)
        if not reading.has_snapshot:
            verdicts = reading.exclude_pruned(verdicts)
    sums = totals.summarize(verdicts, endpoint.name)
    summary = sums.summary
    if findings is not None:
        _write(_finding_rows(verdicts, endpoint.name), _FINDING_COLUMNS, findings)
    if destinations is not None:
        _write(_destination_rows(sums.destinations), _DESTINATION_COLUMNS, destinations)
    width = round_width(summary.span_seconds, summaries.CURVE_POINTS + 1)
    return replace(
        summaries.make_result(summary, pruned, store.redacted_address, as_of, late_after),
        findings=totals.findings_of(verdicts),
        curve=totals.count_curve(verdicts, width),
        curve_seconds=width,
        findings_to=None if findings_to is None else str(findings_to),
        destinations_to=None if destinations_to is None else str(destinations_to),
        took_seconds=time.perf_counter() - started,
        engine="local",
    )


# --- reading ----------------------------------------------------------------------------------------------------------


class _LocalReading:
    """Reads one store that is open, from a snapshot if it has snapshots."""

    def __init__(self, store: OpenStore, budget: ScanBudget) -> None:
        self.store, self.budget = store, budget
        self.has_snapshot = False

    def read_events(self) -> list[AuditEvent]:
        """Return all events as one consistent picture."""
        scannable = self.store.require_scannable()
        with scannable.snapshot() as snapshot:
            self.has_snapshot = snapshot is not None
            if snapshot is not None:
                return [*self._records(self._parts(), snapshot, times=1, before=1), *self._waiting(snapshot)]
            if isinstance(scannable, PrunableStore) and scannable.records_in_commit_order:
                return self._read_by_number()
            return self._read_twice()

    def _read_by_number(self) -> list[AuditEvent]:
        seen_parts = self._parts()
        seen_end = seen_parts[-1].end if seen_parts else 0
        waiting = [*self._waiting(None)]
        new_parts = [ScanPart(max(part.first, seen_end), part.end) for part in self._parts() if part.end > seen_end]
        return [
            *self._records(seen_parts, None, times=1, before=1),
            *self._records(new_parts, None, times=1, before=0),
            *waiting,
        ]

    def _read_twice(self) -> list[AuditEvent]:
        """Read records before and after. The first reading only shows which records existed when the audit began."""
        first = [*self._records(self._parts(), None, times=0, before=1)]
        waiting = [*self._waiting(None)]
        return [*first, *waiting, *self._records(self._parts(), None, times=1, before=0)]

    def _parts(self) -> Sequence[ScanPart]:
        return self.store.require_scannable().scan_parts("records", 1)

    def _records(
        self, parts: Sequence[ScanPart], snapshot: str | None, *, times: int, before: int
    ) -> Iterator[AuditEvent]:
        columns = LEDGER_ARROW.names
        for batch in scan_rows(self.store, "records", columns, self.budget, parts=parts, snapshot=snapshot):
            for row in zip(*(_values(batch, name) for name in columns), strict=True):
                kind, message_id, at, due, destination, detail = row
                if not message_id.startswith(OWN_PREFIX):
                    archived = kind == "scheduled" and detail == ARCHIVED
                    kind_here = _kind_of(kind, detail)
                    yield AuditEvent(kind_here, message_id, at, due, destination, archived, times, before)

    def _waiting(self, snapshot: str | None) -> Iterator[AuditEvent]:
        """Yield pending messages, then queues. Messages sent without a delay have no due time, and are not audited."""
        for table, destination in (("pending", "destination"), ("queued", "queue")):
            columns = ("message_id", "due", destination)
            for batch in scan_rows(self.store, table, columns, self.budget, snapshot=snapshot):
                for message_id, due, queue in zip(*(_values(batch, name) for name in columns), strict=True):
                    if due is not None and not message_id.startswith(OWN_PREFIX):
                        yield AuditEvent(table, message_id, None, due, queue, archived=False, times=1, before=1)

    def exclude_pruned(self, verdicts: list[AuditVerdict]) -> list[AuditVerdict]:
        """Return verdicts without messages whose records were removed during the audit.

        A lost message without its *scheduled* record has none any more, nor has an orphaned one without other records.
        """
        suspects = {verdict.message_id: verdict for verdict in verdicts if not verdict.lines.isdisjoint(_SUSPECT)}
        if not suspects:
            return verdicts
        is_few = len(suspects) <= stores.ASKED_FOR_BY_ID
        scan_filter = ScanFilter(message_ids=tuple(suspects)) if is_few else ScanFilter()
        scheduled, ended = set[str](), set[str]()
        columns = ("message_id", "kind", "detail")
        for batch in scan_rows(self.store, "records", columns, ScanBudget(None), scan_filter=scan_filter):
            for message_id, kind, detail in zip(*(_values(batch, name) for name in columns), strict=True):
                if kind != "scheduled":
                    ended.add(message_id)
                elif detail != ARCHIVED:
                    scheduled.add(message_id)
        pruned = {
            message_id
            for message_id, verdict in suspects.items()
            if ("lost" in verdict.lines and message_id not in scheduled)
            or ("orphaned" in verdict.lines and message_id not in ended)
        }
        return [verdict for verdict in verdicts if verdict.message_id not in pruned]


_SUSPECT = frozenset({"lost", "orphaned"})


def _kind_of(kind: str, detail: str | None) -> str:
    """Return the kind of an event, which some records say in their detail."""
    if kind == "rescheduled" and detail is not None:
        return "came_back" if detail == stores.CAME_BACK or detail.startswith(RETURNED_BY_MIGRATION) else kind
    return "sent_again" if kind == "retried" and (detail or "").startswith(stores.SENT_AGAIN) else kind


def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
    column = batch.column(name)
    return (pc.cast(column, pa.int64()) if column.type == INSTANT else column).to_pylist()


# --- folders ----------------------------------------------------------------------------------------------------------


def _finding_rows(verdicts: Sequence[AuditVerdict], endpoint: str) -> list[dict[str, Any]]:
    rows = [
        {
            "finding": name,
            "message_id": verdict.message_id,
            "destination": verdict.destination,
            "due": verdict.due,
            "detail": verdict.about[name],
            "endpoint": endpoint,
        }
        for verdict in verdicts
        for name in FINDINGS
        if name in verdict.about
    ]
    return sorted(rows, key=lambda row: (row["finding"], row["message_id"]))


def _destination_rows(destinations: Mapping[str | None, totals.KeyTotals]) -> list[dict[str, Any]]:
    return [
        {"destination": destination, **asdict(total.audit_counts), **asdict(total.lateness)}
        for destination, total in destinations.items()
    ]


def _write(rows: Sequence[Mapping[str, Any]], schema: pa.Schema, folder: LocalFolder) -> None:
    """Write rows to a new folder: JSON lines if its name ends in .json, else Parquet."""
    columns: list[Any] = [_column(field, [row[field.name] for row in rows]) for field in schema]
    table = pa.Table.from_arrays(columns, schema=schema)
    folder.write(table, "json" if folder.location.endswith(".json") else "parquet")


def _column(field: pa.Field[Any], values: list[Any]) -> Any:
    if field.type == INSTANT:
        return cast("Any", pa.array(values, pa.int64())).cast(INSTANT)
    return pa.array(values, field.type)
