"""A second look at messages that seem lost or orphaned in a store read without a snapshot.

An archive removes records while others read. It first marks the *scheduled* record, and removes that one last, if at
all; so an unmarked *scheduled* record proves that no record of the message was removed yet, and the finding is true.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.pipeline.audit.reading import AuditedStore
from postdate.pipeline.frames import scan_frame, scan_parts
from postdate.ports import ScanFilter
from postdate.ports.scanning import ARCHIVED

_ASKED_FOR_BY_ID = 1_000
"""Suspects up to which the store is asked for their records alone."""


def without_pruned(
    spark: SparkSession, judged: DataFrame, endpoints: Sequence[AuditedStore], partitions: int
) -> DataFrame | None:
    """Return ``judged`` without messages archived while they were read; ``None`` if there are none."""
    unheld = [endpoint for endpoint in endpoints if not endpoint.held]
    suspects = judged.where((F.col("lost") | F.col("orphaned")) & F.col("endpoint").isin(*(e.name for e in unheld)))
    if not unheld or suspects.isEmpty():
        return None
    excused = [_pruned(spark, suspects.where(F.col("endpoint") == e.name), e, partitions) for e in unheld]
    pruned = excused[0]
    for frame in excused[1:]:
        pruned = pruned.unionByName(frame)
    if pruned.isEmpty():
        return None
    return judged.join(F.broadcast(pruned), ["endpoint", "message_id"], "left_anti")


def _pruned(spark: SparkSession, suspects: DataFrame, endpoint: AuditedStore, partitions: int) -> DataFrame:
    ids = [row[0] for row in suspects.select("message_id").take(_ASKED_FOR_BY_ID + 1)]
    where = ScanFilter(message_ids=tuple(ids)) if len(ids) <= _ASKED_FOR_BY_ID else ScanFilter()
    parts = scan_parts(endpoint.store, "records", partitions)
    columns = ("message_id", "kind", "detail")
    scheduled = F.col("kind") == "scheduled"
    there = (
        scan_frame(spark, endpoint.store, "records", columns, parts, where=where)
        .groupBy("message_id")
        .agg(
            F.count_if(scheduled & (F.coalesce("detail", F.lit("")) != ARCHIVED)).alias("unmarked"),
            F.count_if(~scheduled).alias("others"),
        )
    )
    looked_at = suspects.select("endpoint", "message_id", "lost", "orphaned").join(there, "message_id", "left")
    gone = (F.col("lost") & (F.coalesce("unmarked", F.lit(0)) == 0)) | (
        F.col("orphaned") & (F.coalesce("others", F.lit(0)) == 0)
    )
    return looked_at.where(gone).select("endpoint", "message_id")
