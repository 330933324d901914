"""The clock of a store: one for all services that share it, whatever their own clocks show. Source: ADR 0019."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Protocol, runtime_checkable


@runtime_checkable
class TimekeepingStore(Protocol):
    """A store on a server with a clock of its own (PostgreSQL, MariaDB, SQL Server, Azure)."""

    async def server_now(self) -> datetime:
        """Return the time of the server, UTC, to its precision, or a little before it, never after; one round trip.

        What has gone by since the answer was heard may be added, and is: who asked may be told of it much later.

        Raises:
            StoreUnavailable: transient.
        """
        ...

    async def report_clock(self, ahead: timedelta) -> None:
        """Note for others how far this process' clock is ahead of the server's; negative: behind."""
        ...

    async def reported_clocks(self) -> Mapping[str, timedelta]:
        """Return what live processes have noted, by ``machine:pid``."""
        ...
