"""Real servers, real faults, accounts of every message. The cases are in ``cases.py``, the page is ``docs/faults.md``.

``make test`` runs those that are marked so; ``make faults`` all of them, and writes the page anew.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.faults import table
from tests.faults.cases import CASES
from tests.faults.deployments import Servers
from tests.faults.lab import Case, Lab
from tests.faults.ledger import Figures, broken
from tests.machine import folder_for_servers

RESULTS = Path(__file__).parents[2] / "build" / "faults"
ALL = os.environ.get("POSTDATE_FAULTS") == "all"


@pytest.fixture(scope="module")
def servers() -> Generator[Servers]:
    """Servers of the lab's own: other tests go on while it breaks them."""
    with folder_for_servers() as folder:
        servers = Servers(folder)
        try:
            yield servers
        finally:
            servers.stop()


@pytest.fixture
def folder() -> Generator[Path]:
    """A folder with a short name: its path is part of addresses."""
    folder = Path(tempfile.mkdtemp(prefix="postdate-lab-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if ALL or case.by_default])
def test_every_promise_holds_through(case: Case, servers: Servers, folder: Path) -> None:
    lab = Lab(case, folder, servers)
    figures = lab.run()
    name = re.sub(r"\W+", "-", case.name)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"case": case.name, **asdict(figures)}, indent=2) + "\n")
    log = "\n".join(service.said()[-3_000:] for service in lab.services)
    assert not (said := broken(figures, case.promise, sorted(lab.ledger.strangers()))), f"{said}\n{figures}\n{log}"


def test_every_case_has_its_row_and_the_page_is_what_was_measured() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert text == table.page(table.load(), text), "run .venv/bin/python -m tests.faults.table"
    assert [text.count(f"{case.title} | {case.deployment} |") for case in CASES] == [1] * len(CASES)


def test_the_page_shows_no_promise_that_was_broken() -> None:
    promises = {case.name: case.promise for case in CASES}
    measured = {name: Figures(**figures["now"]) for name, figures in table.load().items() if "now" in figures}
    assert {name: said for name, figures in measured.items() if (said := broken(figures, promises[name]))} == {}
