"""Entry point of the format. Methods run on the driver, in Python processes of Spark's own."""

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
from postdate.pipeline.columns import spark_schema
from postdate.pipeline.source.options import SourceOptions, StoreUse
from postdate.pipeline.source.reading import Reading, columns_read, reader_for
from postdate.pipeline.source.streaming import Following, RecordStreamReader
from postdate.pipeline.source.writing import StoreWriter, StreamStoreWriter, Writing, check_columns

FORMAT = "postdate"


def register(spark: SparkSession) -> None:
    """Make ``postdate`` a known format in a session whose Python does not have Postdate installed.

    Where it is installed Spark finds the format by itself, through the package ``pyspark_postdate``.
    """
    spark.dataSource.register(PostdateDataSource)


class PostdateDataSource(DataSource):
    """Entry point of the format; Spark makes one for each ``load``, ``save`` and ``start``."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of what is read."""
        # Whether it becomes a frame or a stream is not known yet; what is followed are records, unless said otherwise.
        return spark_schema(columns_read(SourceOptions(self.options, StoreUse.READING, StoreUse.FOLLOWING)))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a data frame."""
        return reader_for(Reading.of(SourceOptions(self.options, StoreUse.READING), schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream."""
        return RecordStreamReader(Following.of(SourceOptions(self.options, StoreUse.FOLLOWING), schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the writer of a data frame; tables that are missing have been created then.

        Raises:
            PipelineError: the mode is ``overwrite``, or a column is missing or of a wrong type.
        """
        _refuse(overwrite)
        writing = Writing.of(SourceOptions(self.options, StoreUse.WRITING))
        check_columns(schema, at_once=writing.sweep is not None)
        writing.set_up()
        return StoreWriter(writing, SystemClock().now())

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the writer of a micro-batch; see :meth:`writer`."""
        _refuse(overwrite)
        writing = Writing.of(SourceOptions(self.options, StoreUse.WRITING_A_STREAM))
        check_columns(schema, at_once=writing.sweep is not None)
        return StreamStoreWriter(writing)


def _refuse(overwrite: bool) -> None:
    if overwrite:
        raise PipelineError("messages are never overwritten; write with mode('append'): ids already there are kept")
