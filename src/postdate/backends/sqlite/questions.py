"""Statements for an operator's questions about pending messages, answered from indexes."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from postdate.backends.sqlite.rows import PENDING_COLUMNS
from postdate.clock import to_microseconds
from postdate.ports.limits import LANE_WIDTH, LANES


def _first_rows_by(time: str, condition: str) -> str:
    """Return SQL for the first messages of a page, by an index of ``time``.

    It has two parts, each a range of the index: SQLite does not use an index range for a comparison of pairs.
    """
    rows = f"SELECT * FROM delayed_message WHERE {condition} AND {time} < coalesce(:due_to, {2**63 - 1})"
    return f"""SELECT * FROM (
        SELECT * FROM (
            {rows} AND {time} = :due_from AND seq > :behind
            UNION ALL {rows} AND {time} > :due_from
            ORDER BY {time}, seq LIMIT coalesce(:among, -1))
        WHERE :destination IS NULL OR destination = :destination LIMIT :limit)"""


_LANES: Final = to_microseconds(LANES)
_LANE_WIDTH: Final = LANE_WIDTH // timedelta(microseconds=1)


def _next_lane(lane: str) -> str:
    """Return SQL for the number of the first lane from ``lane`` on that has messages."""
    return f"""
        SELECT (min(d.attempt_at) - {_LANES}) / {_LANE_WIDTH} FROM delayed_message AS d
        WHERE d.attempt_at >= {_LANES} + ({lane}) * {_LANE_WIDTH}"""


_UNREADABLE: Final = "SELECT count(*) FROM delayed_message WHERE unreadable IS NOT NULL"


class SqliteQuestions:
    """Statements for an operator's questions about pending messages; see :class:`SqlQuestions`."""

    # Due times differ from attempt_at only in rows that failed, are claimed, are in a
    # lane, or wait for their destination: only these are read.
    next_due: Final = """
        SELECT min(first) FROM (
            SELECT min(attempt_at) AS first FROM delayed_message
            UNION ALL SELECT min(due) FROM delayed_message WHERE attempt_at <> due
            UNION ALL SELECT min(due) FROM delayed_message WHERE attempt_at IS NULL AND unreadable IS NULL)"""
    statistics: Final = f"""
        SELECT (SELECT count(*) FROM delayed_message) - ({_UNREADABLE}),
            (SELECT count(*) FROM delayed_message WHERE attempt_at < :at)
                + (SELECT count(*) FROM delayed_message WHERE attempt_at <> due AND attempt_at >= :at AND due < :at),
            (SELECT count(*) FROM delayed_message WHERE attempt_at IS NULL AND unreadable IS NULL),
            (SELECT count(*) FROM delayed_message WHERE failures > 0 AND unreadable IS NULL),
            ({next_due}), ({_UNREADABLE})"""
    due_count: Final = "SELECT count(*) FROM delayed_message WHERE attempt_at >= :first AND attempt_at < :end"
    moved_dues: Final = f"""
        SELECT at - ((at % 1000000) + 1000000) % 1000000, sum(count) FROM (
            SELECT due AS at, 1 AS count FROM delayed_message WHERE failures > 0 AND unreadable IS NULL
            UNION ALL SELECT due, 1 FROM delayed_message
                WHERE failures = 0 AND attempt_at IS NULL AND unreadable IS NULL
            UNION ALL SELECT due, 1 FROM delayed_message
                WHERE failures = 0 AND attempt_at > {_LANES}
            UNION ALL SELECT attempt_at, -1 FROM delayed_message WHERE failures > 0 AND unreadable IS NULL)
        WHERE at >= :first AND at < :end GROUP BY 1"""
    record_counts: Final = "SELECT kind, count(*) FROM record GROUP BY kind ORDER BY kind"
    list_pending: Final = f"""
        SELECT {PENDING_COLUMNS} FROM (
            {_first_rows_by("attempt_at", "attempt_at = due")}
            UNION ALL {_first_rows_by("due", "attempt_at <> due")}
            UNION ALL {_first_rows_by("due", "attempt_at IS NULL AND unreadable IS NULL")})
        ORDER BY due, seq LIMIT :limit"""
    get: Final = f"""
        SELECT {PENDING_COLUMNS} FROM delayed_message
        WHERE unreadable IS NULL AND seq = (SELECT seq FROM record WHERE kind = 1 AND message_id = :id)"""
    limits_table: Final = "destination_limit"
    # It goes from each lane with messages to the next one: one search of an index for each, however many are empty.
    limits_of_held: Final = f"""
        WITH RECURSIVE
        last(lane) AS (SELECT max(lane) FROM destination_limit),
        held(lane) AS (
            SELECT ({_next_lane("0")})
            UNION ALL
            SELECT ({_next_lane("h.lane + 1")}) FROM held AS h WHERE h.lane < (SELECT lane FROM last))
        SELECT l.destination, l.lane, l.limits, l.free_at
        FROM held AS h JOIN destination_limit AS l ON l.lane = h.lane"""
    history: Final = (
        "SELECT kind, message_id, at, due, destination, detail FROM record WHERE message_id = :id ORDER BY seq"
    )
