"""The service process of a benchmark: an ordinary send-only endpoint that also notes when each batch was in its queue.

Run as ``python -m postdate.bench.service TALLY LEAD [now]``; the deployment comes as the first line on its standard
input. It says ``ready`` once started, looks for due messages from the second line on (with ``now``: at once), stops at
the next, and then prints one JSON object. If the second line is a load, the service also stores each of its messages,
``LEAD`` seconds before it is due.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from postdate.bench.deployment import Deployment
from postdate.bench.storer import paced
from postdate.bench.system import peak_rss_mb
from postdate.bench.tally import SharedCount
from postdate.bench.workload import Workload
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import PostdateError
from postdate.messages import Envelope
from postdate.ports import Claim, ClaimingStore, MoveReport, MovingStore, Transport, Work
from postdate.runtime.process import freeze_what_is_loaded


class Notes:
    """Notes deliveries, and holds the gate before the first look for due messages."""

    def __init__(self, tally: SharedCount) -> None:
        self.marks: list[tuple[float, int]] = []
        self.gate = anyio.Event()
        self._tally = tally

    def delivered(self, count: int) -> None:
        """Note the machine time at which ``count`` messages are durably in their queue."""
        if count:
            self.marks.append((time.time(), count))
            self._tally.add(count)


def watch(store: ClaimingStore, transport: Transport, notes: Notes) -> None:
    """Hold back claims until the gate opens, and note deliveries.

    Patches the two objects, not their classes, so that the endpoint sees their capabilities unchanged.
    """
    claim_due, send = store.claim_due, transport.send

    async def gated_claim_due(now: datetime, limit: int) -> Sequence[Claim]:
        await notes.gate.wait()
        return await claim_due(now, limit)

    async def noted_send(
        envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        errors = await send(envelopes, now, work=work)
        notes.delivered(sum(error is None for error in errors))
        return errors

    vars(store)["claim_due"] = gated_claim_due
    vars(transport)["send"] = noted_send
    if isinstance(store, MovingStore):
        move_due = store.move_due

        async def noted_move_due(now: datetime, limit: int, **options: Any) -> MoveReport:
            await notes.gate.wait()
            report = await move_due(now, limit, **options)
            notes.delivered(report.delivered)
            return report

        vars(store)["move_due"] = noted_move_due


async def serve(deployment: Deployment, tally: SharedCount, lead: float, *, at_once: bool) -> None:
    stored: Mapping[str, float] = {}
    store, transport, notes = deployment.open_store(), deployment.open_transport(), Notes(tally)
    watch(store, transport, notes)
    endpoint = Endpoint(
        deployment.endpoint,
        transport=transport,
        delayed_delivery=DelayedDelivery(store),
        error_queue=deployment.error_queue,
        send_only=True,
    )
    async with endpoint:
        if at_once:
            notes.gate.set()
        freeze_what_is_loaded()  # as `postdate run` does
        print("ready", flush=True)
        line = await anyio.to_thread.run_sync(sys.stdin.readline)
        used_before = time.process_time()
        notes.gate.set()
        if line.strip():
            stored = await paced(store, Workload.from_json(line), lead)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        used = time.process_time() - used_before
    await store.close()
    await transport.close()
    found = {"marks": notes.marks, "rss_mb": peak_rss_mb(), "cpu_s": used, "stored": stored}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    with SharedCount(Path(sys.argv[1])) as of_ours:
        place, lead_seconds = Deployment.from_json(sys.stdin.readline()), float(sys.argv[2])
        anyio.run(lambda: serve(place, of_ours, lead_seconds, at_once=sys.argv[3:] == ["now"]))
