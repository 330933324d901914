"""Each pair of transport and store, one after the other; what servers keep of a module is in one schema."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.integration.endpoints.places import KINDS, Place
from tests.postgres_subjects import drop_schema, fresh_schema


@pytest.fixture(scope="module")
def schema(postgres_url: str) -> Iterator[str]:
    """A schema whose tables are created by the first endpoint in it: to be shared, as creating them takes longest."""
    schema = fresh_schema()
    yield schema
    drop_schema(postgres_url, schema)


@pytest.fixture(params=KINDS)
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_url: str, schema: str, rabbitmq_url: str
) -> AsyncIterator[Place]:
    place = Place(request.param, tmp_path / "all.db", postgres_url, schema, rabbitmq_url)
    yield place
    await place.close()
