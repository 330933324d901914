"""Lists of what waits, and changes by filter, on SQLite: what they read and what they keep."""

import sqlite3
import tracemalloc
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from postdate import Answer, Pending, SendOptions, connect
from postdate.backends.sqlite.store import SqliteStore
from postdate.client.client import Client

AT = datetime(2100, 1, 31, 9, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncGenerator[Client]:
    async with connect(f"sqlite:///{tmp_path}/shop.db") as opened:
        yield opened


async def _herd(client: Client, count: int, body: bytes = b"") -> None:
    await client.send_many(
        [(body, SendOptions("mails", deliver_at=AT, message_id=f"m-{number:05d}")) for number in range(count)]
    )


async def test_a_dry_run_keeps_nothing_of_what_it_counts(client: Client) -> None:
    """2,000 messages of 20 KB are due at one instant: two pages of them are in memory at once."""
    await _herd(client, 2_000, b"x" * 20_000)
    tracemalloc.start()
    try:
        assert await client.cancel_where(Pending("mails"), dry_run=True) == {Answer.DONE: 2_000}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 25_000_000


async def test_a_page_in_a_herd_goes_by_an_index(client: Client, tmp_path: Path) -> None:
    """By due time and number, so that it does not depend on how many are due at its instant."""
    await _herd(client, 1)
    values = {"due_from": 0, "behind": 1, "due_to": None, "among": None, "destination": None, "limit": 10}
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {SqliteStore._sql.list_pending}", values).fetchall()
    steps = [str(step[3]) for step in plan if "delayed_message" in str(step[3])]
    assert len(steps) == 6
    assert all("USING INDEX" in step for step in steps)
    assert sum("=? AND rowid>?" in step for step in steps) == 3
    connection.close()
