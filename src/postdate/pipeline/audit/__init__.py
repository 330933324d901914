"""Compares scheduled messages with their outcomes: lost, duplicated, early, orphaned, overdue; how late; and where."""

from postdate.pipeline.audit.job import SAMPLE_SIZE, audit
from postdate.pipeline.audit.reading import endpoints_of
from postdate.pipeline.audit.results import (
    BROKEN_PROMISES,
    FINDINGS,
    AuditCounts,
    AuditResult,
    AuditRow,
    CurvePoint,
    Finding,
    Lateness,
    LatenessBin,
)

__all__ = [
    "BROKEN_PROMISES",
    "FINDINGS",
    "SAMPLE_SIZE",
    "AuditCounts",
    "AuditResult",
    "AuditRow",
    "CurvePoint",
    "Finding",
    "Lateness",
    "LatenessBin",
    "audit",
    "endpoints_of",
]
