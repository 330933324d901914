"""What the simulator promises of itself: the endpoint keeps its promises, and what is taken out of it is missed.

Source: ADR 0019; docs/guides/testing.md has the table of what is taken out.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulator.mutations import MUTATIONS, first_found
from tests.simulator.run import run
from tests.simulator.soak import soak

SEEDS = range(100)
"""Those of every profile are among them; `make soak` does more."""

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "testing.md"
ROW = re.compile(r"^\| `(?P<fix>[a-z-]+)` \|.*\| (?P<seed>\d+) \| [^|]+ \|$", re.MULTILINE)
ROWS = {row["fix"]: int(row["seed"]) for row in ROW.finditer(GUIDE.read_text("utf-8"))}


def test_whatever_happens_every_promise_is_kept() -> None:
    lines: list[str] = []
    found = soak(SEEDS, jobs=1, tell=lines.append)
    assert (found.seeds, found.violations, found.errors) == (len(SEEDS), [], []), "".join(lines)
    assert len(found.profiles) == 14


@pytest.mark.parametrize("fix", MUTATIONS)
def test_a_fix_that_is_taken_out_is_missed(fix: str) -> None:
    """By the seed of the guide; or by another, where the core goes other ways since: `--table` then has the new one."""
    assert first_found(fix, [ROWS[fix], *range(1_000)]) is not None


def test_the_guide_names_a_seed_for_every_fix() -> None:
    assert sorted(ROWS) == sorted(MUTATIONS)


@pytest.mark.parametrize("seed", [0, 5, 11])
def test_a_seed_replays_exactly_in_another_process(seed: int) -> None:
    """Also where texts have other hashes and objects other addresses."""
    command = [sys.executable, "-m", "tests.simulator", "--seed", str(seed), "--trace"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": str(seed + 1)}, capture_output=True, text=True, check=False
    )
    result = run(seed, traced=True)
    assert len(result.trace) > 50
    assert done.stdout.splitlines()[:-1] == list(result.trace)


def test_a_violation_prints_its_seed_and_ends_with_1() -> None:
    fix = "reading-row-by-row"
    found = first_found(fix, [ROWS[fix], *range(1_000)])
    assert found is not None
    assert found.violation is not None
    command = [sys.executable, "-m", "tests.simulator", "--without", fix, "--seed", str(found.seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(f"seed {found.seed} ({found.profile}): ")
    assert done.stdout.splitlines()[-1].endswith(found.violation.text)
