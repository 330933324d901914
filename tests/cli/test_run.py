"""``postdate run`` in a process of its own: signals, critical errors, clocks."""

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from datetime import datetime

import pytest
from tests.waiting import READY

from postdate.clock import SystemClock


def is_seen(cli) -> bool:
    """Return whether other processes know of a running service."""
    checks = cli("doctor", "--json").json["checks"]
    return any(check["name"] == "service" and check["found"].startswith("running") for check in checks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_delivers_what_is_due_and_stops_at_a_signal(cli, service, eventually, number):
    cli.ok("setup", "--queue", "orders")
    running = service()
    eventually(lambda: is_seen(cli), "others see the service")
    assert cli.ok("send", "orders", "x", "--delay", "50ms", "--json").json["services"] == 1
    eventually(lambda: cli.ok("messages", "stats", "--json").json["queues"]["orders"] == 1, "delivered")
    running.process.send_signal(number)
    assert running.end() == 0
    assert "stopping: finishing what is in hand" in running.log
    assert running.log.rstrip().endswith("stopped")
    assert cli.ok("doctor", "--json").json["result"] == "warn"  # no process is left behind; no service runs


def test_what_is_loaded_is_left_out_of_full_collections(cli, own_folder, eventually):
    """Or each of them would stop the deliveries for as long as a walk over all modules takes."""
    cli.ok("setup", "--queue", "orders")
    tell = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()))"
    program = [sys.executable, "-c", f"{tell}; from postdate.cli import main; main()", "run"]
    with subprocess.Popen(program, cwd=own_folder, stdout=subprocess.PIPE) as running:
        eventually(lambda: is_seen(cli), "others see the service")
        running.send_signal(signal.SIGTERM)
        printed, _ = running.communicate()
    assert int(printed) > 10_000


def test_it_creates_what_is_missing(cli, service, own_folder):
    (own_folder / "postdate.toml").write_text('[endpoint]\nname = "billing"\n[queues]\ncreate = ["orders"]\n')
    running = service()
    assert set(cli.ok("messages", "stats", "--json").json["queues"]) == {"billing.timeouts", "error", "orders"}
    assert "intake queue billing.timeouts" in running.log


def test_explain_and_doctor_see_the_service(cli, service, eventually):
    running = service()
    eventually(lambda: is_seen(cli), "others see the service")
    cli.ok("send", "orders", "x", "--delay", "1h", "--id", "m1")
    pid = running.process.pid
    facts = cli.ok("messages", "explain", "m1", "--json").json["facts"]
    assert any(f"delivers due messages: process {pid} " in fact for fact in facts)
    services = {check["name"]: check["found"] for check in cli.ok("doctor", "--json").json["checks"]}
    assert services["service"] == f"running (process {pid}); 0 messages overdue"


def test_after_kill_9_the_doctor_finds_the_dead(cli, service, eventually):
    running = service()
    eventually(lambda: is_seen(cli), "others see the service")
    running.process.kill()
    running.process.wait()
    found = {check["name"]: check for check in cli.ok("doctor", "--json").json["checks"]}
    assert found["processes"]["result"] == "warn"
    assert f"died without stopping ({running.process.pid})" in found["processes"]["found"]
    assert found["service"]["result"] == "warn"


