"""``postdate move``: what waits in one store is in another one afterwards, whole, once, whenever a run ends."""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.conftest import damage_row
from tests.integration.pipeline.old_timeouts import by_id, ids, messages
from tests.integration.store_places import StorePlace, place_in
from tests.waiting import until

from postdate.backends.azure.store import AzureTableStore
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.redis.store import RedisStore
from postdate.backends.sqlite.store import SqliteStore
from postdate.backends.sqlite.transport import LocalTransport
from postdate.clock import LATEST, SystemClock
from postdate.core.limits import NO_LIMITS, add_pause, change_limits, limit_change, load_limits_in_force
from postdate.core.simple_store import SimpleStore
from postdate.core.upkeep.wall_times import ZoneMarkers, decode_rules, ensure_rules, list_markers
from postdate.core.zones import rules_of
from postdate.errors import (
    ConfigurationError,
    MessageTooLarge,
    MigrationConflict,
    NotSupported,
    StoreNotSetUp,
    StoreUnavailable,
)
from postdate.messages import INTENTS, DelayedMessage, Headers
from postdate.operations import store_move
from postdate.ports import Outcome, Record, RecordKind
from postdate.testing import Damage

DAY, SECOND = timedelta(days=1), timedelta(seconds=1)
_NOW = SystemClock().now
_STORES = (SqliteStore, PostgresStore, MariaDbStore, RedisStore, AzureTableStore)

PAIRS = (
    ("sqlite", "postgres"),
    ("postgres", "redis"),
    ("redis", "sqlite"),
    ("mariadb", "postgres"),
    ("postgres", "mariadb"),
    ("azure", "sqlite"),
    ("sqlite", "azure"),
)
_TO_POSTGRES, _TO_REDIS, _FROM_MARIADB, _FROM_AZURE = PAIRS[0], PAIRS[1], PAIRS[3], PAIRS[5]
_FILES = ("sqlite", "sqlite")

