"""Where a case takes place: a store, queues, links to their servers, and how drivers look at both."""

import itertools
import os
import resource
import sqlite3
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pymysql
from tests.azure_server import Azurite
from tests.faults.ledger import Arrival
from tests.faults.observers import AzureObserver, Observer, PostgresObserver, RabbitMqObserver, SqliteObserver
from tests.proxy import LOOPBACK, FaultyLink
from tests.servers import MariaDB, PostgreSQL, RabbitMQ, Server

from postdate.backends.azure.store import AzureTableStore
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.sqlite.store import SqliteStore
from postdate.ports import RecordKind

ClaimingStore = AzureTableStore | MariaDbStore | PostgresStore | SqliteStore

Noted = Callable[[Iterable[Arrival]], None]
_NUMBERS = itertools.count(1)
ROLE = "lab"
"""Of the services in PostgreSQL: it owns its tables and is no superuser, so that rights and time limits bind it."""


class DatingPostgreSQL(PostgreSQL):
    """One that tells when a row was committed."""

    _settings_without_sync: ClassVar[dict[str, str]] = {
        **PostgreSQL._settings_without_sync,
        "track_commit_timestamp": "on",
    }

    def _furnish(self) -> None:
        super()._furnish()
        if not self.query(f"SELECT 1 FROM pg_roles WHERE rolname = '{ROLE}'"):
            self.query(f"CREATE ROLE {ROLE} LOGIN")
            self.query(f"GRANT CREATE ON DATABASE postdate TO {ROLE}")


class Servers:
    """The private servers of one run of the lab, started when they are needed first; stopped at the end.

    Args:
        folder: where they live; their accounts can reach it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[type[Server], Server] = {}

    def server(self, kind: type[Server]) -> Any:
        """Return the running server of a kind; also one that a case has left dead."""
        if kind not in self._started:
            self._started[kind] = kind(self._folder / kind.__name__.lower())
        self._started[kind].start()
        return self._started[kind]

    def stop(self) -> None:
        """Stop all of them."""
        for server in self._started.values():
            server.stop()


class Deployment(ABC):
    """One store and its queues, for one case.

    Args:
        folder: for files.
        servers: the private ones.
    """

    same_database: ClassVar[bool] = False
    """Whether a delivery is one transaction: then nothing comes twice."""
    in_hand: ClassVar[int] = 4_000
    """Elsewhere, how many messages one service has sent and not yet removed at most: four batches of a thousand."""

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.folder, self.servers = folder, servers
        self.name = f"lab-{os.getpid()}-{next(_NUMBERS)}"
        self.queue, self.error_queue = f"{self.name}-target", f"{self.name}-error"
        self._links = ExitStack()
        self.store_server: Server | None = None
        self.queue_server: Server | None = None
        self.store_link: FaultyLink | None = None
        self.queue_link: FaultyLink | None = None
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Start servers and links, make what must be there before the services."""

    @abstractmethod
    def addresses(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings of store and transport."""

    @abstractmethod
    def sender(self) -> ClaimingStore:
        """Return the store, as an application on a faultless way opens it."""

    @abstractmethod
    def observers(self, noted: Noted) -> Sequence[Observer]:
        """Return what looks at the queues."""

    def settings(self, more: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the settings of the services; ``more`` takes precedence."""
        sections: dict[str, dict[str, Any]] = {
            "endpoint": {"name": self.name, "error_queue": self.error_queue},
            "queues": {"create": [self.queue]},
        }
        for part in (self.addresses(), more):
            for section, values in part.items():
                sections.setdefault(section, {}).update(values)
        return sections

    def environment(self) -> dict[str, str]:
        """Return what the services find in their environment."""
        return {}

    def records(self, kind: RecordKind) -> int | None:
        """Return how many records of a kind there are; None where drivers cannot ask."""
        return self.query(f"SELECT count(*) FROM {self.record_table} WHERE kind = {kind.value}")[0][0]

    def query(self, sql: str) -> Sequence[tuple[Any, ...]]:
        """Run a statement on the store's database with every right; return its rows."""
        raise NotImplementedError(f"{type(self).__name__} has no SQL: {sql}")

    waiting_table: str = ""
    record_table: str = ""
    content_table: str = ""

    def _link(self, port: int) -> FaultyLink:
        return self._links.enter_context(FaultyLink(LOOPBACK, port))

    def close(self) -> None:
        """Close links, and drop what is in the way of others."""
        self._links.close()


def through(link: FaultyLink, url: str, user: str | None = None) -> str:
    """Return a URL with the link's port in place of the server's."""
    parts = urlsplit(url)
    account = user or parts.netloc.rpartition("@")[0]
    return urlunsplit(parts._replace(netloc=f"{account}@{LOOPBACK}:{link.port}"))


# --- SQLite -----------------------------------------------------------------------------------------------------------


class OneFile(Deployment):
    """Store and queues in one SQLite file."""

    same_database = True
    waiting_table, record_table, content_table = "delayed_message", "record", "content"

    def prepare(self) -> None:
        self.path = self.folder / "store.db"
        self.queues = self.path

    def addresses(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "store": {"address": f"sqlite:///{self.path}", "synchronous": "normal"},
            "transport": {"address": f"local:///{self.queues}"},
        }

    def sender(self) -> ClaimingStore:
        return SqliteStore(self.path, synchronous="normal")

    def observers(self, noted: Noted) -> Sequence[Observer]:
        return [SqliteObserver(self.queues, noted)]

    def query(self, sql: str) -> Sequence[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=20)) as connection:
            return connection.execute(sql).fetchall()

    def is_locked(self) -> bool:
        """Tell whether a process is within a write transaction."""
        for path in {self.path, self.queues}:
            with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    return True
        return False


