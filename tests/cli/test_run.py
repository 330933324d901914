"""``postdate run`` in a process of its own: signals, critical errors, clocks."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


class Service:
    """A running ``postdate run``; what it logs goes to a file that the test reads."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._log, self._out = folder / "run.log", folder / "run.out"
        with self._log.open("wb") as log, self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "postdate.cli", "run", *options],
                cwd=folder,
                stdout=out,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def is_delivering(self) -> bool:
        assert self.process.poll() is None, self.log
        return "delivering from" in self.log

    def end(self) -> int:
        """Return the exit code; nothing may have come to stdout."""
        status = self.process.wait(timeout=60)
        assert self._out.read_bytes() == b""
        return status


@pytest.fixture
def service(own_folder, eventually) -> Iterator:
    """Start services; those still running at the end are killed."""
    started: list[Service] = []

    def start(*options: str) -> Service:
        service = Service(own_folder, *options)
        started.append(service)
        eventually(service.is_delivering, "the service delivers")
        return service

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_delivers_what_is_due_and_stops_at_a_signal(cli, service, eventually, number):
    cli.ok("setup", "--queue", "orders")
    running = service()
    assert cli.ok("send", "orders", "x", "--delay", "50ms", "--json").json["services"] == 1
    eventually(lambda: cli.ok("messages", "stats", "--json").json["queues"]["orders"] == 1, "delivered")
    running.process.send_signal(number)
    assert running.end() == 0
    assert "stopping: finishing what is in hand" in running.log
    assert running.log.rstrip().endswith("stopped")
    assert cli.ok("doctor", "--json").json["result"] == "warn"  # no process is left behind; no service runs


def test_it_creates_what_is_missing(cli, service, own_folder):
    (own_folder / "postdate.toml").write_text('[endpoint]\nname = "billing"\n[queues]\ncreate = ["orders"]\n')
    running = service()
    assert set(cli.ok("messages", "stats", "--json").json["queues"]) == {"billing.timeouts", "error", "orders"}
    assert "intake queue billing.timeouts" in running.log


def test_explain_and_doctor_see_the_service(cli, service):
    running = service()
    cli.ok("send", "orders", "x", "--delay", "1h", "--id", "m1")
    pid = running.process.pid
    facts = cli.ok("messages", "explain", "m1", "--json").json["facts"]
    assert any(f"delivers due messages: process {pid} " in fact for fact in facts)
    services = {check["name"]: check["found"] for check in cli.ok("doctor", "--json").json["checks"]}
    assert services["service"] == f"running (process {pid}); 0 messages overdue"


def test_after_kill_9_the_doctor_finds_the_dead(cli, service):
    running = service()
    running.process.kill()
    running.process.wait()
    found = {check["name"]: check for check in cli.ok("doctor", "--json").json["checks"]}
    assert found["processes"]["result"] == "warn"
    assert f"died without stopping ({running.process.pid})" in found["processes"]["found"]
    assert found["service"]["result"] == "warn"


def test_a_second_signal_ends_at_once(own_folder, cli):
    """The first signal finds the service in a lock that another process holds: it cannot stop before the lock goes."""
    cli.ok("setup")
    blocker = sqlite3.connect(own_folder / "postdate.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    script = (
        "import os, sys, signal, threading\n"
        "from postdate.cli import service\n"
        "listen = service._Service._listen_to_signals\n"
        "def listen_and_say(self):\n"
        "    listen(self)\n"
        "    os.write(1, b'listening')\n"
        "service._Service._listen_to_signals = listen_and_say\n"
        "from postdate.cli.entry import run\n"
        "sys.exit(run(['run']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=own_folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 100) == b"listening"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=25)  # less than the 30 s for which it would wait for the lock
    finally:
        blocker.close()
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err.endswith(b"postdate: error [interrupted]: ended at once by a second signal\n")


def test_a_critical_error_ends_it_when_asked_to(service, own_folder):
    """Its table goes away under its hands; after the configured time that is a critical error."""
    (own_folder / "postdate.toml").write_text(
        '[delayed_delivery]\ntime_to_trigger_fetch_circuit_breaker = "10ms"\n'
        'time_to_trigger_store_circuit_breaker = "10ms"\n'
    )
    running = service("--exit-on-critical")
    connection = sqlite3.connect(own_folder / "postdate.db")
    with connection:
        connection.execute("ALTER TABLE delayed_message RENAME TO gone")
    connection.close()
    assert running.end() == 3
    assert "CRITICAL postdate.service" in running.log


def test_a_simulated_clock_makes_a_day_a_moment(cli, service, eventually):
    cli.ok("setup", "--queue", "orders")
    cli.ok("send", "orders", "x", "--at", "2126-01-31T12:00Z", "--id", "m1")
    service("--clock-start", "2126-01-31T00:00Z", "--clock-speed", "1000000")
    eventually(lambda: cli.ok("messages", "stats", "--json").json["queues"]["orders"] == 1, "delivered")
    history = cli.ok("messages", "show", "m1", "--json").json["history"]
    assert history[-1]["what"] == "delivered"
    assert history[-1]["at"] >= "2126-01-31T12:00"


def test_the_log_level_is_obeyed_and_times_are_utc(service):
    running = service("--log-level", "debug")
    assert running.log.splitlines()[0][10] == "T"
    assert "Z DEBUG" in running.log or "Z INFO" in running.log