Ends = tuple[StorePlace, StorePlace]


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Return an old store and a new one, both empty."""
    old, new = request.param
    with ExitStack() as stack:
        yield stack.enter_context(place_in(old, request)), stack.enter_context(place_in(new, request, "bills"))


@pytest.fixture
def files(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Return two stores in files."""
    with place_in("sqlite", request, "old") as old, place_in("sqlite", request, "new") as new:
        yield old, new


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for claims of processes that live."""
    monkeypatch.setattr(store_move, "_PATIENCE_SECONDS", 0)


def small_pages(patch: pytest.MonkeyPatch, size: int = 3) -> None:
    patch.setattr(store_move, "PAGE", size)


def path_of(place: StorePlace) -> Path:
    return Path(place.spec.address.removeprefix("sqlite:///"))


def ends_of(place: StorePlace, message_id: str) -> list[Record]:
    return [each for each in place.history(message_id) if each.kind is RecordKind.CANCELLED]


# --- any pair ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", PAIRS, ids="-".join, indirect=True)
def test_from_any_store_into_any_other_all_that_waits_moves_as_it_was(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pages(monkeypatch, 7)
    old, new = ends
    now = _NOW()
    overdue, later, elsewhere = messages(3, now - DAY), messages(30, now + DAY), messages(2, now + 9 * DAY, "invoices")
    far = messages(1, datetime(9999, 6, 1, tzinfo=UTC))
    expiring = replace(messages(1, now + 9 * DAY)[0], expires_at=now + 10 * DAY)
    waiting = [*overdue, *later, *elsewhere, expiring, *far]
    old.add(waiting)

    looked = old.move_to(new, dry_run=True)
    assert (looked.moved, looked.refused, looked.waiting, looked.waiting_before) == (37, 0, 0, 37)
    assert looked.destinations == {"invoices": 2, "orders": 35}
    assert (len(old.waiting()), new.waiting()) == (37, [])

    result = old.move_to(new)
    assert (result.moved, result.refused, result.waiting, result.waiting_before) == (37, 0, 0, 37)
    assert (result.is_complete, result.known_before, result.remarks) == (True, 0, [])
    assert (old.waiting(), by_id(new.waiting())) == ([], by_id(waiting))
    assert [each.expires_at for each in new.waiting() if each.expires_at] == [expiring.expires_at]

    one = later[0].message_id
    assert not old.ask(lambda store: store.cancel(one, now))
    assert old.ask(lambda store: store.store_many(later[:1], now)).duplicate_ids == (one,)
    scheduled, cancelled = old.history(one)
    assert (scheduled.kind, cancelled.detail) == (RecordKind.SCHEDULED, f"moved to another store: {result.target}")
    assert result.target == new.settings.store.address.redacted_text
    assert (old.move_to(new).moved, old.move_to(new).is_complete) == (0, True)
    assert sorted(new.deliver()) == sorted({*ids(waiting)} - {far[0].message_id})


@pytest.mark.parametrize("ends", [_TO_REDIS, PAIRS[2], _FROM_MARIADB], ids="-".join, indirect=True)
def test_what_another_process_has_claimed_stays_and_is_counted(ends: Ends) -> None:
    old, new = ends
    waiting = messages(6)
    old.add(waiting)

    async def hold(store: Any) -> None:
        claims = await store.claim_due(waiting[2].due + timedelta(microseconds=1), 3)
        result = await anyio.to_thread.run_sync(lambda: old.move_to(new))
        assert (result.moved, result.refused, result.waiting, result.is_complete) == (3, 0, 3, False)
        assert result.remarks == [
            "the remaining messages are claimed by a process, were stored meanwhile, or cannot be read: run it again"
        ]
        assert await store.finish(claims[:1], Outcome.DELIVERED, _NOW()) == 1

    old.ask(hold)
    result = old.move_to(new)
    assert (result.moved, result.is_complete, old.waiting()) == (2, True, [])
    assert by_id(new.waiting()) == by_id(waiting[1:])


@pytest.mark.parametrize("ends", [_TO_REDIS], ids="-".join, indirect=True)
def test_claims_of_a_process_that_ends_are_waited_for(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_move, "_PATIENCE_SECONDS", 60)
    old, new = ends
    waiting = messages(4)
    old.add(waiting)

    async def hold_and_release(store: Any) -> None:
        claims = await store.claim_due(waiting[-1].due + SECOND, 2)
        async with anyio.create_task_group() as tasks:

            async def others_have_moved() -> bool:
                return len(await anyio.to_thread.run_sync(new.waiting)) == 2

            async def release() -> None:
                await until(others_have_moved)
                await store.release(claims, None)

            tasks.start_soon(release)
            result = await anyio.to_thread.run_sync(lambda: old.move_to(new))
            assert (result.moved, result.is_complete) == (4, True)

    old.ask(hold_and_release)


# --- whenever a run ends ----------------------------------------------------------------------------------------------


class Ended(Exception):
    """The process ended here."""


@dataclass
class Ending:
    """Ends a process before or after one of its calls of a store: each is one point. Nothing is released then.

    Args:
        remaining: points until then.
    """

    remaining: int
    has_ended: bool = False

    def step(self) -> None:
        if not self.remaining:
            self.has_ended = True
            raise Ended
        self.remaining -= 1

    @contextmanager
    def in_calls(self) -> Generator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for kind in _STORES:
                for name in ("claim_due", "store_many", "finish", "get", "history", "statistics", "release"):
                    patch.setattr(kind, name, self._counted(getattr(kind, name), is_release=name == "release"))
            yield

    def _counted(self, call: Callable[..., Any], *, is_release: bool) -> Callable[..., Any]:
        async def counted(*arguments: Any) -> Any:
            if is_release and self.has_ended:
                return 0
            self.step()
            result = await call(*arguments)
            self.step()
            return result

        return counted


_POINTS = [(_FILES, range(first, 200, 3)) for first in range(3)] + [
    (pair, range(n, 200, 5)) for n, pair in ((1, _TO_REDIS), (3, _FROM_MARIADB), (0, _FROM_AZURE))
]


@pytest.mark.parametrize(
    ("ends", "points"), _POINTS, ids=[f"{'-'.join(pair)}-{points[0]}" for pair, points in _POINTS], indirect=["ends"]
)
def test_whenever_a_move_ends_another_one_finishes_it_and_each_message_is_delivered_once(
    ends: Ends, points: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new store's service delivers meanwhile; those of the old one stay stopped."""
    small_pages(monkeypatch)
    monkeypatch.setattr(store_move, "_PATIENCE_SECONDS", 60)
    old, new = ends
    delivered, stored, endings = list[str](), list[str](), 0
    for point in points:
        added = messages(4)
        stored += ids(added)
        old.add(added)
        ending = Ending(point)
        with ending.in_calls():
            try:
                old.move_to(new)
            except Ended:
                endings += 1
        if point % 2 == 0:
            delivered += new.deliver(added[2].due)
        result = old.move_to(new)
        assert (result.is_complete, result.refused, result.moved) == (True, 0, result.waiting_before)
        assert sorted([*delivered, *ids(new.waiting())]) == sorted(stored)
        if not ending.has_ended:
            break
    assert endings >= 5
    assert sorted([*delivered, *new.deliver()]) == sorted(stored)


