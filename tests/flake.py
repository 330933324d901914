"""One test again and again: ``make flake TEST=tests/….py::test_… N=200``, beside busy processors.

Source: CONTRIBUTING.md, "A test that is red by chance".
"""

import math
from collections import defaultdict
from typing import Final

import pytest

_TIME: Final = "time_of_flake"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, default=0, metavar="N", help="each test N times, over its variants")


@pytest.fixture
def time_of_flake(request: pytest.FixtureRequest) -> int:
    """Return which time this is."""
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    times = metafunc.config.option.times
    if times:
        metafunc.fixturenames.append(_TIME)
        metafunc.parametrize(_TIME, range(times), indirect=True, ids=lambda time: f"{time} times before")


@pytest.hookimpl(trylast=True)  # when `-k` has chosen among the variants
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave each variant its share of the times."""
    times = config.option.times
    if not times:
        return
    variants = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        variants[item.nodeid.partition("[")[0]].append(item)
    items[:] = [
        item
        for same in variants.values()
        for item in same
        if _time_of(item) < math.ceil(times / (len(same) // times))  # the times of one of so many variants
    ]


def _time_of(item: pytest.Item) -> int:
    call = getattr(item, "callspec", None)
    return 0 if call is None else int(call.params.get(_TIME, 0))
