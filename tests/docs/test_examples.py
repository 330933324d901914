"""The page of the examples tells the truth: its commands run, and print what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples.flights.__main__ import app
from tests.cli.test_docs import examples, pattern, tidy

from postdate.cli.entry import run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
(_BLOCK,) = re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
DAY, ANOTHER_YEAR = examples(_BLOCK)


@pytest.mark.soak(
    "lives through a day, with processes beside it",
    part="docs",
    proven_by=(
        "tests/integration/pipeline/test_flights.py::test_a_day_has_the_messages_of_its_flights_that_are_due_on_it",
        "tests/cli/test_docs.py::test_every_example_prints_what_the_page_says[pipeline]",
    ),
)
def test_the_flights_are_delivered_on_time(tmp_path: Path) -> None:
    command, environment = [sys.executable, *DAY.command.split()[1:]], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert pattern(DAY.expected).fullmatch(tidy(done.stdout)), done.stdout
    assert (tmp_path / "postdate-demo-report.html").exists()


def test_flights_of_another_year_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ANOTHER_YEAR.command.split()[3:], app, "python -m examples.flights") == 2
    assert capsys.readouterr().err == ANOTHER_YEAR.expected


def test_the_make_target_runs_the_main_job() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^demo: install .*\n\t\$\(BIN\)/python -m examples\.flights\n", makefile, re.MULTILINE)


def test_every_option_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"], app, "python -m examples.flights") == 0
    options = set(re.findall(r"--[a-z]+", capsys.readouterr().out)) - {"--help"}
    assert {option for option in options if f"`{option}" not in PAGE} == set()
