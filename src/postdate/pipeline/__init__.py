"""Bulk work on Spark: schedule, sweep, audit …, and the ``postdate`` data source. Only this package imports PySpark.

For your own jobs, :func:`expiry_of`, :func:`is_expired` and :func:`has_malformed_expiry` read the expiry of messages
from a column of headers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.pipeline.lapsing import expiry_of, has_malformed_expiry, is_expired

__all__ = ["expiry_of", "has_malformed_expiry", "is_expired"]


# Imported at first use: executors, and commands before they start Spark, need modules of this package without PySpark.
def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.lapsing"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
