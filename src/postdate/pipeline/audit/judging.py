"""One row a message: its events, and the lines of the audit that apply to the message."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.pipeline.audit.reading import checkpoint_frame
from postdate.pipeline.audit.results import FINDINGS

_COUNTED = (
    "scheduled", "delivered", "expired", "cancelled", "failed",
    "handled", "discarded", "returned", "retried", "sent_again", "came_back", "pending", "queued",
)  # fmt: skip
_ENDS = ("delivered", "expired", "cancelled", "failed")
_KEY = ("endpoint", "message_id")


def group_by_message(events: DataFrame) -> DataFrame:
    """Return one row of counts and times for each message in the events that was known when the audit began."""
    return describe_messages(collect_facts(events))


# --- facts: what the events of a message add up to --------------------------------------------------------------------


_OF_STORE = ("delivered", "expired", "cancelled")
_OF_RECEIVER = ("handled", "discarded", "failed", "returned", "retried", "sent_again")
_BEFORE = {
    "scheduled_before": ("scheduled",),
    "delivered_before": ("delivered",),
    "ended_by_store_before": _OF_STORE,
    "ended_before": _ENDS,
    "received_before": _OF_RECEIVER,
}
_SUMS = (*_COUNTED, *_BEFORE)
_LARGEST = (
    "last_delivery", "last_event", "last_due", "pending_due", "pending_destination", "scheduled_destination",
    "any_destination", "late_microseconds", "recorded_here", "is_present",
)  # fmt: skip
_SMALLEST = ("delivered_at", "earliest_microseconds", "handled_microseconds", "archived")
FACTS = (*_SUMS, *_LARGEST, *_SMALLEST)
"""Columns of facts. Each is a sum, a largest or a smallest value, so facts from two times can be merged."""


def collect_facts(events: DataFrame, *, present: bool = False) -> DataFrame:
    """Return the facts of each message in the events: endpoint, message_id and :data:`FACTS`.

    ``present``: the events hold only now, and a later audit must not add them up with others.
    """

    def sum_of_kinds(column: str, *kinds: str) -> Column:
        return F.coalesce(F.sum(F.when(F.col("kind").isin(*kinds), F.col(column))), F.lit(0))

    of_delivery, of_handling = F.col("kind") == "delivered", F.col("kind") == "handled"
    of_pending, of_scheduling = F.col("kind") == "pending", F.col("kind") == "scheduled"
    after_due = F.unix_micros("at") - F.unix_micros("due")
    return events.groupBy(*_KEY).agg(
        *(sum_of_kinds("times", kind).alias(kind) for kind in _COUNTED),
        *(sum_of_kinds("before", *kinds).alias(name) for name, kinds in _BEFORE.items()),
        F.max(F.when(of_delivery, F.struct("at", "destination", "due"))).alias("last_delivery"),
        F.max(F.when(F.col("at").isNotNull(), F.struct("at", "due"))).alias("last_event"),
        F.max("due").alias("last_due"),
        F.max(F.when(of_pending, F.col("due"))).alias("pending_due"),
        F.max(F.when(of_pending, F.col("destination"))).alias("pending_destination"),
        F.max(F.when(of_scheduling, F.col("destination"))).alias("scheduled_destination"),
        F.max("destination").alias("any_destination"),
        # Each delivery is measured against its own due time: a message that came back was due more than once.
        F.max(F.when(of_delivery, after_due)).alias("late_microseconds"),
        # A receiver that does not record handling may still record discarding, so only handling counts here.
        F.coalesce(F.max(F.when(of_handling, F.col("native"))), F.lit(False)).alias("recorded_here"),
        F.lit(present).alias("is_present"),
        F.min(F.when(of_delivery, F.col("at"))).alias("delivered_at"),
        F.min(F.when(of_delivery, after_due)).alias("earliest_microseconds"),
        F.min(F.when(of_handling, after_due)).alias("handled_microseconds"),
        F.min(F.when(of_scheduling & (F.col("times") > 0), F.col("archived"))).alias("archived"),
    )


def merge_facts(facts: DataFrame) -> DataFrame:
    """Return one row for each message of facts that have several."""
    return facts.groupBy(*_KEY).agg(
        *(F.sum(name).alias(name) for name in _SUMS),
        *(F.max(name).alias(name) for name in _LARGEST),
        *(F.min(name).alias(name) for name in _SMALLEST),
    )


def describe_messages(facts: DataFrame) -> DataFrame:
    """Return the facts of each message that was known when the audit began, with its destination and due time."""
    described = facts.withColumns(
        {
            # The queue where the message was delivered or waits: a message that replaces it may be for another queue.
            "destination": F.coalesce(
                "last_delivery.destination", "pending_destination", "scheduled_destination", "any_destination"
            ),
            # The due time of the delivery, else the latest due time: a rescheduled message has had several.
            "due": F.coalesce("last_delivery.due", "pending_due", "last_event.due"),
            "never_due": F.col("last_due").isNull(),
            "ended": reduce(operator.add, (F.col(name) for name in _ENDS)),
            "archived": F.coalesce("archived", F.lit(False)),
        }
    )
    is_in_store = (F.col("scheduled_before") > 0) | (F.col("pending") > 0)
    return described.where(is_in_store | (F.col("ended_before") > 0) | (F.col("received_before") > 0))


# --- the verdict ------------------------------------------------------------------------------------------------------


_MOST_BROADCAST = 100_000
"""Up to this number of destinations, each executor gets all of them; Spark distributes more."""


def judge_messages(
    messages: DataFrame,
    as_of: datetime,
    late_after: timedelta,
    pruned_before: datetime | None,
    *,
    places: DataFrame | None = None,
    keep: Sequence[str] = (),
) -> DataFrame:
    """Decide for each message which lines of :class:`postdate.pipeline.audit.AuditCounts` apply to it.

    A message is early if its record of delivery is from before its due time. Its time of handling decides only without
    such a record: the receiver's clock may be a little behind, and must not make a punctual message early.

    Retention may have removed records of a message that was due before ``pruned_before``. So a missing record of such a
    message proves nothing.

    ``places`` are those of :func:`find_places`, by default of these messages; then ``messages`` are read twice.
    ``keep`` are further columns to return.

    Returns endpoint, message_id, destination, due, delivered_at, late_microseconds, a column
    for each line, and for each of :data:`postdate.pipeline.audit.FINDINGS` a text ``about_…`` with details, else null.
    """
    all_places = checkpoint_frame(find_places(messages) if places is None else places)
    if all_places.limit(_MOST_BROADCAST + 1).count() <= _MOST_BROADCAST:
        all_places = F.broadcast(all_places)
    located_messages = messages.join(all_places, ["endpoint", "destination"], "left")
    recording, fed = (F.coalesce(name, F.lit(False)) for name in ("recording", "fed"))

    is_in_store = (F.col("scheduled") > 0) | (F.col("pending") > 0)
    # Records beside a queue prove nothing alone, because another store may send to that queue. But a queue to which
    # this store also delivers counts as its own.
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
        *keep,
        *(F.coalesce(column, F.lit(False)).alias(name) for name, column in conditions.items()),
        *(F.when(conditions[name], details[name]).alias(f"about_{name}") for name in FINDINGS),
    )


def find_places(messages: DataFrame) -> DataFrame:
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
