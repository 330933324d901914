"""Gauges of what waits: as of the last look, from any thread, and left out when nothing can be said."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import anyio
import pytest

from postdate import DelayedMessage, SqliteStore, SystemClock
from postdate.config import Settings, load_settings
from postdate.core.limits import add_pause, change_limits
from postdate.errors import PostdateError, StoreUnreachable, TransportUnreachable
from postdate.operations import Overview, overview
from postdate.operations.looking import Refresher
from postdate.telemetry.standing import build_gauge_reader
from postdate.testing import VirtualClock
from postdate.wiring import open_deployment

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def settings_of(path: Path) -> Settings:
    return load_settings(None, {}, {"store.address": f"sqlite:///{path}/one.db"})


async def look_once(path: Path, outage: PostdateError | None = None) -> Overview:
    """Look at an empty store; ``outage``: of its queues."""
    async with open_deployment(settings_of(path), create=True) as deployment:
        await deployment.required_store.setup()
        await deployment.transport.create_queues(["error"])
        if outage is not None:

            async def away() -> None:
                raise outage

            vars(deployment.queue_view)["queue_lengths"] = away
            vars(deployment.transport)["count_unreadable"] = away
        return await overview(deployment, NOW, look_ahead=0)


async def test_a_service_counts_itself_and_old_looks_say_nothing(clock: VirtualClock, tmp_path: Path) -> None:
    state = await look_once(tmp_path)

    async def look(_: object, __: object) -> Overview:
        return state

    looking = Refresher(look, clock)
    gauges = build_gauge_reader(looking, clock)
    assert gauges() == {}
    async with open_deployment(settings_of(tmp_path)) as deployment, anyio.create_task_group() as tasks:
        tasks.start_soon(looking.run, deployment)
        await clock.advance(timedelta(seconds=3))
        found = gauges()
        assert (found["services"], found["errors"], found["overdue.age"]) == ({"": 1}, {"": 0}, {"": 0.0})
        tasks.cancel_scope.cancel()
    await clock.advance(timedelta(hours=1))
    assert gauges() == {}


async def test_what_falls_due_is_counted_until_the_end_of_the_next_minute_the_hour_and_the_day(
    clock: VirtualClock, tmp_path: Path
) -> None:
    async with open_deployment(settings_of(tmp_path), create=True) as deployment:
        await deployment.required_store.setup()
        dues = [NOW + timedelta(seconds=seconds) for seconds in (90, 150, 5 * 3_600, 30 * 3_600)]
        messages = [DelayedMessage(f"m-{number}", due, "orders", {}, b"") for number, due in enumerate(dues)]
        await deployment.required_store.store_many(messages, NOW)
        looking = Refresher(lambda deployment, _: overview(deployment, NOW, look_ahead=0), clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(looking.run, deployment)
            await looking.get_latest()
            tasks.cancel_scope.cancel()
        assert build_gauge_reader(looking, clock)()["due"] == {"minute": 1, "hour": 2, "day": 3}


async def test_services_of_a_store_that_does_not_show_its_processes_are_left_out(
    clock: VirtualClock, tmp_path: Path
) -> None:
    async with open_deployment(settings_of(tmp_path), create=True) as deployment:
        await deployment.required_store.setup()
        looking = Refresher(partial(overview, look_ahead=0), clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(looking.run, replace(deployment, store_view=None))
            await looking.get_latest()
            tasks.cancel_scope.cancel()
        gauges = build_gauge_reader(looking, clock)()
    assert (gauges.get("services"), gauges["pending"]) == (None, {"": 0})


@pytest.mark.parametrize("outage", [TransportUnreachable("away"), StoreUnreachable("away, as queues in a database")])
async def test_queues_out_of_reach_are_not_counted_and_all_else_is(tmp_path: Path, outage: PostdateError) -> None:
    state = await look_once(tmp_path, outage)
    assert (state.errors, state.statistics.pending, state.statistics.queues) == (None, 0, None)
    assert state.statistics.unreadable is None


async def test_what_a_pause_holds_is_overdue_and_has_no_age(clock: VirtualClock, tmp_path: Path) -> None:
    """Or a pause would have somebody woken."""

    async def told() -> tuple[float, float]:
        async with open_deployment(settings_of(tmp_path)) as deployment:
            looking = Refresher(partial(overview, look_ahead=0), clock)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(looking.run, deployment)
                await looking.get_latest()
                tasks.cancel_scope.cancel()
            found = build_gauge_reader(looking, clock)()
        return found["overdue"][""], found["overdue.age"][""]

    await look_once(tmp_path)
    minute, store = timedelta(minutes=1), SqliteStore(tmp_path / "one.db")
    now = SystemClock().now()
    await store.store(DelayedMessage("held", now - minute, "orders", {}, b""), now)
    await change_limits(store, "orders", add_pause, now)
    assert await told() == (1, 0)
    await store.store(DelayedMessage("late", now - minute, "bills", {}, b""), now)
    overdue, age = await told()
    assert (overdue, age >= 60) == (2, True)
    await store.close()
