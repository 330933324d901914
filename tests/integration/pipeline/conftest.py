"""One Spark for all tests of the pipeline."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests import java

from postdate.pipeline.session import spark_session
from postdate.pipeline.stores import StoreSpec


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local Spark that knows the format ``postdate``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(java.folder(tmp_path_factory))
        if (documentation := SparkSession.getActiveSession()) is not None:
            documentation.stop()
        session = spark_session("postdate-tests", cores=2, with_format=True, conf=java.SMALL_DATA | java.PATIENCE)
    with session:
        yield session


@pytest.fixture
def store(tmp_path: Path) -> StoreSpec:
    """A store of the test's own that does not exist yet."""
    return StoreSpec(f"sqlite:///{tmp_path / 'messages.db'}", synchronous="normal")


@pytest.fixture
def now() -> datetime:
    """When the test takes place."""
    return datetime(2026, 3, 1, 12, tzinfo=UTC)
