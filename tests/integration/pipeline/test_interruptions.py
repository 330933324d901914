"""A job ends right although a Python worker is killed, or the store is away for some seconds."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from pyspark import TaskContext
from pyspark.sql import SparkSession
from tests.integration.test_postgres_silence import through
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.proxy import FaultyLink
from tests.waiting import Eventually

from postdate.errors import PipelineError, StoreError, StoreUnreachable
from postdate.pipeline.audit import audit
from postdate.pipeline.frames import scan_frame, scan_parts
from postdate.pipeline.rows import INSTANT, split_columns
from postdate.pipeline.schedule import ScheduleJob, schedule
from postdate.pipeline.stores import StoreSpec, open_in_task, open_spec, retry_call

MESSAGE = (
    "concat('m-', id) AS message_id",
    "'orders' AS destination",
    "timestamp'2030-05-01 12:00:00' + make_dt_interval(0, 0, 0, id) AS due",
)


@pytest.fixture
def link(postgres_url: str) -> Iterator[FaultyLink]:
    server = urlsplit(postgres_url)
    assert server.hostname is not None
    assert server.port is not None
    with FaultyLink(server.hostname, server.port) as link:
        yield link


@pytest.fixture
def postgres(postgres_url: str, link: FaultyLink) -> Iterator[StoreSpec]:
    """A store behind a link that breaks on demand."""
    schema = fresh_schema()
    yield StoreSpec(through(link, postgres_url), schema=schema, endpoint="service")
    drop_schema(postgres_url, schema)


def count_stored(url: str, spec: StoreSpec) -> int:
    assert spec.schema is not None
    table = sql.Identifier(spec.schema, "service.timeouts")
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(table)).fetchall()
    return rows[0][0]


def go_away(link: FaultyLink, chance: random.Random) -> None:
    """Cut the link for one to three seconds. How long an outage lasts does not depend on who waits for its end."""
    link.cut()
    threading.Event().wait(1 + 2 * chance.random())
    link.restore()


def test_a_killed_python_worker_does_not_end_a_job(spark: SparkSession) -> None:
    def die_at_first(batches: Any) -> Any:
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from batches

    assert spark.range(10).mapInArrow(die_at_first, "id long").count() == 10


@pytest.mark.soak(
    "a whole job that waits for a server",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_interruptions.py::test_a_task_that_stores_goes_on_where_the_store_went_away",
        "tests/integration/pipeline/test_interruptions.py::test_a_scan_waits_for_a_store_that_is_away",
    ),
)
def test_a_schedule_waits_for_a_store_that_is_away(
    spark: SparkSession,
    postgres: StoreSpec,
    postgres_url: str,
    link: FaultyLink,
    eventually: Eventually,
    chance: random.Random,
) -> None:
    with open_spec(postgres, create=True) as store:
        store.setup()
    messages = spark.range(0, 6_000, numPartitions=2).selectExpr(*MESSAGE)

    def interrupt() -> None:
        eventually(lambda: count_stored(postgres_url, postgres) >= 100, "the first batches are stored")
        interruptions.append(count_stored(postgres_url, postgres))
        go_away(link, chance)

    interruptions = list[int]()
    with ExitStack() as stack:
        interrupter = threading.Thread(target=interrupt)
        stack.callback(interrupter.join)
        interrupter.start()
        result = schedule(messages, ScheduleJob(postgres, datetime(2030, 5, 1, tzinfo=UTC), batch=20))
    assert 100 <= interruptions[0] < 6_000
    assert (result.read, result.set_aside) == (6_000, {})
    assert count_stored(postgres_url, postgres) == 6_000
    counts = audit(spark, postgres, datetime(2030, 5, 1, tzinfo=UTC)).counts
    assert (counts.scheduled, counts.pending, counts.lost, counts.duplicated) == (6_000, 6_000, 0, 0)


def test_a_scan_waits_for_a_store_that_is_away(
    spark: SparkSession, postgres: StoreSpec, link: FaultyLink, chance: random.Random
) -> None:
    with open_spec(postgres, create=True) as store:
        store.setup()
    schedule(spark.range(100).selectExpr(*MESSAGE), ScheduleJob(postgres, datetime(2030, 5, 1, tzinfo=UTC)))
    frame = scan_frame(spark, postgres, "pending", ("message_id",), scan_parts(postgres, "pending", 2))
    away = threading.Thread(target=go_away, args=[link, chance])
    away.start()
    assert frame.count() == 100
    away.join()


def test_a_store_that_stays_away_fails_the_task_when_the_patience_is_over(
    postgres: StoreSpec, link: FaultyLink
) -> None:
    with open_spec(postgres, create=True) as store:
        store.setup()
    impatient = StoreSpec(postgres.address, schema=postgres.schema, endpoint="service", patience=timedelta(seconds=1))
    link.cut()
    with pytest.raises(StoreUnreachable), open_in_task(impatient) as store:
        store.retry(lambda: store.count_overdue(datetime(2030, 5, 1, tzinfo=UTC)))


def test_only_transient_errors_are_repeated() -> None:
    calls = list[BaseException]()

    def fail(*errors: BaseException) -> str:
        if len(calls) < len(errors):
            calls.append(errors[len(calls)])
            raise calls[-1]
        return "answer"

    patience = timedelta(seconds=10)
    assert retry_call(lambda: fail(StoreUnreachable("away"), StoreUnreachable("still")), patience) == "answer"
    assert len(calls) == 2
    for error in (StoreError("wrong"), PipelineError("wrong")):
        calls.clear()
        with pytest.raises(type(error)):
            retry_call(lambda error=error: fail(error), patience)
        assert len(calls) == 1


def test_a_task_that_stores_goes_on_where_the_store_went_away(
    postgres: StoreSpec, postgres_url: str, link: FaultyLink, chance: random.Random
) -> None:
    """As the task of a schedule, without Spark: the store is away between two of its batches."""
    with open_spec(postgres, create=True) as store:
        store.setup()
    due = pa.array([datetime(2030, 5, 1, 12, tzinfo=UTC)] * 10, INSTANT)
    away = threading.Thread(target=go_away, args=[link, chance])
    with open_in_task(postgres) as store:
        for first in (0, 10, 20):
            ids = pa.array([f"m-{n}" for n in range(first, first + 10)])
            queues = pa.array(["orders"] * 10)
            batch = pa.record_batch([ids, due, queues], names=["message_id", "due", "destination"])
            messages, bad = split_columns(batch, store.largest_message_bytes)
            assert not bad
            if first == 10:
                away.start()
            assert store.store_batch(messages, datetime(2030, 5, 1, tzinfo=UTC)).stored == 10
    away.join()
    assert count_stored(postgres_url, postgres) == 30
