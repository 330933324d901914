"""What a service tells of itself: metrics by OpenTelemetry and for Prometheus, health, the service manager, the log."""

import logging
import os
import re
import socket
import urllib.error
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from tests.waiting import until

from postdate import DelayedDelivery, Endpoint, MemoryStore, MemoryTransport
from postdate.clock import steady_seconds
from postdate.core.due.poller import Poller
from postdate.errors import ConfigurationError, StoreUnreachable
from postdate.runtime import resource
from postdate.runtime.reporting import OTHER_DESTINATIONS, CountedMetrics
from postdate.telemetry import vitals
from postdate.telemetry.metrics import OpenTelemetryMetrics, prometheus
from postdate.telemetry.server import serve_status
from postdate.telemetry.vitals import Vitals
from postdate.testing import VirtualClock

MILLISECOND = timedelta(milliseconds=1)


def note_everything(metrics: CountedMetrics) -> None:
    metrics.count("stored", 3)
    metrics.report_poll(2, 5 * MILLISECOND)
    metrics.report_send(2, 20 * MILLISECOND)
    metrics.report_deliveries({"orders": 2, "bills": 1}, [0.004, 0.2])
    metrics.count("expired", 4)
    metrics.count("discarded", 5)
    metrics.count("failed", 6)
    metrics.count("retried", 7)
    metrics.count("moved_to_error", 8)
    metrics.count("handled", 9)
    metrics.report_handler_runs("shop.Mail", 3, 0.5, 0.25)
    metrics.report_handler_runs("shop.Mail", 1, 0.125, 0.125)
    metrics.report_breaker_state("one", "armed")
    metrics.report_breaker_state("one", "triggered")
    metrics.report_breaker_state("other", "disarmed")
    metrics.report_stall(0.03)


def exported(reader: InMemoryMetricReader) -> dict[str, Any]:
    data = reader.get_metrics_data()
    assert data is not None
    return {each.name: each for one in data.resource_metrics for scope in one.scope_metrics for each in scope.metrics}


def test_all_is_exported_under_names_of_the_conventions() -> None:
    reader = InMemoryMetricReader()
    metrics = OpenTelemetryMetrics(MeterProvider(metric_readers=[reader]).get_meter("test"))
    note_everything(metrics)
    found = exported(reader)
    counted = {
        tuple(sorted(point.attributes.items())): point.value for point in found["postdate.messages"].data.data_points
    }
    outcome = "postdate.outcome"
    assert counted == {
        (("messaging.destination.name", "orders"), (outcome, "delivered")): 2,
        (("messaging.destination.name", "bills"), (outcome, "delivered")): 1,
        ((outcome, "stored"),): 3,
        ((outcome, "expired"),): 4,
        ((outcome, "discarded"),): 5,
        ((outcome, "failed"),): 6,
        ((outcome, "retried"),): 7,
        ((outcome, "moved_to_error"),): 8,
        ((outcome, "handled"),): 9,
    }
    assert [point.value for point in found["postdate.breakers.triggered"].data.data_points] == [1]
    for name, value in {"postdate.handler.runs": 4, "postdate.handler.time": 0.625}.items():
        (point,) = found[name].data.data_points
        assert (point.value, dict(point.attributes)) == (value, {"postdate.message_type": "shop.Mail"})
    durations = [each for name, each in found.items() if each.unit == "s" and name != "postdate.handler.time"]
    sums = {each.name: each.data.data_points[0].sum for each in durations}
    assert sums == {
        "postdate.look.duration": 0.005,
        "postdate.send.duration": 0.02,
        "postdate.lateness": 0.2,
        "postdate.loop.delay": 0.03,
        "postdate.handler.duration": 0.375,
    }
    # OpenTelemetry's rules for names, and units by UCUM with counted things in braces.
    assert all(re.fullmatch(r"postdate(\.[a-z_]+)+", name) for name in found)
    assert {each.unit for each in found.values()} == {"s", "{message}", "{breaker}", "{resource}", "{run}"}


def test_what_has_not_happened_yet_is_counted_from_the_start() -> None:
    """Or Prometheus would take the first failures for where a count begins, and not for an increase."""
    reader = InMemoryMetricReader()
    metrics = OpenTelemetryMetrics(MeterProvider(metric_readers=[reader]).get_meter("test"))
    points = exported(reader)["postdate.messages"].data.data_points
    assert [point.value for point in points] == [0] * 7
    assert {point.attributes["postdate.outcome"] for point in points} > {"failed", "moved_to_error"}
    assert not metrics.counts


