"""The dispatching that a load over time needs: rates and herds. Pure functions on arrays; runs on the driver.

**The model.** All messages that are due within one step (a second, unless there are too many) are due at its
beginning. A dispatcher sends them in the order of their due times at a constant rate. A lateness in this model differs
by less than one step from the lateness of the same dispatcher with exact due times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]

HOUR_SECONDS = 3_600
EXCEPTIONAL_SECONDS = HOUR_SECONDS // 10
"""Number of seconds of an hour that may exceed its usual load: one in ten."""

WIDTHS_SECONDS = (
    1, 10, 60, 300, 600, 3_600, 21_600, 86_400, 604_800, 2_592_000, 31_536_000, 315_360_000, 3_153_600_000,
    31_536_000_000,
)  # fmt: skip
"""Lengths of intervals that are round numbers for people, up to a thousand years."""


@dataclass(frozen=True, slots=True)
class Load:
    """Numbers of messages by due time.

    ``seconds`` since 1970 UTC are the beginnings of steps of ``step`` seconds: ascending, each once, with at least one
    message each.
    """

    seconds: Integers
    counts: Integers
    step: int = 1

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def starting_at(self, second: int, overdue: int) -> Load:
        """Return the load of a dispatcher that begins at ``second`` (since 1970) with ``overdue`` additional messages.

        Messages that are due before ``second`` count as due then.
        """
        seconds = np.concatenate([np.array([second], np.int64), np.maximum(self.seconds, second)])
        counts = np.concatenate([np.array([overdue], np.int64), self.counts])
        distinct, inverse = np.unique(seconds, return_inverse=True)
        merged = np.zeros(len(distinct), np.int64)
        np.add.at(merged, inverse, counts)
        return Load(distinct[merged > 0], merged[merged > 0], self.step)


# --- the rate that is needed ------------------------------------------------------------------------------------------


def needed_rate(load: Load, tolerance_seconds: float) -> float:
    """Return the smallest constant rate, in messages a second, at which no message is later than the tolerance.

    That is the greatest ``messages due from a to b / (b - a + tolerance)`` over all steps ``a`` and ``b``: this many
    messages must be sent in this time, and if each such demand is met then no message is too late. The rate is found by
    Dinkelbach's method: take a rate, find the demand that exceeds it most, take the rate of that demand, until none
    exceeds it. Each round is linear in the number of steps, and there are few rounds.

    An empty load needs rate 0; ``tolerance_seconds`` is greater than 0.
    """
    if not len(load):
        return 0.0
    cumulative = np.cumsum(load.counts)
    cumulative_before = cumulative - load.counts
    rate = int(load.counts.max()) / tolerance_seconds
    while True:
        demand = cumulative_before - rate * _times(load, rate)
        excess = demand + load.counts - np.minimum.accumulate(demand)
        end = int(np.argmax(excess))
        start = int(np.argmin(demand[: end + 1]))
        better = int(cumulative[end] - cumulative_before[start]) / (
            int(load.seconds[end] - load.seconds[start]) + tolerance_seconds
        )
        if better <= rate:
            return rate
        rate = better


def _times(load: Load, rate: float) -> Numbers:
    """Return the steps as seconds since the first, with gaps cut to the time in which the whole load would be sent.

    Steps after such a gap do not depend on the steps before it. Without the cut, one message in the year 9998 would
    make the numbers so large that they lose the precision for the messages of today.
    """
    gaps = np.minimum(np.diff(load.seconds).astype(np.float64), np.ceil(load.total / rate) + 1)
    return np.concatenate([np.zeros(1), np.cumsum(gaps)])


# --- herds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HerdSpan:
    """Consecutive steps, each of which has far more than the usual load.

    ``peak`` and ``usual`` are numbers for one step.
    """

    start: int
    seconds: int
    messages: int
    peak: int
    usual: int


def find_herds(load: Load, factor: float, least: int) -> list[HerdSpan]:
    """Return the herds of a load, biggest first.

    A step belongs to a herd if at least ``least`` messages are due in it, and more than ``factor`` times the usual
    load. The usual load of an hour (of UTC) is the load that nine in ten of its steps do not exceed, with empty steps
    counted. If the hour before or after has a higher usual load, that one counts, so that a plan is no herd where it
    begins or ends. Consecutive steps are one herd. With steps above 6 minutes no herds can be seen.

    ``factor`` and ``least`` are at least 1.
    """
    if not len(load):
        return []
    usual = _usual(load)
    crowded = np.flatnonzero((load.counts >= least) & (load.counts > factor * usual))
    if not len(crowded):
        return []
    seconds, counts = load.seconds[crowded], load.counts[crowded]
    starts = np.flatnonzero(np.diff(seconds, prepend=seconds[0] - 2 * load.step) != load.step)
    lengths = np.diff(np.append(starts, len(crowded))) * load.step
    columns = (
        seconds[starts].tolist(),
        lengths.tolist(),
        np.add.reduceat(counts, starts).tolist(),
        np.maximum.reduceat(counts, starts).tolist(),
        np.maximum.reduceat(usual[crowded], starts).tolist(),
    )
    return sorted([HerdSpan(*row) for row in zip(*columns, strict=True)], key=lambda herd: (-herd.messages, herd.start))


def _usual(load: Load) -> Integers:
    """Return the usual load around each step; see :func:`find_herds`."""
    hours = load.seconds // HOUR_SECONDS
    by_size = load.counts[np.lexsort((-load.counts, hours))]
    distinct, first, inverse, steps = np.unique(hours, return_index=True, return_inverse=True, return_counts=True)
    exceptional = EXCEPTIONAL_SECONDS // load.step
    index = np.minimum(first + exceptional, len(load) - 1)
    usual = np.where(steps > exceptional, by_size[index], 0)
    is_adjacent = np.diff(distinct) == 1
    highest = usual.copy()
    highest[1:] = np.maximum(highest[1:], np.where(is_adjacent, usual[:-1], 0))
    highest[:-1] = np.maximum(highest[:-1], np.where(is_adjacent, usual[1:], 0))
    return highest[inverse]


# --- what is shown ----------------------------------------------------------------------------------------------------


def horizon(load: Load) -> int:
    """Return the last second that a chart should show: the last of all, unless a few messages are far away.

    A few are one in a hundred, or ten if that is no more than one in ten. They are far away if the last is due more
    than ten times as far from the first as all others. Then the chart shows messages up to twice as far as the others.
    The load must have a message.
    """
    spare = max(load.total // 100, min(10, load.total // 10))
    cumulative = np.cumsum(load.counts)
    first, last = int(load.seconds[0]), int(load.seconds[-1])
    reach_seconds = int(load.seconds[int(np.searchsorted(cumulative, load.total - spare))]) - first + load.step
    if last - first <= 10 * reach_seconds:
        return last
    return int(load.seconds[int(np.searchsorted(load.seconds, first + 2 * reach_seconds, side="right")) - 1])


def round_width(span_seconds: int, most: int, at_least: int = 1) -> int:
    """Return the smallest round width, in seconds, with which ``most`` intervals cover the span wherever they begin.

    ``span_seconds`` includes the first and the last second; ``most`` is at least 2.
    """
    fitting = (width for width in WIDTHS_SECONDS if width >= at_least and span_seconds <= (most - 1) * width)
    return next(fitting, WIDTHS_SECONDS[-1])
