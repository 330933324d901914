"""A process that is frozen (SIGSTOP, swapped out) loses what it holds in an SQLite file, and does no harm on waking."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import as_another_process
from tests.waiting import until

from postdate import DelayedMessage, Envelope, LocalTransport, SqliteStore
from postdate.backends.sqlite.processes import Heartbeat, SilenceObserver
from postdate.backends.sqlite.registration import unregister
from postdate.errors import ConfigurationError
from postdate.ports import Outcome

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
BOUND_SECONDS = 3
MESSAGES = 2_500


class OneFile:
    """Store and queues of the test itself, on the file that the frozen process shares."""

    def __init__(self, path: Path) -> None:
        self.store = SqliteStore(path, synchronous="normal")
        self.transport = LocalTransport(path, synchronous="normal")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self.store.file.read_blocking(lambda connection: connection.execute(sql).fetchall())

    async def close(self) -> None:
        await self.store.close()
        await self.transport.close()


@pytest.fixture
async def one_file(tmp_path: Path):
    one_file = OneFile(tmp_path / "one.db")
    await one_file.transport.create_queues(["done", "sent"])
    await one_file.store.store_many([DelayedMessage(f"m-{n}", NOW, "done") for n in range(MESSAGES)], NOW)
    await one_file.transport.send([Envelope("done", f"q-{n}") for n in range(50)], NOW)
    yield one_file
    await one_file.close()


async def test_what_a_frozen_process_holds_is_taken_over_and_what_it_does_on_waking_has_no_effect(
    one_file: OneFile, start, eventually, tmp_path: Path
) -> None:
    frozen = start("zombie", tmp_path / "one.db", BOUND_SECONDS, tmp_path / "go")
    assert frozen.says("ready") == f"ready {MESSAGES} 50"
    frozen.freeze()
    receiver = one_file.transport.receiver("done")
    taken_over = await until(lambda: receiver.receive(1_000))
    assert len(taken_over) == 50
    claims = await one_file.store.claim_due(LATER, 10_000)
    assert len(claims) == MESSAGES
    for each in taken_over[:25]:
        await receiver.commit(each, NOW)
    assert await one_file.store.finish(claims[:1_250], Outcome.DELIVERED, NOW) == 1_250

    (tmp_path / "go").touch()
    frozen.thaw()
    # Finished, retried, released: none. Committed: all lost. And what it stores and claims afterwards, it finishes.
    assert frozen.says("ended") == "ended 0 0 0 50 1"
    assert frozen.end() == 0

    assert await one_file.store.finish(claims[1_250:], Outcome.DELIVERED, NOW) == 1_250
    for each in taken_over[25:]:
        await receiver.commit(each, NOW)
    await receiver.close()
    assert one_file.rows("SELECT count(*) FROM delayed_message") == [(0,)]
    assert one_file.rows("SELECT count(*) FROM queue_message") == [(0,)]
    assert one_file.rows("SELECT kind, count(*) FROM record GROUP BY kind") == [(1, MESSAGES + 1), (2, MESSAGES + 1)]


async def test_a_process_shows_life_while_it_holds_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.backends.sqlite.upkeep._HOUSEKEEPING_SECONDS", 0.1)
    monkeypatch.setattr("postdate.backends.sqlite.processes._HEARTBEATS_IN_BOUND", 600)
    store = SqliteStore(tmp_path / "a.db")
    await store.store_many([DelayedMessage(f"m-{n}", NOW, "done") for n in range(3)], NOW)
    claims = await store.claim_due(LATER, 10)
    (sign,) = (tmp_path / "a.db-claimants").glob("*.alive")
    for _ in range(3):  # the first may be of what was written just before
        seen = sign.stat().st_mtime_ns
        await until(lambda seen=seen: sign.stat().st_mtime_ns > seen)
    assert await store.finish(claims, Outcome.DELIVERED, NOW) == 3
    await store.close()


@pytest.mark.soak(
    "a process must show life in time",
    part="silence",
    proven_by=(
        "tests/integration/test_frozen_processes.py::test_a_process_shows_life_while_it_holds_something",
        "tests/integration/test_frozen_processes.py::test_silence_is_counted_only_while_somebody_looks_and_something_is_held",
    ),
)
async def test_a_process_that_holds_for_long_and_lives_keeps_what_it_holds(
    one_file: OneFile, start, eventually, tmp_path: Path
) -> None:
    """It gives signs: two of them are waited for, and then the bound is over."""
    holder = start("zombie", tmp_path / "one.db", BOUND_SECONDS, tmp_path / "go")
    holder.says("ready")
    (sign,) = {each for each in (tmp_path / "one.db-claimants").glob("*.alive") if each.read_text() == "3"}
    marks = set[int]()

    def has_given_signs() -> bool:
        marks.add(sign.stat().st_mtime_ns)
        return len(marks) > BOUND_SECONDS + 1

    eventually(has_given_signs, "signs of life for longer than the bound")
    assert (await one_file.store.statistics(LATER)).claimed == MESSAGES
    (tmp_path / "go").touch()
    assert holder.says("ended") == f"ended {MESSAGES // 2} {MESSAGES // 2} 0 0 1"


async def test_whoever_sends_is_told_that_others_have_it(tmp_path: Path) -> None:
    """So that a process that was frozen ends its sends, and sends no error copy of what others have delivered."""
    store = SqliteStore(tmp_path / "a.db")
    await store.store_many([DelayedMessage(f"m-{n}", NOW, "done") for n in range(3)], NOW)
    (finished,), held = await store.claim_due(LATER, 1), await store.claim_due(LATER, 10)
    await store.finish([finished], Outcome.DELIVERED, NOW)
    lost = list[str]()
    stop = store.listen_for_lost_claims(lost.extend)
    assert all(store.is_in_force(claim) for claim in held)
    other = as_another_process(lambda: SqliteStore(tmp_path / "a.db"))
    number = store.file.claimant
    other.file.write_blocking(lambda tx: unregister(tx, number))
    await until(lambda: set(lost) >= {claim.message.message_id for claim in held})
    assert not any(store.is_in_force(claim) for claim in held)
    again = await store.claim_due(LATER, 10)
    assert all(store.is_in_force(claim) for claim in again)
    assert await store.finish(held, Outcome.DELIVERED, NOW) == 0
    assert await store.finish(again, Outcome.DELIVERED, NOW) == 2
    stop()
    await other.close()
    await store.close()


async def test_silence_is_counted_only_while_somebody_looks_and_something_is_held() -> None:
    """A machine that slept, or a process that holds nothing, loses nothing; whoever never gave a sign is not judged."""
    silence, signs = SilenceObserver(), {1: Heartbeat(100, 10.0), 2: Heartbeat(100, 10.0), 3: None}
    for _ in range(10):
        assert silence.find_silent([1, 2, 3], signs.__getitem__, 1.0) == []
    signs[2] = Heartbeat(101, 10.0)
    assert silence.find_silent([1, 2, 3], signs.__getitem__, 1.0) == [1]
    assert silence.find_silent([3], signs.__getitem__, 1_000.0) == []
    assert silence.find_silent([1, 2, 3], signs.__getitem__, 1_000.0) == []


async def test_store_and_queues_on_one_file_share_the_bound(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    assert store.capabilities.holds_at_most == timedelta(seconds=60)
    transport = LocalTransport(tmp_path / "a.db", holds_at_most=timedelta(seconds=20))
    assert store.capabilities.holds_at_most == timedelta(seconds=20)
    with pytest.raises(ConfigurationError, match="holds_at_most"):
        SqliteStore(tmp_path / "a.db", holds_at_most=timedelta(seconds=30))
    with pytest.raises(ConfigurationError, match="0:00:03 or more"):
        SqliteStore(tmp_path / "b.db", holds_at_most=timedelta(seconds=1))
    await store.close()
    await transport.close()


async def test_a_process_that_was_taken_for_dead_looks_again_when_it_is_registered_again(tmp_path: Path) -> None:
    """Nobody could wake it meanwhile."""
    store = SqliteStore(tmp_path / "empty.db", synchronous="normal")
    woken = list[None]()
    await store.setup()
    stop = await store.listen(lambda: woken.append(None))
    other, number = (
        as_another_process(lambda: SqliteStore(tmp_path / "empty.db", synchronous="normal")),
        store.file.claimant,
    )
    await other.file.write(lambda tx: unregister(tx, number))
    assert not await store.cancel("none", NOW)
    assert (store.file.claimant != number, bool(woken)) == (True, True)
    stop()
    await other.close()
    await store.close()
