"""The rate at which an endpoint with an empty handler handles the messages of its queue."""

from __future__ import annotations

import time
from functools import partial

import anyio

from postdate.bench.bench import Bench
from postdate.bench.deployment import Deployment
from postdate.bench.limits import receive_limit
from postdate.bench.processes import Partner
from postdate.bench.result import BenchmarkResult
from postdate.bench.tally import SharedCount
from postdate.bench.targets import Targets
from postdate.bench.workload import Ping, id_of
from postdate.clock import SystemClock
from postdate.endpoint.message_types import MessageTypes
from postdate.endpoint.outgoing import SendOptions, outgoing_message, sender_headers
from postdate.messages import Envelope

_SENT_AT_ONCE = 1_000
_IDLE_SECONDS = 1.0


def handle(bench: Bench, n: int, concurrency: int) -> BenchmarkResult:
    """Handle ``n`` messages that are queued before the endpoint starts, until the queue is empty."""
    with bench.targets() as targets:
        queues = targets.queues
        _fill(bench, targets, n)
        bench.report(f"limit: taking {n:,} messages off the queue")
        limit = receive_limit(targets, targets.deployment.endpoint, n)
        fill_s = _fill(bench, targets, n)
        with (
            bench.tally("handled") as tally,
            Partner("postdate.bench.handler", "receiving", targets.deployment, tally.path, n, concurrency) as partner,
        ):
            before = queues.cpu_seconds()
            partner.start()
            ended = _wait(bench, targets, n, tally, partner)
            after = queues.cpu_seconds()
            found = partner.finish()
        seconds = ended - found["started"]
        server = None if before is None or after is None else after - before
        return BenchmarkResult(
            "handle", n, n / seconds, limit, lost=found["lost"], duplicated=found["duplicated"],
            rss_mb=found["rss_mb"], cpu_s=found["cpu_s"], server_cpu_s=server,
            server_cpu_cores=None if server is None else server / seconds,
            extra={"concurrency": concurrency, "start_s": found["start_s"], "fill_s": fill_s},
            servers={queues.name: queues.facts},
        )  # fmt: skip


def _fill(bench: Bench, targets: Targets, n: int) -> float:
    bench.report(f"sending {n:,} messages")
    started = time.monotonic()
    anyio.run(partial(_send, targets.deployment, n))
    targets.queues.target.settle()
    return time.monotonic() - started


async def _send(deployment: Deployment, n: int) -> None:
    transport, clock, types, sender = (
        deployment.open_transport(),
        SystemClock(),
        MessageTypes(),
        sender_headers(deployment.endpoint, None),
    )
    try:
        await transport.create_queues([deployment.endpoint])
        for first in range(0, n, _SENT_AT_ONCE):
            now, envelopes = clock.now(), list[Envelope]()
            for number in range(first, min(first + _SENT_AT_ONCE, n)):
                content, body = types.encode(Ping(number))
                options = SendOptions(message_id=id_of(number, deployment.run))
                message = outgoing_message(sender, content, body, deployment.endpoint, options, now)
                assert isinstance(message, Envelope), "there is no delay"
                envelopes.append(message)
            for error in await transport.send(envelopes, now):
                if error is not None:
                    raise error
    finally:
        await transport.close()


def _wait(bench: Bench, targets: Targets, n: int, tally: SharedCount, partner: Partner) -> float:
    """Wait until the queue is empty and return the machine time of that moment.

    Looks at the queue only when all messages were handled or nothing moved for a second, because counting a long queue
    costs the server time.
    """

    def is_empty(count: int, idle_seconds: float) -> bool:
        looks = count >= n or idle_seconds > _IDLE_SECONDS
        return looks and targets.queues.target.is_empty(targets.deployment.endpoint)

    text = f"handling {n:,} messages"
    bench.report(text)
    bench.wait_until(is_empty, [tally], [partner], text)
    return time.time()
