"""Fixtures for tests of programs that use Postdate; pytest finds them wherever Postdate is installed.

pytest imports this module in every project, so it imports the parts of Postdate only when a test uses a fixture. See
the guide *Testing code that sends*.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from postdate.client.testing import ClientTest
    from postdate.testing import EndpointTest

_FIXTURES: Final = frozenset({"postdate_client", "endpoint_test"})


@pytest.fixture
def postdate_client() -> Iterator[ClientTest]:
    """A client in memory, on a clock that the test moves; see :class:`postdate.client.testing.ClientTest`."""
    from postdate.client.testing import ClientTest

    client = ClientTest()
    yield client
    client.end()


@pytest.fixture
def endpoint_test() -> type[EndpointTest]:
    """Runs an endpoint in a test: the class :class:`postdate.testing.EndpointTest`."""
    from postdate.testing import EndpointTest

    return EndpointTest


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an ``async`` test that uses a fixture of this module, unless another plugin runs it.

    anyio comes first, because its hook does, and pytest-asyncio has made a plain function of the test. Without either,
    pytest would fail the test, and each one would need a mark.
    """
    if not iscoroutinefunction(pyfuncitem.obj) or _FIXTURES.isdisjoint(pyfuncitem.fixturenames):
        return None
    import asyncio

    names = pyfuncitem._fixtureinfo.argnames  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - as pytest does it
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
