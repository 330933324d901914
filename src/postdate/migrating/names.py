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

EXCHANGED: Final = "TimeoutData_ranges_"
"""With the id of a run: the table by which one is known that an older version hid with its whole table."""

_RUN_ID: Final = re.compile("[0-9a-f]{32}")


def staging_table(run_id: str) -> str:
    """Return the name of the table that a run hides timeouts in, as upstream's.

    Raises:
        ConfigurationError: the id of the run is not 32 hexadecimal digits.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigurationError(f"the id of a migration is 32 hexadecimal digits in lower case, not {run_id!r}")
    return f"TimeoutData_migration_{run_id}"
