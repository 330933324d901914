"""The Spark data source ``postdate``: a store read in parallel or followed as a stream, and messages written to one.

::

    spark.read.format("postdate").option("store", "sqlite:///messages.db").load()
    messages.write.format("postdate").option("store", "sqlite:///messages.db").mode("append").save()
    spark.readStream.format("postdate").option("store", "sqlite:///messages.db").option("what", "records").load()
    messages.writeStream.format("postdate").option("store", "sqlite:///messages.db").start()

Options, columns and guarantees: docs/guides/spark-source.md. Source: ADR 0011.
"""

from postdate.pipeline.source.format import FORMAT, PostdateDataSource, register
from postdate.pipeline.source.options import DEFAULT_BATCH

BATCH_MESSAGES = DEFAULT_BATCH
"""Messages stored in one transaction."""

__all__ = ["BATCH_MESSAGES", "FORMAT", "PostdateDataSource", "register"]
