"""One check, and all of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Verdict(enum.Enum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Probe:
    """One check.

    Args:
        name: what was looked at.
        result: how it came out.
        found: what was found.
        mend: what to do about it; empty when nothing has to be done.
    """

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
        """The worst of the results."""
        order = list(Verdict)
        return max((check.result for check in self.checks), key=order.index, default=Verdict.OK)
