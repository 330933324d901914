"""The servers and the faulty link that other tests stand on: they start, answer, break and come back as they say."""

import json
import os
import shlex
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from .. import services  # noqa: TID252 - as in servers.py
from ..machine import LOOPBACK, Daemon, boot, daemons_with, port_is_free  # noqa: TID252
from ..proxy import FaultyLink  # noqa: TID252
from ..servers import PostgreSQL, RabbitMQ, Server  # noqa: TID252
from ..services import VARIABLES  # noqa: TID252

PROJECT = Path(__file__).resolve().parent.parent.parent
_HERE = "tests/integration/test_servers.py"


class Listening(Server):
    """Programs that listen on its ports and do nothing else: the life of a server, without the start of a real one."""

    name = "Listening"
    package = account = ""
    _port_names = ("port", "another")

    @classmethod
    def is_installed(cls) -> bool:
        return True

    @classmethod
    def _owner(cls) -> None:
        return None

    @property
    def url(self) -> str:
        return f"tcp://{LOOPBACK}:{self.port}"

    def answers(self) -> bool:
        return not any(map(port_is_free, self.ports.values()))

    def _create(self) -> None:
        self.data.mkdir()

    def _launch(self) -> None:
        program = (
            "import signal, socket, sys; _ = socket.create_server(('127.0.0.1', int(sys.argv[1]))); signal.pause()"
        )
        for port in self.ports.values():
            self._start_daemon([sys.executable, "-S", "-c", program, str(port)])


def on(real: type[Server]) -> Callable[[Callable], Callable]:
    """Run a test on programs that only listen, in the gate; and on a real server."""

    def mark(test: Callable) -> Callable:
        proof = f"{_HERE}::{test.__name__}[Listening]"
        soak = pytest.mark.soak("starts a server of its own", part="servers", proven_by=proof)
        kinds = [pytest.param(Listening, id="Listening"), pytest.param(real, id=real.__name__, marks=soak)]
        return pytest.mark.parametrize("kind", kinds)(test)

    return mark


# --- scripts/services -------------------------------------------------------------------------------------------------


