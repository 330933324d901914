"""Which tests run in one worker, one after the other, and which workers take first: ``make test`` runs several.

Tests wait much of the time, for servers, processes and Spark; ``pytest -n 5`` lets five workers wait at once. A worker
takes a *turn*: the tests of one file, so that fixtures of a module are made once. Some files are taken apart, since
their tests share nothing and take long; some are put together, since they share what is dear or have the names of
queues in common. Long turns are taken first, so that no worker begins one when the others have ended; how long each
took is in ``turns.json``, which a run with ``--record-turns`` writes.

What a test has of a server is its own in any case: each worker has a database of PostgreSQL, and in there and on the
other servers each test has a schema, a prefix or queues.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from tests.run_report import RunReport
from xdist.scheduler import LoadScheduling, LoadScopeScheduling, Scheduling

TOGETHER = {
    "site": r"tests/docs/test_site\.py",  # without Java, unlike the rest of the documentation
    # One Java each, which takes nine seconds to start and then keeps a processor busy: no more than three at a time.
    "documentation": r"tests/docs/|tests/cli/test_docs\.py",
    "Spark, batches": (
        r"tests/integration/pipeline/test_(audit|files|flights|generated|loads|local_cluster|outputs|schedule|session)"
    ),
    "Spark, streams": r"tests/integration/pipeline/",
    "cluster": r"tests/integration/cluster/",
    # The suite names the queues, so that there is one set of them on the server.
    "conformance of RabbitMQ": r"tests/conformance/test_adapters\.py::\w+\[RabbitMq",
}
"""The name of a turn, and the pattern of the tests that have it; the first that matches."""

APART = (
    r"tests/integration/azure/test_processes\.py",
    r"tests/integration/test_(clock_skew|postgres_kills|rabbitmq_kills|saga_kills|servers)\.py",
    r"tests/simulator/",
)
"""The tests of these files are a turn each."""

ADAPTER = re.compile(r"(tests/conformance/test_adapters\.py::\w+\[\w+)")
"""The checks of one adapter are a turn: a thousand in one would be the last to end."""

RECORD: Final = Path(__file__).with_name("turns.json")
_SHORT_SECONDS: Final = 1.0


def recorded() -> Mapping[str, float]:
    """Return how many seconds each turn took when that was recorded last; short ones are left out."""
    return json.loads(RECORD.read_text("utf-8"))


def record(turns: Mapping[str, float]) -> None:
    """Write down how long these turns took, the longest of all first."""
    longest = sorted({**recorded(), **turns}.items(), key=lambda turn: -turn[1])
    rounded = {turn: round(seconds) for turn, seconds in longest if seconds >= _SHORT_SECONDS}
    RECORD.write_text(json.dumps(rounded, indent=2) + "\n", "utf-8")


def turn_of(test: str) -> str:
    """Return the name of the turn that the test is part of; ``test`` is its id for pytest."""
    for turn, pattern in TOGETHER.items():
        if re.match(pattern, test):
            return turn
    if any(re.match(pattern, test) for pattern in APART):
        return test
    if adapter := ADAPTER.match(test):
        return adapter[1]
    return test.partition("::")[0]


class TurnScheduling(LoadScopeScheduling):
    """Gives a turn to each worker that has none left."""

    def _split_scope(self, nodeid: str) -> str:
        return turn_of(nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-turns", action="store_true", help=f"write into {RECORD.name} how long turns took")


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    config.pluginmanager.register(RunReport(turn_of, record if config.option.record_turns else None))
    if config.option.times:
        return LoadScheduling(config, log)
    config.option.loadscopereorder = False  # by length, not by the number of tests
    return TurnScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long turns first, after the order has been made another one; it is the same in every worker."""
    if hasattr(config, "workerinput"):
        seconds = recorded()
        items.sort(key=lambda item: -seconds.get(turn_of(item.nodeid), 0.0))
