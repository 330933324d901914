"""Driver and store are killed with -9 while records go into a lake: it has each once, and nothing was pruned early."""

import os
import random
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.integration.pipeline.history_store import (
    DAY,
    NOW,
    add,
    batches,
    deliver,
    lake_records,
    position,
    prune_all,
    stored_records,
)
from tests.servers import PostgreSQL
from tests.spark_cluster import spark_cluster
from tests.spark_drivers import RestartedDriver, SparkDriver
from tests.waiting import Eventually

from postdate.pipeline.history import write_history
from postdate.pipeline.history.job import read_positions
from postdate.pipeline.stores import StoreSpec, open_spec

FOLLOW = "tests.integration.pipeline.history_store:follow"
KILLS = 2 * int(os.environ.get("POSTDATE_KILL_ROUNDS", "5"))


class Following(threading.Thread):
    """Follows a store in a driver that is started again when it was killed."""

    def __init__(self, driver: RestartedDriver, spec: StoreSpec, lake: Path, stop: Path) -> None:
        super().__init__(name="following")
        self._driver, self._stop_file = driver, stop
        self._arguments: dict[str, object] = {
            "address": spec.address,
            "schema": spec.schema,
            "lake": str(lake),
            "stop": str(stop),
            "rows_per_batch": 100,
        }
        self.failures = list[BaseException]()

    def run(self) -> None:
        try:
            self._driver.run(FOLLOW, **self._arguments)
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the test
            self.failures.append(error)

    def finish(self) -> None:
        self._stop_file.touch()
        self.join()
        if self.failures:
            raise self.failures[0]


def reached_of(spec: StoreSpec) -> int:
    """Return the position of the only lake; 0 before it has one."""
    return min((each.number for each in read_positions(spec)), default=0)


def test_a_driver_that_was_killed_goes_on_and_the_lake_has_each_record_once(
    spark: SparkSession, store: StoreSpec, tmp_path: Path, eventually: Eventually
) -> None:
    lake = tmp_path / "lake"
    with open_spec(store, create=True) as opened:
        opened.setup()
    add(store, *(f"m{n}" for n in range(400)), due=NOW)
    with spark_cluster(within_driver=True) as cluster:
        driver = SparkDriver(cluster, "history", local=True)
        following = threading.Thread(target=_follow_until_it_dies, args=(driver, store, lake, tmp_path / "stop"))
        following.start()
        eventually(lambda: len(batches(lake)) > 3, "some micro-batches are written")
        assert driver.kill()
        following.join()
    assert len(batches(lake)) < 20, "it was killed amid its work"
    deliver(store)
    add(store, "newest")
    records, reached = stored_records(store), position(store)
    prune_all(store, NOW + 2 * DAY)
    assert {number for number in records if number >= reached} <= stored_records(store).keys()
    write_history(spark, store, lake)
    assert lake_records(lake) == records


def _follow_until_it_dies(driver: SparkDriver, spec: StoreSpec, lake: Path, stop: Path) -> None:
    from tests.spark_drivers import DriverDied

    with pytest.raises(DriverDied):
        driver.run(FOLLOW, address=spec.address, schema=spec.schema, lake=str(lake), stop=str(stop))


@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.soak(
    "kills drivers and a server of its own ten times, at random moments",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_history_kills.py::test_a_driver_that_was_killed_goes_on_and_the_lake_has_each_record_once",
        "tests/integration/pipeline/test_history.py::test_the_position_follows_the_commit_and_never_the_files[sqlite]",
        "tests/integration/pipeline/test_history.py::test_a_repeated_micro_batch_replaces_itself",
    ),
)
def test_kills_of_driver_and_store_leave_each_record_in_the_lake_once_and_nothing_is_pruned_early(
    server_folder: Path, tmp_path: Path, eventually: Eventually, chance: random.Random
) -> None:
    """Retention is zero: whatever is over and passed by the stream is removed at once, between the kills."""
    lake, expected = tmp_path / "lake", dict[int, tuple[object, ...]]()
    server = PostgreSQL(server_folder / "postgres", durable=True)
    server.start()
    spec = StoreSpec(server.url, schema="history")
    try:
        with open_spec(spec, create=True) as opened:
            opened.setup()
        with spark_cluster(within_driver=True) as cluster:
            driver = RestartedDriver(lambda: SparkDriver(cluster, "history", local=True))
            following = Following(driver, spec, lake, tmp_path / "stop")
            following.start()
            victims = ["driver", "store"] * (KILLS // 2)
            chance.shuffle(victims)
            for number, victim in enumerate(victims):
                add(spec, *(f"m{number}-{n}" for n in range(100 + chance.randrange(200))), due=NOW)
                deliver(spec)
                expected |= stored_records(spec)
                if chance.random() < 0.7:  # the others are killed while they start, or have nothing to do
                    before, last = len(batches(lake)), max(expected)
                    eventually(
                        lambda before=before, last=last: len(batches(lake)) > before or reached_of(spec) > last,
                        "it goes on",
                    )
                following.join(chance.random() * 2)
                if victim == "driver":
                    assert driver.kill()
                else:
                    server.kill()
                    server.start()
                prune_all(spec, NOW + 2 * DAY)
                missing = expected.keys() - stored_records(spec).keys()
                assert all(each < reached_of(spec) for each in missing), "pruned early"
            stop_error = tmp_path / "stop.error"
            stop_error.unlink(missing_ok=True)
            try:
                eventually(lambda: reached_of(spec) > max(expected), "it has all", 180)
            except AssertionError as error:  # say why it does not go on, or that it is slow
                why = stop_error.read_text() if stop_error.exists() else "no error"
                raise AssertionError(f"{reached_of(spec)} of {max(expected)}: {why}") from error
            following.finish()
            driver.stop()
        prune_all(spec, NOW + 2 * DAY)
        assert len(stored_records(spec)) < len(expected)
        assert lake_records(lake) == expected
    finally:
        server.stop()
