"""One Spark for all tests of the pipeline."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest
from pyspark.sql import SparkSession
from tests import java

from postdate.pipeline.session import spark_session
from postdate.pipeline.stores import StoreSpec

SMALL_DATA: Final = MappingProxyType(
    {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.codegen.wholeStage": "false",
    }
)
"""Plans of thirty rows are interpreted: to compile them, and to plan them anew after each stage, costs more than to run
them. The pages of the command line run with the settings of users."""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local Spark that knows the format ``postdate``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(java.folder(tmp_path_factory))
        session = spark_session("postdate-tests", cores=2, with_format=True, conf=SMALL_DATA)
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
