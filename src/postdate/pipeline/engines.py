"""Which engine runs a job: Spark, or the local one, which works in this process and needs no Java.

The local engine gives the same results as Spark. What it does not do it refuses before anything is changed, by
:class:`NeedsSpark`, so that a caller can go on with Spark. Source: ADR 0065.
"""

from __future__ import annotations

import importlib.util
from typing import Final, Literal

from postdate.errors import PipelineError

EngineName = Literal["local", "spark"]

LARGEST_LOCAL_BYTES: Final = 64 * 1024 * 1024
"""Files up to this size together are read in this process.

The local engine keeps the input in memory, in about eight times its size: half a GiB for such an input. It uses one
core. 300,000 rows in 26 MB of CSV take it 24 s into SQLite, and Spark on two cores 38 s, of which 10 s are the start.
Above this limit Spark is faster.
"""

LARGEST_LOCAL_MESSAGES: Final = 400_000
"""A store with up to this number of messages or records is read in this process.

An audit keeps 2.5 KiB for each message in memory, 1 GiB for so many, and a forecast a Python object for each second
and destination.
"""


class NeedsSpark(PipelineError):
    """The local engine does not do this; nothing was changed. The text says what, without a full stop at its end."""


def is_spark_installed() -> bool:
    return importlib.util.find_spec("pyspark") is not None


def refuse_locally(error: NeedsSpark) -> PipelineError:
    """Return the error for a user who has no other engine, or wants none."""
    missing = "" if is_spark_installed() else ", after pip install 'postdate[pipeline]'"
    return PipelineError(f"{error}: use --engine spark{missing}")
