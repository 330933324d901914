"""The snippet of the README runs as it stands, and so does the session in the shell of the quick start."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import java, newcomer
from tests.cli.conftest import CommandLine

README = Path(__file__).parents[2] / "README.md"
QUICK_START = README.parent / "docs" / "start" / "quick-start.md"
BIN = newcomer.PYTHON.parent


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(arguments: list[str], folder: Path) -> str:
    environment = java.without(newcomer.environment())
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stderr}{done.stdout}"
    return done.stdout


def test_the_example_of_twelve_lines_runs_to_its_end_where_the_message_arrives(tmp_path: Path) -> None:
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line]) <= 12
    (text,) = re.findall(r"prints\s`([^`]*)`", README.read_text(encoding="utf-8"))
    assert run([str(newcomer.PYTHON), "-W", "error", "-c", example], tmp_path) == f"{text}\n"


def test_each_user_has_one_link() -> None:
    """To a page of their own, which no other user has; and every page for users is named."""
    table = README.read_text(encoding="utf-8").partition("\n## Is it for you?\n\n")[2].partition("\n\n")[0]
    pages = [re.findall(r"\]\(docs/start/([\w-]+)\.md\)", row) for row in table.splitlines()[2:]]
    assert sorted(pages) == [[page.stem] for page in sorted(QUICK_START.parent.glob("*.md")) if page != QUICK_START]


def test_make_targets_that_are_named_exist() -> None:
    makefile = README.with_name("Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", blocks("sh")[0], re.MULTILINE):
        assert re.search(rf"^{target}\b.*:", makefile, re.MULTILINE), target


def test_what_it_says_to_install_exists() -> None:
    """And each extra is named, so that nobody looks for one."""
    project = tomllib.loads(README.with_name("pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [line for block in blocks("console") for line in block.splitlines() if "pip install" in line]
    named = {extra for line in lines for extra in re.findall(r"\w+", line.partition("[")[2].partition("]")[0])}
    others = {extra for line in lines for extra in re.findall(r"\w+", line.partition("# or ")[2].partition(":")[0])}
    assert named | others == set(project["optional-dependencies"])


@pytest.mark.soak(
    "each command is a process, with Spark as it starts for a user",
    part="docs",
    proven_by="tests/docs/test_readme.py::test_the_shell_session_runs_line_by_line",
)
def test_the_shell_session_runs_as_processes(tmp_path: Path) -> None:
    play(tmp_path, lambda arguments: run([str(BIN / "postdate"), *arguments], tmp_path))


def test_the_shell_session_runs_line_by_line(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the service, in this process."""
    folder, cli = java.folder(tmp_path_factory), CommandLine(capsys, monkeypatch)
    with java.lasting(folder):
        play(folder, lambda arguments: cli.ok(*arguments).out)


def play(folder: Path, postdate: Callable[[list[str]], str]) -> None:
    """In the order given, ``ID`` being an id that the list shows."""
    (table,) = blocks("csv orders.csv", QUICK_START)
    (folder / "orders.csv").write_text(table, encoding="utf-8")
    service: subprocess.Popen[bytes] | None = None
    try:
        for line in blocks("sh", QUICK_START)[0].splitlines():
            program, *words = shlex.split(line, comments=True)
            assert program == "postdate"
            if words[-1] == "&":
                service = subprocess.Popen([str(BIN / "postdate"), *words[:-1]], cwd=folder)
                continue
            if "ID" in words:
                found = re.search(r'"message_id": ?"([^"]+)"', postdate(["messages", "list", "--json"]))
                assert found is not None
                words[words.index("ID")] = found[1]
            postdate(words)
    finally:
        if service is not None:
            service.terminate()
            service.wait()


def test_every_link_of_the_readme_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert link.startswith("http") or (README.parent / link).exists(), link
