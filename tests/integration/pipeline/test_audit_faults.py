"""One fault of each kind among thousands of records in PostgreSQL: the audit names exactly those messages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pyspark.sql import SparkSession
from tests.postgres_subjects import fresh_schema

from postdate.pipeline.audit import audit

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def planted_faults() -> ModuleType:
    """The benchmark that does the same with a million records."""
    spec = importlib.util.spec_from_file_location("planted_faults", ROOT / "benchmarks" / "planted_faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.soak(
    "the fixture of the benchmark, run small on PostgreSQL",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_audit.py::test_each_crime_is_found_and_nothing_else",
        "tests/integration/pipeline/test_audit_sources.py::test_all_endpoints_of_one_database",
    ),
)
def test_exactly_the_planted_faults_are_found(
    spark: SparkSession, postgres_url: str, tmp_path: Path, planted_faults: ModuleType
) -> None:
    folder = tmp_path / "findings"
    with planted_faults.planted_store(postgres_url, fresh_schema(), 20_001) as (store, planted):
        result = planted_faults.audited(spark, store)
        assert {finding.name: finding.sample for finding in result.findings} == planted._asdict()
        assert result.counts.scheduled == 6_667 - 1
        assert not result.is_clean
        late_after = planted_faults.timedelta(seconds=2)
        audit(spark, store, planted_faults.NOW, late_after=late_after, findings_to=folder)
    found = spark.read.parquet(str(folder))
    assert found.columns == ["finding", "message_id", "destination", "due", "detail", "endpoint"]
    rows = {row["finding"]: (row["message_id"], row["detail"], row["endpoint"]) for row in found.collect()}
    assert rows == {
        "lost": (planted.lost[0], "scheduled; it does not wait and has not ended", "planted"),
        "duplicated": (planted.duplicated[0], "delivered 2, handled 1, discarded 0 times", "planted"),
        "early": (planted.early[0], "0.001000 s before it was due", "planted"),
        "orphaned": (
            planted.orphaned[0],
            "delivered 1, handled 1, expired 0, cancelled 0, failed 0 times; never scheduled",
            "planted",
        ),
    }
