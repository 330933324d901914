"""Options and results of a forecast. Plain values; runs on the driver."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postdate.clock import from_microseconds
from postdate.errors import PipelineError
from postdate.operations.plain import format_span
from postdate.pipeline.engines import EngineName
from postdate.pipeline.local.folders import LocalFolder, check_local_folder
from postdate.pipeline.outputs import NewFolder, check_new_folder
from postdate.pipeline.plain import to_plain

if TYPE_CHECKING:
    from postdate.pipeline.forecast_rates import HerdSpan  # numpy, which is not needed to read a result

FRAME_WIDTHS = {"minute": 60, "hour": 3_600, "day": 86_400}
"""Lengths of the intervals of the table, in seconds."""

AUTO = "auto"
_LOAD_FORMATS = ("parquet", "csv", "json")
_LONGEST_SECONDS = 86_400.0 * 999_999_998
"""The longest span that Python can represent, in seconds."""


@dataclass(frozen=True, slots=True)
class ForecastOptions:
    """How to forecast. Wrong values are refused at once, before Spark does any work.

    Args:
        width: width of the intervals of the table: ``minute``, ``hour``, ``day``, or ``auto``: the shortest of them
            with which at most 400 cover the plan, else days. The intervals of JSON and page are never shorter than a
            named width, and longer if there would be more than 400 of them.
        tolerance: how late a message may be; at least 1 s, since due times are counted by the second.
        herd_factor: how many times the usual load makes a herd; at least 1.
        herd_least: number of messages within one second that makes a herd; at least 1.

    Raises:
        PipelineError: a value is out of its bounds.
    """

    width: str = AUTO
    tolerance: timedelta = timedelta(seconds=1)
    herd_factor: float = 10.0
    herd_least: int = 1_000

    def __post_init__(self) -> None:
        if self.width not in (*FRAME_WIDTHS, AUTO):
            raise PipelineError(f"there is no width {self.width!r}; choose one of {', '.join((*FRAME_WIDTHS, AUTO))}")
        if self.tolerance < timedelta(seconds=1):
            raise PipelineError(
                f"a tolerance of {self.tolerance.total_seconds():g} s is too short; give at least 1 s, since due times "
                f"are counted by the second"
            )
        if not (math.isfinite(self.herd_factor) and self.herd_factor >= 1):
            raise PipelineError(f"a herd factor of {self.herd_factor} makes no sense; give a number of at least 1")
        if self.herd_least < 1:
            raise PipelineError(f"{self.herd_least} messages are no herd; give a number of at least 1")


# --- what falls due ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DestinationLoad:
    """Load of one destination. ``destination`` is ``None`` for rows that name none.

    Args:
        messages: total number, including overdue messages.
        overdue: number of messages due before now.
        first_due, last_due: to the microsecond; UTC.
        most_in_a_second: largest number of messages due within one second.
    """

    destination: str | None
    messages: int
    overdue: int
    first_due: datetime
    last_due: datetime
    most_in_a_second: int


@dataclass(frozen=True, slots=True)
class DestinationShare:
    """Number of messages for one destination."""

    destination: str | None
    messages: int


@dataclass(frozen=True, slots=True)
class LoadInterval:
    """Messages due within one interval.

    Args:
        start: beginning of the interval; UTC.
        destinations: shares of the destinations with the most messages in total, at most 8, without those that have
            none in this interval.
        others: number of messages for all other destinations.
    """

    start: datetime
    messages: int
    destinations: tuple[DestinationShare, ...]
    others: int


@dataclass(frozen=True, slots=True)
class Herd:
    """Far more messages at once than usual; see :func:`postdate.pipeline.forecast_rates.find_herds`.

    Args:
        start: first second of the herd; UTC.
        seconds: length.
        messages: number of messages due in the herd.
        usual_in_a_second: the usual load, in messages a second, for comparison.
        destinations: destinations with the most messages of the herd, at most 5.
    """

    start: datetime
    seconds: int
    messages: int
    most_in_a_second: int
    usual_in_a_second: int
    destinations: tuple[DestinationShare, ...]

    @classmethod
    def of(cls, span: HerdSpan, destinations: tuple[DestinationShare, ...]) -> Herd:
        """Return the herd of this span."""
        return cls(
            start=from_microseconds(span.start * 1_000_000),
            seconds=span.seconds,
            messages=span.messages,
            most_in_a_second=span.peak,
            usual_in_a_second=span.usual,
            destinations=destinations,
        )


# --- what it takes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NeededRate:
    """The smallest constant rate at which no message is later than the tolerance.

    Args:
        tolerance_seconds: how late a message may be.
        per_second: rate in messages a second, for messages that still become due.
        with_overdue_per_second: the same if overdue messages count as due now.
    """

    tolerance_seconds: float
    per_second: float
    with_overdue_per_second: float


# --- all of it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForecastResult:
    """The result of a forecast.

    Args:
        source: address of the store, without password, or the name of another source.
        as_of: the instant against which overdue is measured; UTC.
        options: options of the call.
        load: the table: ``start`` (timestamp), ``destination``, ``messages``, ``overdue`` (long), in no order. A frame
            of Spark, which keeps it until ``load.unpersist()`` or the end of the session; of the local engine, a table
            of Arrow.
        load_width_seconds: length of the intervals of the table.
        step_seconds: resolution with which due times were counted: 1, and more only for plans of many millions of
            seconds.
        messages: total number.
        overdue: number of messages due before now.
        without_due: rows left out: without a due time, or with one outside the years 1 to 9999.
        first_due, last_due: to the microsecond, overdue or not; UTC; ``None`` without messages.
        destinations: destinations with the most messages first, at most 400.
        destinations_found: total number of destinations.
        intervals: intervals of messages that still become due, in order, without empty ones; at most 400.
        interval_seconds: length of these intervals.
        beyond: number of messages due after the last interval: a few that are far away, see
            :func:`postdate.pipeline.forecast_rates.horizon`.
        herds: biggest first, at most 100.
        herds_found: total number of herds.
        needed: for the given tolerance, 10 s and 60 s; in order.
        engine: what has counted the messages, ``local`` or ``spark``; the results of both are the same.
    """

    source: str
    as_of: datetime
    options: ForecastOptions
    load: Any = field(repr=False, compare=False)
    load_width_seconds: int
    step_seconds: int = 1
    messages: int = 0
    overdue: int = 0
    without_due: int = 0
    first_due: datetime | None = None
    last_due: datetime | None = None
    destinations: tuple[DestinationLoad, ...] = ()
    destinations_found: int = 0
    intervals: tuple[LoadInterval, ...] = ()
    interval_seconds: int = 1
    beyond: int = 0
    herds: tuple[Herd, ...] = ()
    herds_found: int = 0
    needed: tuple[NeededRate, ...] = ()
    took_seconds: float = 0.0
    engine: EngineName = "spark"

    @property
    def upcoming(self) -> int:
        """Number of messages that still become due."""
        return self.messages - self.overdue

    def to_json(self) -> dict[str, Any]:
        field_names = [each.name for each in fields(self) if each.name not in {"load", "options"}]
        return {name: to_plain(getattr(self, name)) for name in [*field_names, "options"]}

    def table(self) -> list[tuple[str, str]]:
        """Return the totals as lines of name and value, for terminals."""
        lines = [
            ("messages", f"{self.messages:,}"),
            ("overdue", f"{self.overdue:,}"),
            ("without due time", f"{self.without_due:,}"),
            ("first due", format_instant(self.first_due)),
            ("last due", format_instant(self.last_due)),
            ("destinations", f"{self.destinations_found:,}"),
            ("herds", f"{self.herds_found:,}"),
        ]
        return lines + [
            (f"needed for {each.tolerance_seconds:g} s", f"{format_rate(each.per_second)} messages/s")
            for each in self.needed
        ]

    def write_load(self, path: str | Path | NewFolder | LocalFolder, load_format: str = "parquet") -> None:
        """Write the table, in order of time and destination, to a new directory.

        Args:
            path: the directory, which must not exist yet: a path on the driver's machine, as text a URI, or a folder
                that was checked before.
            load_format: ``parquet``, ``csv`` (with a header) or ``json``.

        Raises:
            PipelineError: the directory exists or cannot be written, or there is no such format.
        """
        if load_format not in _LOAD_FORMATS:
            raise PipelineError(f"the table is written as {' or '.join(_LOAD_FORMATS)}, not {load_format!r}")
        if self.engine == "local":
            local = check_local_folder(path, "the table") if isinstance(path, str | Path) else path
            assert isinstance(local, LocalFolder)
            local.write(self.load, load_format)
            return
        folder = path
        if isinstance(folder, str | Path):
            folder = check_new_folder(self.load.sparkSession, folder, "the table")
        assert isinstance(folder, NewFolder)
        folder.write(self.load.orderBy("start", "destination"), load_format, header=True)


def headlines(result: ForecastResult) -> list[str]:
    """Return the most important results for an operator, in sentences."""
    if not result.messages:
        return ["Nothing waits: there is nothing to forecast."]
    waiting = f"{result.messages:,} messages wait, due from {format_instant(result.first_due)}"
    sentences = [f"{waiting} to {format_instant(result.last_due)}."]
    if result.overdue:
        sentences.append(f"{result.overdue:,} of them are overdue.")
    if result.herds:
        sentences.append(_herd_sentence(result.herds[0], result.herds_found))
    if result.upcoming:
        rates = (
            f"{_format_span(each.tolerance_seconds)} it takes {format_rate(each.per_second)}/s"
            for each in result.needed
        )
        sentences.append(f"For nothing to be later than {', than '.join(rates)}.")
    return sentences


def _herd_sentence(herd: Herd, herds: int) -> str:
    top_share = herd.destinations[0]
    length_text = "at once" if herd.seconds == 1 else f"within {_format_span(herd.seconds)}"
    share = f"{top_share.messages / herd.messages:.0%} of them for {format_destination(top_share.destination)}"
    remark = "" if herds == 1 else f"; it is one of {herds:,}"
    return f"The biggest herd: {herd.messages:,} {length_text} at {format_instant(herd.start)}, {share}{remark}."


def _format_span(seconds: float) -> str:
    """Return a length of time in one or two units, rounded up."""
    exact = min(seconds, _LONGEST_SECONDS)
    unit = next((unit for least, unit in ((86_400, 3_600), (3_600, 60)) if exact >= least), 1)
    return format_span(timedelta(seconds=math.ceil(exact / unit) * unit))


def format_instant(instant: datetime | None) -> str:
    """Return an instant to the second, for people. Return a dash for ``None``."""
    return "-" if instant is None else f"{instant.replace(tzinfo=None):%F %T} UTC"


def format_rate(per_second: float) -> str:
    """Return a rate for people, rounded up, so that a needed rate is never shown as less than it is."""
    return f"{math.ceil(per_second):,}" if per_second > 10 else f"{math.ceil(per_second * 1_000) / 1_000:g}"


def format_destination(destination: str | None) -> str:
    return "(unknown)" if destination is None else destination
