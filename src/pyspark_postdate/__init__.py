"""Makes ``postdate`` a format that every Spark session knows in which Postdate is installed.

PySpark imports installed packages whose names begin with ``pyspark_``, once in each session that asks for a format
written in Python, and takes ``DefaultSource`` from them. So this module imports nothing that Spark has not imported
already; the format itself is loaded when it is used.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import DataSource

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """Stands for :class:`postdate.pipeline.source.PostdateDataSource` until it is needed: to make one makes that."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "postdate"

    def __new__(cls, options: MutableMapping[str, str]) -> DataSource:
        """Return the format itself."""
        from postdate.pipeline.source import PostdateDataSource

        return PostdateDataSource(options)