def left_in_both(old: StorePlace, new: StorePlace, waiting: list[DelayedMessage]) -> None:
    """Leave a page in both stores, as a process does that is killed before it removes the page from the old one."""
    old.add(waiting)
    with pytest.MonkeyPatch.context() as patch:
        for kind in _STORES:
            patch.setattr(kind, "finish", lambda *_: (_ for _ in ()).throw(Ended))
        with pytest.raises(Ended):
            old.move_to(new)
    assert by_id(old.waiting()) == by_id(new.waiting()) == by_id(waiting)


@pytest.mark.parametrize("ends", [_TO_POSTGRES, _TO_REDIS, PAIRS[4], PAIRS[6]], ids="-".join, indirect=True)
def test_what_the_new_store_did_between_two_runs_is_not_undone(ends: Ends) -> None:
    """There one is delivered, one is cancelled, one has another due time, and one went to the error queue."""
    old, new = ends
    now = _NOW()
    waiting = [replace(each, headers={**each.headers, Headers.DELIVER_AT: ""}) for each in messages(6)]
    left_in_both(old, new, waiting)
    _, cancelled, moved, failed, replaced, other = (each.message_id for each in waiting)

    async def change(store: Any) -> None:
        (claim,) = await store.claim_due(waiting[0].due + timedelta(microseconds=1), 1)
        await store.finish([claim], Outcome.DELIVERED, now)
        assert await store.cancel(cancelled, now)
        assert await store.reschedule(moved, waiting[2].due + 9 * DAY, now)
        assert await store.reschedule(replaced, waiting[4].due, now)
        claims = await store.claim_due(waiting[3].due + timedelta(microseconds=1), 9)
        assert await store.finish(claims, Outcome.FAILED, now, "no") == 1

    new.ask(change)
    after = new.waiting()
    result = old.move_to(new)
    assert (result.moved, result.known_before, result.refused, old.waiting()) == (6, 6, 0, [])
    assert sorted(ids(after)) == sorted([moved, replaced, other])
    assert by_id(new.waiting()) == by_id(after)
    assert [each.kind for each in new.history(failed)][-1] is RecordKind.FAILED


def test_a_message_that_was_replaced_in_the_new_store_between_two_runs_is_not_undone(files: Ends) -> None:
    old, new = files
    due = _NOW() + DAY
    keyed(old, "report", due, b"old")
    left_in_both(old, new, old.waiting())
    new.ask(lambda store: store.store_keys([f"report~{1:08d}"]))  # that much was done, too
    keyed(new, "report", due + DAY, b"new")
    result = old.move_to(new)
    assert (result.moved, result.refused, old.waiting()) == (1, 0, [])
    assert [each.body for each in new.waiting()] == [b"new"]


