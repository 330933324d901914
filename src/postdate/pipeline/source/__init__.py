"""The Spark data source ``postdate``: a store read in parallel or followed as a stream, and messages written to one.

::

    spark.read.format("postdate").option("store", "sqlite:///messages.db").load()
    messages.write.format("postdate").option("store", "sqlite:///messages.db").mode("append").save()
    spark.readStream.format("postdate").option("store", "sqlite:///messages.db").option("what", "records").load()
    messages.writeStream.format("postdate").option("store", "sqlite:///messages.db").start()

Options, columns and guarantees: docs/guides/spark-source.md. Source: ADR 0011.
"""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from postdate.clock import SystemClock
from postdate.errors import PipelineError
from postdate.pipeline.rows import spark_schema
from postdate.pipeline.source.options import SourceOptions, StoreUse
from postdate.pipeline.source.reading import ReadPlan, create_reader, selected_columns
from postdate.pipeline.source.streaming import FollowPlan, RecordStreamReader
from postdate.pipeline.source.writing import StoreWriter, StreamStoreWriter, WritePlan, check_columns

__all__ = ["FORMAT", "PostdateDataSource", "register"]


# --- the entry point; its methods run on the driver, in Python processes of Spark's own -------------------------------


FORMAT = "postdate"


def register(spark: SparkSession) -> None:
    """Make ``postdate`` a known format in a session whose Python does not have Postdate installed.

    If Postdate is installed, Spark finds the format through the package ``pyspark_postdate``.
    """
    spark.dataSource.register(PostdateDataSource)


class PostdateDataSource(DataSource):
    """The entry point of the format. Spark creates one for each ``load``, ``save`` and ``start``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        # Spark does not say here whether the result is a frame or a stream. Only records can be followed as a stream.
        return spark_schema(selected_columns(SourceOptions(self.options, StoreUse.READING, StoreUse.FOLLOWING)))

    def reader(self, schema: StructType) -> DataSourceReader:
        return create_reader(ReadPlan.of(SourceOptions(self.options, StoreUse.READING), schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return RecordStreamReader(FollowPlan.of(SourceOptions(self.options, StoreUse.FOLLOWING), schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Create missing tables, and return the writer of a data frame. Refuse ``overwrite`` and wrong columns."""
        plan = self._create_write_plan(StoreUse.WRITING, schema, overwrite)
        plan.create_tables()
        return StoreWriter(plan, SystemClock().now())

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return StreamStoreWriter(self._create_write_plan(StoreUse.WRITING_A_STREAM, schema, overwrite))

    def _create_write_plan(self, use: StoreUse, schema: StructType, overwrite: bool) -> WritePlan:
        if overwrite:
            raise PipelineError("messages are never overwritten; write with mode('append'): ids already there are kept")
        plan = WritePlan.of(SourceOptions(self.options, use))
        check_columns(schema, for_queues=plan.sweep is not None)
        return plan