def test_destinations_beyond_some_are_counted_together() -> None:
    tally = CountedMetrics()
    for number in range(1_000):
        tally.report_deliveries({f"q-{number}": 1, "q-0": 1}, [0.0])
    assert len(tally.delivered_to) == 201
    assert tally.delivered_to[OTHER_DESTINATIONS] == 800
    assert tally.delivered_to["q-0"] == 1_000
    assert tally.counts["delivered"] == tally.delivered_to.total() == 1_999


def ask(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_prometheus_reads_them_in_both_forms() -> None:
    metrics, registry = prometheus()
    note_everything(metrics)
    with serve_status("127.0.0.1:0", Vitals(metrics, list), registry) as port:
        status, kind, text = ask(port, "/metrics")
        _, open_kind, open_text = ask(port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert open_kind.startswith("application/openmetrics-text")
    for families in (list(plain(text)), list(openmetrics(open_text))):
        samples = {
            (each.name, *sorted(each.labels.items())): each.value for family in families for each in family.samples
        }
        delivered = (("messaging_destination_name", "orders"), ("postdate_outcome", "delivered"))
        assert samples["postdate_messages_total", *delivered] == 2
        assert samples["postdate_lateness_seconds_bucket", ("le", "0.25")] == 1
        assert samples["postdate_lateness_seconds_bucket", ("le", "0.1")] == 0
        assert ("process_cpu_seconds_total",) in samples


class HeldCollector:
    """Says when somebody begins to collect, and lets him go when told."""

    def __init__(self) -> None:
        self.begun, self.goes_on = Queue[None](), Queue[None]()

    def collect(self) -> list[Any]:
        self.begun.put(None)
        self.goes_on.get()
        return []


def test_scrapes_at_one_time_are_taken_one_after_the_other() -> None:
    """The exporter's collector has one place for its numbers: two at once would have each other's."""
    (metrics, registry), held = prometheus(), HeldCollector()
    registry.register(held)
    with serve_status("127.0.0.1:0", Vitals(metrics, list), registry) as port, ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(ask, port, "/metrics") for _ in range(2)]
        try:
            held.begun.get(timeout=20)
            with pytest.raises(Empty):
                held.begun.get(timeout=0.3)
        finally:
            held.goes_on.put(None)
            held.goes_on.put(None)
        assert [each.result()[0] for each in answers] == [200, 200]


@pytest.fixture
def resources(monkeypatch: pytest.MonkeyPatch) -> None:
    """No resources of other tests, which may be out of reach."""
    monkeypatch.setattr(resource, "_by_identity", WeakValueDictionary())
    monkeypatch.setattr(resource, "_by_adapter", WeakKeyDictionary())


@pytest.mark.usefixtures("resources")
def test_health_is_told_in_words() -> None:
    metrics, registry = prometheus()
    problems = list[str]()
    signs = Vitals(metrics, lambda: problems)
    with serve_status("127.0.0.1:0", signs, registry) as port:
        assert ask(port, "/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
        assert ask(port, "/readyz")[::2] == (503, "it has not started, or is stopping\n")
        signs.is_ready = True
        assert ask(port, "/readyz")[0] == 200
        assert "postdate_outages 0.0" in ask(port, "/metrics")[2]
        claiming = resource.resource_at("shop", "PostgreSQL shop").calls(
            "cannot claim due messages", logging.getLogger()
        )
        claiming.report_failure(StoreUnreachable("connection refused"), steady_seconds())
        assert ask(port, "/readyz")[::2] == (503, "PostgreSQL shop is out of reach for 0.0 s: connection refused\n")
        assert ask(port, "/healthz")[0] == 200
        assert "postdate_outages 1.0" in ask(port, "/metrics")[2]
        claiming.report_success(steady_seconds())
        assert ask(port, "/readyz")[0] == 200
        metrics.report_breaker_state("dispatch", "triggered")
        assert ask(port, "/readyz")[::2] == (503, "dispatch is triggered\n")
        assert ask(port, "/healthz")[0] == 200  # a restart would not bring the queues back
        problems.append("Poller has ended")
        assert ask(port, "/healthz?why")[::2] == (503, "Poller has ended\n")
        assert ask(port, "/")[0] == 404
        with pytest.raises(ConfigurationError, match=rf"cannot listen at 127.0.0.1:{port}: Address already in use"):
            serve_status(f"127.0.0.1:{port}", signs, registry).__enter__()


def test_a_child_of_a_fork_does_not_keep_the_address() -> None:
    """Its parent, started again, could not listen there; and what it was asked would be answered by nobody."""
    metrics, registry = prometheus()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
        with serve_status("127.0.0.1:0", Vitals(metrics, list), registry) as port:
            if not (child := os.fork()):
                os.close(writing)
                os.read(reading, 1)  # until the parent closes its end
                os._exit(0)
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_who_says_nothing_or_hangs_up_leaves_no_trace(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.telemetry.server._Handler.timeout", 0.01)
    metrics, registry = prometheus()
    with serve_status("127.0.0.1:0", Vitals(metrics, list), registry) as port:
        for said in (b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost"):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(said)
                assert connection.recv(1) == b""
    assert capfd.readouterr() == ("", "")


async def test_a_part_that_ended_without_an_error_is_a_problem(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = anyio.Event()

    async def ends(_: Poller, __: object) -> None:
        ended.set()

    monkeypatch.setattr(Poller, "_poll_until_stopped", ends)
    async with Endpoint(
        "sales", transport=MemoryTransport(), delayed_delivery=DelayedDelivery(MemoryStore()), clock=clock
    ) as endpoint:
        await ended.wait()
        await anyio.wait_all_tasks_blocked()
        assert endpoint.problems() == ["Poller has ended"]
    assert endpoint.problems() == []


async def test_a_loop_that_stands_still_is_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(vitals, "steady_seconds", lambda: now[0])
    signs = Vitals(CountedMetrics(), list)
    now[0] += 10.5
    assert signs.health_problems() == []
    now[0] += 30
    assert signs.health_problems() == ["the event loop has been blocked for 40 s"]


async def test_the_log_sums_up_each_minute_in_which_something_happened(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally, beats = CountedMetrics(), 0

    async def sleep(_: float) -> None:
        nonlocal beats
        beats += 1
        if beats == 3:
            note_everything(tally)
        if beats > 5:
            raise EOFError

    monkeypatch.setattr(vitals.anyio, "sleep", sleep)
    monkeypatch.setattr(vitals, "_SUMMARY_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "postdate.service")
    with pytest.raises(EOFError):
        await Vitals(tally, list).run()
    counts = "3 stored, 3 delivered, 4 expired, 5 discarded, 6 failed, 7 retried, 8 moved to error, 9 handled"
    assert caplog.messages == [f"in the last minute: {counts}"]


@pytest.mark.parametrize(
    ("microseconds", "process", "pause"),
    [
        ("300000", "", 0.15),  # half of what the service manager waits, so that one beat may come late
        ("300000", "own", 0.15),
        ("300000", "another", 1.0),  # the service manager watches another process
        ("20000000", "own", 1.0),  # a beat a second is more often than every ten
        ("", "", 1.0),
    ],
)
async def test_the_watchdog_is_told_twice_within_its_time(
    microseconds: str, process: str, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep(seconds: float) -> None:
        assert seconds == pause
        raise EOFError

    monkeypatch.setattr(vitals.anyio, "sleep", sleep)
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    monkeypatch.setenv("WATCHDOG_PID", {"own": f"{os.getpid()}", "another": "1"}.get(process, ""))
    with pytest.raises(EOFError):
        await Vitals(CountedMetrics(), list).run()


async def test_the_service_manager_hears_of_it_while_it_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems, asked = list[str](), 0

    def looked() -> list[str]:
        nonlocal asked
        asked += 1
        return problems

    async def beats(count: int) -> None:
        enough = asked + count
        await until(lambda: asked >= enough)

    def heard(manager: socket.socket) -> list[bytes]:
        found = list[bytes]()
        with suppress(BlockingIOError):
            while True:
                found.append(manager.recv(100))
        return found

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("manager")
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", "manager")
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Vitals(CountedMetrics(), looked).run)
            await beats(3)
            assert set(heard(manager)) == {b"WATCHDOG=1"}
            problems.append("something is wrong")
            await beats(2)
            heard(manager)
            await beats(3)
            assert heard(manager) == []
            tasks.cancel_scope.cancel()
