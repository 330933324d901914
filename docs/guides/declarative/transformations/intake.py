"""Files of orders become delayed messages: rows that are messages go into the store, the others into a table.

Spark imports this file to learn what there is. It calls the functions for their plans alone: they must only describe,
and stand below what they use.
"""

# ruff: noqa: INP001 - Spark imports it as a file

from pyspark import pipelines as dp
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

spark = SparkSession.active()

dp.create_sink("orders_store", "postdate", {"store": "env:ORDERS_STORE"})


def is_message() -> Column:
    """Tell whether a row has all that a message must have."""
    named = F.length("message_id").between(1, 250) & F.length("destination").between(1, 200)
    return F.coalesce(named, F.lit(False)) & F.col("due").isNotNull()


@dp.temporary_view
def incoming() -> DataFrame:
    """Rows of the files as they arrive; a due time that is none, or has no offset from UTC, becomes null."""
    files = spark.readStream.option("maxFileAge", "1000000d")  # else Spark skips what is a week older than the newest
    rows = files.schema("message_id string, destination string, due string, body string").json("incoming")
    has_offset = F.col("due").rlike(r"(Z|[+-]\d\d:\d\d)$")
    return rows.withColumn("due", F.when(has_offset, F.try_to_timestamp("due")))


@dp.append_flow(target="orders_store", name="orders_intake")
def orders_intake() -> DataFrame:
    """Store what is a message; the sink is idempotent by message id."""
    return spark.readStream.table("incoming").where(is_message())


@dp.table
def set_aside() -> DataFrame:
    """Keep what is none. A row that reached the sink would fail the run instead."""
    return spark.readStream.table("incoming").where(~is_message())
