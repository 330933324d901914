"""One row a message: its events, and the lines of the audit that apply to the message."""

from __future__ import annotations

from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.pipeline.audit.results import FINDINGS

_COUNTED = (
    "scheduled", "delivered", "expired", "cancelled", "failed",
    "handled", "discarded", "returned", "retried", "sent_again", "came_back", "pending", "queued",
)  # fmt: skip
_ENDS = ("delivered", "expired", "cancelled", "failed")
_KEY = ("endpoint", "message_id")


def group_by_message(events: DataFrame) -> DataFrame:
    """Return one row of counts and times for each message in the events that was known when the audit began."""

    def sum_of_kinds(column: str, *kinds: str) -> Column:
        return F.coalesce(F.sum(F.when(F.col("kind").isin(*kinds), F.col(column))), F.lit(0))

    of_delivery, of_handling = F.col("kind") == "delivered", F.col("kind") == "handled"
    is_stored = (F.col("kind") == "scheduled") & (F.col("times") > 0)
    after_due = F.unix_micros("at") - F.unix_micros("due")
    grouped = events.groupBy(*_KEY).agg(
        # The queue where the message was delivered or waits: a message that replaces it may be for another queue.
        F.coalesce(
            F.max_by(F.when(of_delivery, F.col("destination")), F.when(of_delivery, F.col("at"))),
            F.max(F.when(F.col("kind") == "pending", F.col("destination"))),
            F.max(F.when(F.col("kind") == "scheduled", F.col("destination"))),
            F.max("destination"),
        ).alias("destination"),
        # The due time of the delivery, else the latest due time: a rescheduled message has had several.
        F.coalesce(
            F.max_by(F.when(of_delivery, F.col("due")), F.when(of_delivery, F.col("at"))),
            F.max(F.when(F.col("kind") == "pending", F.col("due"))),
            F.max_by("due", "at"),
        ).alias("due"),
        F.max("due").isNull().alias("never_due"),
        F.min(F.when(of_delivery, F.col("at"))).alias("delivered_at"),
        # Each delivery is measured against its own due time: a message that came back was due more than once.
        F.max(F.when(of_delivery, after_due)).alias("late_microseconds"),
        F.min(F.when(of_delivery, after_due)).alias("earliest_microseconds"),
        F.min(F.when(of_handling, after_due)).alias("handled_microseconds"),
        *(sum_of_kinds("times", kind).alias(kind) for kind in _COUNTED),
        sum_of_kinds("times", *_ENDS).alias("ended"),
        sum_of_kinds("before", "scheduled").alias("scheduled_before"),
        sum_of_kinds("before", "delivered").alias("delivered_before"),
        sum_of_kinds("before", "delivered", "expired", "cancelled").alias("ended_by_store_before"),
        sum_of_kinds("before", *_ENDS).alias("ended_before"),
        sum_of_kinds("before", "handled", "discarded", "failed", "returned", "retried", "sent_again").alias(
            "received_before"
        ),
        F.coalesce(F.min(F.when(is_stored, F.col("archived"))), F.lit(False)).alias("archived"),
        # A receiver that does not record handling may still record discarding, so only handling counts here.
        F.coalesce(F.max(F.when(of_handling, F.col("native"))), F.lit(False)).alias("recorded_here"),
    )
    is_in_store = (F.col("scheduled_before") > 0) | (F.col("pending") > 0)
    return grouped.where(is_in_store | (F.col("ended_before") > 0) | (F.col("received_before") > 0))


