"""Turns of the suite: what shares a Java or the names of queues is one, and none is so long that others wait for it."""

import pytest
from tests.side_by_side import recorded, turn_of

WORKERS = 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tests/docs/test_readme.py::test_one", "tests/cli/test_docs.py::test_two[start]"),
        ("tests/integration/pipeline/test_audit.py::test_one", "tests/integration/pipeline/test_loads.py::test_two"),
        (
            "tests/conformance/test_adapters.py::test_transport[RabbitMqTransport-quorum-a]",
            "tests/conformance/test_adapters.py::test_transport[RabbitMqTransport-classic-b]",
        ),
    ],
)
def test_what_shares_something_dear_is_one_turn(one: str, other: str) -> None:
    assert turn_of(one) == turn_of(other)


def test_no_turn_is_longer_than_the_share_of_a_worker() -> None:
    """Or all other workers wait for the one that has it."""
    seconds = recorded()
    assert max(seconds.values()) <= sum(seconds.values()) / WORKERS
