"""Parts that several reports share: bodies, history, and times in words."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from postdate.config import format_duration
from postdate.ports import Process, Record

Progress = Callable[[int], None]
"""A callback that receives the number of items done so far."""


def ignore_progress(done: int) -> None:
    """Ignore progress: the default callback."""


@dataclass(frozen=True, slots=True)
class Body:
    """A body for display: ``text`` when it is UTF-8, else ``base64``."""

    size_bytes: int
    text: str | None
    base64: str | None


def body_of(content: bytes) -> Body:
    try:
        return Body(len(content), content.decode(), None)
    except UnicodeDecodeError:
        return Body(len(content), None, base64.b64encode(content).decode())


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a message's history. ``what`` is the name of the record kind in lower case."""

    at: datetime
    what: str
    due: datetime | None
    destination: str | None
    detail: str


def events_of(history: Sequence[Record]) -> tuple[Event, ...]:
    return tuple(
        Event(record.at, record.kind.name.lower(), record.due, record.destination, record.detail) for record in history
    )


def escape_control_characters(text: str) -> str:
    """Return ``text`` with control characters escaped, so that a message cannot control the terminal of its reader."""
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


def format_time(instant: datetime) -> str:
    """Return ISO 8601 in UTC, with microseconds only where they are not 0."""
    return instant.isoformat().replace("+00:00", "Z")


def format_span(span: timedelta) -> str:
    """Return a duration with one or two units, rounded down: ``3h12m``, ``45s``, ``12ms``."""
    seconds = abs(span).total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    for step, size in ((86_400, 3_600), (3_600, 60), (1, 1)):
        if seconds >= step:
            return format_duration(timedelta(seconds=seconds // size * size))
    return "0s"


def format_lateness(lateness: timedelta) -> str:
    """Return ``45s after it was due``. A delivery that is early by its record shows that clocks differ."""
    if lateness < timedelta(0):
        return f"{format_span(lateness)} before it was due, because clocks differ"
    return f"{format_span(lateness)} after it was due"


def format_count(count: int, noun: str) -> str:
    """Return ``1 message``, ``1,234 messages``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def running_services(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if process.alive and process.delivers]
