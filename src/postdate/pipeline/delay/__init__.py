"""The delay operator: rows of a stream wait in Spark's own state until they are due. No store is needed.

::

    from postdate.pipeline.delay import delay, delay_conf, reopen_last_batch, read_directory
    from postdate.pipeline.session import spark_session

    with spark_session(conf=delay_conf()) as spark:
        orders = read_directory(spark, "orders", "order_id string, due timestamp")
        reopen_last_batch(spark, "state")
        delay(orders, due="due").writeStream.option("checkpointLocation", "state").start("due-orders", "parquet")

``packing`` maps due times to buckets and packs rows of one bucket, ``processor`` keeps packages in Spark's state,
``slot`` keeps cancelled ids, and ``operator`` joins them, and runs between two directories.
"""

from postdate.pipeline.delay.operator import DelayOptions, DelayTarget, delay, delay_conf, reopen_last_batch, run_delay
from postdate.pipeline.files import read_directory

__all__ = ["DelayOptions", "DelayTarget", "delay", "delay_conf", "read_directory", "reopen_last_batch", "run_delay"]
