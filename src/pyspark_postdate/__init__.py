"""Makes ``postdate`` a format that every Spark session knows in which Postdate is installed.

PySpark imports installed packages whose names begin with ``pyspark_``, once in each session that asks for a format
written in Python, and takes ``DefaultSource`` from them. So this module imports nothing that Spark has not imported
already; the format itself is loaded when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """Stands for :class:`postdate.pipeline.source.PostdateDataSource` until it is needed."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "postdate"

    def _format(self) -> DataSource:
        from postdate.pipeline.source import PostdateDataSource

        return PostdateDataSource(self.options)

    def schema(self) -> StructType | str:
        """Return the columns of what is read."""
        return self._format().schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a data frame."""
        return self._format().reader(schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a data frame."""
        return self._format().writer(schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream."""
        return self._format().streamReader(schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of a stream."""
        return self._format().streamWriter(schema, overwrite)
