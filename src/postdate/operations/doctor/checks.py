"""One check, and all of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Verdict(enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Probe:
    """One check; ``mend`` says how to repair it, and is empty when nothing has to be done."""

    name: str
    result: Verdict
    found: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks, in the order in which they build on each other."""

    checks: Sequence[Probe]

    @property
    def worst(self) -> Verdict:
        order = list(Verdict)
        return max((check.result for check in self.checks), key=order.index, default=Verdict.OK)