class Checkout:
    """Another directory with this project's servers: what happens to them happens to no other test's."""

    def __init__(self, project: Path, folder: Path) -> None:
        self.project = project
        self.folder = folder
        for name in (
            "scripts/services",
            "tests/services.py",
            "tests/servers.py",
            "tests/machine.py",
            "tests/azure_server.py",
            "tests/npm/package.json",
            "tests/npm/package-lock.json",
        ):
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, project / name)

    def services(self, *arguments: str, code: int = 0) -> str:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ran = subprocess.run(
            [self.project / "scripts/services", *arguments],
            env={**os.environ, "TMPDIR": str(self.folder), "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    def processes(self) -> dict[str, list[Daemon]]:
        return {
            record.parent.name: [Daemon(**daemon) for daemon in json.loads(record.read_text())["daemons"]]
            for record in self.folder.glob("*/*/server.json")
        }

    def left(self) -> list[Daemon]:
        return [left for data in self.folder.glob("*/*/data") for left in daemons_with(f"POSTDATE_SERVER={data}")]


@pytest.fixture
def checkout(tmp_path: Path, server_folder: Path) -> Generator[Checkout]:
    other = Checkout(tmp_path / "checkout", server_folder)
    yield other
    other.services("down")


class ThatListen(services.Services):
    """Two of them, in place of the real ones."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plain = {name: Listening(directory / name) for name in ("postgres", "redis")}
        self.durable = {}


def test_servers_come_up_once_are_mended_and_go_down_without_remains(
    server_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services, "URLS", tmp_path / "urls" / "urls.json")
    both = ThatListen(server_folder)

    def said(command: Callable[..., int], code: int = 0, **options: bool) -> str:
        assert command(both, **options) == code
        return capsys.readouterr().out

    def processes() -> list[Daemon]:
        return [daemon for server in both.plain.values() for daemon in server.processes()]

    try:
        with ThreadPoolExecutor(2) as shells:
            assert list(shells.map(lambda _: services.up(both, durable=False), range(2))) == [0, 0]
        assert capsys.readouterr().out.count("up already") == 2, "of each the one that came second"
        first = processes()
        assert len(first) == 4
        assert said(services.up, durable=False).count("up already") == 2
        assert processes() == first
        said(services.status)
        exported = said(services.env, durable=False)
        for url in json.loads(services.URLS.read_text())["plain"].values():
            assert f"={shlex.quote(url)}\n" in exported

        first[-1].send(signal.SIGKILL)
        assert first[-1].ends_within(30)
        said(services.status, code=1)
        assert said(services.up, durable=False).count("up already") == 1
        said(services.status)
        assert said(services.env, durable=False) == exported, "a server that came back has another port"
    finally:
        assert said(services.down) == "stopped: Listening, Listening\n"
    assert not processes()
    assert said(services.down) == "stopped: nothing was running\n"


@pytest.mark.soak(
    "starts all servers in another checkout",
    part="servers",
    proven_by=f"{_HERE}::test_servers_come_up_once_are_mended_and_go_down_without_remains",
)
def test_services_come_up_once_are_mended_and_go_down_without_remains(checkout: Checkout) -> None:
    with ThreadPoolExecutor(2) as shells:
        said = list(shells.map(lambda _: checkout.services("up"), range(2)))
    assert sorted(text.count("up already") for text in said) == [0, len(VARIABLES)], said
    first = checkout.processes()
    assert set(first) == set(VARIABLES)

    assert checkout.services("up").count("up already") == len(VARIABLES)
    assert checkout.processes() == first
    checkout.services("status")
    exported = checkout.services("env")
    for url in json.loads((checkout.project / ".services/urls.json").read_text())["plain"].values():
        assert f"={shlex.quote(url)}\n" in exported

    first["mariadb"][-1].send(signal.SIGKILL)
    assert first["mariadb"][-1].ends_within(30)
    checkout.services("status", code=1)
    assert checkout.services("up").count("up already") == len(VARIABLES) - 1
    checkout.services("status")
    assert checkout.services("env") == exported, "a server that came back has another port"

    assert checkout.services("down") == "stopped: PostgreSQL, pgbouncer, MariaDB, RabbitMQ, Redis, Azurite\n"
    assert not checkout.left()
    assert checkout.services("down") == "stopped: nothing was running\n"


# --- private servers --------------------------------------------------------------------------------------------------


@contextmanager
def running(server: Server) -> Generator[None]:
    server.start()
    try:
        yield
    finally:
        server.stop()
        assert not server.processes()


@on(RabbitMQ)
def test_a_killed_broker_comes_back_and_takes_its_port_mapper_along(server_folder: Path, kind: type[Server]) -> None:
    broker = kind(server_folder / "private")
    with running(broker):
        ports = broker.ports
        broker.kill()
        assert all(port_is_free(port) for port in ports.values())
        broker.start()
        assert broker.is_up()
        assert broker.ports == ports


@on(PostgreSQL)
def test_a_process_with_the_number_of_a_dead_server_is_left_alone(server_folder: Path, kind: type[Server]) -> None:
    stranger = Daemon.of(os.getpid())
    assert stranger is not None
    server = kind(server_folder / "private")
    server.directory.mkdir()
    record = {"boot": boot(), "daemons": [{"pid": stranger.pid, "born_ticks": stranger.born_ticks - 1}]}
    (server.directory / "server.json").write_text(json.dumps(record))
    assert not server.is_running
    server.kill()
    with running(server):
        assert server.pid != stranger.pid


@on(PostgreSQL)
def test_a_server_whose_record_is_lost_is_found_and_ended(server_folder: Path, kind: type[Server]) -> None:
    server = kind(server_folder / "private")
    with running(server):
        lost = server.processes()
        (server.directory / "server.json").unlink()
        server.start()
        assert not any(daemon.is_running for daemon in lost)
        assert server.is_up()


@on(PostgreSQL)
def test_a_port_that_another_program_took_is_left_to_it(server_folder: Path, kind: type[Server]) -> None:
    server = kind(server_folder / "private")
    with running(server):
        port = server.port
    with socket.create_server((LOOPBACK, port)), running(server):
        assert server.port != port
        assert server.is_up()


@on(PostgreSQL)
def test_a_server_is_found_by_another_object_and_by_its_url(server_folder: Path, kind: type[Server]) -> None:
    server = kind(server_folder / "private")
    with running(server):
        same = kind(server_folder / "private")
        assert (same.pid, same.url) == (server.pid, server.url)
        same.start()
        assert same.pid == server.pid


# --- the faulty link --------------------------------------------------------------------------------------------------


class Shouting(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(line.upper())


class ShoutingServer(socketserver.ThreadingTCPServer):
    def __init__(self) -> None:
        super().__init__((LOOPBACK, 0), Shouting)


@pytest.fixture
def link() -> Generator[FaultyLink]:
    with ShoutingServer() as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        with FaultyLink(LOOPBACK, server.server_address[1]) as link:
            yield link
        server.shutdown()
        thread.join()


def connect(link: FaultyLink) -> closing[socket.socket]:
    return closing(socket.create_connection((LOOPBACK, link.port), timeout=10))


def say(connection: socket.socket, word: bytes) -> bytes:
    connection.sendall(word + b"\n")
    return connection.recv(100)


def test_a_link_forwards_and_forwards_the_end(link: FaultyLink) -> None:
    with connect(link) as connection:
        assert say(connection, b"hello") == b"HELLO\n"
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert link.accepted == 1


def test_a_cut_link_resets_and_refuses_until_it_is_restored(link: FaultyLink) -> None:
    with connect(link) as connection:
        say(connection, b"hello")
        link.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(100)
    with pytest.raises(ConnectionRefusedError):
        connect(link)
    link.restore()
    with connect(link) as connection:
        assert say(connection, b"again") == b"AGAIN\n"


def test_a_reset_link_accepts_the_next_connection(link: FaultyLink) -> None:
    with connect(link) as connection:
        say(connection, b"hello")
        link.reset()
        with pytest.raises(ConnectionResetError):
            connection.recv(100)
    with connect(link) as connection:
        assert say(connection, b"again") == b"AGAIN\n"


def test_a_stalled_link_is_silent_and_delivers_when_restored(link: FaultyLink) -> None:
    with connect(link) as old:
        say(old, b"hello")
        link.stall()
        with connect(link) as new:
            for connection, word in ((old, b"old"), (new, b"new")):
                connection.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    say(connection, word)
                connection.settimeout(10)
            link.restore()
            assert (old.recv(100), new.recv(100)) == (b"OLD\n", b"NEW\n")


def test_a_stalled_link_can_be_cut(link: FaultyLink) -> None:
    link.stall()
    with connect(link) as connection:
        connection.sendall(b"lost\n")
        link.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(100)


def test_requests_pass_a_link_that_stalls_replies(link: FaultyLink) -> None:
    link.stall(replies_only=True)
    with connect(link) as connection:
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            say(connection, b"done")
        connection.settimeout(10)
        link.restore()
        assert connection.recv(100) == b"DONE\n"


def test_a_link_forgets_the_connections_it_has_and_carries_new_ones(link: FaultyLink) -> None:
    with connect(link) as old:
        say(old, b"hello")
        link.forget()
        old.settimeout(0.1)
        with pytest.raises(TimeoutError):
            say(old, b"swallowed")
        with connect(link) as new:
            assert say(new, b"new") == b"NEW\n"
        link.cut()
        with pytest.raises(ConnectionResetError):
            old.recv(100)


def test_latency_counts_once_in_each_direction(link: FaultyLink) -> None:
    with connect(link) as connection:
        say(connection, b"hello")
        link.delay(timedelta(milliseconds=100))
        began = time.monotonic()  # noqa: TID251 - latency is time, and a slow machine only adds to it
        assert say(connection, b"slow") == b"SLOW\n"
        assert time.monotonic() - began >= 0.2  # noqa: TID251


@pytest.mark.soak(
    "starts a server of its own",
    part="servers",
    proven_by=(
        f"{_HERE}::test_requests_pass_a_link_that_stalls_replies",
        "tests/integration/test_redis_claims.py::test_a_commit_whose_answer_was_lost_took_place_once",
    ),
)
def test_a_statement_whose_answer_is_lost_has_taken_effect(
    server_folder: Path, eventually: Callable[..., None]
) -> None:
    server = PostgreSQL(server_folder / "private")
    with running(server), FaultyLink(LOOPBACK, server.port) as link:
        assert server.query("SHOW server_encoding; SHOW fsync").split() == ["UTF8", "off"]
        server.query("CREATE TABLE heard (number int)")
        with connect(link) as connection:
            connection.sendall(_POSTGRESQL_LOGIN)
            assert connection.recv(1) == b"R"
            link.stall(replies_only=True)
            connection.sendall(_POSTGRESQL_INSERT)
            eventually(lambda: server.query("SELECT number FROM heard") == "1", "the row is there")
            link.cut()
            with pytest.raises(ConnectionResetError):
                read_to_the_end(connection)


def read_to_the_end(connection: socket.socket) -> None:
    while connection.recv(10_000):
        pass


def _postgresql(body: bytes, kind: bytes = b"") -> bytes:
    return kind + struct.pack("!I", 4 + len(body)) + body


_POSTGRESQL_LOGIN = _postgresql(struct.pack("!I", 3 << 16) + b"user\0postdate\0database\0postdate\0\0")
_POSTGRESQL_INSERT = _postgresql(b"INSERT INTO heard VALUES (1)\0", b"Q")
