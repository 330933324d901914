"""The guide about the year of flights shows code that runs: its script, here for one quiet day."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
SCRIPT = GUIDES / "year" / "year.py"


@pytest.mark.soak(
    "a whole day of flights",
    part="docs",
    proven_by=(
        "tests/docs/test_year_guide.py::test_the_guide_shows_the_lines_of_the_script",
        "tests/integration/pipeline/test_flights.py::test_a_day_has_the_messages_of_its_flights_that_are_due_on_it",
        "tests/integration/pipeline/test_audit.py::test_a_day_is_counted",
    ),
)
def test_one_day_is_scheduled_forecast_swept_and_audited(tmp_path: Path) -> None:
    folder = tmp_path / "year"
    slice_ = ["--day", "2013-12-25", "--folder", str(folder), "--head-start", "5", "--seconds", "5"]
    done = subprocess.run([sys.executable, str(SCRIPT), *slice_], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stored = [_number(found) for found in re.findall(r"^([\d,]+) stored", done.stdout, re.MULTILINE)]
    (swept,) = re.findall(r"^([\d,]+) delivered, ([\d,]+) expired, 0 left$", done.stdout, re.MULTILINE)
    assert stored[0] == stored[1] == sum(map(_number, swept)) > 1_000
    counted = [_audited(done.stdout, name) for name in ("delivered", "expired", "discarded")]
    # What was delivered in time and expired in its queue, which nobody reads here, counts as all three.
    ended = [delivered + expired - discarded for delivered, expired, discarded in zip(*counted, strict=True)]
    assert ended == _audited(done.stdout, "scheduled") == stored
    assert done.stdout.count("clean: True") == 2
    for picture in ("load.png", "lateness.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    for page in ("forecast.html", "audit.html"):
        assert "<svg" in (folder / page).read_text(encoding="utf-8")


def test_the_guide_shows_the_lines_of_the_script() -> None:
    code = SCRIPT.read_text(encoding="utf-8")
    shown = re.findall(r"^```py\n(.*?)^```", (GUIDES / "year.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(shown) > 3
    for block in shown:
        for part in re.split(r"^…\n", block, flags=re.MULTILINE):
            assert any(textwrap.indent(part, " " * depth) in code for depth in (0, 4, 8)), part


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _audited(printed: str, name: str) -> list[int]:
    """Return one line of each audit's table."""
    return [_number(found) for found in re.findall(rf"^{name} +([\d,]+)$", printed, re.MULTILINE)]
