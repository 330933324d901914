"""Whose checkpoint is it? Spark finds out late, in words of its own, or not at all. Runs on the driver."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from postdate.errors import PipelineError

_OURS = "postdate"
_OF_ANY_QUERY = "metadata"


def claim_checkpoint(spark: SparkSession, checkpoint: str, job: Mapping[str, str | int]) -> None:
    """Write down in a checkpoint which job it belongs to, or see that it belongs to this one.

    Args:
        spark: any session.
        checkpoint: folder on any file system of Spark; made when it is missing.
        job: what must be the same whenever the query is started with the checkpoint; no secrets.

    Raises:
        PipelineError: it is that of another job; says what differs.
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
