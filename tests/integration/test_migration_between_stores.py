"""Messages move from one Postdate store into another, whole, once, whenever that ends. Row 115, 116."""

import re
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.conftest import damage_row
from tests.integration.migration_stores import StorePlace, place_in
from tests.integration.pipeline.old_timeouts import by_id, ids, messages
from tests.waiting import Eventually

from postdate.backends.azure.store import AzureTableStore
from postdate.backends.sqlite.processes import presence_folder
from postdate.backends.sqlite.store import SqliteStore
from postdate.clock import SystemClock
from postdate.core.limits import NO_LIMITS, Limits, change_limits, limited, paused
from postdate.core.simple_store import SimpleStore
from postdate.core.wall_times import KeptZones, markers, note_rules, rules_in, rules_of
from postdate.errors import MessageTooLarge, MigrationConflict, NotSupported, PipelineError
from postdate.messages import DelayedMessage, Headers
from postdate.pipeline.migrate import between_stores, status_of_store
from postdate.pipeline.migrate.ends import TargetStore
from postdate.pipeline.migrate.looking import target_of
from postdate.pipeline.stores import StoreSpec
from postdate.ports import OUTCOME_RECORDS, ClaimingStore, Outcome, RecordKind
from postdate.ports.migrating import BatchStatus
from postdate.testing import Damage
from postdate.wiring.sources import migration_source

DAY = timedelta(days=1)
_NOW = SystemClock().now

PAIRS = (
    ("sqlite", "postgres"),
    ("postgres", "redis"),
    ("redis", "sqlite"),
    ("mariadb", "postgres"),
    ("postgres", "mariadb"),
    ("azure", "sqlite"),
    ("sqlite", "azure"),
)


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[StorePlace, StorePlace]]:
    """Return an old store and a new one, both empty."""
    old, new = request.param
    with ExitStack() as stack:
        yield stack.enter_context(place_in(old, request)), stack.enter_context(place_in(new, request, "bills"))


@pytest.fixture
def files(request: pytest.FixtureRequest) -> Iterator[tuple[StorePlace, StorePlace]]:
    """Return two stores in files."""
    with place_in("sqlite", request, "old") as old, place_in("sqlite", request, "new") as new:
        yield old, new


# --- any pair ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", PAIRS, ids="-".join, indirect=True)
def test_row_115_from_any_store_into_any_other_all_that_waits_moves_as_it_was(
    ends: tuple[StorePlace, StorePlace],
) -> None:
    old, new = ends
    now = _NOW()
    overdue, far, elsewhere = messages(3, now - DAY), messages(30, now + DAY), messages(2, now + 9 * DAY, "invoices")
    expiring = replace(messages(1, now + 9 * DAY)[0], expires_at=now + 10 * DAY)
    found = [*overdue, *far, *elsewhere, expiring]
    old.add(found)
    move = old.move_to(new, batch_size=7)
    (seen,) = move.preview().endpoints
    assert (seen.count, seen.problems, seen.earliest) == (36, (), overdue[0].due)
    assert (len(old.waiting()), new.waiting()) == (36, [])

    result = move.run()
    (moved,) = result.endpoints
    assert (result.complete, moved.moved, moved.verified, moved.refused) == (True, 36, 36, 0)
    assert (moved.stored_late, moved.already_there) == (3, 0)
    assert (old.waiting(), old.intents(), by_id(new.waiting())) == ([], [], by_id(found))
    assert [each.expires_at for each in new.waiting() if each.expires_at] == [expiring.expires_at]

    one = far[0].message_id
    assert not old.ask(lambda store: store.cancel(one, now))
    assert old.ask(lambda store: store.store_many(far[:1], now)).already_there == (one,)
    scheduled, cancelled = old.history(one)
    assert (scheduled.kind, cancelled.kind) == (RecordKind.SCHEDULED, RecordKind.CANCELLED)
    assert re.fullmatch(r"moved to another store by migration [0-9a-f]{32} to .*", cancelled.detail)
    assert cancelled.detail.endswith(target_of(move.target)["target"])
    assert new.ask(lambda store: store.reschedule(one, now + 3 * DAY, now))
    assert new.ask(lambda store: store.cancel(one, now))
    (nothing,) = move.run().endpoints
    assert (nothing.moved, nothing.status) == (0, "completed")
    assert sorted(new.deliver()) == sorted(set(ids(found)) - {one})


