"""Which engine runs a job: Spark, or the local one, which works in this process and needs no Java.

The local engine gives the same results as Spark. What it does not do it refuses before anything is changed, by
:class:`NeedsSpark`, so that a caller can go on with Spark. Source: ADR 0065.
"""

from __future__ import annotations

import importlib.util
from typing import Final, Literal

from postdate.errors import PipelineError

EngineName = Literal["local", "spark"]

LARGEST_LOCAL_BYTES: Final = 256 * 1024 * 1024
"""Files up to this size together are read in this process.

The local engine keeps the input in memory, in about four times its size, and uses one core. At some 20,000 rows a
second it needs a minute for such an input, and Spark on four cores not much less.
"""

LARGEST_LOCAL_MESSAGES: Final = 1_000_000
"""A store with up to this number of messages or records is read in this process, in some seconds."""


class NeedsSpark(PipelineError):
    """The local engine does not do this; nothing was changed. The text says what, without a full stop at its end."""


def is_spark_installed() -> bool:
    return importlib.util.find_spec("pyspark") is not None


def refuse_locally(error: NeedsSpark) -> PipelineError:
    """Return the error for a user who has no other engine, or wants none."""
    missing = "" if is_spark_installed() else ", after pip install 'postdate[pipeline]'"
    return PipelineError(f"{error}: use --engine spark{missing}")
