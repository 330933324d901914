"""What a look costs: an index from its beginning, whatever the planner believes and however much waits."""

import json
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from tests.integration.postgres_place import Place, now, placed
from tests.waiting import until

from postdate.backends.postgres import observation
from postdate.backends.postgres.expiring import ExpiryStatements
from postdate.backends.postgres.names import sql
from postdate.backends.postgres.outbox import PostgresOutbox
from postdate.backends.postgres.queues import QueueStatements
from postdate.backends.postgres.sagas import PostgresSagaStore
from postdate.clock import EARLIEST
from postdate.ports import MessageFilter

DAY = timedelta(days=1)


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every step of a plan."""
    return [plan, *(node for part in plan.get("Plans", ()) for node in nodes(part))]


def plan_of(connection: psycopg.Connection[Any], statement: bytes, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a statement, undo it, and return the steps of its plan."""
    with connection.transaction(force_rollback=True):
        found = connection.execute(b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, values).fetchone()
    assert found is not None
    plan = found[0] if isinstance(found[0], list) else json.loads(found[0])
    return nodes(plan[0]["Plan"])


def goes_by_the_index(steps: list[dict[str, Any]], table: str, most_rows: int) -> None:
    """Nothing is read from end to end, nothing of the table is sorted, and no more rows are touched than wanted."""
    of_table = [step for step in steps if step.get("Relation Name") == table]
    assert of_table, steps
    for step in of_table:
        assert step["Node Type"] not in {"Seq Scan", "Bitmap Heap Scan"}, step
        read = (step["Actual Rows"] + step.get("Rows Removed by Filter", 0)) * step["Actual Loops"]
        assert read <= most_rows + 1, step
    scans = [step for step in of_table if "Index" in step["Node Type"]]
    assert any("attempt_at" in step.get("Index Name", "") for step in scans), of_table
    sorts = [step for step in steps if step["Node Type"] in {"Sort", "Incremental Sort"}]
    assert all(step["Actual Rows"] * step["Actual Loops"] <= most_rows for step in sorts), sorts
    touched = max(step["Shared Hit Blocks"] + step["Shared Read Blocks"] for step in steps)
    assert touched < 60 * (most_rows + 10), f"{touched} blocks for {most_rows} rows"


def fill(place: Place, first: int, count: int) -> None:
    """Put messages straight into the tables: half of them due, all of them in a queue that exists."""
    place.run(
        f"""
        INSERT INTO "service.timeouts" (number, due, attempt_at, message_id, destination)
        SELECT n, at, at, 'm-' || n, 'done' FROM (
            SELECT n, now() + (n - {first + count // 2}) * interval '1 ms' AS at
            FROM generate_series({first + 1}, {first + count}) AS n) AS g"""
    )
    place.run(f"INSERT INTO content SELECT n, '{{}}', 'x' FROM generate_series({first + 1}, {first + count}) AS n")


def statements(place: Place, limit: int) -> dict[str, tuple[bytes, dict[str, Any], int]]:
    """Return what a service asks again and again, with its parameters, and how many rows it may touch."""
    sql, at = place.store._sql, {"now": now(), "from": None, "store": 1}
    return {
        "claim": (sql.claim, {**at, "limit": limit}, limit),
        "next": (sql.next_attempt, {"from": None, "held": [1, 2, 3], "store": 1}, 4),
        "move": (sql.move, {**at, "limit": limit, "listing": False}, limit),
        "move_few": (sql.move_few, {**at, "limit": limit, "held": "{1,2,3}", "listing": False}, 2 * limit + 4),
    }


@pytest.fixture(scope="module")
async def many(postgres_url: str):
    """A place where very many messages wait."""
    async with placed(postgres_url) as place:
        fill(place, 0, 200_000)
        place.run('ANALYZE "service.timeouts"')
        place.run("ANALYZE content")
        yield place


@pytest.mark.parametrize("limit", [1, 100, 1_000])
@pytest.mark.parametrize("what", ["claim", "next", "move", "move_few"])
async def test_a_look_at_very_many_messages_reads_what_it_takes(many: Place, what: str, limit: int) -> None:
    statement, values, rows = statements(many, limit)[what]
    with many.store.database.connect() as connection:
        goes_by_the_index(plan_of(connection, statement, values), "service.timeouts", rows)


