"""Compares scheduled messages with their outcomes: lost, duplicated, early, orphaned, overdue; how late; and where."""

from postdate.pipeline.audit.job import audit
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
from postdate.pipeline.audit.summary import SAMPLE_SIZE

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
