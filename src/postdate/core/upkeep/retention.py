"""Prunes the records of messages that ended long ago. Source: ADR 32."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Final

from postdate.clock import Clock, SystemClock, later
from postdate.core.upkeep.daily import Daily
from postdate.ports import PrunableStore, ScanPart
from postdate.runtime.threads import run_in_thread

_FIRST_AFTER: Final = timedelta(minutes=5)
"""The time from the start to the first run: right after the start a service has other work."""

_SHARE: Final = 64
"""One transaction removes a 64th of what a job removes in one: deliveries wait for it, or share the disk with it."""

_PAUSE: Final = 19
"""A pause is this many times as long as the call before it. So at most a twentieth of one connection's time is used."""


def retention_loop(store: PrunableStore, retention_period: timedelta, clock: Clock) -> Daily:
    """Return the loop that prunes records that are older than ``retention_period``.

    Several services of a store may run it at the same time: each record is removed by one of them.
    """

    async def prune_old_records(daily: Daily) -> bool:
        before, removed = later(clock.now(), -retention_period), 0
        for full_part in await daily.call_store(lambda: run_in_thread(store.scan_parts, "records", 1)):
            width = max(store.prune_share_width // _SHARE, 1)
            for first in range(full_part.first, full_part.end, width):
                part, started_at = ScanPart(first, min(first + width, full_part.end)), SystemClock().monotonic()
                removed += await daily.call_store(
                    lambda part=part: run_in_thread(store.prune_before, part, before, clock.now())
                )
                if not await daily.pause(_PAUSE * (SystemClock().monotonic() - started_at)):
                    return False
        if removed:
            log = logging.getLogger("postdate.retention")
            log.info("removed %d records from before %s of messages that are over", removed, before.isoformat())
        return True

    return Daily(store, clock, "old records are not removed", _FIRST_AFTER, prune_old_records)
