"""Compare scheduled messages with their outcomes: lost, duplicated, early, orphaned, overdue; how late; and where."""

from postdate.pipeline.audit.job import SAMPLE_SIZE as SAMPLE_SIZE, audit as audit
from postdate.pipeline.audit.reading import endpoints_of as endpoints_of
from postdate.pipeline.audit.results import (
    BROKEN_PROMISES as BROKEN_PROMISES,
    FINDINGS as FINDINGS,
    AuditCounts as AuditCounts,
    AuditResult as AuditResult,
    AuditRow as AuditRow,
    CurvePoint as CurvePoint,
    Finding as Finding,
    Lateness as Lateness,
    LatenessBin as LatenessBin,
)
