"""``postdate bench``: how fast a store stores, how fast a service delivers from it, and how late.

The adapters work as in a service, on messages of the run. Its place is created for the run and removed after it: a
file, or the :class:`postdate.ports.backends.Scratch` of a server. So no message of the user is touched.
Source: ADR 22.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from datetime import timedelta
from itertools import chain
from typing import Annotated, Any, Final, cast

import anyio
import typer

from postdate.cli.bench import messages as bench_messages
from postdate.cli.bench.places import Common, Trial, create_trial, open_trial, queue_names
from postdate.cli.command import Exit, add_command, create_group, option, options_of
from postdate.cli.output import print_pairs
from postdate.clock import SystemClock, steady_seconds
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.settings import DelayedDelivery
from postdate.ports import AdministrableStore, ClaimingStore
from postdate.runtime.process import freeze_loaded_objects

app = create_group(
    "bench",
    "Measure your own store and queues, in a place that is made for the run. Physical limits, several services, a "
    "writer beside them, herds, backlogs and handling: python -m benchmarks in the repository.",
)

Number = Annotated[int, option("--n", "Messages.", min=1)]


@asynccontextmanager
async def run_service(trial: Trial, n: int) -> AsyncGenerator[tuple[ClaimingStore, bench_messages.Deliveries]]:
    """Run a service with its default settings that delivers ``n`` messages from the store."""
    queues, deliveries = queue_names(trial.run), bench_messages.Deliveries(n)
    async with open_trial(trial) as (store, transport):
        bench_messages.instrument_adapters(store, transport, deliveries)
        endpoint = Endpoint(
            queues.endpoint,
            transport=transport,
            delayed_delivery=DelayedDelivery(store),
            error_queue=queues.error,
            send_only=True,
        )
        async with endpoint:
            freeze_loaded_objects()  # The command ``postdate run`` does the same.
            yield store, deliveries


# --- the benchmarks ---------------------------------------------------------------------------------------------------

_LEAD_SECONDS: Final = 1.0
_AHEAD_SECONDS: Final = 0.2

Figures = dict[str, object]
Benchmark = Callable[..., Awaitable[Figures]]


def _register_benchmark(benchmark: Benchmark) -> Benchmark:
    """Register a benchmark as a command with its own options and the common options.

    Its first argument is the trial.
    """

    def run(context: typer.Context, **values: Any) -> None:
        del context
        common = Common(**{each.name: values.pop(each.name) for each in fields(Common)})
        _run_benchmark(benchmark, common, values)

    add_command(app, benchmark.__name__, benchmark, run, options_of(Common))
    return benchmark


@_register_benchmark
async def schedule(
    trial: Trial,
    n: Number = 200_000,
    batch: Annotated[int, option("--batch", "Messages in one commit.", min=1)] = bench_messages.BATCH,
) -> Figures:
    """Store messages in bulk. Making them is not counted."""
    clock, seconds, cpu_s, stored = SystemClock(), 0.0, 0.0, 0
    due = clock.now() + timedelta(hours=1)
    trial.report(f"storing {n:,} messages, {batch:,} at a time")
    async with open_trial(trial) as (store, _):
        for messages in bench_messages.messages_of(trial, n, due, timedelta(milliseconds=1), batch):
            started, cpu_before = time.perf_counter(), time.process_time()
            stored += (await store.store_many(messages, clock.now())).stored
            seconds += time.perf_counter() - started
            cpu_s += time.process_time() - cpu_before
        if isinstance(store, AdministrableStore):
            stored = (await store.statistics(clock.now())).pending
    return {"n": n, "rate": n / seconds, "lost": n - stored, "duplicated": 0, **_cpu_figures(cpu_s, n)}


@_register_benchmark
async def drain(trial: Trial, n: Number = 200_000) -> Figures:
    """Deliver messages that are due. The rate is from the first look to the last delivery."""
    clock, fill_started = SystemClock(), steady_seconds()
    due = clock.now() - timedelta(days=1)
    trial.report(f"storing {n:,} messages")
    async with open_trial(trial) as (store, _):
        for messages in bench_messages.messages_of(trial, n, due, timedelta(microseconds=100), bench_messages.BATCH):
            await store.store_many(messages, clock.now())
    fill_s = steady_seconds() - fill_started
    trial.report(f"delivering {n:,} messages")
    async with run_service(trial, n) as (_, deliveries):
        started, cpu_before = time.time(), time.process_time()
        deliveries.gate.set()
        await deliveries.wait_until_complete()
        cpu_s = time.process_time() - cpu_before
    seconds = deliveries.marks[-1][0] - started
    return {"n": n, "rate": n / seconds, **await _count_losses(trial, n), **_cpu_figures(cpu_s, n), "fill_s": fill_s}


@_register_benchmark
async def lateness(
    trial: Trial,
    rate: Annotated[int, option("--rate", "Messages a second.", min=1)] = 200,
    seconds: Annotated[float, option("--seconds", "For how long.", min=1)] = 30,
) -> Figures:
    """Deliver at an even rate. The same service stores each message a second before it is due."""
    n, spacing = int(rate * seconds), timedelta(seconds=1) / rate
    # The fraction keeps each store call from coinciding with a delivery.
    lead_seconds = _LEAD_SECONDS + 0.37 / rate
    trial.report(f"delivering {rate:,} messages a second")
    async with run_service(trial, n) as (store, deliveries):
        first_due = SystemClock().now() + timedelta(seconds=lead_seconds + _AHEAD_SECONDS)
        messages = chain.from_iterable(bench_messages.messages_of(trial, n, first_due, spacing, batch=1))
        cpu_before = time.process_time()
        deliveries.gate.set()
        stored_when_due = await bench_messages.store_paced(store, messages, lead_seconds)
        await deliveries.wait_until_complete()
        cpu_s = time.process_time() - cpu_before
    lateness_seconds = bench_messages.lateness_of(
        [(first_due + number * spacing).timestamp() for number in range(n)], deliveries.marks
    )
    losses = await _count_losses(trial, n, early=sum(value < 0 for value in lateness_seconds))
    return {
        "n": n,
        **losses,
        **_cpu_figures(cpu_s, n),
        **bench_messages.percentiles(lateness_seconds),
        "stored_when_due": stored_when_due,
    }


def _cpu_figures(cpu_s: float, n: int) -> Figures:
    """Return the processor time of this process, which runs the service: the total, and the time a message."""
    return {"cpu_s": cpu_s, "cpu_us_per_message": cpu_s / n * 1_000_000}


async def _count_losses(trial: Trial, n: int, early: int = 0) -> Figures:
    """Receive all messages of their queue. Return how many are lost, duplicated, and early or unexpected."""
    trial.report(f"counting {n:,} messages")
    async with open_trial(trial) as (_, transport):
        receive_counts = Counter(await bench_messages.receive_ids(transport, queue_names(trial.run).arrived, n))
    expected_ids = {bench_messages.id_of(number, trial.run) for number in range(n)}
    return {
        "lost": len(expected_ids - receive_counts.keys()),
        "duplicated": sum(count > 1 for count in receive_counts.values()),
        "early": early + len(receive_counts.keys() - expected_ids),
    }


# --- output -----------------------------------------------------------------------------------------------------------


def _run_benchmark(benchmark: Benchmark, common: Common, values: Mapping[str, Any]) -> None:
    results = list[Figures]()

    async def measure(run: Trial) -> None:
        servers = await run.set_up()
        figures = await benchmark(run, **values)
        rounded_figures = {name: _round_figure(name, value) for name, value in figures.items()}
        results.append({"benchmark": benchmark.__name__, **rounded_figures, "servers": servers})

    async def measure_interruptibly(run: Trial) -> None:
        # SIGINT cancels the first task by means of asyncio, which do not wait for a thread. A thread that was creating
        # tables
        # continued, and created the schema of the run again after it had been dropped. A cancel scope waits for the
        # thread.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(measure, run)

    def report(text: str) -> None:
        if not common.as_json or sys.stderr.isatty():
            typer.echo(f"{text} …", err=True)

    with common.working_folder() as folder, create_trial(common, folder, queue_names, report) as created_trial:
        anyio.run(measure_interruptibly, created_trial)
    (figures,) = results
    if common.as_json:
        typer.echo(json.dumps(figures))
    else:
        servers = cast("dict[str, dict[str, str]]", figures.pop("servers"))
        lines = {name: ", ".join(map(" ".join, facts.items())) for name, facts in servers.items()}
        print_pairs({**figures, **lines})
    if any(figures.get(name) for name in ("lost", "duplicated", "early")):
        raise typer.Exit(Exit.NOT_KEPT)


def _round_figure(name: str, value: object) -> object:
    return round(value, 1 if name == "rate" else 3) if isinstance(value, float) else value