def test_a_second_signal_ends_at_once(own_folder, cli):
    """The first signal finds the service in a lock that is held until the service has ended: it cannot stop before."""
    cli.ok("setup")
    blocker = sqlite3.connect(own_folder / "postdate.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    script = (
        "import os, sys, signal\n"
        "from postdate.cli import service\n"
        "listen = signal.signal\n"
        "def listen_and_say(number, handler):\n"
        "    listen(number, handler)\n"
        "    if number == signal.SIGTERM:\n"
        "        os.write(1, b'listening')\n"
        "signal.signal = listen_and_say\n"
        "service.SAME_SIGNAL_SECONDS = 0\n"
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
        _, err = process.communicate()
    finally:
        process.kill()
        process.wait()
        blocker.close()
    assert process.returncode == 130
    assert err.endswith(b"postdate: error [interrupted]: ended at once by a second signal\n")


def test_stopping_does_not_wait_for_a_store_that_never_closes(own_folder, cli):
    """What blocks is a thread, as one that reads from a connection that has fallen silent: nothing can end it."""
    cli.ok("setup")
    script = (
        "import sys, threading\n"
        "from postdate.backends.sqlite.store import SqliteStore\n"
        "from postdate.runtime.threads import run_in_thread\n"
        "from postdate.wiring import deployment\n"
        "deployment.CLOSE_DEADLINE /= 100\n"
        "async def close(self):\n"
        "    await run_in_thread(threading.Event().wait)\n"
        "SqliteStore.close = close\n"
        "from postdate.cli.entry import run\n"
        "sys.exit(run(['run']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=own_folder, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while READY not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "WARNING postdate.wiring: the store was not closed: SqliteStore did not answer within 0.1 s" in err
    assert err.rstrip().endswith("stopped")


def test_a_file_that_is_damaged_is_told_at_the_start(own_folder, cli):
    """Damage in an index that only a look for due messages meets: the service ran, and logged that, again and again."""
    cli.ok("setup", "--queue", "orders")
    cli.ok("send", "orders", "x", "--delay", "1h")
    connection = sqlite3.connect(own_folder / "postdate.db")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'delayed_message_attempt'").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    with (own_folder / "postdate.db").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * 100)
    process = subprocess.run(
        [sys.executable, "-m", "postdate.cli", "run"],
        cwd=own_folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 3
    assert "postdate: error [not_a_database]:" in process.stderr
    assert "damaged" in process.stderr.splitlines()[-1]
    assert any(
        check["result"] == "fail" and "damaged" in check["found"] for check in cli("doctor", "--json").json["checks"]
    )


def test_a_critical_error_ends_it_when_asked_to(cli, service, own_folder):
    """Its table goes away under its hands; after the configured time that is a critical error.

    A service with nothing to wait for looks once a minute: three seconds of the clock that it is given.
    """
    (own_folder / "postdate.toml").write_text(
        '[delayed_delivery]\ntime_to_trigger_fetch_circuit_breaker = "10ms"\n'
        'time_to_trigger_store_circuit_breaker = "10ms"\n'
    )
    cli.ok("setup")
    running = service("--exit-on-critical", "--clock-start", "2126-01-31T00:00Z", "--clock-speed", "20")
    connection = sqlite3.connect(own_folder / "postdate.db")
    with connection:
        connection.execute("ALTER TABLE delayed_message RENAME TO gone")
    connection.close()
    assert running.end() == 3
    assert "CRITICAL postdate." in running.log


def test_a_file_that_is_replaced_ends_it_and_it_starts_again_with_the_new_one(cli, service, own_folder):
    cli.ok("setup", "--queue", "orders")
    cli.ok("send", "orders", "x", "--at", "2126-01-31T12:00Z", "--id", "m1")
    running = service()
    path, copy = own_folder / "postdate.db", own_folder / "copy.db"
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    copy.replace(path)
    assert running.end() == 3
    assert "postdate.db was replaced, removed or moved away while this process had it open" in running.log
    assert "Traceback" not in running.log
    assert running.log.rstrip().endswith("stopped")
    service()
    assert cli.ok("messages", "stats", "--json").json["pending"] == 1


def test_a_simulated_clock_makes_a_day_a_moment(cli, service, eventually):
    cli.ok("setup", "--queue", "orders")
    cli.ok("send", "orders", "x", "--at", "2126-01-31T12:00Z", "--id", "m1")
    service("--clock-start", "2126-01-31T00:00Z", "--clock-speed", "1000000")
    eventually(lambda: cli.ok("messages", "stats", "--json").json["queues"]["orders"] == 1, "delivered")
    history = cli.ok("messages", "show", "m1", "--json").json["history"]
    assert history[-1]["what"] == "delivered"
    assert history[-1]["at"] >= "2126-01-31T12:00"


@pytest.mark.parametrize("level", ["debug", "info"])
def test_the_log_level_is_obeyed_and_times_are_utc(cli, level):
    """Where nothing is set up it ends at once; its event loop has said one thing by then, at the level debug."""
    began = SystemClock().now().replace(microsecond=0)
    said = cli("run", "--no-setup", "--log-level", level).err
    times = re.findall(r"^(\S+Z) DEBUG ", said, re.MULTILINE)
    assert bool(times) == (level == "debug")
    assert all(began <= datetime.fromisoformat(each) <= SystemClock().now() for each in times)


def test_one_order_to_stop_may_come_as_several_signals(cli, service):
    """To the process and to its group, as terminals and supervisors do."""
    running = service()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        running.process.send_signal(number)
    assert running.end() == 0
    assert running.log.rstrip().endswith("stopped")


def test_without_setup_it_does_not_start_where_a_queue_is_missing(cli, own_folder):
    cli.ok("setup")
    (own_folder / "postdate.toml").write_text('[endpoint]\nerror_queue = "failures"\n')
    ran = cli("run", "--no-setup")
    assert ran.status == 3
    assert "delivering from" not in ran.err
    assert "[store_not_set_up]: 'local:///postdate.db' (transport.address, default) lacks queues" in ran.err
    assert "'postdate': failures; run `postdate setup`" in ran.err


def test_without_setup_it_needs_the_poison_queue_instead_of_the_error_queue(cli, service, own_folder):
    """The queue that setup creates, and no other."""
    (own_folder / "postdate.toml").write_text('[delayed_delivery]\npoison_queue = "poison"\n')
    assert "error" not in cli.ok("setup", "--json").json["queues"]
    running = service("--no-setup")
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0
    (own_folder / "postdate.toml").write_text('[delayed_delivery]\npoison_queue = "other"\n')
    ran = cli("run", "--no-setup")
    assert ran.status == 3
    assert "'postdate': other; run `postdate setup`" in ran.err


def test_ready_is_said_once_and_last_to_the_service_manager_too(service, own_folder, monkeypatch):
    """On systemd's socket, where that is asked for; and when it stops."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(own_folder / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(own_folder / "notify"))
        running = service()
        assert manager.recv(100) == b"READY=1"
        assert running.log.endswith(READY)
        assert running.log.count(READY) == 1
        running.process.send_signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert running.end() == 0


def test_a_service_manager_that_is_gone_holds_nothing_up(service, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", "@nobody listens here")
    running = service()
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0
    assert "the service manager could not be told READY=1" in running.log  # said after what the service waits for


def test_it_tells_at_an_address_how_it_is(cli, service, own_folder, eventually):
    (own_folder / "postdate.toml").write_text('[metrics]\nlisten = "127.0.0.1:0"\n')
    cli.ok("setup", "--queue", "orders")
    running = service()
    (port,) = re.findall(r"metrics and health at port ([0-9]+)", running.log)

    def asked(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.read().decode()

    assert asked("/healthz") == "ok\n"
    eventually(lambda: is_answered(asked, "/readyz"), "it is ready")
    cli.ok("send", "orders", "x", "--delay", "1ms")
    delivered = 'postdate_messages_total{messaging_destination_name="orders",postdate_outcome="delivered"} 1.0'
    eventually(lambda: delivered in asked("/metrics"), "a delivery is counted")


def is_answered(asked: Callable[[str], str], path: str) -> bool:
    try:
        return asked(path) == "ok\n"
    except urllib.error.HTTPError:
        return False


def test_it_logs_json_if_asked_to(cli, service):
    cli.ok("setup")
    running = service("--log-json")
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0
    lines = [json.loads(line) for line in running.log.splitlines()]
    assert {each["level"] for each in lines} == {"INFO"}
    assert [each["message"] for each in lines][-2:] == ["stopping: finishing what is in hand", "stopped"]
    assert all(each["time"].endswith("Z") and each["logger"].startswith("postdate.") for each in lines)
