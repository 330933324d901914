"""Bulk work on Spark: schedule, sweep, audit …, and the ``postdate`` data source. Only this package imports PySpark.

For your own jobs, :func:`end_of_use`, :func:`lapsed` and :func:`malformed_end_of_use` read the expiry of messages from
a column of headers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.pipeline.lapsing import end_of_use, lapsed, malformed_end_of_use

__all__ = ["end_of_use", "lapsed", "malformed_end_of_use"]


# Imported at first use: executors, and commands before they start Spark, need modules of this package without PySpark.
def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.lapsing"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