@pytest.mark.parametrize("what", ["claim", "next", "move", "move_few"])
async def test_a_prepared_look_at_very_many_messages_reads_what_it_takes(many: Place, what: str) -> None:
    """After five executions the server may have made a plan for all values of the parameters."""
    statement, values, rows = statements(many, 100)[what]
    with many.store.database.connect() as connection:
        connection.execute("SET plan_cache_mode = force_generic_plan")
        goes_by_the_index(prepared_plan(connection, statement, values), "service.timeouts", rows)


def prepared_plan(
    connection: psycopg.Connection[Any], statement: bytes, values: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the plan of a statement that this session has prepared, as it is executed."""
    with connection.transaction(force_rollback=True):
        connection.execute("LOAD 'auto_explain'")
        for name, value in {
            "log_min_duration": "0",
            "log_analyze": "on",
            "log_format": "json",
            "log_buffers": "on",
        }.items():
            connection.execute(f"SET LOCAL auto_explain.{name} = '{value}'".encode())
        connection.execute("SET LOCAL client_min_messages = log")
        said: list[str] = []
        connection.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
        connection.execute(statement, values, prepare=True)
    (plan,) = [text.partition("plan:\n")[2] for text in said if "plan:\n" in text]
    return nodes(json.loads(plan)["Plan"])


async def test_a_plan_made_while_the_table_was_empty_still_goes_by_the_index(postgres_url: str) -> None:
    """The server is never told how many messages there are: 50,000 come after the plans are made, without ANALYZE."""
    async with placed(postgres_url) as place:
        place.run('ALTER TABLE "service.timeouts" SET (autovacuum_enabled = off)')
        place.run("ALTER TABLE content SET (autovacuum_enabled = off)")
        with place.store.database.connect() as connection:
            connection.execute("SET plan_cache_mode = force_generic_plan")
            for statement, values, _ in statements(place, 100).values():
                for _ in range(8):
                    with connection.transaction(force_rollback=True):
                        connection.execute(statement, values, prepare=True)
            fill(place, 0, 50_000)
            for name, (statement, values, rows) in statements(place, 100).items():
                goes_by_the_index(prepared_plan(connection, statement, values), "service.timeouts", rows)
                assert name in {"claim", "next", "move", "move_few"}


async def test_a_receiver_reads_what_it_takes_of_a_long_queue(postgres_url: str) -> None:
    async with placed(postgres_url) as place:
        place.run(
            "INSERT INTO queue_message (queue_id, content, message_id) "
            "SELECT queue_id, n, 'm-' || n FROM generate_series(1, 50000) AS n, queue"
        )
        place.run("INSERT INTO content SELECT n, '{}', 'x' FROM generate_series(1, 50000) AS n")
        sql = QueueStatements(place.store.database.names)
        with place.store.database.connect() as connection:
            row = connection.execute(sql.find, ("done",)).fetchone()
            assert row is not None
            values = {"holder": 1, "queue": row[0], "limit": 16, "low": 0}
            steps = plan_of(connection, sql.claim, values)
        of_queue = [step for step in steps if step.get("Relation Name") == "queue_message"]
        assert all(step["Actual Rows"] * step["Actual Loops"] <= 16 for step in of_queue), of_queue
        assert all(step["Node Type"] not in {"Seq Scan", "Bitmap Heap Scan"} for step in of_queue), of_queue


@pytest.mark.parametrize("of", ["sagas", "outbox"])
async def test_rows_of_several_messages_are_read_and_written_by_the_index(postgres_url: str, of: str) -> None:
    """Planned while there were ten; 50,000 come, of which the server is not told."""
    async with placed(postgres_url) as place:
        store = (PostgresSagaStore if of == "sagas" else PostgresOutbox)(postgres_url, schema=place.schema)
        row = "n::text, 'kind', 'n', 'n-' || n, 1, '{}', '{}'" if of == "sagas" else "'e', n::text, now()"
        table = "saga" if of == "sagas" else "outbox"
        await store.setup()
        place.run(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        place.run(f"INSERT INTO {table} SELECT {row} FROM generate_series(1, 10) AS n")
        place.run(f"VACUUM ANALYZE {table}")
        given: dict[str, Any] = {"saga_type": "kind", "saga_id": "7", "property": "n", "value": "n-7", "version": 1}
        given |= {"state": "", "details": "", "endpoint": "e", "message_id": "7", "at": now(), "handled_at": now()}
        given |= {"dispatched_at": now()}
        values: dict[str, Any] = {name: [value] * 3 for name, value in given.items()} | {"operations": [b""] * 3}
        with place.store.database.connect() as connection:
            connection.execute("SET plan_cache_mode = force_generic_plan")
            for statement in store._batch_statements.values():
                for _ in range(8):
                    with connection.transaction(force_rollback=True):
                        connection.execute(statement, values, prepare=True)
            place.run(f"INSERT INTO {table} SELECT {row} FROM generate_series(11, 50000) AS n")
            for step, statement in store._batch_statements.items():
                steps = prepared_plan(connection, statement, values)
                if "INSERT" not in statement.decode():
                    assert rows_read(steps, table) <= 3, (step, steps)
            for statement, rows in zip(getattr(store, "_pages", ()), (3, 0), strict=False):
                steps = plan_of(connection, statement, {"saga_type": "kind", "saga_id": "7", "limit": 3})
                assert rows_read(steps, table) == rows
        await store.close()


async def test_the_latest_deliveries_are_read_from_the_end_of_the_records(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observation, "_LATEST_PAGES", 10)
    async with placed(postgres_url) as place:
        place.run(
            "INSERT INTO record (at, kind, message_id) SELECT now(), 2, 'm-' || n FROM generate_series(1, 20000) AS n"
        )
        observer, names = place.store.observer(), place.store.database.names
        values = {"record": names.name_of("record").replace("%%", "%"), "table": "service.timeouts", "limit": 5}
        with place.store.database.connect() as connection:
            steps = plan_of(connection, sql(observer._latest_query), values)
        (scan,) = [step for step in steps if step.get("Relation Name") == "record"]
        assert scan["Node Type"] == "Tid Range Scan"
        assert scan["Actual Rows"] + scan["Rows Removed by Filter"] < 2_000


def enqueue(place: Place, queue: str, first: int, count: int, ends_at: str = "NULL") -> None:
    """Put messages straight into a queue, with their contents."""
    place.run(
        f"INSERT INTO queue_message (queue_id, content, message_id, ends_at) SELECT queue_id, n, 'm-' || n, {ends_at} "
        f"FROM generate_series({first + 1}, {first + count}) AS n, queue WHERE name = '{queue}' ORDER BY n"
    )
    place.run(f"INSERT INTO content SELECT n, '{{}}', 'x' FROM generate_series({first + 1}, {first + count}) AS n")


def rows_read(steps: list[dict[str, Any]], table: str) -> int:
    """Return how many rows of a table the step that reads most of them reads; none of them from end to end."""
    of_table = [step for step in steps if step.get("Relation Name") == table]
    assert of_table, steps
    assert all(step["Node Type"] not in {"Seq Scan", "Bitmap Heap Scan"} for step in of_table), of_table
    return max(
        (step["Actual Rows"] + step.get("Rows Removed by Filter", 0)) * step["Actual Loops"] for step in of_table
    )


@pytest.mark.parametrize("told", [True, False], ids=["analyzed", "planned while empty"])
async def test_messages_that_expired_are_found_and_removed_without_a_walk(postgres_url: str, *, told: bool) -> None:
    """Thousands at the head of a queue, and many that live behind them and in another queue.

    Neither a claim, nor the removal, nor a look when nothing has expired reads more than it takes.
    """
    async with placed(postgres_url) as place:
        place.run("ALTER TABLE queue_message SET (autovacuum_enabled = off)")
        place.run("ALTER TABLE content SET (autovacuum_enabled = off)")
        sql = QueueStatements(place.store.database.names)
        removal = ExpiryStatements(place.store.database.names)
        with place.store.database.connect() as connection:
            row = connection.execute(sql.find, ("done",)).fetchone()
            assert row is not None
            claim: dict[str, Any] = {"holder": 1, "queue": row[0], "limit": 16, "low": 0}
            discard = {"holder": 1, "queue": row[0], "numbers": "{1,2,3}"}
            looks = [(sql.claim, claim, 16), (removal.reap, {"limit": 500}, 500), (removal.discard, discard, 3)]
            for statement, values, _ in looks:
                for _ in range(8):
                    with connection.transaction(force_rollback=True):
                        connection.execute(statement, values, prepare=True)
            enqueue(place, "done", 0, 20_000, "clock_timestamp()")
            enqueue(place, "done", 20_000, 50_000)
            enqueue(place, "consumer", 70_000, 50_000, "clock_timestamp() + interval '1 day'")
            if told:
                place.run("ANALYZE queue_message")
                place.run("ANALYZE content")
            for statement, values, most in looks:
                steps = prepared_plan(connection, statement, values)
                assert rows_read(steps, "queue_message") <= most, statement
                assert rows_read(steps, "content") <= most, statement
            place.run("UPDATE queue_message SET ends_at = NULL WHERE ends_at < clock_timestamp()")

            def nothing_is_found_in_a_few_blocks() -> bool:
                place.run("VACUUM queue_message")  # which leaves what sessions with old snapshots can see
                steps = prepared_plan(connection, removal.reap, {"limit": 500})
                assert rows_read(steps, "queue_message") == 0
                return max(step["Shared Hit Blocks"] + step["Shared Read Blocks"] for step in steps) < 10

            await until(nothing_is_found_in_a_few_blocks)


async def test_looking_up_one_message_reads_a_few_pages(many: Place) -> None:
    sql, values = many.store._sql, {"id": "m-1", "store": 1}
    with many.store.database.connect() as connection:
        connection.execute("SET enable_bitmapscan = on")  # as for a history: the only way by an index of ranges
        for statement in (sql.get, sql.history):
            steps = plan_of(connection, statement, values)
            assert max(step["Shared Hit Blocks"] + step["Shared Read Blocks"] for step in steps) < 20, statement


async def test_a_list_is_by_due_time_and_reads_what_it_shows(postgres_url: str) -> None:
    """Of messages some of which are claimed, postponed, or attempted earlier."""
    async with placed(postgres_url) as place:
        fill(place, 0, 20_000)
        for number, attempt_at in ((3, "NULL"), (5, "due + interval '1 day'"), (7, "due - interval '1 day'")):
            place.run(f'UPDATE "service.timeouts" SET attempt_at = {attempt_at} WHERE number = {number}')
        place.run('ANALYZE "service.timeouts"')
        begin = {"due_from": EARLIEST, "behind": -1, "due_to": None, "limit": 50}
        found: list[dict[str, Any]] = [
            {**begin, "destination": None, "among": None},
            {**begin, "destination": "done", "among": 60},
            {**begin, "destination": "nowhere", "among": 60},
        ]
        with place.store.database.connect() as connection:
            connection.execute("SET plan_cache_mode = force_generic_plan")
            for values in found:
                rows = connection.execute(place.store._sql.list_pending, values).fetchall()
                assert [row[0] for row in rows] == ([] if values["destination"] == "nowhere" else [*range(1, 51)])
                steps = prepared_plan(connection, place.store._sql.list_pending, values)
                assert rows_read(steps, "service.timeouts") <= (values["among"] or 50) + 1  # that is attempted earlier


@pytest.mark.parametrize("told", [True, False], ids=["analyzed", "planned while empty"])
async def test_a_page_in_a_herd_reads_what_it_shows(postgres_url: str, *, told: bool) -> None:
    """Twenty thousand are due at one instant, and a page begins in their midst."""
    async with placed(postgres_url) as place:
        with place.store.database.connect() as connection:
            connection.execute("SET plan_cache_mode = force_generic_plan")
            values = {"destination": None, "due_to": None, "among": None, "limit": 50}
            list_pending, begin = place.store._sql.list_pending, {"due_from": EARLIEST, "behind": -1}
            prepared_plan(connection, list_pending, {**begin, **values})
            fill(place, 0, 20_000)
            place.run("UPDATE \"service.timeouts\" SET due = date_trunc('day', now()) + interval '9 h'")
            place.run('UPDATE "service.timeouts" SET attempt_at = due')
            if told:
                place.run('VACUUM ANALYZE "service.timeouts"')
            (first,) = await place.store.list_pending(MessageFilter(), 1)
            values |= {"due_from": first.due, "behind": 9_000}
            rows = connection.execute(list_pending, values).fetchall()
            assert [row[0] for row in rows] == [*range(9_001, 9_051)]
            assert rows_read(prepared_plan(connection, list_pending, values), "service.timeouts") <= 51
