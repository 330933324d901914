"""How a chunk of due timeouts is put together from queries that a table answers by its index on ``Time``.

Source: specification 4.6, 4.7, row 95.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from postdate.errors import MessageError
from postdate.persistence.timeouts import decode_due, in_order, read_time
from postdate.ports.timeouts import DueChunk, DueTimeout

log = logging.getLogger("postdate.timeouts")

_TOLD: Final = 10_000
"""Unreadable rows that are remembered, so that each is told of once."""

Due = Callable[[datetime, datetime, int | None], Sequence[tuple[Any, ...]]]
"""``Id`` and ``Time`` of rows after the first instant and until the second, by ``Time``; at most so many, or all."""

First = Callable[[datetime], object]
"""The earliest ``Time`` after an instant, or ``None``."""


def next_chunk(start: datetime, now: datetime, limit: int, due: Due, first: First) -> DueChunk:
    """Return a chunk as :meth:`postdate.ports.timeouts.TimeoutPersister.next_chunk` promises it.

    Rows that cannot be read are logged and passed over: they must not hold up the others.
    """
    size = max(limit, 1)
    while True:
        rows = due(start, now, size + 1)
        found = _readable(rows[:size])
        if len(rows) <= size:
            return DueChunk(in_order(found), _next_query(now, first(now), None))
        if found:
            break
        size *= 2  # so many unreadable ones that the limit hides what is behind them
    last = found[-1].due
    earlier = [each for each in found if each.due < last]
    # More may be due at the last one's time than the limit let in, and the next chunk starts after that time.
    tied = _readable(due(earlier[-1].due if earlier else start, last, None))
    return DueChunk(in_order([*earlier, *tied]), _next_query(now, first(last), now))


def _readable(rows: Iterable[tuple[Any, ...]]) -> list[DueTimeout]:
    found: list[DueTimeout] = []
    for row in rows:
        try:
            found.append(decode_due(*row))
        except MessageError as error:
            _tell_once(str(error))
    return found


@lru_cache(maxsize=_TOLD)
def _tell_once(error: str) -> None:
    log.error("a row of the timeouts cannot be read and is passed over until it is mended: %s", error)


def _next_query(now: datetime, later: object, unreadable: datetime | None) -> datetime | None:
    """Return when to ask again, given the time of the first timeout after a chunk: at once if that is due.

    Args:
        now: until when was looked.
        later: as it is stored; ``None``: there is none.
        unreadable: what to return if it cannot be read. Behind a chunk that was cut there may be more that is due; else
            those behind it are found by whoever asks without being told to.
    """
    try:
        return None if later is None else max(read_time(later), now)
    except MessageError as error:  # what is due must not wait for whoever mends it
        _tell_once(str(error))
        return unreadable
