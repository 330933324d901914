"""Compare scheduled messages with their outcomes: lost, duplicated, early, orphaned, overdue; how late; and where."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from postdate.pipeline.audit.results import (
    BROKEN_PROMISES as BROKEN_PROMISES,
    FINDINGS as FINDINGS,
    SAMPLE_SIZE as SAMPLE_SIZE,
    AuditCounts as AuditCounts,
    AuditResult as AuditResult,
    AuditRow as AuditRow,
    CurvePoint as CurvePoint,
    Finding as Finding,
    Lateness as Lateness,
    LatenessBin as LatenessBin,
)
from postdate.pipeline.audit.stores import endpoints_of as endpoints_of

if TYPE_CHECKING:
    from postdate.pipeline.audit.job import audit as audit


# Imported at first use, because only this function needs PySpark.
def __getattr__(name: str) -> object:
    if name != "audit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = importlib.import_module(f"{__name__}.job").audit
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), "audit"})
