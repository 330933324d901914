"""Real servers, real faults, accounts of every message. The cases are in ``cases.py``, the page is ``docs/faults.md``.

``make test`` runs a few of them in a short form, ``make soak`` all; ``make faults`` writes the page anew, too.
"""

import json
import random
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
from tests.faults.proofs import PROVEN_BY
from tests.machine import folder_for_servers

RESULTS = Path(__file__).parents[2] / "build" / "faults"


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


def _run(case: Case, servers: Servers, folder: Path, chance: random.Random) -> Figures:
    lab = Lab(case, folder, servers, chance)
    figures = lab.run()
    log = "\n".join(service.said()[-3_000:] for service in lab.services)
    assert not (said := broken(figures, case.promise, sorted(lab.ledger.strangers()))), f"{said}\n{figures}\n{log}"
    return figures


@pytest.mark.parametrize("case", [pytest.param(each.in_short(), id=each.name) for each in CASES if each.in_gate])
def test_in_short(case: Case, servers: Servers, folder: Path, chance: random.Random) -> None:
    """Cases on cheap servers, which stand for the lab itself, too."""
    _run(case, servers, folder, chance)


def _soak(case: Case) -> pytest.MarkDecorator:
    return pytest.mark.soak("breaks real servers for seconds", part="faults", proven_by=PROVEN_BY[case.title])


@pytest.mark.parametrize("case", [pytest.param(each, id=each.name, marks=_soak(each)) for each in CASES])
def test_every_promise_holds_through(case: Case, servers: Servers, folder: Path, chance: random.Random) -> None:
    figures = _run(case, servers, folder, chance)
    name = re.sub(r"\W+", "-", case.name)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"case": case.name, **asdict(figures)}, indent=2) + "\n")


def test_every_case_has_its_row_and_the_page_is_what_was_measured() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert text == table.page(table.load(), text), "run .venv/bin/python -m tests.faults.table"
    assert [text.count(f"{case.title} | {case.deployment} |") for case in CASES] == [1] * len(CASES)


def test_the_page_shows_no_promise_that_was_broken() -> None:
    promises = {case.name: case.promise for case in CASES}
    measured = {name: Figures(**figures["now"]) for name, figures in table.load().items() if "now" in figures}
    assert {name: said for name, figures in measured.items() if (said := broken(figures, promises[name]))} == {}
