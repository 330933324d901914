"""The forecast in this process: :mod:`postdate.pipeline.forecast` without Spark."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa

from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import PipelineError
from postdate.messages import OF_THE_STORE, aware_utc
from postdate.pipeline import forecast_result, forecast_shape
from postdate.pipeline.forecast_rates import HerdSpan, Load, find_herds, horizon
from postdate.pipeline.local.scanning import ScanBudget, scan_rows
from postdate.pipeline.rows import CALENDAR, INSTANT, arrow_schema, pc
from postdate.pipeline.stores import StoreSpec, open_spec

_COLUMNS = ("due", "destination")
_LOAD = pa.schema([("start", INSTANT), ("destination", pa.string()), ("messages", pa.int64()), ("overdue", pa.int64())])


def forecast(
    store: StoreSpec,
    now: datetime,
    options: forecast_result.ForecastOptions | None = None,
    *,
    most_messages: int | None = None,
) -> forecast_result.ForecastResult:
    """Forecast the pending messages of a store.

    Args:
        store: the store to read. Retried messages count at the time at which they were first due.
        now: the instant against which overdue is measured, and at which dispatching begins; aware.
        options: the defaults if left out.
        most_messages: from how many messages on Spark does the job; ``None``: never.

    Raises:
        StoreError: the store is missing or unreachable.
        NeedsSpark: the store has more than ``most_messages``.
        PipelineError: the store cannot be read in bulk.
    """
    started, as_of = time.perf_counter(), aware_utc(now, "now")
    with open_spec(store) as opened:
        batches = [*scan_rows(opened, "pending", _COLUMNS, ScanBudget(most_messages))]
    pending = pa.Table.from_batches(batches, arrow_schema("pending", _COLUMNS))
    is_own = pc.is_in(pending.column("destination"), value_set=pa.array(sorted(OF_THE_STORE)))
    options = options or forecast_result.ForecastOptions()
    return _forecast(pending.filter(pc.invert(is_own)), as_of, options, store.redacted_address, started)


def forecast_table(
    messages: pa.Table,
    now: datetime,
    options: forecast_result.ForecastOptions | None = None,
    *,
    due: str = "due",
    destination: str = "destination",
) -> forecast_result.ForecastResult:
    """Forecast any table of messages, such as a plan that is not scheduled yet.

    For the arguments see :func:`postdate.pipeline.forecast.forecast_frame`; due times are instants of microseconds.

    Raises:
        PipelineError: a column is missing or of another type.
    """
    started, as_of = time.perf_counter(), aware_utc(now, "now")
    columns = {"due": (due, INSTANT), "destination": (destination, pa.string())}
    for name, expected in columns.values():
        if name not in messages.column_names:
            raise PipelineError(f"there is no column {name!r}; there are {', '.join(messages.column_names)}")
        actual = messages.schema.field(name).type
        if actual != expected:
            raise PipelineError(f"the column {name!r} is {actual}, and a forecast needs {expected}; cast it before")
    plain = pa.Table.from_arrays([messages.column(column) for column, _ in columns.values()], names=list(columns))
    return _forecast(plain, as_of, options or forecast_result.ForecastOptions(), "a table", started)


class _Count(NamedTuple):
    """The messages of one destination that are due in one second, times in microseconds since 1970."""

    second: int
    destination: str | None
    messages: int
    overdue: int
    first: int
    last: int

    @property
    def upcoming(self) -> int:
        return self.messages - self.overdue


def _forecast(
    messages: pa.Table, as_of: datetime, options: forecast_result.ForecastOptions, source: str, started: float
) -> forecast_result.ForecastResult:
    counts, without_due = _count_by_second(messages, as_of)
    overdue = sum(count.overdue for count in counts)
    upcoming = _upcoming(counts)
    width = forecast_shape.interval_width(upcoming, options.width)
    last = horizon(upcoming) if len(upcoming) else 0
    destinations = _destinations(counts)
    shown = destinations[: forecast_shape.MOST_DESTINATIONS]
    spans = find_herds(upcoming, options.herd_factor, options.herd_least)
    load_width = forecast_shape.load_width(upcoming, options.width)
    return forecast_result.ForecastResult(
        source=source,
        as_of=as_of,
        options=options,
        messages=sum(count.messages for count in counts),
        overdue=overdue,
        without_due=without_due,
        first_due=from_microseconds(min(count.first for count in counts)) if counts else None,
        last_due=from_microseconds(max(count.last for count in counts)) if counts else None,
        destinations=shown,
        destinations_found=len(destinations),
        intervals=_intervals(counts, width, last + upcoming.step, shown) if len(upcoming) else (),
        interval_seconds=width,
        beyond=int(upcoming.counts[upcoming.seconds > last].sum()),
        herds=_herds(counts, spans[: forecast_shape.MOST_HERDS]),
        herds_found=len(spans),
        needed=forecast_shape.needed_rates(upcoming, as_of, overdue, options.tolerance),
        load_width_seconds=load_width,
        load=_load(counts, load_width),
        took_seconds=time.perf_counter() - started,
        engine="local",
    )


def _count_by_second(messages: pa.Table, as_of: datetime) -> tuple[list[_Count], int]:
    """Count by second and destination. Return also the number of rows without a due time in the calendar."""
    due = cast("Any", messages.column("due").cast(pa.int64()))
    has_due = pc.fill_null(
        pc.and_(pc.greater_equal(due, CALENDAR[0]), pc.less_equal(due, CALENDAR[1])), fill_value=False
    )
    timed, due = messages.filter(has_due), due.filter(has_due)
    seconds = np.floor_divide(np.asarray(due, np.int64), 1_000_000)
    is_overdue = pc.less(due, to_microseconds(as_of)).cast(pa.int64())
    columns: list[Any] = [pa.array(seconds, pa.int64()), timed.column("destination"), is_overdue, due]
    table = pa.Table.from_arrays(columns, names=["second", "destination", "overdue", "due"])
    sums = table.group_by(["second", "destination"]).aggregate(
        [("due", "count"), ("overdue", "sum"), ("due", "min"), ("due", "max")]
    )
    names = ("second", "destination", "due_count", "overdue_sum", "due_min", "due_max")
    rows = zip(*(sums.column(name).to_pylist() for name in names), strict=True)
    return [_Count(*row) for row in rows], messages.num_rows - timed.num_rows


def _upcoming(counts: Iterable[_Count]) -> Load:
    """Return the load by second, without overdue messages."""
    by_second = Counter[int]()
    for count in counts:
        if count.upcoming:
            by_second[count.second] += count.upcoming
    rows = sorted(by_second.items())
    seconds, messages = (np.array([row[number] for row in rows], np.int64) for number in (0, 1))
    return Load(seconds, messages)


def _name_order(destination: str | None) -> tuple[bool, str]:
    """Return the place of a destination in an order by name, in which none is first."""
    return destination is not None, destination or ""


def _destinations(counts: Iterable[_Count]) -> tuple[forecast_result.DestinationLoad, ...]:
    groups = dict[str | None, list[_Count]]()
    for count in counts:
        groups.setdefault(count.destination, []).append(count)
    loads = [
        forecast_result.DestinationLoad(
            destination=destination,
            messages=sum(each.messages for each in group),
            overdue=sum(each.overdue for each in group),
            first_due=from_microseconds(min(each.first for each in group)),
            last_due=from_microseconds(max(each.last for each in group)),
            most_in_a_second=max(each.messages for each in group),
        )
        for destination, group in groups.items()
    ]
    return tuple(sorted(loads, key=lambda each: (-each.messages, _name_order(each.destination))))


def _intervals(
    counts: Iterable[_Count], width: int, end: int, destinations: Sequence[forecast_result.DestinationLoad]
) -> tuple[forecast_result.LoadInterval, ...]:
    separate = [each.destination for each in destinations[: forecast_shape.SEPARATE_DESTINATIONS]]
    by_start = dict[int, Counter[str | None]]()
    remaining = Counter[int]()
    for count in counts:
        if count.upcoming and count.second < end:
            start = count.second // width * width
            shares = by_start.setdefault(start, Counter())
            if count.destination in separate:
                shares[count.destination] += count.upcoming
            else:
                remaining[start] += count.upcoming
    return tuple(
        forecast_result.LoadInterval(
            start=from_microseconds(start * 1_000_000),
            messages=shares.total() + remaining[start],
            destinations=tuple(
                forecast_result.DestinationShare(each, shares[each]) for each in separate if each in shares
            ),
            others=remaining[start],
        )
        for start, shares in sorted(by_start.items())
    )


def _herds(counts: Iterable[_Count], spans: Sequence[HerdSpan]) -> tuple[forecast_result.Herd, ...]:
    """Add to each herd the destinations of its messages."""
    herd_of_second = {
        second: number for number, span in enumerate(spans) for second in range(span.start, span.start + span.seconds)
    }
    shares = [Counter[str | None]() for _ in spans]
    for count in counts:
        if count.upcoming and count.second in herd_of_second:
            shares[herd_of_second[count.second]][count.destination] += count.upcoming
    return tuple(
        forecast_result.Herd.of(
            span,
            tuple(
                forecast_result.DestinationShare(destination, messages)
                for destination, messages in sorted(
                    shares[number].items(), key=lambda each: (-each[1], _name_order(each[0]))
                )[: forecast_shape.DESTINATIONS_OF_A_HERD]
            ),
        )
        for number, span in enumerate(spans)
    )


def _load(counts: Iterable[_Count], width: int) -> pa.Table:
    """Return the table of the load, in order of time and destination."""
    sums = dict[tuple[int, str | None], list[int]]()
    for count in counts:
        row = sums.setdefault((count.second // width * width, count.destination), [0, 0])
        row[0] += count.messages
        row[1] += count.overdue
    rows = sorted(sums.items(), key=lambda row: (row[0][0], _name_order(row[0][1])))
    columns: list[Any] = [
        pa.array([start * 1_000_000 for (start, _), _ in rows], pa.int64()).cast(INSTANT),
        pa.array([destination for (_, destination), _ in rows], pa.string()),
        pa.array([messages for _, (messages, _) in rows], pa.int64()),
        pa.array([overdue for _, (_, overdue) in rows], pa.int64()),
    ]
    return pa.Table.from_arrays(columns, schema=_LOAD)
