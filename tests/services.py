"""What ``scripts/services`` does: one set of servers for the tests of this directory, and one for benchmarks.

The servers live in a directory for temporary files that is named after the project's. ``.services/urls.json`` has
their URLs, and nothing that is needed to find the servers again.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from .azure_server import Azurite  # noqa: TID252 - as in servers.py
from .machine import ServerError, place_for_servers  # noqa: TID252 - as in servers.py
from .servers import (  # noqa: TID252
    Chromium,
    MariaDB,
    PgBouncer,
    PostgreSQL,
    RabbitMQ,
    Redis,
    Server,
    SqliteShell,
    install_missing,
)

PROJECT = Path(__file__).resolve().parent.parent
URLS = PROJECT / ".services" / "urls.json"

VARIABLES: Mapping[str, str] = {
    "postgres": "POSTDATE_POSTGRES_URL",
    "pgbouncer": "POSTDATE_PGBOUNCER_URL",
    "mariadb": "POSTDATE_MARIADB_URL",
    "rabbitmq": "POSTDATE_RABBITMQ_URL",
    "redis": "POSTDATE_REDIS_URL",
    "azurite": "POSTDATE_AZURITE_CONNECTION",
}


class Services:
    """The servers of this project directory and this user: ``plain`` for tests, ``durable`` for benchmarks.

    Both sets have the same RabbitMQ, which syncs what it confirms in any case, and the same Azurite, which never does.
    """

    def __init__(self) -> None:
        self.directory = _own_directory()
        rabbitmq, azurite = RabbitMQ(self.directory / "rabbitmq"), Azurite(self.directory / "azurite")
        postgres = PostgreSQL(self.directory / "postgres")
        self.plain: dict[str, Server] = {
            "postgres": postgres,
            "pgbouncer": PgBouncer(self.directory / "pgbouncer", postgres),
            "mariadb": MariaDB(self.directory / "mariadb"),
            "rabbitmq": rabbitmq,
            "redis": Redis(self.directory / "redis"),
            "azurite": azurite,
        }
        self.durable: dict[str, Server] = {
            "postgres": PostgreSQL(self.directory / "postgres-durable", durable=True),
            "mariadb": MariaDB(self.directory / "mariadb-durable", durable=True),
            "rabbitmq": rabbitmq,
            "redis": Redis(self.directory / "redis-durable", durable=True),
            "azurite": azurite,
        }

    def chosen(self, *, durable: bool) -> dict[str, Server]:
        return self.durable if durable else self.plain

    def everything(self) -> list[Server]:
        return [*self.plain.values(), *(server for server in self.durable.values() if server.durable)]

    @contextmanager
    def alone(self) -> Generator[None]:
        """Keep other ``up`` and ``down`` waiting. The lock is no server's: they inherit no descriptor."""
        with (self.directory / "lock").open("a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def write_urls(self) -> None:
        """Write the URLs of both sets, as far as they run: whole or not at all."""
        sets = {"plain": self.plain, "durable": self.durable}
        urls = {
            name: {key: server.url for key, server in servers.items() if server.is_running}
            for name, servers in sets.items()
        }
        text = json.dumps({"directory": str(self.directory), **urls}, indent=2) + "\n"
        with suppress(OSError):
            if URLS.read_text(encoding="utf-8") == text:
                return
        try:
            URLS.parent.mkdir(exist_ok=True)
            new = URLS.with_suffix(f".{os.getpid()}")
            new.write_text(text, encoding="utf-8")
            new.replace(URLS)
        except PermissionError as error:
            raise ServerError(f"cannot write {URLS}: remove {URLS.parent}, which belongs to another user") from error


def _own_directory() -> Path:
    """Return the directory of the servers, made if it is missing; never one that somebody else put there."""
    user = os.geteuid()
    name = f"postdate-services-{hashlib.sha256(f'{PROJECT} {user}'.encode()).hexdigest()[:12]}"
    known = _known_directory()
    if known is not None and known.name.startswith(name) and _is_ours(known):
        return known  # chosen by an `up` that had another TMPDIR
    directory = place_for_servers() / name
    for number in range(2, 10):
        with suppress(FileExistsError):
            directory.mkdir()
            directory.chmod(0o755)  # whatever the umask
        if _is_ours(directory):
            return directory
        directory = directory.with_name(f"{name}-{number}")
    raise ServerError(f"{directory} and its like belong to somebody else; remove them, or set TMPDIR")


def _known_directory() -> Path | None:
    try:
        return Path(json.loads(URLS.read_text(encoding="utf-8"))["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_ours(directory: Path) -> bool:
    return directory.is_dir() and not directory.is_symlink() and directory.lstat().st_uid == os.geteuid()


def _bring_up(server: Server) -> str:
    """Start one server where it does not run; return the line that says so."""
    began = time.monotonic()
    state = "up already"
    if not server.is_up():
        state = "up"
        # Without fsync a machine that went down leaves anything at all on the disk, which may even seem to work.
        if server.ran_before_this_boot and not server.durable and not isinstance(server, RabbitMQ):
            _empty(server)
            state = "up, emptied: the machine went down under it"
        try:
            server.start()
        except ServerError:
            if not server.data.exists():
                raise
            _empty(server)
            server.start()
            state = "up, emptied: what it had stored would not start"
    return f"{_full_name(server):<21} {server.shown:<76} {state} ({time.monotonic() - began:.2f} s)"


def _empty(server: Server) -> None:
    server.kill()
    if server.data.exists():
        shutil.rmtree(server.data)


def up(services: Services, *, durable: bool) -> int:
    servers = services.chosen(durable=durable)
    with services.alone():
        install_missing([*(type(server) for server in servers.values()), Chromium, SqliteShell])
        with ThreadPoolExecutor(len(servers)) as pool:
            begun = [pool.submit(_bring_up, server) for server in servers.values()]
        failed = [error for error in (start.exception() for start in begun) if error is not None]
        services.write_urls()
    for start in begun:
        if start.exception() is None:
            say(start.result())
    for error in failed:
        complain(f"services: {error}")
    return 1 if failed else 0


def down(services: Services) -> int:
    with services.alone():
        running = [server for server in services.everything() if server.processes()]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda server: server.stop(), running))
        with suppress(FileNotFoundError):
            URLS.unlink()
    say(f"stopped: {', '.join(_full_name(server) for server in running) or 'nothing was running'}")
    return 0


def status(services: Services) -> int:
    for server in services.everything():
        state = "up" if server.is_up() else "does not answer" if server.processes() else "down"
        where = f"{server.shown}  process {server.pid}  {server.directory}" if server.is_running else ""
        say(f"{_full_name(server):<21} {state:<16} {where}".rstrip())
    return 0 if all(server.is_up() for server in services.plain.values()) else 1


def env(services: Services, *, durable: bool) -> int:
    servers = services.chosen(durable=durable)
    missing = [server.name for server in servers.values() if not server.is_up()]
    for key, server in servers.items():
        if server.name not in missing:
            say(f"export {VARIABLES[key]}={shlex.quote(server.url)}")
    if missing:
        command = f"scripts/services up{' --durable' if durable else ''}"
        complain(f"services: not running: {', '.join(missing)}; start them with {command}")
    return 1 if missing else 0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def complain(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _full_name(server: Server) -> str:
    return f"{server.name} (durable)" if server.durable else server.name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/services", description="The servers that tests and benchmarks need.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in {
        "up": "install and start what is missing",
        "down": "stop all of it",
        "status": "say what runs; exit code 1 unless every server of the tests answers",
        "env": "print the URLs as lines for eval in a shell",
    }.items():
        command = commands.add_parser(name, help=words, description=words)
        if name in {"up", "env"}:
            command.add_argument("--durable", action="store_true", help="the set for benchmarks: commits are synced")
    options = parser.parse_args(arguments)
    try:
        services = Services()
        match options.command:
            case "up":
                return up(services, durable=options.durable)
            case "down":
                return down(services)
            case "status":
                return status(services)
            case _:
                return env(services, durable=options.durable)
    except ServerError as error:
        complain(f"services: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
