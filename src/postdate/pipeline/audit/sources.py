"""Records in Parquet instead of a store: archives, and ledgers of sweeps. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from postdate.errors import PipelineError
from postdate.pipeline.columns import LEDGER_ARROW, spark_schema, spark_types
from postdate.pipeline.failures import told_in_one_line

ARCHIVE_MARK = "_archive.json"
"""File that marks a folder as an archive, even if it is empty."""


def open_records(spark: SparkSession, path: str | Path) -> DataFrame:
    """Return the records in a folder; which files are read is settled now.

    Returns kind, message_id, at, due, destination, detail, and any other columns. Raises PipelineError where there is
    nothing, no Parquet, or other columns.
    """
    shown = str(path)
    if "://" not in shown:
        folder = Path(shown)
        if not folder.exists():
            raise PipelineError(f"there are no records at {shown}: no such folder")
        if (folder / ARCHIVE_MARK).exists() and not any(folder.glob("day=*/*.parquet")):
            return spark.createDataFrame([], spark_schema(LEDGER_ARROW))
        if folder.is_dir() and not any(folder.rglob("*")):
            raise PipelineError(f"there are no records at {shown}: the folder is empty")
    with told_in_one_line(f"the records at {shown} cannot be read as Parquet"):
        found = spark.read.parquet(shown)
    _check_columns(shown, found.schema)
    return found


def _check_columns(shown: str, schema: StructType) -> None:
    types = spark_types(LEDGER_ARROW)
    missing = [name for name in types if name not in schema.fieldNames()]
    if missing:
        raise PipelineError(
            f"what is at {shown} are no records: there is no column {missing[0]!r} among "
            f"{', '.join(schema.fieldNames()) or 'none'}; an archive or a ledger has {', '.join(types)}"
        )
    for name, wanted in types.items():
        found = schema[name].dataType.simpleString()
        if found != wanted:
            raise PipelineError(f"what is at {shown} are no records: {name!r} is {found} and not {wanted}")


def shown_paths(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Return the paths as texts; raise PipelineError for one named twice, which is surely a mistake."""
    texts = tuple(str(path) for path in paths)
    twice = [text for number, text in enumerate(texts) if text in texts[:number]]
    if twice:
        raise PipelineError(f"the records at {twice[0]} are named twice; name each folder once")
    return texts
