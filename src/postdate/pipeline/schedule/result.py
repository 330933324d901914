"""The result of a schedule job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from postdate.pipeline.engines import EngineName
from postdate.pipeline.plain import to_plain

CONFLICTS_WITH_STORE = "conflicts_with_store"
"""Reason of rows whose id the store knows with other content."""

SYNC_COUNTS = ("unchanged", "rescheduled", "replaced", "delivered_meanwhile", "cancelled", "not_cancelled")
"""The counts of :class:`SyncResult` that are sums over its rows and messages."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What became of the messages that were pending under a load. Of a dry run: what would become of them.

    Args:
        unchanged: rows that are equal to the message that is pending.
        rescheduled: rows of which only the due time differed; the message has the new one.
        replaced: rows of which anything else differed; the row replaces the message.
        delivered_meanwhile: rows that differed, and whose message was claimed or delivered, or ended otherwise, before
            it could be changed.
        cancelled: messages that were pending and not in the table.
        not_cancelled: messages that were pending and not in the table, and that were claimed or delivered, or ended
            otherwise, before they could be cancelled.
        retained: messages that are not in the table and stay, because rows were set aside: the table is incomplete.
        samples: of a dry run, up to ten messages that would be ``rescheduled``, ``replaced`` and ``cancelled``.
    """

    unchanged: int = 0
    rescheduled: int = 0
    replaced: int = 0
    delivered_meanwhile: int = 0
    cancelled: int = 0
    not_cancelled: int = 0
    retained: int = 0
    samples: Mapping[str, tuple[Mapping[str, Any], ...]] = field(
        default_factory=dict[str, tuple[Mapping[str, Any], ...]]
    )

    @property
    def rows(self) -> int:
        """Number of rows of the table that these counts are about."""
        return self.unchanged + self.rescheduled + self.replaced + self.delivered_meanwhile


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """Result of a schedule job.

    ``read`` is the sum of ``accepted``, ``already_there``, ``conflicting`` and all of ``set_aside``; with ``sync`` also
    of its ``unchanged``, ``rescheduled``, ``replaced`` and ``delivered_meanwhile``.

    Args:
        read: rows of the input, counted separately from the results.
        accepted: messages that are new in the store.
        already_there: rows whose id was stored before, by this job (equal rows count once) or an earlier one, and
            which do not differ from what the store has.
        conflicting: rows whose id was stored before with another due time, destination, expiry, body or other headers.
            The store keeps what it has.
        set_aside: rows by reason.
        rejected_to: directory of the rows that were not stored; ``None`` if there are none, or if no directory was
            named.
        seconds: duration from the start to the last commit.
        reported_to: directory of the validation report; ``None`` if none was named.
        unused: columns of the input of which nothing was stored.
        is_dry_run: nothing was stored: ``accepted`` counts the messages that would be.
        sample: of a dry run, up to ten messages that would be stored, as texts.
        rejected_sample: of a dry run, up to ten rows that would not be stored, as texts with ``reason`` and ``detail``.
        load: name of the load; ``None``: the messages belong to no load.
        sync: what became of the messages that were pending under the load; ``None`` without ``sync``.
        engine: what ran the job, ``local`` or ``spark``; the results of both are the same.
    """

    read: int
    accepted: int
    already_there: int
    conflicting: int = 0
    set_aside: Mapping[str, int] = field(default_factory=dict[str, int])
    rejected_to: str | None = None
    seconds: float = 0.0
    reported_to: str | None = None
    unused: tuple[str, ...] = ()
    is_dry_run: bool = False
    sample: tuple[Mapping[str, Any], ...] = ()
    rejected_sample: tuple[Mapping[str, Any], ...] = ()
    load: str | None = None
    sync: SyncResult | None = None
    engine: EngineName = "spark"

    @property
    def rows_per_second(self) -> float:
        """Rows read a second, over the whole duration."""
        return self.read / self.seconds if self.seconds else 0.0

    def report_lines(self) -> list[tuple[str, str | None, int]]:
        """Return the lines of the validation report: outcome, reason, rows."""
        return [
            ("accepted", None, self.accepted),
            ("already_there", None, self.already_there),
            *([] if self.sync is None else [(name, None, getattr(self.sync, name)) for name in SYNC_COUNTS]),
            *([("conflicting", CONFLICTS_WITH_STORE, self.conflicting)] if self.conflicting else []),
            *(("set_aside", reason, count) for reason, count in self.set_aside.items()),
        ]

    def to_json(self) -> dict[str, Any]:
        return {**to_plain(self), "rows_per_second": round(self.rows_per_second, 1)}
