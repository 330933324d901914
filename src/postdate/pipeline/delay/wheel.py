"""Where a row waits: in buckets of due time, narrow for near times and wide for far ones: a hierarchical timing wheel.

Level 0 has buckets of one resolution, and each level above has buckets 256 times as wide. A row goes to the lowest
level that reaches its due time, so one load of rows makes a few hundred buckets at most, whether they are due within a
minute or within a decade. Before a wide bucket begins, its rows are spread over narrower ones; only level 0 releases
rows. Pure arithmetic; every time is in UTC since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from postdate.errors import PipelineError

OVERDUE = -1
"""The place of rows that were due when they were packed: they are not kept."""

FEWEST_MS, MOST_MS = 10, 60_000
_FACTOR = 256
_PLACES_PER_BUCKET = 8
_WIDEST_MS = 40 * 365 * 86_400_000
"""Less than the time since 1970: otherwise a waiting row could be in bucket 0, whose timer is before 1970."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """Maps due times to places, and places to timers. A place is a level and the number of a bucket, in one integer.

    ``resolution_ms`` is the width of the narrowest bucket, 10 to 60,000 milliseconds; else PipelineError.
    """

    resolution_ms: int

    def __post_init__(self) -> None:
        if not FEWEST_MS <= self.resolution_ms <= MOST_MS:
            raise PipelineError(
                f"a resolution of {self.resolution_ms} ms is out of bounds; choose {FEWEST_MS} to {MOST_MS} ms"
            )

    @property
    def top(self) -> int:
        """The highest level; it also takes rows due beyond its reach."""
        level = 0
        while self.width_ms(level + 1) <= _WIDEST_MS:
            level += 1
        return level

    def width_ms(self, level: int) -> int:
        """Return how much due time a bucket of this level covers."""
        return self.resolution_ms * _FACTOR**level

    def lead_ms(self, level: int) -> int:
        """Return how long before its beginning a bucket above level 0 is spread: a quarter of its width."""
        return self.width_ms(level) // 4

    def places(self, due_us: NDArray[np.int64], now_ms: int, below: int | None = None) -> NDArray[np.int64]:
        """Return the place of each row; rows that are due by ``now_ms`` get :data:`OVERDUE`.

        Args:
            due_us: due times in microseconds.
            now_ms: decides how far off a row is, and so only its level: a wrong clock costs time, never a row.
            below: the level whose bucket is being spread; rows go to lower ones.
        """
        top = self.top if below is None else below - 1
        distance_ms = -(-due_us // 1000) - now_ms
        # A bucket is taken apart at most 1.25 widths before its last row is due: the level below reaches that far.
        reach_ms = np.array([2 * self.width_ms(level + 1) for level in range(top)], dtype=np.int64)
        levels = np.searchsorted(reach_ms, distance_ms, side="right")
        widths_us = np.array([self.width_ms(level) * 1000 for level in range(top + 1)], dtype=np.int64)[levels]
        # Level 0 lets rows go at the end of their bucket, so due times are rounded up; the others begin before them.
        buckets = np.where(levels == 0, -(-due_us // widths_us), due_us // widths_us)
        return np.where(due_us <= now_ms * 1000, OVERDUE, buckets * _PLACES_PER_BUCKET + levels)

    def place_near(self, due_us: int) -> int:
        """Return the place at level 0."""
        return -(-due_us // (self.resolution_ms * 1000)) * _PLACES_PER_BUCKET

    def level(self, place: int) -> int:
        return place % _PLACES_PER_BUCKET

    def begins_ms(self, place: int) -> int:
        """Return the earliest due time of a place above level 0."""
        return place // _PLACES_PER_BUCKET * self.width_ms(self.level(place))

    def timer_ms(self, place: int) -> int:
        """Return when a place is opened: at level 0 the end of its bucket, above it the lead before its beginning.

        A timer modulo the resolution is its level, so that no two levels share a timer.
        """
        level = self.level(place)
        if level == 0:
            return place // _PLACES_PER_BUCKET * self.resolution_ms
        return self.begins_ms(place) - self.lead_ms(level) + level

    def place_of(self, timer_ms: int) -> int:
        """Return the place that a timer opens; any later timer of the same level within one width opens it as well."""
        level = timer_ms % self.resolution_ms
        if level == 0:
            return timer_ms // self.resolution_ms * _PLACES_PER_BUCKET
        return (timer_ms - level + self.lead_ms(level)) // self.width_ms(level) * _PLACES_PER_BUCKET + level

    def later_timer_ms(self, place: int, now_ms: int) -> int | None:
        """Return a timer at or after ``now_ms`` for a place above level 0; ``None`` if its bucket begins before."""
        level = self.level(place)
        timer = -(-(now_ms - level) // self.resolution_ms) * self.resolution_ms + level
        return timer if timer <= self.begins_ms(place) else None