class TwoFiles(OneFile):
    """Store and queues in two SQLite files: at least once, as with a broker."""

    same_database = False

    def prepare(self) -> None:
        super().prepare()
        self.queues = self.folder / "queues.db"


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


class InPostgres(Deployment):
    """A store in a schema of PostgreSQL."""

    def prepare(self) -> None:
        self.store_server = server = self.servers.server(DatingPostgreSQL)
        self.url: str = server.url
        self.store_link = self._link(server.port)
        self.waiting_table = f'"{self.name}"."{self.name}.timeouts"'
        self.record_table = f'"{self.name}".record'
        self.content_table = f'"{self.name}".content'

    def addresses(self) -> Mapping[str, Mapping[str, Any]]:
        assert self.store_link is not None
        return {"store": {"address": through(self.store_link, self.url, ROLE), "schema": self.name}}

    def sender(self) -> ClaimingStore:
        return PostgresStore(self.url, schema=self.name, table=f"{self.name}.timeouts")

    def query(self, sql: str) -> Sequence[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True, connect_timeout=20) as connection:
            cursor = connection.execute(sql.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def close(self) -> None:
        self.query(f"ALTER ROLE {ROLE} RESET ALL")
        super().close()


class OneSchema(InPostgres):
    """Store and queues in one schema of PostgreSQL."""

    same_database = True

    def addresses(self) -> Mapping[str, Mapping[str, Any]]:
        store = super().addresses()["store"]
        return {"store": store, "transport": store}

    def observers(self, noted: Noted) -> Sequence[Observer]:
        return [PostgresObserver(self.url, self.name, noted)]


# --- little room ---------------------------------------------------------------------------------------------------


class Disk(ABC):
    """Where there is room for little, and then for nothing, and then again."""

    @abstractmethod
    def fill(self, pids: Sequence[int]) -> None:
        """Leave no room on it to these services."""

    @abstractmethod
    def empty(self, pids: Sequence[int]) -> None:
        """Give it room again."""


class MountedDisk(Disk):
    """A file system of some megabytes in memory. To mount it takes root.

    Args:
        folder: where it is mounted.
        closing: unmounts it.
    """

    _megabytes = 24

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        folder.mkdir()
        self.folder = folder
        options = f"size={self._megabytes}m,mode=755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
        closing.callback(subprocess.run, ["umount", "--lazy", folder], check=True)

    def fill(self, pids: Sequence[int]) -> None:
        with (self.folder / "filler").open("wb", buffering=0) as filler:
            for size in (65_536, 1):
                with suppress(OSError):
                    while True:
                        filler.write(b"x" * size)

    def empty(self, pids: Sequence[int]) -> None:
        (self.folder / "filler").unlink()


class LimitedFiles(Disk):
    """Without root: no file of a service may grow beyond a mebibyte, which SQLite hears as an error of the disk."""

    def fill(self, pids: Sequence[int]) -> None:
        self._limit(pids, 1 << 20)

    def empty(self, pids: Sequence[int]) -> None:
        self._limit(pids, resource.RLIM_INFINITY)

    @staticmethod
    def _limit(pids: Sequence[int], size: int) -> None:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class RefusingTables(Disk):
    """Without root: a trigger answers for PostgreSQL that the disk is full, when a row is added to a queue."""

    def __init__(self, deployment: InPostgres) -> None:
        self._deployment = deployment

    def fill(self, pids: Sequence[int]) -> None:
        schema = f'"{self._deployment.name}"'
        self._deployment.query(
            f"CREATE FUNCTION {schema}.full() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END$$"
        )
        self._deployment.query(
            f"CREATE TRIGGER full_disk BEFORE INSERT ON {schema}.queue_message EXECUTE FUNCTION {schema}.full()"
        )

    def empty(self, pids: Sequence[int]) -> None:
        self._deployment.query(f'DROP TRIGGER full_disk ON "{self._deployment.name}".queue_message')


class OnSmallDisk(Deployment):
    """A deployment whose disk can be filled."""

    disk: Disk


class OneSmallFile(OnSmallDisk, OneFile):
    """Store and queues in one SQLite file on a small disk."""

    def prepare(self) -> None:
        super().prepare()
        if os.geteuid() == 0:
            self.disk = disk = MountedDisk(self.folder / "disk", self._links)
            self.path = self.queues = disk.folder / "store.db"
        else:
            self.disk = LimitedFiles()


class OneSmallSchema(OnSmallDisk, OneSchema):
    """Store and queues in one schema of PostgreSQL, whose tables are on a small disk."""

    def prepare(self) -> None:
        super().prepare()
        if os.geteuid() != 0:
            self.disk = RefusingTables(self)
            return
        assert self.store_server is not None
        self.disk = disk = MountedDisk(self.store_server.directory / self.name, self._links)
        space, owner = disk.folder / "space", self.store_server._owner()
        space.mkdir(mode=0o700)
        if owner is not None:
            os.chown(space, owner.pw_uid, owner.pw_gid)
        self.query(f"CREATE TABLESPACE \"{self.name}\" LOCATION '{space}'")
        self.query(f'GRANT CREATE ON TABLESPACE "{self.name}" TO {ROLE}')
        self.query(f"ALTER ROLE {ROLE} SET default_tablespace = '{self.name}'")

    def close(self) -> None:
        if os.geteuid() == 0:
            self.query(f'DROP SCHEMA "{self.name}" CASCADE')
            self.query(f'DROP TABLESPACE "{self.name}"')
        super().close()


# --- queues elsewhere -------------------------------------------------------------------------------------------------


class ToRabbitMq(Deployment):
    """Queues in RabbitMQ."""

    def prepare(self) -> None:
        self.queue_server = broker = self.servers.server(RabbitMQ)
        self.broker: RabbitMQ = broker
        self.queue_link = self._link(broker.port)
        super().prepare()

    def addresses(self) -> Mapping[str, Mapping[str, Any]]:
        assert self.queue_link is not None
        return {**super().addresses(), "transport": {"address": through(self.queue_link, self.broker.url)}}

    def observers(self, noted: Noted) -> Sequence[Observer]:
        return [RabbitMqObserver(self.broker.url, [self.queue, self.error_queue], noted)]


class PostgresToRabbitMq(ToRabbitMq, InPostgres):
    """A store in PostgreSQL, queues in RabbitMQ."""


class InMariaDb(Deployment):
    """A store in a database of MariaDB."""

    def prepare(self) -> None:
        self.store_server = server = self.servers.server(MariaDB)
        self.url: str = server.url
        self.store_link = self._link(server.port)
        server.query(f"CREATE DATABASE `{self.name}`")
        self.waiting_table = self.content_table = f"`{self.name}`.`{self.name}.timeouts`"
        self.record_table = f"`{self.name}`.postdate_record"

    def addresses(self) -> Mapping[str, Mapping[str, Any]]:
        assert self.store_link is not None
        return {"store": {"address": through(self.store_link, self.url), "schema": self.name}}

    def sender(self) -> ClaimingStore:
        return MariaDbStore(self.url, schema=self.name, table=f"{self.name}.timeouts")

    def connect(self) -> "pymysql.Connection[Any]":
        """Open a connection of the test's own."""
        assert self.store_server is not None
        return pymysql.connect(
            host=LOOPBACK, port=self.store_server.port, user="postdate", password="postdate", autocommit=True
        )

    def query(self, sql: str) -> Sequence[tuple[Any, ...]]:
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())


