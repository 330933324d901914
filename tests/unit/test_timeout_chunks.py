"""How chunks of due timeouts are put together although some rows cannot be read (specification 4.7, row 95)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from postdate.backends.sql.timeouts import next_chunk
from postdate.backends.sql.timeouts_layout import text_time

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
START = NOW - timedelta(days=1)
MILLISECOND = timedelta(milliseconds=1)
UNREADABLE = "no uuid"


class Rows:
    """A table of due timeouts, by time; it counts the rows that are read."""

    def __init__(self, *rows: tuple[str, str]) -> None:
        self._rows = sorted(rows, key=lambda row: row[1])
        self.read = 0

    def due(self, after: datetime, until: datetime, at_most: int | None) -> Sequence[tuple[Any, ...]]:
        found = [row for row in self._rows if text_time(after) < row[1] <= text_time(until)][:at_most]
        self.read += len(found)
        return found

    def first(self, after: datetime) -> object:
        return next((time for _, time in self._rows if time > text_time(after)), None)


def rows(ids: Sequence[str], first: datetime) -> list[tuple[str, str]]:
    return [(each, text_time(first + number * MILLISECOND)) for number, each in enumerate(ids)]


def ids(count: int) -> list[str]:
    return [str(uuid.UUID(int=number)) for number in range(count)]


@pytest.mark.parametrize("unreadable", [9, 10, 11, 35])
def test_more_unreadable_rows_than_the_limit_do_not_make_a_look_read_all_that_is_due(unreadable: int) -> None:
    table = Rows(*rows([UNREADABLE] * unreadable, START + MILLISECOND), *rows(ids(5_000), START + timedelta(hours=1)))
    chunk = next_chunk(START, NOW, 10, table.due, table.first)
    assert chunk.due[0].timeout_id == ids(1)[0]
    assert chunk.next_query == NOW
    assert table.read < 10 * unreadable


def test_with_nothing_but_unreadable_rows_it_is_told_when_the_next_is_due() -> None:
    later = NOW + timedelta(hours=1)
    table = Rows(*rows([UNREADABLE] * 50, START + MILLISECOND), *rows(ids(1), later))
    chunk = next_chunk(START, NOW, 10, table.due, table.first)
    assert (list(chunk.due), chunk.next_query) == ([], later)


def test_a_cut_chunk_before_an_unreadable_time_is_still_known_to_be_cut() -> None:
    """Otherwise whoever looks back takes what is behind it for gone, and announces it again."""
    first, second = rows(ids(2), START + MILLISECOND)
    table = Rows(first, (ids(3)[2], f"{first[1]}x"), second)
    chunk = next_chunk(START, NOW, 1, table.due, table.first)
    assert [each.timeout_id for each in chunk.due] == [first[0]]
    assert chunk.next_query == NOW
