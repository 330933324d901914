"""Ties a checkpoint to its job, because Spark notices a wrong one late, or never. Runs on the driver."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from postdate.errors import PipelineError

_OURS = "postdate"
_OF_ANY_QUERY = "metadata"


def claim_checkpoint(spark: SparkSession, checkpoint: str, job: Mapping[str, str | int]) -> None:
    """Note in a checkpoint the job that it belongs to, or raise PipelineError if it is another's.

    ``job`` has the values that must be the same at every start of the query with this checkpoint; no secrets.
    """
    ours = f"{checkpoint}/{_OURS}"
    found = _text(spark, ours)
    if found is not None:
        theirs: dict[str, str | int] = json.loads(found)
        differs = [
            f"{key} {theirs.get(key)!r}, not {value!r}" for key, value in job.items() if theirs.get(key) != value
        ]
        if differs:
            raise PipelineError(
                f"the checkpoint {checkpoint} is that of another job: {', '.join(differs)}; name another folder, "
                f"or start the job as it was"
            )
        return
    if _text(spark, f"{checkpoint}/{_OF_ANY_QUERY}") is not None:
        raise PipelineError(f"the checkpoint {checkpoint} is that of another query; name another folder")
    line = spark.createDataFrame([(json.dumps(dict(job)),)], "value string")
    line.coalesce(1).write.mode("overwrite").text(ours)


def _text(spark: SparkSession, path: str) -> str | None:
    """Return the first line of a file or folder; ``None`` when there is none."""
    try:
        rows = spark.read.text(path).take(1)
    except AnalysisException:
        return None
    return rows[0]["value"] if rows else None
