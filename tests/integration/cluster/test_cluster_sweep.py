"""Sweeps on the cluster: whoever is killed, nothing is lost, and nothing is doubled where store and queues are one."""

import random
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest
from tests.rabbitmq_subjects import channel_of
from tests.spark_cluster import SparkCluster
from tests.spark_drivers import RestartedDriver
from tests.spark_kills import kill_rounds, killing

from postdate import DelayedMessage, SystemClock, TransactionMode
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport

JOBS = "tests.integration.cluster.sweep_jobs"
MESSAGES = 3_000
"""In a round of kills."""

OVER = timedelta(seconds=6)

pytestmark = [
    pytest.mark.timeout(900 + 120 * kill_rounds()),
    pytest.mark.soak(
        "executors, Python workers and drivers of a cluster of five JVMs are killed",
        part="cluster",
        proven_by=(
            "tests/integration/test_postgres_kills.py::test_what_a_killed_process_had_locked_is_free_at_once_row_25",
            "tests/integration/test_dispatching.py::test_many_at_once_deliver_everything_once",
            "tests/integration/pipeline/test_sweep.py::test_a_query_delivers_as_messages_fall_due_and_goes_on_from_its_checkpoint",
            "tests/integration/pipeline/test_local_cluster.py::test_a_cluster_has_the_results_of_one_process_by_its_package_and_shows_no_secret",
        ),
    ),
]


def rows(address: str, sql: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(address, autocommit=True) as connection:
        return connection.execute(sql.encode()).fetchall()


async def prepare(address: str) -> None:
    queues = PostgresTransport(address)
    store = PostgresStore(address)
    await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    await queues.create_queues(["orders", "error"])
    await queues.close()
    await store.close()


async def fill(address: str, first: int, number: int, over: timedelta, destination: str = "orders") -> None:
    """Store messages that fall due one after the other, from now on."""
    store, begin = PostgresStore(address), SystemClock().now()
    await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
    messages = [
        DelayedMessage(f"m-{n}", begin + (n - first) * over / number, destination, {}, b"x" * 100)
        for n in range(first, first + number)
    ]
    await store.store_many(messages, begin)
    await store.close()


def delivered(address: str) -> int:
    return rows(address, "SELECT count(*) FROM postdate.record WHERE kind = 2")[0][0]


def test_a_sweep_on_the_cluster_delivers_what_is_due(database: str, driver: RestartedDriver) -> None:
    anyio.run(prepare, database)
    anyio.run(fill, database, 0, 5_000, timedelta(0))
    found = driver.run(f"{JOBS}:sweep_once", store=database, transport=database, slots=2)
    assert (found["delivered"], found["left"]) == (5_000, 0)
    assert rows(database, "SELECT count(*), count(DISTINCT message_id) FROM postdate.queue_message") == [(5_000, 5_000)]


@pytest.mark.parametrize("kind", ["executor", "python", "driver"])
def test_kills_during_a_sweep_lose_and_double_nothing(
    kind: str, cluster: SparkCluster, driver: RestartedDriver, database: str, tmp_path: Path, chance: random.Random
) -> None:
    """Messages fall due all the time; a round ends when all of them are delivered."""
    anyio.run(prepare, database)
    for number in range(kill_rounds()):
        first = number * MESSAGES
        begun = first + chance.randrange(1, MESSAGES // 2)
        anyio.run(fill, database, first, MESSAGES, OVER)
        with killing(
            cluster,
            chance.randrange(1_000_000),
            1.0,
            {kind},
            driver=driver,
            ready=lambda: delivered(database) >= begun,  # noqa: B023 - asked in this round only
            at_most=1 if kind == "driver" else chance.randrange(1, 4),
        ) as kills:
            batches = driver.run(
                f"{JOBS}:sweep_until_nothing_waits",
                store=database,
                transport=database,
                checkpoint=str(tmp_path / "checkpoint"),
                ledger=str(tmp_path / "ledger"),
            )
        assert kills.total >= 1
        print(f"{kind}, round {number + 1}: {kills.total} kills, {batches} micro-batches")  # noqa: T201
    messages = kill_rounds() * MESSAGES
    found = rows(database, "SELECT count(*), count(DISTINCT message_id) FROM postdate.queue_message")
    assert found == [(messages, messages)]
    audited = driver.run(f"{JOBS}:audit_with_ledger", store=database, ledger=str(tmp_path / "ledger"))
    counts = audited["counts"]
    assert (counts["lost"], counts["duplicated"], counts["early"]) == (0, 0, 0)
    assert (counts["scheduled"], counts["delivered"], counts["pending"]) == (messages, messages, 0)


def test_to_rabbitmq_a_kill_loses_nothing_and_what_comes_twice_has_one_id(
    cluster: SparkCluster,
    driver: RestartedDriver,
    database: str,
    rabbitmq_url: str,
    tmp_path: Path,
    chance: random.Random,
) -> None:
    queue = f"cluster-{tmp_path.name}"
    anyio.run(prepare, database)
    with channel_of(rabbitmq_url) as channel:
        channel.queue_declare(queue, durable=True)
        try:
            anyio.run(fill, database, 0, MESSAGES, OVER, queue)
            begun = chance.randrange(1, MESSAGES // 2)
            with killing(
                cluster,
                chance.randrange(1_000_000),
                1.0,
                {"executor", "python"},
                ready=lambda: delivered(database) >= begun,
                at_most=2,
            ) as kills:
                driver.run(
                    f"{JOBS}:sweep_until_nothing_waits",
                    store=database,
                    transport=rabbitmq_url,
                    checkpoint=str(tmp_path / "checkpoint"),
                    ledger=str(tmp_path / "ledger"),
                )
            assert kills.total >= 1
            came = Counter[str]()
            while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
                properties = got[1]
                assert properties is not None
                came[str(properties.message_id)] += 1
        finally:
            channel.queue_delete(queue)
    print(f"{kills.total} kills, {came.total() - len(came)} came again")  # noqa: T201
    assert came.keys() == {f"m-{n}" for n in range(MESSAGES)}
