"""Every snippet of the README runs as it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests import java

README = Path(__file__).parents[2] / "README.md"
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(arguments: list[str], folder: Path) -> str:
    environment = java.without(os.environ)
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=880, check=False
    )
    assert done.returncode == 0, f"{arguments}: {done.stderr}{done.stdout}"
    return done.stdout


def test_the_first_python_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    assert run([sys.executable, "-W", "error", "-c", blocks("python")[0]], tmp_path) == "the offer ends today\n"


def test_every_python_example_runs(tmp_path: Path) -> None:
    for example in blocks("python"):
        run([sys.executable, "-W", "error", "-c", example], tmp_path)


def test_make_targets_that_are_named_exist() -> None:
    makefile = README.with_name("Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", blocks("sh")[0], re.MULTILINE):
        assert re.search(rf"^{target}\b.*:", makefile, re.MULTILINE), target


def test_the_shell_session_runs_line_by_line(tmp_path: Path) -> None:
    """In the order given, ``ID`` being an id that the list shows, with the table that the README schedules."""
    (tmp_path / "orders.csv").write_text(
        "message_id,due,destination,body\norder-8,2030-05-01T12:00:00,orders,eight\n", encoding="utf-8"
    )
    service: subprocess.Popen[bytes] | None = None
    try:
        for line in blocks("sh")[1].splitlines():
            words = shlex.split(line, comments=True)
            assert words[0] == "postdate"
            command = [str(BIN / "postdate"), *words[1:]]
            if command[-1] == "&":
                service = subprocess.Popen(command[:-1], cwd=tmp_path)
                continue
            if "ID" in command:
                listed = run([str(BIN / "postdate"), "messages", "list", "--json"], tmp_path)
                found = re.search(r'"message_id":"([^"]+)"', listed.replace('": "', '":"'))
                assert found is not None, listed
                command[command.index("ID")] = found[1]
            run(command, tmp_path)
    finally:
        if service is not None:
            service.terminate()
            service.wait(20)


def test_every_link_of_the_readme_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert link.startswith("http") or (README.parent / link).exists(), link
