"""What every test gets: one event loop kind, bounded and random examples, and no dependence on the host's time zone."""

import os
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,  # a shared machine stalls; the per-test timeout is the limit
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Real adapters run on asyncio, so the tests do too."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def hostile_time_zone() -> Iterator[None]:
    """Run every test far from UTC, at a half-hour offset, so that a naive local time shows itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Australia/Lord_Howe")
        _apply_time_zone()
        yield
    _apply_time_zone()


def _apply_time_zone() -> None:
    if sys.platform != "win32":
        time.tzset()
