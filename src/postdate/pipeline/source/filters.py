"""Spark's filters as conditions of a store. Source: ADR 0011, point 3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeGuard

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from postdate.pipeline.source.options import QUEUED
from postdate.ports import ScanFilter

MOST_TEXTS: Final = 10_000
"""Ids or destinations in one condition; a longer list is left to Spark."""

_INSTANT: Final = timedelta(microseconds=1)
_ALWAYS_THERE: Final = frozenset({"message_id", "kind", "number", "at", "queue"})
_THERE_WHEN_PENDING: Final = frozenset({"destination", "due", "headers", "body", "number_of_failures"})


@dataclass
class Pushed:
    """Collects the conditions for the store; each narrows the rows of ``what``."""

    what: str
    _ids: frozenset[str] | None = None
    _destinations: frozenset[str] | None = None
    _due_from: datetime | None = None
    _due_to: datetime | None = None

    def take(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take the filters that the store fulfils exactly; return the others."""
        given = list(filters)
        left = [each for each in given if not isinstance(each, IsNotNull) and not self._takes(each)]
        # A condition that was taken implies that its column is not null.
        left += [each for each in given if isinstance(each, IsNotNull) and not self._has_value(each.attribute)]
        return left

    @property
    def is_impossible(self) -> bool:
        """Whether no row can fulfil the conditions."""
        empty_range = self._due_from is not None and self._due_to is not None and self._due_from >= self._due_to
        return self._ids == frozenset() or self._destinations == frozenset() or empty_range

    @property
    def where(self) -> ScanFilter:
        return ScanFilter(_listed(self._ids), _listed(self._destinations), self._due_from, self._due_to)

    @property
    def _destination(self) -> str:
        return "queue" if self.what == QUEUED else "destination"

    def _has_value(self, path: tuple[str, ...]) -> bool:
        (column, *inner) = path
        if inner:
            return False
        conditions = {
            "message_id": self._ids,
            self._destination: self._destinations,
            "due": self._due_from or self._due_to,
        }
        there = column in _ALWAYS_THERE or (self.what == "pending" and column in _THERE_WHEN_PENDING)
        return there or conditions.get(column) is not None

    def _takes(self, each: Filter) -> bool:
        match each:
            case EqualTo((column,), value) | EqualNullSafe((column,), value):
                return self._equals(column, value)
            case In((column,), values):
                return self._is_one_of(column, [value for value in values if value is not None])
            case GreaterThan(("due",), value) | GreaterThanOrEqual(("due",), value) if _is_instant(value):
                return self._is_due(value if isinstance(each, GreaterThanOrEqual) else _after(value), None)
            case LessThan(("due",), value) | LessThanOrEqual(("due",), value) if _is_instant(value):
                return self._is_due(None, value if isinstance(each, LessThan) else _after(value))
            case _:
                return False

    def _equals(self, column: str, value: object) -> bool:
        if _is_instant(value):
            after = _after(value)
            return column == "due" and after is not None and self._is_due(value, after)
        return self._is_one_of(column, [value])

    def _is_one_of(self, column: str, values: Sequence[object]) -> bool:
        if column not in {"message_id", self._destination} or len(values) > MOST_TEXTS:
            return False
        if not all(isinstance(value, str) for value in values):
            return False
        texts = frozenset(value for value in values if isinstance(value, str) and _can_be_stored(value))
        if column == "message_id":
            self._ids = texts if self._ids is None else self._ids & texts
        else:
            self._destinations = texts if self._destinations is None else self._destinations & texts
        return True

    def _is_due(self, first: datetime | None, end: datetime | None) -> bool:
        if first is None and end is None:  # beyond the last instant that there is
            return False
        if first is not None:
            first = first.astimezone(UTC)
            self._due_from = first if self._due_from is None else max(self._due_from, first)
        if end is not None:
            end = end.astimezone(UTC)
            self._due_to = end if self._due_to is None else min(self._due_to, end)
        return True


def _listed(texts: frozenset[str] | None) -> tuple[str, ...] | None:
    return None if texts is None else tuple(sorted(texts))


def _is_instant(value: object) -> TypeGuard[datetime]:
    return isinstance(value, datetime) and value.tzinfo is not None


def _after(instant: datetime) -> datetime | None:
    """Return the next instant; times are whole microseconds."""
    try:
        return instant + _INSTANT
    except OverflowError:
        return None


def _can_be_stored(text: str) -> bool:
    """Return whether a row may have the text: no message has one with a NUL or a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
