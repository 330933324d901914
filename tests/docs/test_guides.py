"""The snippets of the guides run as they stand, and print what the text says."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests import java, newcomer
from tests.docs import at_a_glance, message_way

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = sorted(
    guide
    for guide in [*(DOCS / "guides").glob("*.md"), *(DOCS / "start").glob("*.md")]
    if guide.stem not in {"rabbitmq-delay", "testing-code-that-sends", "migrations"}  # they have tests of their own
    and guide.stem not in {"comparison", "data-engineer", "nservicebus", "rabbitmq-plugin"}  # they have no snippets
)

_HANGS_AFTER = 300
"""Seconds: what has not arrived by then never does."""


_LONG = {
    "delay": ("test_delay.py::test_rows_that_wait_are_in_the_checkpoint_and_go_once_after_a_restart",),
    "spark-source": (
        "test_source.py::test_messages_are_read_as_they_were_written",
        "test_source.py::test_writing_again_stores_nothing_twice",
    ),
}
"""Guides whose snippets are whole jobs on Spark, and the tests that prove what they show."""


def _guide(guide: Path) -> Any:
    proofs = tuple(f"tests/integration/pipeline/{test}" for test in _LONG.get(guide.stem, ()))
    marks = [pytest.mark.soak("whole jobs on Spark", part="docs", proven_by=proofs)] if proofs else []
    return pytest.param(guide, id=guide.stem, marks=marks)


@pytest.mark.parametrize("guide", list(map(_guide, GUIDES)))
def test_snippets_run_and_print_what_is_said(
    guide: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each snippet is a process; those that start Spark run in this one, which has one Spark for all of them."""
    text = guide.read_text(encoding="utf-8")
    if "DATABASE_URL" in text:
        monkeypatch.setenv("DATABASE_URL", request.getfixturevalue("empty_database"))
    for variable, fixture in re.findall(r'os\.environ\["((\w+)_URL)"\]', text):
        if variable != "DATABASE_URL":
            monkeypatch.setenv(variable, request.getfixturevalue(f"{fixture.lower()}_url"))
    snippets = re.findall(r"^```python\n(.*?)^```\n+(?:It prints `([^`]*)`)?", text, re.DOTALL | re.MULTILINE)
    assert snippets
    for code, said in snippets:
        if " import spark_session" in code:
            with java.lasting(java.folder(tmp_path_factory)):
                exec(code, {"__name__": "__main__"})
            printed = capsys.readouterr().out
        else:
            done = subprocess.run(
                [newcomer.PYTHON, "-c", code],
                cwd=tmp_path,
                env=newcomer.environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=_HANGS_AFTER,
            )
            assert done.returncode == 0, done.stderr
            printed = done.stdout
        assert printed == (f"{said}\n" if said else "")
    if "DATABASE_URL" in text:
        assert left_in(os.environ["DATABASE_URL"]) == []


def left_in(url: str) -> list[str]:
    """Return the ids of messages that wait, or are in a queue, as in that for errors: none, at the end of a guide."""
    with psycopg.connect(url) as connection:
        in_queues = connection.execute("SELECT message_id FROM postdate.queue_message").fetchall()
        stores = connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'postdate'"
            " AND table_name LIKE '%.timeouts'"
        ).fetchall()
        waiting = [
            row
            for (name,) in stores
            for row in connection.execute(
                sql.SQL("SELECT message_id FROM {} WHERE message_id NOT LIKE 'postdate~%%'").format(
                    sql.Identifier("postdate", name)
                ),
                [],
            )
        ]
    assert stores
    return [id_ for (id_,) in [*in_queues, *waiting]]


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_pictures_are_as_they_are_drawn() -> None:
    for drawing in (at_a_glance, message_way):
        assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.picture()
