"""Make ``postdate`` a known format in every Spark session whose Python has Postdate installed.

PySpark imports installed packages whose names begin with ``pyspark_``, once in each session that asks for a format
written in Python, and registers their ``DefaultSource``. So this module imports only modules that Spark has imported
already. The format itself is imported when it is used.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import DataSource

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """A placeholder that imports nothing. An instance is a :class:`postdate.pipeline.source.PostdateDataSource`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "postdate"

    def __new__(cls, options: MutableMapping[str, str]) -> DataSource:
        """Create the format itself, which is imported only now."""
        from postdate.pipeline.source import PostdateDataSource

        return PostdateDataSource(options)
