"""Messages follow the clocks of a zone, whatever becomes of its rules (ADR 33)."""

import logging
import struct
import zoneinfo
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest
from tests import mariadb_subjects, postgres_subjects
from tests.simulator.zones import ZoneRules, files_of
from tests.waiting import until

import postdate
from postdate import (
    Client,
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    HandlerContext,
    MemoryStore,
    MemoryTransport,
    Pending,
    Recoverability,
    SendOptions,
    Sqlite,
    operations,
)
from postdate.clock import LATEST
from postdate.config import load_settings
from postdate.core import zones
from postdate.core.limits import Limits, change_limits
from postdate.core.upkeep import wall_times
from postdate.endpoint.outgoing import timeouts_queue_envelope
from postdate.errors import DelayConflict, InvalidMessage, InvalidTimestamp, NotSupported, StoreUnavailable
from postdate.messages import MARKERS, Envelope, Headers
from postdate.operations.doctor.checks import Verdict, diagnose_time_zones
from postdate.ports import MessageFilter, RecordKind
from postdate.testing import FaultyStore, VirtualClock
from postdate.wiring import OpenDeployment, open_store

PARIS = "Europe/Paris"
SUMMER, WINTER = "2027-07-01 09:00", "2027-12-01T09:00"


def at(hour: int, month: int = 7) -> datetime:
    return datetime(2027, month, 1, hour, tzinfo=UTC)


@pytest.fixture
def rules(tmp_path: Path) -> Iterator[Any]:
    """A function that gives Paris its own rules, or those of another zone, from files that may say their version."""
    folder, before = tmp_path / "zones", zoneinfo.TZPATH
    (folder / "Europe").mkdir(parents=True)
    real = {zone: zones.rules_of(zone) for zone in (PARIS, "Africa/Algiers")}

    def set_to(zone: str, version: str = "", *, is_seen: bool = True) -> None:
        (folder / "Europe" / "Paris").write_bytes(real[zone])
        (folder / "+VERSION").write_text(version, encoding="ascii")
        zoneinfo.reset_tzpath([str(folder)])
        if is_seen:
            zones._read_rules.cache_clear()

    set_to(PARIS)
    yield set_to
    zoneinfo.reset_tzpath(before)
    zones._read_rules.cache_clear()


@contextmanager
def address(kind: str, request: pytest.FixtureRequest) -> Generator[tuple[str, dict[str, Any]]]:
    if kind == "sqlite":
        yield f"sqlite:///{request.getfixturevalue('tmp_path') / 'shop.db'}", {}
        return
    subjects = postgres_subjects if kind == "postgres" else mariadb_subjects
    server, schema = request.getfixturevalue(f"{kind}_url"), subjects.fresh_schema()
    yield server, {"schema": schema}
    subjects.drop_schema(server, schema)


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    with address(request.param, request) as found:
        yield found


