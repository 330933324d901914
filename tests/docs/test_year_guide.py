"""The guide about the year of flights shows code that runs: its script, here for one quiet day."""

import functools
import os
import re
import runpy
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests import java

from postdate.pipeline.session import spark_session
from postdate.pipeline.sweep import sweep_continuously

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
SCRIPT = GUIDES / "year" / "year.py"


@pytest.mark.soak(
    "a whole day of flights",
    part="docs",
    proven_by="tests/integration/pipeline/test_flights.py::test_a_day_has_the_messages_of_its_flights_that_are_due_on_it",
)
def test_one_day_is_scheduled_forecast_swept_and_audited(tmp_path: Path) -> None:
    folder = tmp_path / "year"
    slice_ = ["--day", "2013-12-25", "--folder", str(folder), "--head-start", "5", "--seconds", "5"]
    environment = {**os.environ, "PYTHONPATH": str(GUIDES.parents[1])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *slice_], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    stored = [_number(found) for found in re.findall(r"^([\d,]+) stored", done.stdout, re.MULTILINE)]
    (swept,) = re.findall(r"^([\d,]+) delivered, ([\d,]+) expired, 0 left$", done.stdout, re.MULTILINE)
    assert stored[0] == stored[1] == sum(map(_number, swept)) > 1_000
    counted = [_audited(done.stdout, name) for name in ("delivered", "expired", "discarded")]
    # What was delivered in time and expired in its queue, which nobody reads here, counts as all three.
    ended = [delivered + expired - discarded for delivered, expired, discarded in zip(*counted, strict=True)]
    assert ended == _audited(done.stdout, "scheduled") == stored
    assert done.stdout.count("clean: True") == 2
    _expect_pictures_and_pages(folder)


@pytest.mark.soak(
    "four jobs on Spark for one page",
    part="docs",
    proven_by=(
        "tests/integration/pipeline/test_flights.py::test_a_day_has_the_messages_of_its_flights_that_are_due_on_it",
        "tests/docs/test_year_guide.py::test_the_guide_shows_the_lines_of_the_script",
    ),
)
def test_the_script_lives_through_a_handful_of_messages(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its functions, with a second for the day and nothing that expires."""
    script = runpy.run_path(str(SCRIPT))
    names = ", ".join(f"('{n}/{queue}', {n * 3600}L)" for n in range(3) for queue in script["QUEUES"])
    few = f"""
        SELECT id AS message_id, timestamp_seconds(1388000000L + s) AS due, CAST(NULL AS timestamp) AS expires_at,
          map('n', id) AS headers, encode(id, 'UTF-8') AS body
        FROM VALUES {names} AS t(id, s)"""
    with java.lasting(java.folder(tmp_path_factory)), spark_session("year", cores=1) as spark:
        for name, value in java.SMALL_DATA.items():
            spark.conf.set(name, value)
        # The Java of the documentation has one core: a sweep gives it to others after a moment.
        brief = functools.partial(sweep_continuously, residency=timedelta(seconds=0.2))
        few_messages = SimpleNamespace(messages=spark.sql(few))
        script["messages_of"].__globals__.update(flight_messages=lambda *_: few_messages, sweep_continuously=brief)
        script["live_through_the_year"](spark, tmp_path, None)
        script["live_through_a_day"](spark, tmp_path, script["BUSIEST_DAY"], head_start=1, seconds=1)
    printed = capsys.readouterr().out
    assert re.findall(r"^(\d+) stored", printed, re.MULTILINE) == ["9", "9"]
    assert "\n9 delivered, 0 expired, 0 left\n" in printed
    assert (_audited(printed, "scheduled"), _audited(printed, "delivered")) == ([9, 9], [9, 9])
    assert printed.count("clean: True") == 2
    _expect_pictures_and_pages(tmp_path)


def test_the_guide_shows_the_lines_of_the_script() -> None:
    code = SCRIPT.read_text(encoding="utf-8")
    shown = re.findall(r"^```py\n(.*?)^```", (GUIDES / "year.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(shown) > 3
    for block in shown:
        for part in re.split(r"^…\n", block, flags=re.MULTILINE):
            assert any(textwrap.indent(part, " " * depth) in code for depth in (0, 4, 8)), part


def _expect_pictures_and_pages(folder: Path) -> None:
    for picture in ("load.png", "lateness.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    for page in ("forecast.html", "audit.html"):
        assert "<svg" in (folder / page).read_text(encoding="utf-8")


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _audited(printed: str, name: str) -> list[int]:
    """Return one line of each audit's table."""
    return [_number(found) for found in re.findall(rf"^{name} +([\d,]+)$", printed, re.MULTILINE)]
