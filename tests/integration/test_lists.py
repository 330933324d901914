"""Lists of what waits, and changes by filter, on SQLite: what they read and what they keep."""

import sqlite3
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from postdate import Answer, Origin, Pending, SendOptions, connect
from postdate.backends.sqlite.store import SqliteStore
from postdate.client.client import Client
from postdate.errors import InvalidMessage, PostdateError
from postdate.messages import INTENTS, MARKERS, Headers

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


# --- why a message waits ----------------------------------------------------------------------------------------------

OF_ENDPOINTS = {
    "retry": {Headers.DELAYED_RETRIES: "1"},
    "timeout": {Headers.IS_SAGA_TIMEOUT_MESSAGE: "True"},
    "retried timeout": {Headers.IS_SAGA_TIMEOUT_MESSAGE: "True", Headers.DELAYED_RETRIES: "2"},
}


async def _of_each_origin(client: Client, folder: Path) -> None:
    for message_id, headers in {"mine": {}, **OF_ENDPOINTS}.items():
        await client.send(b"x", destination="mails", deliver_at=AT, message_id=message_id, headers=headers)
    for destination in (MARKERS, INTENTS):  # of the store's own, which no application can send
        message_id = await client.send(b"x", destination="mails", deliver_at=AT)
        with closing(sqlite3.connect(folder / "shop.db")) as file, file:
            file.execute("UPDATE delayed_message SET destination = ? WHERE message_id = ?", (destination, message_id))


@pytest.mark.parametrize(
    "where",
    [Pending("mails"), Pending(text="x"), Pending(due_from=AT), Pending(failing=False), Pending(due_to=AT + HOUR)],
    ids=str,
)
async def test_filters_match_what_an_application_scheduled(client: Client, tmp_path: Path, where: Pending) -> None:
    """Not what waits to be tried again, and no timeouts of sagas; a list without a filter has all, and marks them."""
    await _of_each_origin(client, tmp_path)
    assert [each.message_id for each in await client.list(where)] == ["mine"]
    assert await client.reschedule_where(where, later_by=timedelta(0)) == {Answer.DONE: 1}
    assert await client.cancel_where(where, dry_run=True) == {Answer.DONE: 1}
    assert await client.cancel_where(where) == {Answer.DONE: 1}
    assert {each.message_id: each.origin for each in await client.list()} == {
        "retry": Origin.RETRY,
        "timeout": Origin.SAGA_TIMEOUT,
        "retried timeout": Origin.RETRY,
    }


async def test_what_waits_for_another_reason_is_matched_when_it_is_named(client: Client, tmp_path: Path) -> None:
    await _of_each_origin(client, tmp_path)
    retries = Pending("mails", origins={Origin.RETRY})
    assert [each.message_id for each in await client.list(retries)] == ["retry", "retried timeout"]
    assert len(await client.list(Pending(origins=list(Origin)))) == 4
    assert await client.cancel_where(Pending(origins={Origin.SAGA_TIMEOUT})) == {Answer.DONE: 1}
    for everything in (Pending(), Pending(origins=list(Origin)), Pending(origins={Origin.APPLICATION, Origin.RETRY})):
        with pytest.raises(InvalidMessage, match="no condition"):
            await client.cancel_where(everything)
    assert len(await client.list()) == 3


# --- slips of a program -----------------------------------------------------------------------------------------------

SLIPS: dict[str, dict[str, object]] = {
    "a body that is bytes": {"text": b"x"},
    "half a character": {"text": "\ud800"},
    "a destination that is a number": {"destination": 5},
    "a NUL": {"destination": "a\0"},
    "headers that are a text": {"headers": "customer"},
    "headers that are a list": {"headers": [("customer", "1")]},
    "a header that is a number": {"headers": {"customer": 1}},
    "a number for a choice": {"failing": 1},
    "a zone that is a number": {"zone": 1},
    "a day": {"due_to": AT.date()},
    "a text for a time": {"due_from": "2026-01-31"},
    "an origin that is a text": {"origins": "retry"},
    "origins that are texts": {"origins": ["retry"]},
    "no origin": {"origins": []},
    "None for origins": {"origins": None},
}


@pytest.mark.parametrize("slip", SLIPS.values(), ids=SLIPS)
def test_a_filter_of_another_type_is_refused_where_it_is_made(slip: dict[str, object]) -> None:
    with pytest.raises(PostdateError) as raised:
        Pending(**slip)  # type: ignore[arg-type]
    assert not raised.value.transient


async def test_slips_are_errors_of_the_program_and_not_of_the_store(client: Client) -> None:
    """Such as callers do not try again, in each method that takes a filter."""
    await _herd(client, 1)
    mails, untyped = Pending("mails"), cast("Any", client)
    slips = [
        *(partial(untyped.list, limit=limit) for limit in (-1, "5", 1.5, True)),
        *(partial(untyped.list, after=after) for after in (5, b"x", "", "x")),
        *(partial(untyped.list, where) for where in ("mails", 0, {}, Pending)),
        *(partial(untyped.cancel_where, where) for where in ("mails", None)),
        *(partial(untyped.reschedule_where, mails, later_by=by) for by in (5, "5")),
        *(partial(untyped.reschedule_where, mails, delay=by) for by in (5, "5")),
        *(partial(untyped.reschedule_where, mails, deliver_at=at) for at in (5, "9:00")),
    ]
    for slip in slips:
        with pytest.raises(PostdateError) as raised:
            await slip()
        assert not raised.value.transient, slip
        assert not isinstance(raised.value.__cause__, TypeError | AttributeError)
    assert [each.due for each in await client.list()] == [AT]
    assert await client.list(limit=0) == []


@pytest.mark.parametrize("damage", ["'soon'", "x'00'", "1.5"])
async def test_a_damaged_attempt_time_is_in_nobodys_way(client: Client, tmp_path: Path, damage: str) -> None:
    await _herd(client, 1)
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute(f"UPDATE delayed_message SET attempt_at = {damage}")
    connection.close()
    await client.send(b"x", destination="mails", deliver_at=AT, message_id="next")
    assert "next" in [each.message_id for each in await client.list(Pending("mails"))]
    assert await client.cancel("next")