@pytest.mark.parametrize("ends", [PAIRS[0], PAIRS[2], PAIRS[3], PAIRS[5]], ids="-".join, indirect=True)
def test_row_116_what_a_service_holds_stays_with_it(
    ends: tuple[StorePlace, StorePlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claims of another process, of which one is given back after a failure, are no concern of a move."""
    monkeypatch.setattr(between_stores, "_LOOKS", 1)
    old, new = ends
    found = messages(6)
    old.add(found)
    move = old.move_to(new)

    async def held(store: Any) -> list[str]:
        claims = await store.claim_due(found[2].due + timedelta(microseconds=1), 3)
        assert len(claims) == 3
        in_thread: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: in_thread.update(moved=move.run()))
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        (moved,) = in_thread["moved"].endpoints
        assert (moved.moved, moved.refused) == (0 if lease_is_ours else 3, 0)
        (left,) = moved.problems
        assert left.startswith(f"{6 if lease_is_ours else 3} wait in the old store still: a service of it holds them")
        assert not in_thread["moved"].complete
        assert await store.retry_later(claims[0], found[0].due + DAY, _NOW(), "no")
        return [claim.message.message_id for claim in claims]

    lease_is_ours = old.spec.address.startswith("azure")  # whoever has the lease dispatches, and nobody else
    assert sorted(old.ask(held)) == ids(found[:3])
    assert ids(old.waiting()) == ids(found if lease_is_ours else found[:3])
    (rest,) = move.run().endpoints
    assert (rest.moved, old.waiting(), by_id(new.waiting())) == (6 if lease_is_ours else 3, [], by_id(found))


# --- whenever it ends -------------------------------------------------------------------------------------------------


class Ended(Exception):
    """The process ended here."""


@dataclass
class Ending:
    """Ends a process before or after one of its calls to the stores: each is one point.

    Args:
        left: points until then.
    """

    left: int
    ended: bool = False

    def step(self) -> None:
        if not self.left:
            self.ended = True
            raise Ended
        self.left -= 1

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count the calls of whatever runs in the block."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("ask", "store_batch"):
                patch.setattr(TargetStore, name, self._counted(getattr(TargetStore, name)))
            yield

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.step()
            result = call(*arguments)
            self.step()
            return result

        return counted


_FILES = ("sqlite", "sqlite")
_POINTS = [(_FILES, range(first, 200, 3)) for first in range(3)] + [(PAIRS[n], range(n, 200, 5)) for n in (1, 3)]


@pytest.mark.parametrize(
    ("ends", "points"), _POINTS, ids=[f"{'-'.join(pair)}-{points[0]}" for pair, points in _POINTS], indirect=["ends"]
)
def test_row_116_whenever_a_move_ends_each_message_is_delivered_by_one_of_the_two(
    ends: tuple[StorePlace, StorePlace], points: range
) -> None:
    """Every point: then both services deliver what they have, and it is gone on with, or aborted."""
    old, new = ends
    move, delivered, stored, ends_seen = old.move_to(new, batch_size=3), list[str](), list[str](), 0
    for point in points:
        found = messages(4)
        stored += ids(found)
        old.add(found)
        ending = Ending(point)
        with ending.counting():
            try:
                move.run()
            except Ended:
                ends_seen += 1
        if point % 3 == 0:  # the services of both go on, before anybody ends what is on its way
            delivered += [*old.deliver(found[2].due), *new.deliver(found[2].due)]
        (ended,) = (move.abort() if point % 2 else move.run()).endpoints
        assert (ended.exact, ended.problems, old.intents()) == (True, (), [])
        assert sorted([*delivered, *ids(old.waiting()), *ids(new.waiting())]) == sorted(stored)
        if not ending.ended:
            break
    assert ends_seen >= 10
    assert sorted([*delivered, *old.deliver(), *new.deliver()]) == sorted(stored)


@pytest.mark.parametrize("ends", [("sqlite", "sqlite"), PAIRS[1], PAIRS[3]], ids="-".join, indirect=True)
@pytest.mark.parametrize("before", ["finish", "store_batch"])
def test_row_116_a_move_that_stands_still_while_others_end_it_does_no_harm(
    ends: tuple[StorePlace, StorePlace], before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has an intent, and its claims, or has finished them: an abort leaves it alone, or is ahead of it."""
    monkeypatch.setattr(between_stores, "_PATIENCE_SECONDS", 0.1)
    old, new = ends
    found = messages(5)
    old.add(found)
    move, seen = old.move_to(new), list[Any]()

    def standing(call: Callable[..., Any], is_time: Callable[..., bool]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            if not seen and is_time(*arguments):
                seen.append(None)
                (seen[0],) = move.abort().endpoints
            return call(*arguments)

        return called

    def finishes(_: Any, question: Any) -> bool:
        return "finish" in question.__code__.co_names

    is_time = finishes if before == "finish" else (lambda *_: True)
    name = "ask" if before == "finish" else "store_batch"
    monkeypatch.setattr(TargetStore, name, standing(getattr(TargetStore, name), is_time))
    (moved,) = move.run().endpoints
    aborted = (0, 5, "5 are held by another process") if before == "finish" else (5, 0, "")
    assert (seen[0].moved, seen[0].refused, "".join(seen[0].problems).partition(":")[0]) == aborted
    assert (moved.moved, moved.already_there, moved.exact) == (5, 0 if before == "finish" else 5, True)
    assert (old.waiting(), old.intents(), by_id(new.waiting())) == ([], [], by_id(found))


def test_row_116_a_move_that_has_lost_its_claims_while_it_stood_still_moves_nothing(
    files: tuple[StorePlace, StorePlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were given back, the intent was ended, a service has delivered: then it goes on."""
    old, new = files
    found = messages(5)
    old.add(found)
    move, delivered, ask = old.move_to(new), list[str](), TargetStore.ask

    def losing(store: TargetStore, question: Any) -> Any:
        if "finish" in question.__code__.co_names and not delivered:
            (claims,) = (cell.cell_contents for cell in question.__closure__ if isinstance(cell.cell_contents, list))
            assert ask(store, lambda itself: itself.release(claims, None)) == 5
            (aborted,) = move.abort().endpoints
            assert (aborted.returned, aborted.moved, old.intents()) == (5, 0, [])
            delivered.extend(old.deliver(found[3].due))
        return ask(store, question)

    monkeypatch.setattr(TargetStore, "ask", losing)
    (moved,) = move.run().endpoints
    assert (moved.moved, delivered, ids(old.waiting())) == (0, [each.message_id for each in found[:3]], ids(found[3:]))
    assert (new.waiting(), old.intents(), move.run().endpoints[0].moved) == ([], [], 2)


def recorded_and_not_removed(old: StorePlace, new: StorePlace) -> None:
    """Begin a move out of an Azure table that ends between the two: no transaction is over both."""

    async def half(store: Any, claims: Any, outcome: Outcome, now: Any, detail: str) -> int:
        held = await store._holding.still_held(claims, store._opened.lease)
        await store._opened.records.end([each.waiting for each in held], OUTCOME_RECORDS[outcome], now, detail)
        raise Ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AzureTableStore, "finish", half)
        with pytest.raises(Ended):
            old.move_to(new).run()


@pytest.mark.parametrize("ends", [PAIRS[5]], ids="-".join, indirect=True)
def test_row_116_what_is_recorded_as_moved_and_was_not_removed_is_still_with_the_old_store(
    ends: tuple[StorePlace, StorePlace],
) -> None:
    old, new = ends
    found = messages(3)
    old.add(found)
    recorded_and_not_removed(old, new)
    (aborted,) = old.move_to(new).abort().endpoints
    assert (aborted.moved, aborted.returned, new.waiting(), by_id(old.waiting())) == (0, 3, [], by_id(found))
    assert old.move_to(new).run().complete
    assert (old.waiting(), by_id(new.waiting())) == ([], by_id(found))


@pytest.mark.parametrize("ends", [PAIRS[5]], ids="-".join, indirect=True)
def test_row_116_what_stayed_and_was_delivered_before_its_intent_was_gone_is_not_moved(
    ends: tuple[StorePlace, StorePlace],
) -> None:
    """Whoever ended the batch found that all of it had stayed, and ended itself before it cancelled the intent."""
    old, new = ends
    found = messages(3)
    old.add(found)
    recorded_and_not_removed(old, new)
    ask = TargetStore.ask

    def ending(store: TargetStore, question: Any) -> Any:
        if "cancel" in question.__code__.co_names:
            raise Ended
        return ask(store, question)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetStore, "ask", ending)
        with pytest.raises(Ended):
            old.move_to(new).abort()
    assert (sorted(old.deliver()), len(old.intents())) == (ids(found), 1)
    (moved,) = old.move_to(new).run().endpoints
    assert (moved.moved, new.waiting(), old.intents()) == (0, [], [])


@dataclass
class Service:
    """Delivers what is due in a store, as long as it runs.

    Args:
        place: the store.
        ahead: how far its clock is ahead.
        delivered: ids, in the order of delivery.
    """

    place: StorePlace
    ahead: timedelta
    delivered: list[str] = field(default_factory=list[str])
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._ended.wait(0.01):
            self.delivered += self.place.deliver(_NOW() + self.ahead)

    def end(self) -> None:
        self._ended.set()


@pytest.mark.parametrize("ends", [PAIRS[0], PAIRS[1], PAIRS[3]], ids="-".join, indirect=True)
def test_row_116_each_message_is_delivered_by_one_of_two_stores_whose_services_go_on(
    ends: tuple[StorePlace, StorePlace], eventually: Eventually
) -> None:
    """Both are fast, so that they deliver what is being moved: the one before it moves, the other as it comes."""
    old, new = ends
    now = _NOW()
    passing, late = messages(400, now + DAY), messages(9, now + 9 * DAY)
    old.add([*passing, *late])
    services = [Service(old, 2 * DAY), Service(new, 2 * DAY)]
    threads = [threading.Thread(target=each.run) for each in services]
    for thread in threads:
        thread.start()
    try:
        (moved,) = old.move_to(new, batch_size=20).run().endpoints
        assert (moved.mismatched, moved.refused) == (0, 0)
        theirs, ours = (each.delivered for each in services)
        eventually(lambda: len(theirs) + len(ours) >= 400, "what is due is delivered")
    finally:
        for each in services:
            each.end()
        for thread in threads:
            thread.join()
    assert sorted([*theirs, *ours]) == ids(passing)
    assert sorted([*ids(old.waiting()), *ids(new.waiting())]) == ids(late)
    assert moved.moved == 409 - len(theirs) - len(old.waiting())


# --- what is in the way -----------------------------------------------------------------------------------------------


def left_on_its_way(old: StorePlace, new: StorePlace, found: list[DelayedMessage]) -> None:
    """Leave a batch as a process may that was killed right before the new store was given it."""
    old.add(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetStore, "store_batch", lambda *_: (_ for _ in ()).throw(Ended))
        with pytest.raises(Ended):
            old.move_to(new).run()


def test_row_115_what_is_on_its_way_is_shown_and_goes_where_it_was_to_go_only(
    files: tuple[StorePlace, StorePlace], request: pytest.FixtureRequest
) -> None:
    old, new = files
    move = old.move_to(new)
    with pytest.raises(PipelineError, match=r"no batch is on its way in .*old\.db; `run` moves what waits there"):
        move.resume()
    found = messages(5)
    left_on_its_way(old, new, found)
    (run,) = status_of_store(move.source).runs
    assert (run.run.endpoint, run.messages[BatchStatus.STAGED]) == ("old.db", 5)
    assert run.run.parameters["target"] == new.spec.address
    assert (old.waiting(), new.waiting()) == ([], [])
    with place_in("sqlite", request, "other") as other:
        elsewhere = old.move_to(other)
        with pytest.raises(PipelineError, match=r"old\.db: a batch is on its way, begun with .*target .*new\.db"):
            elsewhere.run()
        with pytest.raises(MigrationConflict, match=r"migration-\w+ is on its way, begun with .*target .*new\.db"):
            elsewhere.abort()
        assert other.waiting() == []
    new.add(messages(1))
    with pytest.raises(PipelineError, match="the target itself is being emptied by a migration"):
        new.move_to(old).run()
    new.deliver()
    (resumed,) = replace(move, endpoints=None).resume().endpoints
    assert (resumed.moved, by_id(new.waiting()), status_of_store(move.source).runs) == (5, by_id(found), ())


def test_row_115_a_batch_that_somebody_has_changed_is_said(files: tuple[StorePlace, StorePlace]) -> None:
    old, new = files
    left_on_its_way(old, new, messages(2))
    with closing(sqlite3.connect(_path(old))) as connection, connection:
        connection.execute("UPDATE content SET body = x'00'")
    with pytest.raises(PipelineError, match=r"message 'migration-\w+' is no batch of a migration any more") as caught:
        old.move_to(new).abort()
    for path in map(_path, (old, new)):  # closed as soon as it failed, and not when the error is forgotten
        assert not list(presence_folder(path).glob("*.alive")), caught
    assert len(old.intents()) == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
def test_row_115_the_same_store_is_known_by_whatever_address(
    request: pytest.FixtureRequest, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place_in(kind, request) as place:
        place.add(messages(3))
        address = place.spec.address.replace("127.0.0.1", "localhost")
        folder = request.getfixturevalue("tmp_path")
        other = StorePlace(replace(place.spec, address=address.replace(str(folder), f"{folder}/../{folder.name}")))
        with pytest.raises(PipelineError, match="source and target are the same store"):
            place.move_to(other).run()
        monkeypatch.setattr(between_stores, "nothing_new", lambda _: None)  # as if the look had come too early
        with pytest.raises(PipelineError, match="are the same store"):
            place.move_to(other).run()
        assert (len(place.waiting()), place.intents()) == (3, [])


@pytest.mark.parametrize("by", ["this version", "an older one"])
def test_row_115_nothing_moves_back_to_where_it_came_from(files: tuple[StorePlace, StorePlace], by: str) -> None:
    """The old store knows the ids, and that the messages have ended: they would be lost."""
    old, new = files
    found = messages(3)
    if by == "this version":
        old.add(found)
        old.move_to(new).run()
    else:
        new.add(found)
        with closing(sqlite3.connect(_path(old))) as connection, connection:
            for each in found:
                for kind, detail in ((1, None), (6, f"moved to another store by migration {'0' * 32}")):
                    values = (kind, each.message_id, 1, 2, "orders", detail)
                    sql = (
                        "INSERT INTO record (kind, message_id, at, due, destination, detail) VALUES (?, ?, ?, ?, ?, ?)"
                    )
                    connection.execute(sql, values)
    with pytest.raises(PipelineError, match=r"3 were moved out of the target before, which knows their ids") as refused:
        new.move_to(old).run()
    assert ", ".join(ids(found)) in str(refused.value)
    assert (by_id(new.waiting()), new.intents()) == (by_id(found), [])


@pytest.mark.parametrize("ends", [PAIRS[2], ("sqlite", "redis")], ids="-".join, indirect=True)
def test_row_115_nor_where_one_of_the_two_cannot_be_scanned(
    ends: tuple[StorePlace, StorePlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids cannot be looked for before, so each message is when it is claimed, and stays where it is."""
    monkeypatch.setattr(between_stores, "_LOOKS", 1)
    old, new = ends
    found = messages(3)
    old.add(found)
    assert old.move_to(new).run().complete
    (back,) = new.move_to(old).run().endpoints
    assert (back.moved, back.refused, old.waiting(), new.intents()) == (0, 3, [], [])
    assert "was moved out of the target before" in back.problems[0]
    assert by_id(new.waiting()) == by_id(found)
    assert sorted(new.deliver()) == ids(found)


def test_row_115_what_the_target_does_not_take_or_nobody_can_read_stays_and_is_named(
    files: tuple[StorePlace, StorePlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between_stores, "_LOOKS", 1)
    old, new = files
    found = messages(9)
    large, damaged = replace(found[4], body=bytes(20_001)), found[6]
    old.add([*found[:4], large, *found[5:]])
    damage_row(_path(old), "delayed_message", damaged.message_id, Damage.HEADERS)
    move = old.move_to(StorePlace(replace(new.spec, largest_message_bytes=20_000)))
    result = move.run()
    (moved,) = result.endpoints
    assert (result.complete, moved.messages, moved.moved, moved.refused) == (False, 9, 7, 2)
    assert large.message_id in moved.problems[0]
    assert moved.problems[1] == "1 cannot be read: `postdate errors` shows them"
    assert ids(old.waiting()) == [large.message_id]
    assert by_id(new.waiting()) == by_id([*found[:4], found[5], *found[7:]])
    (seen,) = move.preview().endpoints
    assert (seen.count, seen.warnings) == (1, ("1 cannot be read and are set aside: `postdate errors` shows them",))
    assert old.deliver() == [large.message_id]


def test_row_115_what_the_target_has_otherwise_is_named_and_what_it_had_is_unchanged(
    files: tuple[StorePlace, StorePlace],
) -> None:
    """Known before are one as it is, one with another body, one with another due time, and one that is over."""
    old, new = files
    found = messages(9)
    old.add(found)
    others = [found[0], replace(found[1], body=b"another"), replace(found[2], due=found[2].due + 9 * DAY), found[3]]
    new.add(others)
    new.ask(lambda store: store.remove(found[3].message_id, _NOW()))
    move = old.move_to(new)
    for result in (move.run(), move.abort(), move.run()):
        (moved,) = result.endpoints
        assert (result.exact, moved.already_there >= 4, moved.mismatched, moved.delivered_meanwhile) == (
            False,
            True,
            2,
            1,
        )
        said = {difference.message_id: difference.what for difference in moved.differences}
        assert said == {found[1].message_id: "body", found[2].message_id: "due"}
    assert by_id(new.waiting()) == by_id([*others[:3], *found[4:]])
    (intent,) = old.intents()
    assert intent.message_id in moved.problems[0]
    assert old.ask(lambda store: store.cancel(intent.message_id, _NOW()))
    assert move.run().complete


def test_row_115_what_the_target_refuses_when_it_comes_keeps_no_others_from_it(
    files: tuple[StorePlace, StorePlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure tables take no headers of more than 32,768 characters: nobody can know that before."""
    old, new = files
    found = messages(11)
    old.add(found)
    store = SqliteStore.store_many

    async def refusing(self: Any, batch: Any, now: Any) -> Any:
        if found[7].message_id in [each.message_id for each in batch]:
            raise MessageTooLarge("its headers")
        return await store(self, batch, now)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "store_many", refusing)
        for _ in range(2):
            (moved,) = old.move_to(new).run().endpoints
            assert (moved.exact, moved.refused, moved.problems[0]) == (
                False,
                1,
                "1 is refused by the target: its headers",
            )
    assert (len(new.waiting()), len(old.intents()), old.waiting()) == (10, 1, [])
    assert old.move_to(new).abort().exact
    assert (by_id(new.waiting()), old.intents()) == (by_id(found), [])


def test_row_116_an_abort_changes_no_due_time_and_asks_no_archive(
    files: tuple[StorePlace, StorePlace], eventually: Eventually
) -> None:
    """What was rescheduled meanwhile stays so; of what is archived nobody can say whether it has left."""
    old, new = files
    found = messages(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteStore, "finish", lambda *_: (_ for _ in ()).throw(Ended))
        old.add(found)
        with pytest.raises(Ended):
            old.move_to(new).run()
    other = found[1].due + DAY
    free = lambda: old.ask(lambda store: store.reschedule(found[1].message_id, other, _NOW()))  # noqa: E731
    eventually(free, "its claims are free")
    assert old.deliver(found[0].due + timedelta(microseconds=1)) == [found[0].message_id]
    _archive(old, found[0])
    with pytest.raises(PipelineError, match=rf"{found[0].message_id}' is in an archive: bring it back"):
        old.move_to(new).abort()
    with closing(sqlite3.connect(_path(old))) as connection, connection:
        connection.execute("UPDATE record SET detail = NULL WHERE detail = 'archived'")
    (aborted,) = old.move_to(new).abort().endpoints
    assert (aborted.moved, aborted.returned, old.intents()) == (0, 4, [])
    assert {each.message_id: each.due for each in old.waiting()}[found[1].message_id] == other


def _archive(place: StorePlace, message: DelayedMessage) -> None:
    with closing(sqlite3.connect(_path(place))) as connection, connection:
        mine = "message_id = ? AND kind"
        connection.execute(f"UPDATE record SET detail = 'archived' WHERE {mine} = 1", (message.message_id,))
        connection.execute(f"DELETE FROM record WHERE {mine} > 1", (message.message_id,))


@pytest.mark.parametrize("ends", [("sqlite", "sqlite"), PAIRS[0][::-1], PAIRS[3]], ids="-".join, indirect=True)
def test_row_115_what_an_older_version_has_hidden_is_left_to_that_version(ends: tuple[StorePlace, StorePlace]) -> None:
    old, new = ends
    old.add(messages(2))
    dialect: Any = migration_source(old.spec.address, schema=old.spec.schema)._sql
    with closing(dialect.connect()) as session:
        session.begin()
        names = ("StoreMigration_State", "MigrationRunId", "Status")
        table, run_id, status = dialect.table(names[0]), *map(dialect.quoted, names[1:])
        session.change(f"CREATE TABLE {table} ({run_id} char(32) PRIMARY KEY, {status} smallint)", {})
        session.change(f"INSERT INTO {table} VALUES ('{'0' * 32}', 2), ('{'1' * 32}', 1)", {})
        session.commit()
        move = old.move_to(new)
        for act in (move.preview, move.run, move.resume, move.abort, lambda: status_of_store(move.source)):
            with pytest.raises(MigrationConflict, match=rf"{'1' * 32} .* resume or abort it with that version"):
                act()
        (into,) = new.move_to(old).preview().endpoints
        (why,) = into.problems
        assert f"the target itself is being emptied: migration {'1' * 32} " in why
        session.begin()
        session.change(f"UPDATE {table} SET {status} = 3", {})
        session.commit()
    assert move.run().complete


def test_row_115_a_batch_that_no_intent_has_room_for_moves_by_more_of_them(
    files: tuple[StorePlace, StorePlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between_stores, "_INTENT_BYTES", 1_000)
    old, new = files
    found = messages(60)
    old.add(found)
    assert old.move_to(new).run().complete
    assert by_id(new.waiting()) == by_id(found)
    moved_by = {old.history(each.message_id)[-1].detail for each in found}
    assert 3 < len(moved_by) < 30


def test_row_115_a_store_that_does_not_show_what_is_in_it_is_refused(
    files: tuple[StorePlace, StorePlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = files
    old.add(messages(1))
    whole = StoreSpec.open

    def with_six_methods(spec: StoreSpec, *, create: bool) -> ClaimingStore:
        store = whole(spec, create=create)
        return SimpleStore(store) if spec == new.spec else store

    monkeypatch.setattr(StoreSpec, "open", with_six_methods)
    with pytest.raises(NotSupported, match=r"new\.db' does not show what is in it"):
        old.move_to(new).run()
    assert len(old.waiting()) == 1


def test_row_115_endpoints_are_those_with_a_store_there(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place_in("postgres", request) as place, place_in("sqlite", request) as new:
        place.add(messages(2))
        move = replace(place.move_to(new), endpoints=None)
        assert [each.endpoint for each in move.preview().endpoints] == ["billing"]
        with pytest.raises(PipelineError, match="no endpoint 'biling' owns messages there; it has billing"):
            replace(move, endpoints=("biling",)).preview()
        with pytest.raises(PipelineError, match=r"old\.db|billing\.db"):
            replace(new.move_to(place), endpoints=("other",)).preview()
        monkeypatch.setenv("OLD", place.spec.address)
        elsewhere = replace(move, source=replace(move.source, address="env:OLD"))
        assert [each.count for each in elsewhere.preview().endpoints] == [2]
    with place_in("redis", request) as redis, place_in("sqlite", request, "new") as new:
        with pytest.raises(PipelineError, match="cannot be listed; name each with --endpoint"):
            replace(redis.move_to(new), endpoints=None).preview()
        with pytest.raises(PipelineError, match="at least one message, not batch_size=0"):
            redis.move_to(new, batch_size=0)


def test_row_115_a_schema_without_stores_is_refused(files: tuple[StorePlace, StorePlace], postgres_url: str) -> None:
    old, new = files
    old.add(messages(1))
    nowhere = StoreSpec(postgres_url, schema="no stores here")
    with pytest.raises(Exception, match=r"no stores here|--schema"):
        replace(old.move_to(new), source=nowhere).preview()


def _path(place: StorePlace) -> Path:
    return Path(place.spec.address.removeprefix("sqlite:///"))


# --- messages that follow the clocks of a zone ------------------------------------------------------------------------


def follow(place: StorePlace) -> DelayedMessage:
    """Have a message for a time in Paris wait there."""
    place.ask(lambda store: KeptZones(store).keep("Europe/Paris", _NOW()))
    due = _NOW() + DAY
    headers = {Headers.WALL_TIME: f"{due.replace(tzinfo=None).isoformat()} Europe/Paris"}
    place.add([replace(messages(1, due)[0], headers=headers)])
    return place.ask(lambda store: store.get("postdate~Europe/Paris~00000001"))


def test_the_rules_of_their_zones_go_with_messages(files: tuple[StorePlace, StorePlace]) -> None:
    old, new = files
    marker = follow(old)
    move = old.move_to(new)
    (seen,) = move.preview().endpoints
    assert (seen.count, seen.problems, dict(seen.destinations)) == (1, (), {"orders": 1})
    elsewhere = rules_of("Asia/Tokyo")
    new.ask(lambda store: note_rules(store, "Europe/Paris", [elsewhere], _NOW()))
    assert move.run().complete
    (there,) = new.ask(markers)
    assert rules_in(there) == [elsewhere, *rules_in(marker)]
    assert move.run().complete


@pytest.mark.parametrize("limits", [paused, limited(5, "00:00-24:00 UTC")], ids=["paused", "limited"])
def test_nothing_moves_while_limits_are_in_force_and_what_they_held_moves_when_they_are_lifted(
    files: tuple[StorePlace, StorePlace], limits: Callable[[Limits], Limits]
) -> None:
    """No service of the old store has let go what was held: the move does."""
    old, new = files
    now = _NOW()
    found = [*messages(3, now - DAY), *messages(2, now + DAY)]
    old.add(found)

    async def hold(store: Any) -> None:
        await change_limits(store, "orders", limits, now)
        (kept,) = await store.kept_limits()
        for claim in await store.claim_due(now, 9):
            await store.release([claim], kept.place(claim.message.due))

    old.ask(hold)
    move = old.move_to(new)
    (seen,) = move.preview().endpoints
    assert (seen.count, seen.earliest, seen.latest) == (5, found[0].due, found[-1].due)
    (problem,) = seen.problems
    assert problem.startswith("limits of its queues would be lost: orders; set them in the new store")
    with pytest.raises(PipelineError, match="limits of its queues would be lost: orders"):
        move.run()
    assert (by_id(old.waiting()), new.waiting()) == (by_id(found), [])
    old.ask(lambda store: change_limits(store, "orders", lambda _: NO_LIMITS, now))
    (moved,) = move.run().endpoints
    assert (moved.moved, old.waiting(), by_id(new.waiting())) == (5, [], by_id(found))
    assert sorted(new.deliver(now)) == ids(found[:3])


@pytest.mark.parametrize("ends", [("sqlite", "redis")], ids="-".join, indirect=True)
def test_a_store_that_cannot_follow_a_zone_takes_no_such_messages(ends: tuple[StorePlace, StorePlace]) -> None:
    old, new = ends
    follow(old)
    (seen,) = old.move_to(new).preview().endpoints
    assert seen.problems == (
        "there are messages that follow the clocks of zones, which RedisStore cannot have them do",
    )