def test_a_failing_store_loses_nothing_and_the_run_can_be_repeated(
    files: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pages(monkeypatch)
    old, new = files
    waiting = messages(9)
    old.add(waiting)
    store_many, calls = SqliteStore.store_many, list[int]()

    async def failing(self: Any, batch: Any, now: Any) -> Any:
        calls.append(len(batch))
        if len(calls) == 2:
            raise StoreUnavailable("no room")
        return await store_many(self, batch, now)

    monkeypatch.setattr(SqliteStore, "store_many", failing)
    with pytest.raises(StoreUnavailable):
        old.move_to(new)
    assert sorted([*ids(old.waiting()), *ids(new.waiting())]) == ids(waiting)
    assert old.ask(lambda store: store.statistics(_NOW())).claimed == 0
    assert (old.move_to(new).moved, by_id(new.waiting())) == (6, by_id(waiting))


def test_two_moves_at_once_move_each_message_once(files: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pages(monkeypatch)
    monkeypatch.setattr(store_move, "_PATIENCE_SECONDS", 60)
    old, new = files
    waiting = messages(60)
    old.add(waiting)
    results = list[store_move.StoreMoveResult]()

    async def both() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(one)

    async def one() -> None:
        results.append(await store_move.move_store(old.plan_to(new)))

    anyio.run(both)
    assert (sum(each.moved for each in results), by_id(new.waiting()), old.waiting()) == (60, by_id(waiting), [])
    assert all(each.is_complete for each in results)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_the_new_store_has_otherwise_is_named_and_both_stay_as_they_are(files: Ends) -> None:
    """Known before are one as it is, one with another body, one with another due time, and one that is over."""
    old, new = files
    waiting = messages(9)
    old.add(waiting)
    others = [
        waiting[0],
        replace(waiting[1], body=b"another"),
        replace(waiting[2], due=waiting[2].due + 9 * DAY),
        waiting[3],
    ]
    new.add(others)
    new.ask(lambda store: store.remove(waiting[3].message_id, _NOW()))
    for moved, known in ((7, 2), (0, 0)):
        result = old.move_to(new)
        assert (result.moved, result.known_before, result.refused, result.waiting) == (moved, known, 2, 0)
        assert result.waiting_before == moved + 2
        assert {each.message_id: each.reason.rpartition(": ")[2] for each in result.refusals} == {
            waiting[1].message_id: "body differs",
            waiting[2].message_id: "due differs",
        }
    assert by_id(new.waiting()) == by_id([*others[:3], *waiting[4:]])
    assert by_id(old.waiting()) == by_id(waiting[1:3])
    assert old.ask(lambda store: store.statistics(_NOW())).claimed == 0


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
def test_the_same_store_is_known_by_whatever_address(
    request: pytest.FixtureRequest, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place_in(kind, request) as place:
        waiting = messages(3)
        place.add(waiting)
        address = place.spec.address.replace("127.0.0.1", "localhost")
        folder = request.getfixturevalue("tmp_path")
        other = StorePlace(replace(place.spec, address=address.replace(str(folder), f"{folder}/../{folder.name}")))
        with pytest.raises(ConfigurationError, match="are the same store, or one is a copy of the other"):
            place.move_to(other)
        # As if the message at the begin of the list were in one of them only.
        check, checked = store_move._Transfer._check_different_stores, list[str]()

        async def second_check(run: Any, message_id: str) -> None:
            checked.append(message_id)
            if len(checked) > 1:
                await check(run, message_id)

        monkeypatch.setattr(store_move._Transfer, "_check_different_stores", second_check)
        with pytest.raises(ConfigurationError, match="are the same store"):
            place.move_to(other)
        assert by_id(place.waiting()) == by_id(waiting)


@pytest.mark.parametrize("ends", [_FILES, PAIRS[2]], ids="-".join, indirect=True)
def test_nothing_moves_back_to_where_it_came_from(ends: Ends) -> None:
    """The old store knows the ids, and that the messages have left it: they would be lost."""
    old, new = ends
    waiting = messages(3)
    old.add(waiting)
    assert old.move_to(new).is_complete
    back = new.move_to(old)
    assert (back.moved, back.refused, old.waiting()) == (0, 3, [])
    assert {each.reason for each in back.refusals} == {
        "it was moved out of the new store before, so the new store would not deliver it"
    }
    assert by_id(new.waiting()) == by_id(waiting)
    assert sorted(new.deliver()) == ids(waiting)


def test_what_is_too_large_or_cannot_be_read_stays_and_is_counted(files: Ends) -> None:
    old, new = files
    waiting = messages(9)
    large, damaged = replace(waiting[4], body=bytes(20_001)), waiting[6]
    old.add([*waiting[:4], large, *waiting[5:]])
    small = StorePlace(replace(new.spec, largest_message_bytes=20_000))
    looked = old.move_to(small, dry_run=True)
    assert (looked.moved, looked.refused, looked.waiting, looked.is_complete) == (8, 1, 0, False)
    damage_row(path_of(old), "delayed_message", damaged.message_id, Damage.HEADERS)
    result = old.move_to(small)
    assert (result.waiting_before, result.moved, result.refused, result.waiting) == (9, 7, 2, 0)
    (refusal,) = result.refusals
    assert (refusal.message_id, result.is_complete) == (large.message_id, False)
    assert "bytes, and the new store accepts 20,000" in refusal.reason
    assert any(each.startswith("1 row of the old store cannot be read") for each in result.remarks)
    assert ids(old.waiting()) == [large.message_id]
    assert by_id(new.waiting()) == by_id([*waiting[:4], waiting[5], *waiting[7:]])
    again = old.move_to(new)
    assert (again.moved, again.is_complete) == (1, True)


def test_what_the_new_store_refuses_when_it_comes_keeps_no_others_from_it(
    files: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure tables take no headers of more than 32,768 characters: nobody can know that before."""
    old, new = files
    waiting = messages(11)
    old.add(waiting)
    store_many = SqliteStore.store_many

    async def refusing(self: Any, batch: Any, now: Any) -> Any:
        if waiting[7].message_id in [each.message_id for each in batch]:
            raise MessageTooLarge("its headers")
        return await store_many(self, batch, now)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "store_many", refusing)
        result = old.move_to(new)
    assert [(each.message_id, each.reason) for each in result.refusals] == [
        (waiting[7].message_id, "the new store does not accept it: its headers")
    ]
    assert (result.moved, len(new.waiting()), len(old.waiting())) == (10, 10, 1)
    assert old.move_to(new).is_complete


def test_a_run_that_refuses_very_many_ends(files: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pages(monkeypatch)
    monkeypatch.setattr(store_move, "MOST_REFUSED", 6)
    monkeypatch.setattr(store_move, "_NAMED", 2)
    old, new = files
    waiting = messages(9)
    old.add(waiting)
    new.add([replace(each, body=b"another") for each in waiting])
    result = old.move_to(new)
    assert (result.moved, result.refused, result.waiting, len(result.refusals)) == (0, 6, 3, 2)
    assert "the run ended when it had refused 6; more may move" in result.remarks
    assert by_id(old.waiting()) == by_id(waiting)


def test_what_is_never_due_stays_and_is_told(files: Ends) -> None:
    old, new = files
    never = [replace(each, due=LATEST) for each in messages(2)]
    waiting = messages(3)
    old.add([*never, *waiting])
    for moved in (3, 0):
        result = old.move_to(new)
        assert (result.waiting_before, result.moved, result.refused, result.waiting) == (moved + 2, moved, 2, 0)
        assert {each.reason.partition(":")[0] for each in result.refusals} == {
            "it is due at the last microsecond of the year 9999"
        }
    assert sorted(ids(old.waiting())) == sorted(ids(never))


def test_a_store_that_does_not_show_what_is_in_it_is_refused(files: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = files
    old.add(messages(1))
    open_store = store_move.open_store

    def with_six_methods(address: str, **settings: Any) -> Any:
        store = open_store(address, **settings)
        return SimpleStore(store) if str(address) == new.spec.address else store

    monkeypatch.setattr(store_move, "open_store", with_six_methods)
    with pytest.raises(NotSupported, match=r"new\.db' does not support listing its messages"):
        old.move_to(new)
    assert len(old.waiting()) == 1


def test_missing_files_and_tables_are_told_and_not_made(files: Ends, tmp_path: Path, postgres_url: str) -> None:
    old, new = files
    old.add(messages(1))
    nowhere = StorePlace(replace(new.spec, address=f"sqlite:///{tmp_path}/no.db"))
    for move in (lambda: old.move_to(nowhere), lambda: nowhere.move_to(new)):
        with pytest.raises(StoreNotSetUp, match=r"there is no file .*/no\.db"):
            move()
    assert not list(tmp_path.glob("no.db*"))
    schema = StorePlace(replace(new.spec, address=postgres_url, schema="no such schema"))
    for move in (lambda: old.move_to(schema), lambda: schema.move_to(new)):
        with pytest.raises(StoreNotSetUp, match="no such schema"):
            move()
    with pytest.raises(ConfigurationError, match="takes no table"):
        anyio.run(store_move.move_store, replace(old.plan_to(new), table="orders.timeouts"))
    assert len(old.waiting()) == 1


# --- services of the old store ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [_FROM_MARIADB], ids="-".join, indirect=True)
def test_a_store_that_lists_no_processes_needs_the_word_of_the_operator(ends: Ends) -> None:
    """Services tell it how far off their clocks are: these are named. Where none does, none may run, or it may not."""
    old, new = ends
    old.add(messages(2))
    with pytest.raises(ConfigurationError, match=r"this store does not show whether services of .*--services-stopped"):
        old.move_to(new, services_stopped=False)

    async def report(store: Any) -> None:
        await store.report_clock(timedelta(0))
        with pytest.raises(MigrationConflict, match=rf"services of .* run: process {os.getpid()} on .*; stop them"):
            await anyio.to_thread.run_sync(lambda: old.move_to(new, services_stopped=False))
        looked = await anyio.to_thread.run_sync(lambda: old.move_to(new, services_stopped=False, dry_run=True))
        assert (looked.moved, looked.is_complete) == (2, True)
        assert looked.remarks[0].endswith("stop them first")

    old.ask(report)
    assert len(old.waiting()) == 2
    assert old.move_to(new).is_complete


@pytest.mark.parametrize("side", ["old", "new"])
def test_a_store_with_an_interrupted_migration_of_before_is_left_to_the_version_that_began_it(
    files: Ends, side: str
) -> None:
    """Its last batch is a message of the store: the content of messages that may be nowhere else."""
    old, new = files
    waiting = messages(2)
    old.add(waiting)
    intent = DelayedMessage("migration-1", datetime(9999, 1, 1, tzinfo=UTC), INTENTS, {"target": "x"}, b"a batch")
    place = old if side == "old" else new
    place.add([intent])
    for dry_run in (True, False):
        with pytest.raises(MigrationConflict, match=rf"{side}\.db was interrupted.*with the version .* began it"):
            old.move_to(new, dry_run=dry_run)
    assert place.ask(lambda store: store.get("migration-1")) == intent
    assert by_id(old.waiting()) == by_id(waiting)


# --- what goes along --------------------------------------------------------------------------------------------------


def keyed(place: StorePlace, key: str, due: datetime, body: bytes = b"") -> str:
    """Have a message wait under a key; return its id."""
    return place.ask(
        lambda store: store.replace(key, lambda id_, _: DelayedMessage(id_, due, "orders", {}, body), _NOW())
    )


@pytest.mark.parametrize("ends", [_TO_POSTGRES, PAIRS[4]], ids="-".join, indirect=True)
def test_messages_wait_under_their_keys_as_before(ends: Ends) -> None:
    old, new = ends
    due = _NOW() + DAY
    keyed(old, "report", due)
    old.deliver()
    old.add([DelayedMessage(f"other~{3:08d}", due, "orders")])  # an ordinary id
    assert keyed(old, "report", due) == f"report~{2:08d}"
    assert old.move_to(new).is_complete
    assert keyed(new, "report", due + DAY) == f"report~{2:08d}"
    assert keyed(new, "other", due) == f"other~{1:08d}"
    assert sorted(ids(new.waiting())) == [f"other~{1:08d}", f"other~{3:08d}", f"report~{2:08d}"]


def follow(place: StorePlace) -> DelayedMessage:
    """Have a message for a time in Paris wait there; return the marker of that zone."""
    place.ask(lambda store: ZoneMarkers(store).ensure_marker("Europe/Paris", _NOW()))
    due = _NOW() + DAY
    headers = {Headers.WALL_TIME: f"{due.replace(tzinfo=None).isoformat()} Europe/Paris"}
    place.add([replace(messages(1, due)[0], headers=headers)])
    return place.ask(lambda store: store.get("postdate~Europe/Paris~00000001"))


def test_the_rules_of_their_zones_go_with_messages(files: Ends) -> None:
    old, new = files
    marker = follow(old)
    assert old.move_to(new, dry_run=True).moved == 1
    elsewhere = rules_of("Asia/Tokyo")
    new.ask(lambda store: ensure_rules(store, "Europe/Paris", [elsewhere], "2099a", _NOW()))
    result = old.move_to(new)
    assert (result.waiting_before, result.moved, result.is_complete) == (1, 1, True)
    (there,) = new.ask(list_markers)
    assert decode_rules(there) == [elsewhere, *decode_rules(marker)]
    assert old.move_to(new).is_complete


@pytest.mark.parametrize("ends", [("sqlite", "redis")], ids="-".join, indirect=True)
def test_a_store_that_cannot_follow_a_zone_takes_no_such_messages(ends: Ends) -> None:
    old, new = ends
    follow(old)
    others = messages(2)
    old.add(others)
    result = old.move_to(new)
    assert (result.moved, result.refused, by_id(new.waiting())) == (2, 1, by_id(others))
    (refusal,) = result.refusals
    assert refusal.reason == "it has a wall time in a zone, which RedisStore does not support"


@pytest.mark.parametrize("ends", [_FILES, _TO_POSTGRES, PAIRS[4]], ids="-".join, indirect=True)
def test_limits_of_queues_go_along_and_what_they_hold_moves(ends: Ends) -> None:
    old, new = ends
    now = _NOW()
    waiting = [*messages(3, now - DAY), *messages(2, now + DAY), *messages(1, now + DAY, "mails")]
    old.add(waiting)

    async def hold(store: Any) -> None:
        await change_limits(store, "orders", add_pause, now)
        await change_limits(store, "mails", limit_change(5, "00:00-24:00 UTC"), now)
        kept = next(each for each in await store.load_limits() if each.destination == "orders")
        for claim in await store.claim_due(now, 9):
            await store.release([claim], kept.attempt_time(claim.message.due))

    old.ask(hold)
    new.ask(lambda store: change_limits(store, "mails", add_pause, now))
    looked = old.move_to(new, dry_run=True)
    assert (looked.limits, looked.moved, new.ask(load_limits_in_force).keys()) == ({"orders": "paused"}, 6, {"mails"})
    result = old.move_to(new)
    assert (result.moved, result.limits, old.waiting()) == (6, {"orders": "paused"}, [])
    assert by_id(new.waiting()) == by_id(waiting)
    assert any(each.startswith("limits of mails stay as in the new store: paused") for each in result.remarks)
    assert {queue: str(limits) for queue, limits in new.ask(load_limits_in_force).items()} == {
        "mails": "paused",
        "orders": "paused",
    }


@pytest.mark.parametrize("ends", [("sqlite", "redis")], ids="-".join, indirect=True)
def test_limits_that_the_new_store_cannot_keep_are_to_be_lifted_first(ends: Ends) -> None:
    old, new = ends
    old.add(messages(2))
    old.ask(lambda store: change_limits(store, "orders", add_pause, _NOW()))
    with pytest.raises(
        NotSupported, match="does not support limits of queues; these queues have limits: orders; remove them"
    ):
        old.move_to(new)
    assert len(old.waiting()) == 2
    old.ask(lambda store: change_limits(store, "orders", lambda _: NO_LIMITS, _NOW()))
    assert old.move_to(new).is_complete


def test_what_stays_beside_the_store_is_told(files: Ends) -> None:
    """Messages in queues, and the state of sagas."""
    old, new = files
    now = _NOW()
    old.add([replace(messages(1, now - DAY)[0], destination="here")])

    async def deliver(store: SqliteStore) -> None:
        transport = LocalTransport(path_of(old), synchronous="normal")
        await transport.create_queues(["here"])
        assert (await store.move_due(now, 9)).delivered == 1
        await transport.close()

    old.ask(deliver)
    timeout = replace(messages(1)[0], headers={Headers.IS_SAGA_TIMEOUT_MESSAGE: "True"})
    old.add([timeout])
    result = old.move_to(new)
    assert (result.moved, result.is_complete) == (1, True)
    sagas, queues = result.remarks
    assert sagas.startswith("timeouts of sagas are among them (1); the state of sagas")
    assert queues == "messages in queues of the old store stay there: 1 in here; let receivers empty them"
