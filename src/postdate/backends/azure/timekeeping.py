"""What the clock of an account shows, and how far those of the processes that share a table are from it.

The header ``Date`` tells whole seconds, which is too little to judge by what is due; the time at which a row was
written is kept to a fraction of a microsecond. So each process has a row beside the records.

Source: :mod:`postdate.ports.stores`; ADR 0019.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from postdate.backends.azure.groups import Operation, Table
from postdate.backends.azure.layout import changed_at
from postdate.errors import StoreUnavailable

_PARTITION: Final = "clock"
_AHEAD: Final = "AheadMicroseconds"
_MICROSECOND: Final = timedelta(microseconds=1)
_LIVES_FOR: Final = timedelta(minutes=2)
"""Every half minute each process looks at the clock, and so writes its row."""

_NOT_IN_KEYS: Final = re.compile(r"[/\\#?\x00-\x1f\x7f-\x9f']")


class Timekeeping:
    """The clock of an account.

    Args:
        table: of the records.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        name = _NOT_IN_KEYS.sub("_", f"{platform.node()}:{os.getpid()}")
        self._keys = {"PartitionKey": _PARTITION, "RowKey": name}

    async def now(self) -> datetime:
        """Return the time of the server, UTC, to the microsecond: that of a write, which a second request reads.

        Raises:
            StoreUnavailable: transient.
        """
        await self._table.atomically([Operation("merge", self._keys)])
        row = await self._table.get(self._keys)
        if row is None:  # another took it for that of a dead process
            raise StoreUnavailable(f"the row with the time of this process in {self._table.what} is gone")
        return changed_at(row).astimezone(UTC)

    async def report(self, ahead: timedelta) -> None:
        """See :meth:`postdate.ports.ClaimingStore.report_clock`."""
        await self._table.atomically([Operation("merge", {**self._keys, _AHEAD: str(ahead // _MICROSECOND)})])

    async def reported(self) -> Mapping[str, timedelta]:
        """See :meth:`postdate.ports.ClaimingStore.reported_clocks`; rows of the dead are taken away."""
        now = await self.now()
        rows: list[Mapping[str, Any]] = [row async for row in self._table.query(f"PartitionKey eq '{_PARTITION}'")]
        dead = [row for row in rows if changed_at(row) < now - _LIVES_FOR]
        await self._table.each([Operation("delete", {**self._keys, "RowKey": row["RowKey"]}) for row in dead])
        living = [row for row in rows if row not in dead and row.get(_AHEAD) is not None]
        return {row["RowKey"]: int(row[_AHEAD]) * _MICROSECOND for row in living}
