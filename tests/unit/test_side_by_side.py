"""Which tests one worker runs one after the other."""

import pytest
from tests.side_by_side import FIRST, rank_of, turn_of

ADAPTERS = "tests/conformance/test_adapters.py::test_store"


@pytest.mark.parametrize(
    ("test", "turn"),
    [
        ("tests/unit/test_pump.py::test_one[a-b::c]", "tests/unit/test_pump.py"),
        (f"{ADAPTERS}[PostgresStore-claims.one]", f"{ADAPTERS}[PostgresStore"),
        (f"{ADAPTERS}[RabbitMqTransport-quorum-sending.one]", "conformance of RabbitMQ"),
        ("tests/integration/pipeline/test_audit.py::test_one", "pipeline"),
        ("tests/integration/test_servers.py::test_one", "tests/integration/test_servers.py::test_one"),
        ("tests/cli/test_docs.py::test_one[demo]", "documentation"),
    ],
)
def test_a_worker_runs_the_tests_of_a_turn(test: str, turn: str) -> None:
    assert turn_of(test) == turn


def test_the_longest_turns_are_begun_first() -> None:
    assert rank_of("documentation") == 0
    assert rank_of("tests/integration/test_rabbitmq_kills.py::test_one") < len(FIRST)
    assert rank_of("tests/unit/test_pump.py") == len(FIRST)
