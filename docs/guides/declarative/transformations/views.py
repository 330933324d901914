"""What waits in the store, what falls due when, and what happened: tables that each run computes anew."""

# ruff: noqa: INP001 - Spark imports it as a file

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

spark = SparkSession.active()


def in_store(what: str, *columns: str) -> DataFrame:
    """Return what is in the store."""
    named = {"store": "env:ORDERS_STORE", "what": what, "columns": ",".join(columns)}
    return spark.read.format("postdate").options(**named).load()


@dp.materialized_view
def pending() -> DataFrame:
    """Messages that wait, without their bodies."""
    return in_store("pending", "message_id", "destination", "due")


@dp.materialized_view
def load_by_hour() -> DataFrame:
    """What falls due by hour and destination: the table of the forecast."""
    start = F.date_trunc("hour", "due").alias("start")
    return spark.read.table("pending").groupBy(start, "destination").agg(F.count("*").alias("messages"))


@dp.materialized_view
def records_by_day() -> DataFrame:
    """What happened, by day and kind: what an audit adds up."""
    day = F.to_date("at").alias("day")
    return in_store("records", "kind", "at").groupBy(day, "kind").agg(F.count("*").alias("messages"))