# --- what clocks show -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "instant"),
    [
        (SUMMER, at(7)),
        (datetime(2027, 12, 1, 9), at(8, 12)),  # noqa: DTZ001 - what clocks show has no zone of its own
        ("2027-03-28 02:30", datetime(2027, 3, 28, 1, 30, tzinfo=UTC)),  # left out: clocks show 03:30 then
        ("2027-10-31 02:30", datetime(2027, 10, 31, 0, 30, tzinfo=UTC)),  # twice: the first
        (datetime(2027, 10, 31, 2, 30, fold=1), datetime(2027, 10, 31, 1, 30, tzinfo=UTC)),  # noqa: DTZ001
        ("2027-10-31 02:30;fold=1", datetime(2027, 10, 31, 1, 30, tzinfo=UTC)),
        (datetime(2027, 3, 28, 2, 30, fold=1), datetime(2027, 3, 28, 0, 30, tzinfo=UTC)),  # noqa: DTZ001
        ("2027-07-01", datetime(2027, 6, 30, 22, tzinfo=UTC)),
    ],
)
def test_what_clocks_show_is_an_instant(local: str | datetime, instant: datetime) -> None:
    options = SendOptions("q", deliver_at=local, zone=PARIS)
    assert options.due(at(0)) == instant
    assert wall_times.WallTime.of({Headers.WALL_TIME: str(options.wall_time)}) == options.wall_time


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"deliver_at": SUMMER}, InvalidTimestamp, "name its time zone with zone="),
        ({"zone": PARIS}, InvalidTimestamp, "is a local time in that zone"),
        ({"deliver_at": at(9), "zone": PARIS}, InvalidTimestamp, "without an offset"),
        ({"deliver_at": "2027-07-01T09:00Z", "zone": PARIS}, InvalidTimestamp, "without an offset"),
        ({"deliver_at": "tomorrow", "zone": PARIS}, InvalidTimestamp, "is not a date and time"),
        ({"deliver_at": SUMMER, "zone": "Europe/Pari"}, InvalidTimestamp, "there is no time zone 'Europe/Pari'"),
        ({"deliver_at": SUMMER, "zone": "../../etc/passwd"}, InvalidTimestamp, "there is no time zone"),
        ({"deliver_at": SUMMER, "zone": ""}, InvalidTimestamp, "there is no time zone"),
        ({"deliver_at": SUMMER, "zone": "localtime"}, InvalidTimestamp, "there is no time zone"),
        ({"deliver_at": SUMMER, "zone": 2}, InvalidMessage, "zone must be a str, not int 2"),
        ({"deliver_at": "9999-12-31 23:59", "zone": "America/New_York"}, InvalidTimestamp, "outside of the years"),
        ({"deliver_at": SUMMER, "zone": PARIS, "delay": timedelta(1)}, DelayConflict, "exclude each other"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        SendOptions("q", **wrong)


def test_a_header_that_cannot_be_read_is_no_wall_time() -> None:
    for text in ("", "Europe/Paris", "tomorrow Europe/Paris"):
        assert wall_times.WallTime.of({Headers.WALL_TIME: text}) is None


# --- new rules --------------------------------------------------------------------------------------------------------


Change = Callable[..., None]
FOLLOWS: dict[str, Any] = {"destination": "q", "zone": PARIS}


async def dues(client: Client) -> dict[str, datetime]:
    return {each.message_id: each.due for each in await client.list()}


async def served_until(url: str, more: dict[str, Any], wanted: Callable[[], Awaitable[object]]) -> None:
    """Run a service until something is so."""
    store = open_store(url, **more)
    delivery = DelayedDelivery(store)
    transport, clock = MemoryTransport(), VirtualClock()
    async with Endpoint("shop", transport=transport, delayed_delivery=delivery, error_queue="error", clock=clock):
        await until(wanted)
    await store.close()


@asynccontextmanager
async def looking_into(url: str, more: dict[str, Any]) -> AsyncGenerator[Any]:
    store = open_store(url, **more)
    await store.initialize("shop", postdate.TransactionMode.RECEIVE_ONLY)
    yield store
    await store.close()


async def test_new_rules_move_what_waits(
    place: tuple[str, dict[str, Any]], rules: Change, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "postdate.wall_times")
    url, more = place
    client = postdate.connect(url, endpoint="shop", **more)
    await client.send(b"", **FOLLOWS, deliver_at=SUMMER, message_id="summer")
    await client.send(b"", **FOLLOWS, deliver_at=SUMMER, message_id="by hand")
    assert await client.reschedule("by hand", deliver_at=at(10))
    await client.send_many([(b"", SendOptions(**FOLLOWS, deliver_at=WINTER, message_id="winter"))])
    await client.send(b"", **FOLLOWS, deliver_at=SUMMER, message_id="expires", expires_at=at(7) + timedelta(minutes=1))
    await client.send(b"", destination="q", deliver_at=at(7), message_id="an instant")
    assert await client.replace(b"", key="last", **FOLLOWS, deliver_at=SUMMER) == "last~00000001"
    with pytest.raises(InvalidMessage, match="longest_wait and zone exclude each other"):
        await client.replace(b"", key="cut", **FOLLOWS, deliver_at=SUMMER, longest_wait=timedelta(1))
    before = {
        **dict.fromkeys(["summer", "expires", "an instant", "last~00000001"], at(7)),
        "by hand": at(10),
        "winter": at(8, 12),
    }
    assert await dues(client) == before
    assert len(await client.list(Pending(zone=PARIS))) == 4  # what was rescheduled by hand follows no clocks
    if not url.startswith("mariadb"):  # which holds no queues
        told = await client.explain("summer")
        assert "it was sent for 2027-07-01T09:00:00 Europe/Paris, which is 2027-07-01T07:00" in " ".join(told.facts)

    rules("Africa/Algiers")  # whose clocks are those of Paris in winter, all the year
    after = {**before, "summer": at(8), "last~00000001": at(8)}

    async def moved() -> bool:
        async with looking_into(url, more) as store:
            return [each.headers["moved"] for each in await wall_times.list_markers(store)] == ["2"]

    await served_until(url, more, moved)
    assert await dues(client) == after
    assert "message summer, for 2027-07-01T09:00:00 Europe/Paris, is due at 2027-07-01 08:00" in caplog.text
    assert "the rules of Europe/Paris have changed: 2 messages were moved" in caplog.text
    async with looking_into(url, more) as store:
        kinds = [record.kind for record in await store.history("summer")]
        assert kinds == [RecordKind.SCHEDULED, RecordKind.RESCHEDULED]
        # What somebody with the rules of before stores now is found, too, as long as that may happen.
        late = DelayedMessage("late", at(7), "q", {Headers.WALL_TIME: f"2027-07-01T09:00:00 {PARIS}"}, b"")
        await store.store(late, at(0))

    async def found() -> bool:
        return (await dues(client))["late"] == at(8)

    await served_until(url, more, found)
    assert await dues(client) == {**after, "late": at(8)}

    rules(PARIS)

    async def back() -> bool:
        return await dues(client) == {**before, "late": at(7)}

    await served_until(url, more, back)

    # The markers are none of the application's messages.
    gone = await client.cancel_where(Pending(due_from=datetime(1, 1, 1, tzinfo=UTC)))
    assert sum(gone.values()) == 7
    assert await client.list() == []
    async with looking_into(url, more) as store:
        assert len(await wall_times.list_markers(store)) == 1
    await client.close()


async def test_a_message_is_rescheduled_to_a_wall_time_and_away_from_it(
    place: tuple[str, dict[str, Any]], rules: Change
) -> None:
    url, more = place
    client = postdate.connect(url, endpoint="shop", **more)
    for name in ("a", "b", "c"):
        await client.send(b"", destination="q", deliver_at=at(10), message_id=name, headers={"name": name})
    assert await client.reschedule("a", deliver_at=SUMMER, zone=PARIS)
    answers = await client.reschedule_where(Pending(headers={"name": "b"}), deliver_at=WINTER, zone=PARIS)
    assert answers == {postdate.Answer.DONE: 1}
    assert await dues(client) == {"a": at(7), "b": at(8, 12), "c": at(10)}
    assert [each.message_id for each in await client.list(Pending(zone=PARIS))] == ["a", "b"]
    wrongs: list[dict[str, Any]] = [{"deliver_at": SUMMER}, {"delay": timedelta(1), "zone": PARIS}]
    wrongs.append({"deliver_at": SUMMER, "zone": "Mars"})
    for wrong in wrongs:
        with pytest.raises((InvalidTimestamp, DelayConflict)):
            await client.reschedule("c", **wrong)
    # Away from it to the very instant: it stays there, whatever becomes of the rules.
    assert await client.reschedule("b", deliver_at=at(8, 12))
    assert await client.reschedule("c", deliver_at=SUMMER, zone=PARIS)
    assert await client.reschedule("c", deliver_at=at(7))
    rules("Africa/Algiers")

    async def moved() -> bool:
        return (await dues(client))["a"] == at(8)

    await served_until(url, more, moved)
    assert await dues(client) == {"a": at(8), "b": at(8, 12), "c": at(7)}
    assert [each.message_id for each in await client.list(Pending(zone=PARIS))] == ["a"]
    await client.close()


async def test_the_first_messages_that_follow_a_zone_may_be_rescheduled_to_it_all_at_once(
    place: tuple[str, dict[str, Any]],
) -> None:
    url, more = place
    client = postdate.connect(url, endpoint="shop", **more)
    await client.send(b"", destination="q", deliver_at=at(10), message_id="a")
    for dry_run, zone_names in ((True, []), (False, [PARIS])):
        answers = await client.reschedule_where(Pending("q"), deliver_at=SUMMER, zone=PARIS, dry_run=dry_run)
        assert answers == {postdate.Answer.DONE: 1}
        async with looking_into(url, more) as store:
            assert [each.headers["zone"] for each in await wall_times.list_markers(store)] == zone_names
    await client.close()


async def test_a_message_made_due_by_hand_keeps_its_time_on_its_way_through_a_queue(tmp_path: Path) -> None:
    """A failed message that is returned from the error queue goes that way; it had its old time again."""
    store: Any = open_store(f"sqlite:///{tmp_path / 'shop.db'}")
    await store.initialize("shop", postdate.TransactionMode.RECEIVE_ONLY)
    await store.setup()
    headers = {Headers.WALL_TIME: f"2090-07-01T09:00:00 {PARIS}"}
    await store.store(DelayedMessage("m", datetime(2090, 7, 1, 7, tzinfo=UTC), "q", headers, b""), at(0))
    assert await store.reschedule("m", at(1), at(1))
    message = await store.get("m")
    assert await store.cancel("m", at(1))
    transport, clock = MemoryTransport(), VirtualClock(at(2))
    await transport.create_queues(["q"])
    delivery = DelayedDelivery(store)
    async with Endpoint("shop", transport=transport, delayed_delivery=delivery, error_queue="error", clock=clock):
        returned = replace(message, message_id="m-2")
        await transport.send([timeouts_queue_envelope(returned, "shop.timeouts")], clock.now())
        (arrived,) = await transport.receiver("q").receive(1)
    assert arrived.envelope.message_id == "m-2"
    await store.close()


async def test_what_is_returned_to_a_paused_queue_follows_its_wall_time_no_more() -> None:
    """It has been due: new rules must not have it wait once more."""
    store, transport = MemoryStore(), MemoryTransport()
    await store.initialize("shop", postdate.TransactionMode.RECEIVE_ONLY)
    await transport.create_queues(["q", "error"])
    await change_limits(store, "q", lambda _: Limits(paused=True), at(0))
    headers = {Headers.WALL_TIME: f"2027-07-01T09:00:00 {PARIS}", Headers.FAILED_QUEUE: "q", Headers.MESSAGE_ID: "m"}
    assert await transport.send([Envelope("error", "m", headers, b"")], at(8)) == [None]
    here = OpenDeployment(load_settings(None, {}), store, transport, None, None)
    (result,) = await operations.return_all(here, "error", at(9))
    assert result.done
    (waiting,) = await store.list_pending(MessageFilter("q"), 9)
    assert (waiting.due, waiting.headers[Headers.MESSAGE_ID]) == (at(9), "m")
    assert Headers.WALL_TIME not in waiting.headers


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncGenerator[tuple[str, Client]]:
    """The address of a file in which a message follows Paris, and a client of it."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    client = postdate.connect(url, endpoint="shop")
    await client.send(b"", **FOLLOWS, deliver_at=SUMMER, message_id="m")
    yield url, client
    await client.close()


def says(caplog: pytest.LogCaptureFixture, text: str) -> Callable[[], Awaitable[bool]]:
    async def is_said() -> bool:
        return text in caplog.text

    return is_said


def is_due(client: Client, hour: int) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        return (await dues(client))["m"] == at(hour)

    return is_so


@pytest.mark.parametrize("body", [b"{", b"[]", b"5", b"[1]", b'["AA=="]', b'["VFppZjI="]'])
async def test_a_damaged_marker_stops_no_other_zone_and_is_made_anew(
    tmp_path: Path, rules: Change, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    url, abidjan = f"sqlite:///{tmp_path / 'shop.db'}", "Africa/Abidjan"
    client = postdate.connect(url, endpoint="shop")
    async with looking_into(url, {}) as store:
        await store.setup()
        key = f"postdate~{abidjan}"
        await store.replace(key, lambda id_, _: DelayedMessage(id_, LATEST, MARKERS, {"zone": abidjan}, body), at(0))
    await client.send(b"", **FOLLOWS, deliver_at=SUMMER, message_id="m")
    rules("Africa/Algiers")
    await served_until(url, {}, is_due(client, 8))
    assert f"messages for {abidjan!r} stay where they are" in caplog.text
    await client.send(b"", destination="q", deliver_at=SUMMER, zone=abidjan)
    async with looking_into(url, {}) as store:
        assert {
            each.headers["zone"]: len(wall_times.decode_rules(each)) for each in await wall_times.list_markers(store)
        } == {
            abidjan: 1,
            PARIS: 2,
        }
    await client.close()


async def test_older_files_move_nothing(
    shop: tuple[str, Client], rules: Change, caplog: pytest.LogCaptureFixture
) -> None:
    url, client = shop
    rules("Africa/Algiers", "2099b")
    await served_until(url, {}, is_due(client, 8))
    rules(PARIS, "2099a")
    await served_until(url, {}, says(caplog, "the zone files here are 2099a, older than those"))
    assert await is_due(client, 8)()

    # What is sent by them is found by a service with the newer ones.
    other = postdate.connect(url, endpoint="shop")
    await other.send(b"", **FOLLOWS, deliver_at=SUMMER, message_id="by older files")
    await other.close()
    rules("Africa/Algiers", "2099b")

    async def found() -> bool:
        return set((await dues(client)).values()) == {at(8)}

    await served_until(url, {}, found)


async def test_files_that_have_just_become_newer_move_nothing_by_the_rules_of_before(
    shop: tuple[str, Client], rules: Change
) -> None:
    """For a minute a process goes by the rules that it has read. Before, it took them for those of the newer files."""
    url, client = shop
    async with looking_into(url, {}) as store:
        daily = wall_times.wall_time_loop(store, VirtualClock())
        rules("Africa/Algiers", "2099b")
        await daily._run_once(daily)
        assert await is_due(client, 8)()
        rules(PARIS, "2099a")
        assert wall_times.WallTime.parse(SUMMER, PARIS).instant() == at(7)
        rules("Africa/Algiers", "2099b", is_seen=False)
        await daily._run_once(daily)
    assert await is_due(client, 8)()


async def test_who_has_older_files_judges_by_the_newer_rules_of_the_store(
    shop: tuple[str, Client], rules: Change
) -> None:
    """An intake sent a message on, early: it was due by the rules of its own files (simulator, seed 25175)."""
    url, client = shop
    wall = wall_times.WallTime.parse(SUMMER, PARIS)
    async with looking_into(url, {}) as store:
        daily = wall_times.wall_time_loop(store, VirtualClock())
        rules("Africa/Algiers", "2099b")
        await daily._run_once(daily)
        assert await is_due(client, 8)()
        rules(PARIS, "2099a")
        assert wall.instant() == at(7)
        assert wall.instant(await wall_times.ZoneMarkers(store).ensure_marker(PARIS, at(0))) == at(8)
        rules(PARIS, "2099c")
        assert wall.instant(await wall_times.ZoneMarkers(store).ensure_marker(PARIS, at(0))) == at(7)


async def test_the_next_look_mends_what_two_at_once_have_moved_by_different_rules() -> None:
    """The later marker lacks the rules of the other service, and "steady" is due by those."""
    store: Any = MemoryStore()
    clock, change = VirtualClock(), datetime(2026, 6, 1, tzinfo=UTC)
    old, second, third = (
        ZoneRules("2026a", 3_600, 3_600, change),
        ZoneRules("2026b", 3_600, 0, change),
        ZoneRules("2026c", 0, 3_600, change),
    )
    locals_ = {"steady": datetime(2026, 7, 1, 9), "early": datetime(2026, 5, 1, 9)}  # noqa: DTZ001 - what clocks show
    await store.initialize("shop", postdate.TransactionMode.RECEIVE_ONLY)

    def has_files(version: ZoneRules) -> None:
        zones.SOURCE.set(zones.ZoneSource(lambda: [files_of(version)], clock.monotonic))

    has_files(old)
    await wall_times.ensure_rules(store, PARIS, [old.file()], "", clock.now())
    for name, local in locals_.items():
        headers = {Headers.WALL_TIME: str(wall_times.WallTime(local, PARIS))}
        await store.store(DelayedMessage(name, old.instant(local), "q", headers, b""), clock.now())

    async def look(*versions: ZoneRules) -> None:
        async with anyio.create_task_group() as tasks:
            daily_looks = list[Any]()
            for version in versions:
                context = copy_context()
                context.run(has_files, version)
                daily_looks.append(wall_times.wall_time_loop(store, clock))
                context.run(tasks.start_soon, daily_looks[-1].run)
            await clock.run_until_idle()
            for each in daily_looks:
                each.stop()

    async def times() -> dict[str, datetime]:
        return {name: message.due for name in locals_ if (message := await store.get(name)) is not None}

    await look(second, third)
    (marker,) = await wall_times.list_markers(store)
    assert wall_times.decode_rules(marker) == [third.file(), old.file()]
    assert (await times())["steady"] == second.instant(locals_["steady"]) != third.instant(locals_["steady"])
    await look(third)
    assert await times() == {name: third.instant(local) for name, local in locals_.items()}


async def test_who_sends_by_older_files_does_not_make_the_store_older(shop: tuple[str, Client]) -> None:
    """A service with files as old would move what waits back to their rules."""
    url, _ = shop
    algiers = zones.rules_of("Africa/Algiers")
    async with looking_into(url, {}) as store:
        (before,) = await wall_times.list_markers(store)
        await wall_times.ensure_rules(store, PARIS, [algiers], "1970a", at(0))
        (marker,) = await wall_times.list_markers(store)
        assert marker.headers["version"] == before.headers["version"] != "1970a"
        assert wall_times.decode_rules(marker) == [*wall_times.decode_rules(before), algiers]


async def test_who_sends_by_newer_files_makes_the_store_newer(shop: tuple[str, Client], rules: Change) -> None:
    """Or a service with the older files moves what was sent back, and early (simulator, seeds 41019162, 41020242)."""
    url, client = shop
    async with looking_into(url, {}) as store:
        rules(PARIS, "2099a")
        daily = wall_times.wall_time_loop(store, VirtualClock())
        await wall_times.ensure_rules(store, PARIS, [zones.rules_of(PARIS)], "2099a", at(0))
        rules("Africa/Algiers", "2099b")
        algiers = zones.rules_of(PARIS)
        await wall_times.ensure_rules(store, PARIS, [algiers], "2099b", at(0))
        (marker,) = await wall_times.list_markers(store)
        assert marker.headers["version"] == "2099b"
        assert wall_times.decode_rules(marker)[0] == algiers
        sent = DelayedMessage("sent", at(8), "q", {Headers.WALL_TIME: f"2027-07-01T09:00:00 {PARIS}"}, b"")
        await store.store(sent, at(0))
        rules(PARIS, "2099a")
        await daily._run_once(daily)
        assert (await dues(client))["sent"] == at(8)
        rules("Africa/Algiers", "2099b")
        await daily._run_once(daily)
    assert set((await dues(client)).values()) == {at(8)}


@pytest.mark.parametrize(("more", "hour"), [(0, 8), (1, 7)], ids=["thirty days", "later"])
async def test_what_is_stored_by_rules_of_before_is_looked_for_for_thirty_days(
    shop: tuple[str, Client], rules: Change, more: int, hour: int
) -> None:
    url, client = shop
    clock = VirtualClock()
    rules("Africa/Algiers")
    async with looking_into(url, {}) as store:
        daily = wall_times.wall_time_loop(store, clock)
        await daily._run_once(daily)
        assert await is_due(client, 8)()
        late = DelayedMessage("late", at(7), "q", {Headers.WALL_TIME: f"2027-07-01T09:00:00 {PARIS}"}, b"")
        await store.store(late, at(0))
        await clock.advance(timedelta(days=30, microseconds=more))
        await daily._run_once(daily)
    assert (await dues(client))["late"] == at(hour)


async def test_what_is_stored_by_rules_of_before_is_looked_for_as_long_as_senders_have_these(
    shop: tuple[str, Client], rules: Change
) -> None:
    """Before, thirty days after the new rules no service looked for it any more."""
    url, client = shop
    clock, before = VirtualClock(), zones.rules_of(PARIS)
    rules("Africa/Algiers")
    async with looking_into(url, {}) as store:
        daily = wall_times.wall_time_loop(store, clock)
        await daily._run_once(daily)
        (marker,) = await wall_times.list_markers(store)
        await clock.advance(timedelta(days=40))
        await wall_times.ensure_rules(store, PARIS, [zones.rules_of(PARIS)], "", clock.now())
        assert await wall_times.list_markers(store) == [marker], "a sender with the newest rules changes nothing"
        await wall_times.ensure_rules(store, PARIS, [before], "", clock.now())
        late = DelayedMessage("late", at(7), "q", {Headers.WALL_TIME: f"2027-07-01T09:00:00 {PARIS}"}, b"")
        await store.store(late, clock.now())
        (renewed,) = await wall_times.list_markers(store)
        assert renewed.body == marker.body
        assert renewed.headers == {**marker.headers, "at": clock.now().isoformat()}
        await clock.advance(timedelta(days=1))
        await wall_times.ensure_rules(store, PARIS, [before], "", clock.now())
        assert await wall_times.list_markers(store) == [renewed], "it is written once a day, not by each sender"
        await daily._run_once(daily)
    assert (await dues(client))["late"] == at(8)


async def test_a_look_that_fails_is_made_again_soon(
    shop: tuple[str, Client], rules: Change, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, an hour later: what waits was late by that, as the store was away just after the start."""
    url, client = shop
    rules("Africa/Algiers")
    clock, failures = VirtualClock(), 6
    began = clock.now()
    async with looking_into(url, {}) as store:
        list_pending, looks = store.list_pending, list[datetime]()

        async def fail_first(where: MessageFilter, limit: int) -> list[DelayedMessage]:
            looks.append(clock.now())
            if len(looks) <= failures:
                raise StoreUnavailable("away for a moment")
            return await list_pending(where, limit)

        store.list_pending = fail_first
        daily = wall_times.wall_time_loop(store, clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(daily.run)
            while len(looks) <= failures and clock.now() < began + timedelta(minutes=5):
                await clock.advance(timedelta(seconds=1))
            assert [(each - began).seconds for each in looks[: failures + 1]] == [0, 1, 3, 7, 15, 31, 63]
            await until(is_due(client, 8))
            daily.stop()
    lines = [
        each for each in caplog.records if "due times are not adapted to changes of time zones" in each.getMessage()
    ]
    assert [each.levelname for each in lines].count("WARNING") == 1
    assert "it is tried again in 1 s: away for a moment" in lines[0].getMessage()


async def test_a_marker_has_the_newest_rules_and_seven_of_before(shop: tuple[str, Client], rules: Change) -> None:
    url, client = shop
    names = ["UTC", "Asia/Tokyo", "Asia/Kolkata", "Asia/Dubai", "Asia/Kabul", "Asia/Dhaka", "America/Lima", "Asia/Hovd"]
    others = [zones.rules_of(zone) for zone in names]
    async with looking_into(url, {}) as store:
        (before,) = await wall_times.list_markers(store)
        first = wall_times.decode_rules(before)
        await wall_times.ensure_rules(store, PARIS, others, "", at(0))
        (marker,) = await wall_times.list_markers(store)
        assert wall_times.decode_rules(marker) == [*first, *others[:7]]
        rules("Africa/Algiers")
        daily = wall_times.wall_time_loop(store, VirtualClock())
        await daily._run_once(daily)
        (marker,) = await wall_times.list_markers(store)
        assert wall_times.decode_rules(marker) == [zones.rules_of(PARIS), *first, *others[:6]]
    assert await is_due(client, 8)()


async def test_what_somebody_holds_is_told_and_moves_later(
    shop: tuple[str, Client], rules: Change, caplog: pytest.LogCaptureFixture
) -> None:
    url, client = shop
    rules("Africa/Algiers")
    async with looking_into(url, {}) as store:
        (claim,) = await store.claim_due(at(7) + timedelta(seconds=1), 9)
        await served_until(url, {}, says(caplog, "somebody holds 1 messages that new rules of a zone move"))
        await store.release([claim], None)
    await served_until(url, {}, is_due(client, 8))


async def test_what_ends_while_new_rules_move_it_is_held_by_nobody(
    shop: tuple[str, Client], rules: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, client = shop
    rules("Africa/Algiers")
    async with looking_into(url, {}) as store:
        get = store.get

        async def cancel_first(message_id: str) -> DelayedMessage | None:
            assert await client.cancel(message_id)
            return await get(message_id)

        monkeypatch.setattr(store, "get", cancel_first)
        daily = wall_times.wall_time_loop(store, VirtualClock())
        assert await daily._run_once(daily), "nobody holds a message"
    assert await client.list() == []


async def test_a_marker_that_was_cancelled_is_made_anew(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    for number in (1, 2):
        client = postdate.connect(url, endpoint="shop")
        await client.send(b"", **FOLLOWS, deliver_at=SUMMER)
        async with looking_into(url, {}) as store:
            (marker,) = await wall_times.list_markers(store)
            assert marker.message_id == f"postdate~{PARIS}~{number:08d}"
            await store.cancel(marker.message_id, at(0))
        await client.close()


def test_the_newest_zone_files_hold(tmp_path: Path, rules: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the system, here with the rules of Algiers for Paris, or those of the package; see ADR 42."""
    rules("Africa/Algiers")
    algiers, paris = (zones.ZoneFiles(None, "").read(zone) for zone in ("Africa/Algiers", PARIS))
    monkeypatch.setattr(zones.tzdata, "IANA_VERSION", "2026f")
    for name, text, version in (
        ("nothing", "", ""),  # they do not say it: an administrator may have chosen them
        ("tzdata.zi", "# version 2026f\nR x\n", "2026f"),
        ("tzdata.zi", "# version 2026g\nR x\n", "2026g"),
    ):
        (tmp_path / "zones" / name).write_text(text, encoding="ascii")
        zones._read_rules.cache_clear()
        assert zones.read_rules(PARIS).version == version
        assert zones.rules_of(PARIS) == algiers
        assert "; also installed: 2026f in the package tzdata" in diagnose_time_zones().found
        assert (diagnose_time_zones().result is Verdict.OK) is bool(version)
    for name, text in (("tzdata.zi", "# version 2026e\nR x\n"), ("+VERSION", "2026e\n")):
        (tmp_path / "zones" / "tzdata.zi").unlink(missing_ok=True)
        (tmp_path / "zones" / name).write_text(text, encoding="ascii")
        zones._read_rules.cache_clear()
        assert zones.read_rules(PARIS).version == "2026f"
        assert zones.rules_of(PARIS) == paris
        assert diagnose_time_zones().result is Verdict.OK
        assert diagnose_time_zones().found.startswith(
            "time zones follow 2026f in the package tzdata; also installed: 2026e"
        )


@pytest.mark.parametrize("damaged", [b"TZif2 and no more", b"", b"<html>"], ids=["cut off", "empty", "other text"])
def test_a_damaged_zone_file_is_as_good_as_none(
    tmp_path: Path, rules: Change, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error was taken for an outage of the store."""
    rules("Africa/Algiers")
    path = tmp_path / "zones" / "Europe" / "Paris"
    path.write_bytes(damaged)
    zones._read_rules.cache_clear()
    assert zones.rules_of(PARIS) == zones.ZoneFiles(None, "").read(PARIS)
    assert "is damaged" in caplog.text


def zone(footer: str, *changes: tuple[int, int]) -> bytes:
    """Return a file in which clocks are changed by hours at seconds since 1970 UTC; east of UTC."""
    counts = struct.pack(">6L", 0, 0, 0, len(changes), 3, 4)
    head = b"TZif2" + bytes(15)
    types = b"".join(struct.pack(">lBB", hours * 3600, 0, 0) for hours in range(3)) + b"xxx\0"
    times = b"".join(struct.pack(">q", at) for at, _ in changes) + bytes(hours for _, hours in changes)
    first = head + struct.pack(">6L", 0, 0, 0, 0, 1, 4) + types[:6] + b"xxx\0"
    return first + head + counts + times + types + f"\n{footer}\n".encode()


def test_a_change_of_clocks_at_new_year_in_utc_counts() -> None:
    new_year = int(datetime(2028, 1, 1, tzinfo=UTC).timestamp())
    rules = zone("<x01>-1", (new_year, 1))
    stretches = zones.offset_intervals(rules, new_year - 100)
    assert next(stretches) == (new_year - 100, new_year, 0)
    begin, _, offset = next(stretches)
    assert (begin, offset) == (new_year, 3600)
    begin, _, offset = next(zones.offset_intervals(rules, new_year))
    assert (begin, offset) == (new_year, 3600)


def test_rules_that_differ_between_full_hours_are_others() -> None:
    """Also where they differ in one night far ahead, and by the rule at the end of the file."""

    one = zone("XXX0", (1_800_000_000, 1), (1_800_009_000, 0))
    assert zones.has_same_rules(one, zone("<x00>0", (1_800_000_000, 1), (1_800_009_000, 0)), 2026)
    for other in (
        zone("XXX0", (1_800_000_900, 1), (1_800_009_000, 0)),
        zone("XXX0", (1_800_000_000, 1), (1_800_009_001, 0)),
        zone("XXX0", (1_800_000_000, 1), (1_800_009_000, 0), (2_100_000_001, 1), (2_100_000_062, 0)),
        zone("XXX0YYY,M3.5.0,M10.5.0", (1_800_000_000, 1), (1_800_009_000, 0)),
    ):
        assert not zones.has_same_rules(one, other, 2026)
    last, fourth = (zone(f"XXX0YYY,M3.{week}.0/2:30,M10.5.0") for week in (5, 4))
    assert not zones.has_same_rules(last, fourth, 2026)
    # Only a leap year that begins on a Sunday has a fifth one of February, such as 2032 and 2060.
    last, fourth = (zone(f"XXX0YYY,M2.{week}.0,M10.5.0", (1_990_000_000, 1)) for week in (5, 4))
    assert not zones.has_same_rules(last, fourth, 2026)


async def test_a_zone_is_kept_for_a_transaction_of_the_application(postgres_url: str) -> None:
    schema = postgres_subjects.fresh_schema()
    client = postdate.connect(postgres_url, schema=schema, endpoint="shop")
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await client.send(b"", **FOLLOWS, deliver_at=SUMMER, message_id="kept", transaction=connection)
        await connection.commit()
        await client.send(b"", **FOLLOWS, deliver_at=SUMMER, message_id="undone", transaction=connection)
        await connection.rollback()
    assert [each.message_id for each in await client.list(Pending(zone=PARIS))] == ["kept"]
    async with looking_into(postgres_url, {"schema": schema}) as store:
        assert len(await wall_times.list_markers(store)) == 1
    await client.close()
    postgres_subjects.drop_schema(postgres_url, schema)


async def test_what_comes_through_a_queue_goes_by_the_rules_of_the_service(tmp_path: Path, rules: Change) -> None:
    store: Any = open_store(f"sqlite:///{tmp_path / 'shop.db'}")
    transport, delivery = MemoryTransport(), DelayedDelivery(store)
    endpoint = Endpoint("shop", transport=transport, delayed_delivery=delivery, error_queue="error")
    await transport.create_queues(["shop.timeouts", "error"])
    outgoing = endpoint.outgoing.create(b"", SendOptions(**FOLLOWS, deliver_at="2999-07-01 09:00", message_id="m"))
    await endpoint.outgoing.send([outgoing])
    rules("Africa/Algiers")
    async with endpoint:
        found = await until(lambda: store.get("m"))
        assert found.due == datetime(2999, 7, 1, 8, tzinfo=UTC)
        assert found.headers[Headers.WALL_TIME] == f"2999-07-01T09:00:00 {PARIS}"
        assert [each.headers["zone"] for each in await wall_times.list_markers(store)] == [PARIS]
    await store.close()


async def test_an_intake_sees_newer_rules_of_the_store_at_once_where_the_sender_has_them(
    tmp_path: Path, rules: Change
) -> None:
    """For a minute it went by the rules of its own files, and sent a message early (simulator, seed 41005612)."""
    store: Any = open_store(f"sqlite:///{tmp_path / 'shop.db'}")
    transport, delivery = MemoryTransport(), DelayedDelivery(store)
    endpoint = Endpoint("shop", transport=transport, delayed_delivery=delivery, error_queue="error")
    await transport.create_queues(["shop.timeouts", "error"])

    def outgoing(message_id: str) -> Any:
        send_options = SendOptions(**FOLLOWS, deliver_at="2999-07-01 09:00", message_id=message_id)
        return endpoint.outgoing.create(b"", send_options)

    async def due_of(message_id: str) -> datetime:
        return (await until(lambda: store.get(message_id))).due

    rules(PARIS, "2099a")
    async with endpoint:
        await endpoint.outgoing.send([outgoing("before")])
        assert await due_of("before") == datetime(2999, 7, 1, 7, tzinfo=UTC)
        rules("Africa/Algiers", "2099b")  # the files of a sender and of another service
        daily = wall_times.wall_time_loop(store, VirtualClock())
        await daily._run_once(daily)
        after = outgoing("after")
        rules(PARIS, "2099a")  # those of this service
        await endpoint.outgoing.send([after])
        assert await due_of("after") == datetime(2999, 7, 1, 8, tzinfo=UTC)
    await store.close()


@dataclass
class Order:
    name: str


async def test_a_handler_may_have_the_only_writer_of_the_file(tmp_path: Path) -> None:
    """The marker is made when its message has ended; before, it would wait for the handler, and the handler for it."""
    database = Sqlite(tmp_path / "shop.db")
    endpoint = Endpoint("shop", database, outbox=True, error_queue="error", transaction_mode="receive_only")

    @endpoint.handler(Order)
    async def handle(order: Order, context: HandlerContext) -> None:
        await context.transaction()
        await context.send(b"", **FOLLOWS, deliver_at="2999-07-01 09:00", message_id="m")

    async with endpoint:
        await endpoint.send(Order("a lamp"))
        await until(lambda: wall_times.list_markers(database.store))
        assert await database.store.get("m") is not None
    await database.close()


async def test_a_delayed_retry_follows_no_zone(tmp_path: Path) -> None:
    database = Sqlite(tmp_path / "shop.db")
    policy = Recoverability(immediate_retries=0, delayed_retries=1, time_increase=timedelta(days=1))
    endpoint = Endpoint("shop", database, error_queue="error", recoverability=policy)

    @endpoint.handler(Order)
    async def handle(order: Order, context: HandlerContext) -> None:
        raise ValueError("not now")

    async with endpoint:
        made = endpoint.outgoing.create(Order("a lamp"), SendOptions("shop"))
        delivered = replace(made, headers={**made.headers, Headers.WALL_TIME: f"2027-07-01T09:00:00 {PARIS}"})
        await endpoint.outgoing.send([delivered])
        (retry,) = await until(lambda: database.store.list_pending(MessageFilter(), 9))
        assert Headers.WALL_TIME not in retry.headers
    await database.close()


async def test_a_copied_header_makes_no_wall_time(tmp_path: Path) -> None:
    client = postdate.connect(f"sqlite:///{tmp_path / 'shop.db'}")
    headers = {Headers.WALL_TIME: f"2027-07-01T09:00:00 {PARIS}"}
    await client.send(b"", destination="q", delay=timedelta(days=400), headers=headers)
    assert await client.list(Pending(zone=PARIS)) == []
    await client.close()


async def test_what_a_store_cannot_keep_is_refused_also_when_it_is_due_already() -> None:
    """Else it would depend on the hour whether a program works."""
    delivery = DelayedDelivery(FaultyStore(MemoryStore()))
    endpoint = Endpoint("shop", transport=MemoryTransport(), delayed_delivery=delivery, error_queue="error")
    for year in (2000, 2999):
        with pytest.raises(
            NotSupported, match="FaultyStore does not support messages with a wall time in Europe/Paris"
        ):
            await endpoint.send(b"", **FOLLOWS, deliver_at=f"{year}-07-01 09:00")


async def test_a_store_that_cannot_keep_a_zone_refuses_at_once(redis_url: str) -> None:
    url = f"{redis_url}?prefix=wall-times"
    client = postdate.connect(url)
    with pytest.raises(NotSupported, match="RedisStore does not support messages with a wall time in Europe/Paris"):
        await client.send(b"", **FOLLOWS, deliver_at=SUMMER)
    await client.close()
    store = open_store(url)
    delivery = DelayedDelivery(store)
    endpoint = Endpoint("shop", transport=MemoryTransport(), delayed_delivery=delivery, error_queue="error")
    with pytest.raises(NotSupported, match="give deliver_at as an instant"):
        await endpoint.send(b"", **FOLLOWS, deliver_at=SUMMER)
    await store.close()
