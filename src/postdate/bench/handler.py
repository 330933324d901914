"""The handling process of a benchmark: an ordinary endpoint whose handler only notes which messages it saw.

Run as ``python -m postdate.bench.handler TALLY N CONCURRENCY``; the deployment comes as the first line on its standard
input. It says ``ready`` before it has an endpoint, starts one at the second line, stops it at the next, and then prints
one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import anyio
import anyio.to_thread

from postdate.bench.deployment import Deployment
from postdate.bench.system import peak_rss_mb
from postdate.bench.tally import SharedCount
from postdate.bench.workload import Ping
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.handling import HandlerContext


async def serve(deployment: Deployment, tally: SharedCount, n: int, concurrency: int) -> None:
    transport, times = deployment.open_transport(), [0] * n
    endpoint = Endpoint(
        deployment.endpoint, transport=transport, error_queue=deployment.error_queue, concurrency=concurrency
    )

    @endpoint.handler(Ping)
    async def note(message: Ping, _context: HandlerContext) -> None:
        times[message.number] += 1
        tally.add(1)

    print("ready", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)
    started, used_before = time.time(), time.process_time()
    async with endpoint:
        running = time.time()
        await anyio.to_thread.run_sync(sys.stdin.readline)
        used = time.process_time() - used_before
    await transport.close()
    found = {
        "started": started,
        "start_s": running - started,
        "lost": times.count(0),
        "duplicated": n - times.count(0) - times.count(1),
        "rss_mb": peak_rss_mb(),
        "cpu_s": used,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    with SharedCount(Path(sys.argv[1])) as of_ours:
        place, messages, at_once = Deployment.from_json(sys.stdin.readline()), int(sys.argv[2]), int(sys.argv[3])
        anyio.run(serve, place, of_ours, messages, at_once)
