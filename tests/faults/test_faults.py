"""Real servers, real faults, accounts of every message. The cases are in ``cases.py``, the page is ``docs/faults.md``.

``make test`` runs those that are marked so, ``make soak`` the others; ``make faults`` all, and writes the page anew.
"""

import json
import random
import re
import shutil
import tempfile
from collections.abc import Generator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.faults import table
from tests.faults.cases import CASES
from tests.faults.deployments import Servers
from tests.faults.lab import Case, Lab
from tests.faults.ledger import Figures, broken
from tests.machine import folder_for_servers
from tests.waiting import PATIENCE_SECONDS

PROVEN_BY = (
    "tests/unit/test_outages.py::test_while_the_broker_is_away_for_a_minute_nothing_is_recorded_and_little_is_claimed",
    "tests/unit/test_outages.py::test_a_full_queue_holds_up_only_what_is_meant_for_it",
    "tests/integration/test_rabbitmq_outages.py::test_a_full_queue_moves_nothing_to_the_error_queue",
    "tests/property/test_delivery_under_faults.py::test_dying_at_every_single_call_loses_nothing",
    "tests/conformance/test_adapters.py::test_store",
)
"""Of each kind of fault a part, in the gate."""

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


def _cases() -> list[Any]:
    """Return every case; the gate runs a few on cheap servers, which stand for the harness and for all promises."""
    of_gate = [case.name for case in CASES if case.in_gate]
    proofs = [f"tests/faults/test_faults.py::test_every_promise_holds_through[{name}]" for name in of_gate]
    soak = pytest.mark.soak("breaks real servers for seconds", part="faults", proven_by=(*proofs, *PROVEN_BY))
    return [pytest.param(case, id=case.name, marks=() if case.in_gate else soak) for case in CASES]


@pytest.mark.parametrize("case", _cases())
def test_every_promise_holds_through(case: Case, servers: Servers, folder: Path, chance: random.Random) -> None:
    if case.in_gate:  # where how long it takes says nothing
        case = replace(case, promise=replace(case.promise, recovers_within=timedelta(seconds=PATIENCE_SECONDS)))
    lab = Lab(case, folder, servers, chance)
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
