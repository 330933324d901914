"""Where a timeout manager keeps its timeouts, one adapter, one file. Source: specification 4.6; ADR 0014."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.timeouts.mariadb import MariaDbTimeouts
    from postdate.timeouts.memory import MemoryTimeouts
    from postdate.timeouts.postgres import PostgresTimeouts
    from postdate.timeouts.sqlite import SqliteTimeouts
    from postdate.timeouts.sqlserver import SqlServerTimeouts

__all__ = ["MariaDbTimeouts", "MemoryTimeouts", "PostgresTimeouts", "SqlServerTimeouts", "SqliteTimeouts"]

# Imported at first use: each needs a driver of its own.
_ROOMS = {
    "MariaDbTimeouts": "mariadb",
    "MemoryTimeouts": "memory",
    "PostgresTimeouts": "postgres",
    "SqlServerTimeouts": "sqlserver",
    "SqliteTimeouts": "sqlite",
}


def __getattr__(name: str) -> object:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{room}"), name)
    return value
