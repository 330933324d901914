"""The delay operator: rows of a stream wait in Spark's own state until they are due. No store is needed.

::

    from postdate.pipeline.delay import delay, delay_conf, reopen_last_batch, read_directory
    from postdate.pipeline.session import spark_session

    with spark_session(conf=delay_conf()) as spark:
        orders = read_directory(spark, "orders", "order_id string, due timestamp")
        reopen_last_batch(spark, "state")
        delay(orders, due="due").writeStream.option("checkpointLocation", "state").start("due-orders", "parquet")

``packing`` maps due times to buckets and packs rows of one bucket, ``processor`` keeps packages in Spark's state,
``layout`` says how they were written, ``slot`` keeps that and cancelled ids, and ``operator`` joins them, and runs
between two directories. ``rejecting`` splits off rows that cannot be delayed, and ``waiting`` reads what waits.
"""

from postdate.pipeline.delay.operator import DelayOptions, DelayTarget, delay, delay_conf, reopen_last_batch, run_delay
from postdate.pipeline.delay.rejecting import SplitRows, split_rejected, write_rejected
from postdate.pipeline.delay.waiting import WaitingRows, WaitingSummary, read_waiting, summarize_waiting
from postdate.pipeline.files import read_directory

__all__ = [
    "DelayOptions",
    "DelayTarget",
    "SplitRows",
    "WaitingRows",
    "WaitingSummary",
    "delay",
    "delay_conf",
    "read_directory",
    "read_waiting",
    "reopen_last_batch",
    "run_delay",
    "split_rejected",
    "summarize_waiting",
    "write_rejected",
]
