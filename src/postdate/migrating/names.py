"""Names of what a migration makes beside the tables of timeouts. Source: specification 4.12; ADR 0015."""

from __future__ import annotations

import re
from typing import Final

from postdate.errors import ConfigurationError
from postdate.persistence.timeouts import DESTINATION, HEADERS, ID, STATE, TIME

STATE_TABLE: Final = "TimeoutsMigration_State"
"""One row a run: upstream's columns, and three of ours."""

RUN_ID: Final = "MigrationRunId"
ENDPOINT: Final = "EndpointName"
STATUS: Final = "Status"
PARAMETERS: Final = "RunParameters"
BATCHES: Final = "NumberOfBatches"
CUTOFF: Final = "CutOffTime"
STARTED: Final = "StartedAt"
COMPLETED: Final = "CompletedAt"
TIMEOUTS: Final = "NumberOfTimeouts"
LIVE_TABLE: Final = "TimeoutTable"
ONGOING: Final = "OngoingTable"
"""The table of timeouts while the run is on its way, then NULL: unique, so that one run at a time has a table."""

STATE_COLUMNS: Final = (
    RUN_ID,
    ENDPOINT,
    STATUS,
    PARAMETERS,
    BATCHES,
    CUTOFF,
    STARTED,
    COMPLETED,
    TIMEOUTS,
    LIVE_TABLE,
    ONGOING,
)

BATCH_TABLE: Final = "TimeoutsMigration_Batches"
"""One row a batch: how far it is, so that going on writes one row and not a thousand."""

NUMBER: Final = "BatchNumber"
EARLIEST: Final = "EarliestTime"
BATCH_COLUMNS: Final = (RUN_ID, NUMBER, STATUS, TIMEOUTS, EARLIEST)

READ: Final = (ID, DESTINATION, STATE, TIME, HEADERS)
"""Columns without which no timeout can be moved."""

FIRST_TIME: Final = "FirstTime"
FIRST_ID: Final = "FirstId"
LAST_TIME: Final = "LastTime"
LAST_ID: Final = "LastId"

_RUN_ID: Final = re.compile("[0-9a-f]{32}")


def staging_table(run_id: str) -> str:
    """Return the name of the table that a run hides timeouts in, as upstream's.

    Raises:
        ConfigurationError: the id of the run is not 32 hexadecimal digits.
    """
    return f"TimeoutData_migration_{_checked(run_id)}"


def former_table(run_id: str) -> str:
    """Return the name that a table of timeouts has once a run has put another in its place."""
    return f"TimeoutData_former_{_checked(run_id)}"


def ranges_table(run_id: str) -> str:
    """Return the name of the table that says which batch has which timeouts of the former one."""
    return f"TimeoutData_ranges_{_checked(run_id)}"


def _checked(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigurationError(f"the id of a migration is 32 hexadecimal digits in lower case, not {run_id!r}")
    return run_id


def run_of(staging: str) -> str:
    """Return the id of the run that hides messages in a table."""
    return staging[len(staging_table("0" * 32)) - 32 :]
