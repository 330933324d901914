"""The records that are older than the retention, for all SQL databases. Source: ADR 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from postdate.ports.migrating import MOVED_AWAY
from postdate.ports.scanning import ARCHIVED

_AFTER_OUTCOME: Final = "kind BETWEEN 8 AND 11"
"""Rescheduled (or returned), discarded, returned, pruned. An index of SQLite has exactly this condition."""

_LARGEST_NUMBER: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class AgeCondition:
    """The names of a database in the query for records ``r`` that are too old.

    Args:
        record: table of the records.
        pending: table of the pending messages.
        number: their common column: a pending message has the number of its *scheduled* record.
        before: the instant, as SQL.
        is_keyed: whether the id of ``r`` is one of those under a key, of which only the last may be pending (ADR 31).
        last_of_key: the last possible id under that key.
        same_store: condition on ``{0}``, another record, joined with ``AND``.
        limit: the end of subqueries that must be evaluated row by row.
        position: subquery for the smallest position of the streams of ``r``, or NULL; empty where there are none.
    """

    record: str
    pending: str
    number: str
    before: str
    is_keyed: str
    last_of_key: str
    same_store: str = ""
    limit: str = ""
    position: str = ""

    def _exists_condition(self, other: str, condition: str) -> str:
        """Return the condition that there is another record of the same message."""
        return (
            f"EXISTS (SELECT 1 FROM {self.record} AS {other} WHERE {other}.message_id = r.message_id AND {condition} "
            f"{self.same_store.format(other)} {self.limit})"
        )

    def condition(self) -> str:
        """Return the condition; see :meth:`postdate.ports.scanning.PrunableStore.prune_before`."""
        before, number = self.before, self.number
        is_passed = f"AND r.{number} < COALESCE(({self.position}), {_LARGEST_NUMBER})" if self.position else ""
        ended_condition = self._exists_condition("b", f"b.{_AFTER_OUTCOME} AND b.{number} > f.{number}")
        return f"""
            r.at < {before} AND (r.due IS NULL OR r.due < {before}) AND r.kind BETWEEN 1 AND 10
            {is_passed}
            AND NOT (r.kind = 1 AND COALESCE(r.detail, '') = '{ARCHIVED}')
            AND NOT EXISTS (
                SELECT 1 FROM {self.record} AS a JOIN {self.pending} AS w ON w.{number} = a.{number}
                WHERE a.message_id = r.message_id AND a.kind = 1 {self.same_store.format("a")} {self.limit})
            AND NOT (r.kind = 1 AND {self.is_keyed} AND NOT EXISTS (
                SELECT 1 FROM {self.record} AS n WHERE n.kind = 1 AND n.message_id > r.message_id
                    AND n.message_id <= {self.last_of_key} {self.same_store.format("n")} {self.limit}))
            AND NOT (r.kind = 6 AND SUBSTR(COALESCE(r.detail, ''), 1, {len(MOVED_AWAY)}) = '{MOVED_AWAY}')
            AND NOT {self._exists_condition("s", f"s.kind = 1 AND s.due >= {before}")}
            AND NOT {self._exists_condition("o", f"o.{_AFTER_OUTCOME} AND (o.due >= {before} OR o.at >= {before})")}
            AND NOT {self._exists_condition("f", f"f.kind = 7 AND NOT {ended_condition}")}
            AND NOT (r.{_AFTER_OUTCOME} AND {self._exists_condition("e", f"e.kind = 7 AND e.{number} < r.{number}")})"""