def judge_messages(
    messages: DataFrame, as_of: datetime, late_after: timedelta, pruned_before: datetime | None
) -> DataFrame:
    """Decide for each message which lines of :class:`postdate.pipeline.audit.AuditCounts` apply to it.

    A message is early if its record of delivery is from before its due time. Its time of handling decides only without
    such a record: the receiver's clock may be a little behind, and must not make a punctual message early.

    Retention may have removed records of a message that was due before ``pruned_before``. So a missing record of such a
    message proves nothing.

    Reads ``messages`` twice. Returns endpoint, message_id, destination, due, delivered_at, late_microseconds, a column
    for each line, and for each of :data:`postdate.pipeline.audit.FINDINGS` a text ``about_…`` with details, else null.
    """
    located_messages = messages.join(F.broadcast(_destinations(messages)), ["endpoint", "destination"], "left")
    recording, fed = (F.coalesce(name, F.lit(False)) for name in ("recording", "fed"))

    is_in_store = (F.col("scheduled") > 0) | (F.col("pending") > 0)
    # Records beside a queue prove nothing alone, because another store may send to that queue. But a queue to which
    # this
    # store also delivers counts as its own.
    from_nowhere = (F.col("ended_by_store_before") > 0) | ((F.col("received_before") > 0) & fed)
    # Discarding is also recorded for messages sent without a delay, for which the store promised nothing.
    undelayed = ~is_in_store & (F.col("scheduled_before") == 0) & (F.col("discarded") > 0) & F.col("never_due")
    orphaned = ~is_in_store & (F.col("scheduled_before") == 0) & from_nowhere & ~undelayed
    receptions = F.col("handled") + F.col("discarded") + F.col("queued")
    is_nowhere = (F.col("scheduled_before") > 0) & (F.col("scheduled") > 0) & (
        F.col("ended") + F.col("pending") + receptions == 0
    )  # fmt: skip
    # Of retried messages, only the ones that a receiver sent again under another id have left their queue.
    unhandled = receptions + F.col("failed") + F.col("sent_again") == 0
    has_vanished = recording & (F.col("delivered_before") > 0) & unhandled
    # Each return from the error queue allows one more end.
    ends_in_order = 1 + F.col("came_back")
    is_repeated = (F.col("delivered") > ends_in_order) | (F.col("handled") + F.col("discarded") > ends_in_order)
    waits_after_its_end = (F.col("ended_before") > F.col("came_back")) & (F.col("pending") > 0)
    is_pending = (F.col("pending") > 0) & (F.col("ended") <= F.col("came_back"))
    # The clock of the receiver may be behind, so a record of delivery decides if there is one.
    early = F.coalesce("earliest_microseconds", "handled_microseconds")
    is_pruned = F.lit(False) if pruned_before is None else F.coalesce(F.col("due") < F.lit(pruned_before), F.lit(False))
    is_failed = F.col("failed") > F.col("returned") + F.col("came_back")
    conditions = {
        "scheduled": is_in_store,
        "delivered": F.col("delivered") > 0,
        "handled": F.col("handled") > 0,
        "queued": (F.col("queued") > 0) & ~is_failed,
        "pending": is_pending,
        "overdue": is_pending & (F.col("due") < F.lit(as_of)),
        "expired": (F.col("expired") + F.col("discarded") > 0) & ~undelayed,
        "discarded": F.col("discarded") > 0,
        "undelayed": undelayed,
        "cancelled": F.col("cancelled") > 0,
        "failed": is_failed,
        "retried": F.col("retried") + F.col("sent_again") > 0,
        "archived": F.col("archived"),
        "lost": (is_nowhere | has_vanished) & ~F.col("archived") & ~orphaned & ~is_pruned,
        # Without a delay, a message goes to several queues under one id, and each of them may discard it.
        "duplicated": (is_repeated | waits_after_its_end) & ~undelayed & ~is_pruned,
        "early": early < 0,
        "orphaned": orphaned & ~is_pruned,
        "late": F.col("late_microseconds") > late_after // timedelta(microseconds=1),
    }
    details = {
        "lost": F.when(has_vanished, F.lit("delivered, and not handled; it is not in its queue any more")).otherwise(
            F.lit("scheduled; it does not wait and has not ended")
        ),
        "duplicated": F.concat(
            F.format_string("delivered %d, handled %d, discarded %d times", "delivered", "handled", "discarded"),
            F.when(waits_after_its_end, F.lit("; it still waits")).otherwise(F.lit("")),
        ),
        "early": F.format_string("%.6f s before it was due", -early / 1e6),
        "orphaned": F.format_string(
            "delivered %d, handled %d, expired %d, cancelled %d, failed %d times; never scheduled",
            *("delivered", "handled", "expired", "cancelled", "failed"),
        ),
        "overdue": F.lit("waits"),
        "failed": F.lit("in the error queue"),
        "late": F.format_string("%.6f s after it was due", F.col("late_microseconds") / 1e6),
    }
    verdict = located_messages.where(is_in_store | (F.col("ended_before") > 0) | orphaned | undelayed)
    return verdict.select(
        *_KEY,
        "destination",
        "due",
        "delivered_at",
        "late_microseconds",
        *(F.coalesce(column, F.lit(False)).alias(name) for name, column in conditions.items()),
        *(F.when(conditions[name], details[name]).alias(f"about_{name}") for name in FINDINGS),
    )


def _destinations(messages: DataFrame) -> DataFrame:
    """Return for each destination whether handling there is recorded, and whether this store delivers to it.

    Only some receivers record handling. One handled message shows that the receivers of its destination do. Without
    such a message, a message that has left its queue does not count as missing.
    """
    return (
        messages.where(F.col("destination").isNotNull() & (F.col("scheduled") + F.col("delivered") > 0))
        .groupBy("endpoint", "destination")
        .agg(F.max("recorded_here").alias("recording"), F.max(F.col("delivered") > 0).alias("fed"))
        .where(F.col("recording") | F.col("fed"))
    )
