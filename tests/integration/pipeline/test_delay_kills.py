"""A driver that is killed over and over: every row that waits in the delay operator is delivered, once, never early."""

import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from benchmarks.delay import Delivered, Places, accounted, run_killed, write_messages

ROWS, KILLS = 20_000, int(os.environ.get("POSTDATE_KILL_ROUNDS", "2"))


@pytest.mark.timeout(900 + 60 * KILLS)
@pytest.mark.soak(
    "the driver of a query of minutes is killed again and again",
    part="kills",
    proven_by=(
        "tests/integration/pipeline/test_delay.py::test_rows_that_wait_are_in_the_checkpoint_and_go_once_after_a_restart",
        "tests/integration/pipeline/test_delay_in_virtual_time.py::test_each_row_goes_once_and_never_early_however_far_off_it_is",
        "tests/integration/pipeline/test_delay_in_virtual_time.py::test_rows_go_in_one_micro_batch_after_an_outage",
    ),
)
def test_nothing_is_lost_doubled_or_early_when_the_driver_is_killed_again_and_again(tmp_path: Path) -> None:
    places = Places(tmp_path)
    run_killed(places, ROWS, KILLS, spread_seconds=12, cores=2)
    rows = Delivered(places.delivered).table()
    written = pq.read_table(places.messages)
    assert Counter(rows.column("id").to_pylist()) == Counter(written.column("id").to_pylist())
    assert rows.select(written.schema.names).sort_by("id").to_pylist() == written.sort_by("id").to_pylist()
    early = pc.less(rows.column("emitted"), rows.column("due"))
    assert not any(early.to_pylist())
    account = accounted(places, ROWS)
    assert (account.delivered, account.lost, account.doubled, account.changed, account.early) == (ROWS, 0, 0, 0, 0)


def test_the_account_finds_what_is_lost_doubled_changed_and_early(tmp_path: Path) -> None:
    places = Places(tmp_path)
    first_us = write_messages(places.messages, range(100), lead_seconds=-10, spread_seconds=1, file_rows=30)
    written = pq.read_table(places.messages).sort_by("due").to_pylist()
    delivered = [{**row, "emitted": row["due"]} for row in written[1:]]
    delivered.append(delivered[50])
    delivered[10]["body"] = "another"
    delivered[20]["emitted"] = written[0]["due"]
    commit(places.delivered, delivered[:60], number=0)
    commit(places.delivered, delivered[60:], number=1)
    account = accounted(places, 100)
    assert (account.delivered, account.lost, account.doubled, account.changed, account.early) == (100, 1, 1, 1, 1)
    assert Delivered(places.delivered).rows() == 100
    assert first_us == int(written[0]["due"].timestamp() * 1_000_000)


def commit(directory: Path, rows: list[dict[str, object]], number: int) -> None:
    """Write a file of rows and name it in the log of the sink; beside it lies one that was never committed."""
    log = directory / "_spark_metadata"
    log.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, directory / f"{number}.parquet")
    pq.write_table(table, directory / f"{number}-killed.parquet")
    entry = json.dumps({"path": (directory / f"{number}.parquet").as_uri(), "action": "add"})
    (log / str(number)).write_text(f"v1\n{entry}\n", encoding="utf-8")