class MariaDbToRabbitMq(ToRabbitMq, InMariaDb):
    """A store in MariaDB, queues in RabbitMQ."""


# --- Azure ------------------------------------------------------------------------------------------------------------


class Azure(Deployment):
    """A table and queues of Azure Storage, in the emulator."""

    in_hand = 200  # four pages of fifty

    def prepare(self) -> None:
        self.store_server = self.queue_server = server = self.servers.server(Azurite)
        self.connection: str = server.url
        self._table = f"lab{self.name.replace('-', '')}"
        linked = self.connection
        for name, port in server.ports.items():
            link = self._link(port)
            linked = linked.replace(f":{port}/", f":{link.port}/")
            if name == "port":
                self.queue_link = link
            elif name == "tables":
                self.store_link = link
        self._linked = linked

    def environment(self) -> dict[str, str]:
        return {"LAB_AZURE": self._linked}

    def addresses(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "store": {"address": "azure-table://?connection=env:LAB_AZURE", "table": self._table},
            "transport": {"address": "azure-queues://?connection=env:LAB_AZURE"},
        }

    def sender(self) -> ClaimingStore:
        return AzureTableStore(self.connection, table=self._table)

    def observers(self, noted: Noted) -> Sequence[Observer]:
        return [AzureObserver(self.connection, [self.queue, self.error_queue], noted)]

    def records(self, kind: RecordKind) -> int | None:
        return None


DEPLOYMENTS: Mapping[str, type[Deployment]] = {
    "one SQLite file": OneFile,
    "two SQLite files": TwoFiles,
    "one SQLite file, small disk": OneSmallFile,
    "one PostgreSQL schema": OneSchema,
    "one PostgreSQL schema, small disk": OneSmallSchema,
    "PostgreSQL, RabbitMQ": PostgresToRabbitMq,
    "MariaDB, RabbitMQ": MariaDbToRabbitMq,
    "Azure table and queues": Azure,
}
