"""Which tests run in one worker, one after the other, and which workers take first: ``make test`` runs several.

Tests wait most of the time, for servers, processes and Spark; ``pytest -n 5`` lets five workers wait at once. A worker
takes a *turn*: the tests of one file, in random order, so that fixtures of a module are made once. Some files are taken
apart, since their tests share nothing and take long; some are put together, since they share what is dear or have the
names of queues in common. Long turns are taken first, so that no worker begins one when the others have ended.

What a test has of a server is its own in any case: each worker has a database of PostgreSQL, and in there and on the
other servers each test has a schema, a prefix or queues.
"""

import re
from typing import Any

import pytest
from tests.run_report import RunReport
from xdist.scheduler import LoadScheduling, LoadScopeScheduling, Scheduling

TOGETHER = {
    # Spark keeps a processor busy, and takes nine seconds of it to start: three workers at most have one at a time.
    "documentation": r"tests/docs/|tests/cli/test_docs\.py",
    "pipeline": r"tests/integration/pipeline/",
    "cluster": r"tests/integration/cluster/",
    # The suite names the queues, so that there is one set of them on the server.
    "conformance of RabbitMQ": r"tests/conformance/test_adapters\.py::\w+\[RabbitMq",
}
"""The name of a turn, and the pattern of the tests that have it."""

APART = (
    r"tests/integration/azure/test_processes\.py",
    r"tests/integration/test_(clock_skew|postgres_kills|rabbitmq_kills|saga_kills|servers)\.py",
    r"tests/simulator/",
)
"""The tests of these files are a turn each."""

ADAPTER = re.compile(r"(tests/conformance/test_adapters\.py::\w+\[\w+)")
"""The checks of one adapter are a turn: a thousand in one would be the last to end."""

FIRST = (
    r"documentation",
    r"pipeline",
    r"cluster",
    r"tests/faults/",
    r".*(kills|whatever_happens|row_79|services_come_up)",
    r"conformance of RabbitMQ",
    r"tests/cli/test_bench",
)
"""The longest turns, those before the others."""


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


def rank_of(turn: str) -> int:
    """Return the place of a turn among all: 0 is taken first."""
    return next((place for place, pattern in enumerate(FIRST) if re.match(pattern, turn)), len(FIRST))


class TurnScheduling(LoadScopeScheduling):
    """Gives a turn to each worker that has none left."""

    def _split_scope(self, nodeid: str) -> str:
        return turn_of(nodeid)


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    config.pluginmanager.register(RunReport(turn_of))
    if config.getoption("--times"):
        return LoadScheduling(config, log)
    config.option.loadscopereorder = False  # by length, not by the number of tests
    return TurnScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long turns first, after the order has been made a random one; it is the same in every worker."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank_of(turn_of(item.nodeid)))
