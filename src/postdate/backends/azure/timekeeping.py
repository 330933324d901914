"""The account's clock, and how far the processes that share a table deviate from it.

The header ``Date`` has whole seconds, too coarse for due times; the timestamp of a row is finer than a microsecond. So
each process writes a row beside the records. Source: :mod:`postdate.ports.stores`; ADR 0019.
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
    """The clock of an account, read from the records table."""

    def __init__(self, table: Table) -> None:
        self._table = table
        name = _NOT_IN_KEYS.sub("_", f"{platform.node()}:{os.getpid()}")
        self._keys = {"PartitionKey": _PARTITION, "RowKey": name}

    async def now(self) -> datetime:
        """Return the server's UTC time to the microsecond: the timestamp of a write, read by a second request."""
        await self._table.atomically([Operation("merge", self._keys)])
        row = await self._table.get(self._keys)
        if row is None:  # another process deleted it as a dead one's
            raise StoreUnavailable(f"the row with the time of this process in {self._table.what} is gone")
        return changed_at(row).astimezone(UTC)

    async def report(self, ahead: timedelta) -> None:
        await self._table.atomically([Operation("merge", {**self._keys, _AHEAD: str(ahead // _MICROSECOND)})])

    async def reported(self) -> Mapping[str, timedelta]:
        """Deletes the rows of dead processes."""
        now = await self.now()
        rows: list[Mapping[str, Any]] = [row async for row in self._table.query(f"PartitionKey eq '{_PARTITION}'")]
        dead = [row for row in rows if changed_at(row) < now - _LIVES_FOR]
        await self._table.each([Operation("delete", {**self._keys, "RowKey": row["RowKey"]}) for row in dead])
        living = [row for row in rows if row not in dead and row.get(_AHEAD) is not None]
        return {row["RowKey"]: int(row[_AHEAD]) * _MICROSECOND for row in living}
