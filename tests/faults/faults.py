"""What goes wrong: each a small object that begins and ends. What it needs to remember is its own or the lab's."""

import shutil
import signal
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from tests.faults import deployments
from tests.faults.lab import SECOND, Lab, watch
from tests.faults.ledger import NEVER
from tests.faults.observers import now
from tests.faults.services import Service
from tests.machine import until
from tests.proxy import FaultyLink
from tests.rabbitmq_subjects import channel_of
from tests.servers import Server
from tests.waiting import PATIENCE_SECONDS, freeze_processes

Where = str
"""``store`` or ``queues``: whose server or link."""


def server_of(deployment: deployments.Deployment, where: Where) -> Server:
    server = deployment.store_server if where == "store" else deployment.queue_server
    assert server is not None, f"{deployment.name} has no server of its {where}"
    return server


def link_of(lab: Lab, where: Where) -> FaultyLink:
    link = lab.deployment.store_link if where == "store" else lab.deployment.queue_link
    assert link is not None, f"{lab.case.deployment} has no link to its {where}"
    return link


# --- processes --------------------------------------------------------------------------------------------------------


class KilledService:
    """SIGKILL of the first service, again and again; it is started anew at once, as by a supervisor."""

    def __init__(self, times: int = 3) -> None:
        self._times = times

    def begin(self, lab: Lab) -> None:
        for _ in range(self._times):
            lab.services[0].kill()
            lab.start_services()

    def end(self, lab: Lab) -> None:
        lab.services[0].kill()
        lab.start_services()


@dataclass
class FrozenService:
    """SIGSTOP of the first of two services while it has messages in hand, and SIGCONT after the other took over.

    On files not within a write transaction, whose lock on the file nothing ends but the process.

    Args:
        messages: that fall due in one instant.
    """

    messages: int

    def begin(self, lab: Lab) -> None:
        first, second = lab.services
        second.freeze()  # so that the first one has them all
        before = len(lab.ledger.arrivals)
        with self._nothing_is_sent(lab):
            lab.sender.store([now() + SECOND] * self.messages)
            if lab.deployment.same_database:
                assert until(lambda: len(lab.ledger.arrivals) > before, PATIENCE_SECONDS), "it delivers"
            else:
                self._wait_until_it_holds_all_it_takes(lab)
            first.freeze()
        self._leave_no_lock(lab, first)
        second.thaw()

    def _wait_until_it_holds_all_it_takes(self, lab: Lab) -> None:
        if isinstance(lab.deployment, deployments.Azure):  # what is claimed there, only its process knows
            first = lab.services[0]
            assert until(lambda: first.says("dispatches under the lease"), PATIENCE_SECONDS), "it has the lease"
            watch(3 * SECOND)
        else:
            all_it_takes = min(self.messages, lab.deployment.in_hand)
            assert until(lambda: lab.sender.in_hand() >= all_it_takes, PATIENCE_SECONDS), "it claims"

    @staticmethod
    def _leave_no_lock(lab: Lab, frozen: Service) -> None:
        while isinstance(lab.deployment, deployments.OneFile) and lab.deployment.is_locked():
            frozen.thaw()
            frozen.freeze()

    @contextmanager
    def _nothing_is_sent(self, lab: Lab) -> Generator[None]:
        """Keep what is claimed in hand, where queues are elsewhere."""
        if lab.deployment.queue_link is not None:
            lab.deployment.queue_link.stall()
            yield
            lab.deployment.queue_link.cut()  # what is on its way is not sent
            lab.deployment.queue_link.restore()
        elif isinstance(lab.deployment, deployments.TwoFiles):
            with closing(sqlite3.connect(lab.deployment.queues, isolation_level=None, timeout=20)) as writing:
                writing.execute("BEGIN IMMEDIATE")
                yield
        else:
            yield

    def end(self, lab: Lab) -> None:
        """Wake it, and let it deliver one more, alone: it has had time to do harm with what it once held."""
        first, second = lab.services
        second.freeze()
        self._leave_no_lock(lab, second)
        first.thaw()
        lab.sender.store([now()])
        assert until(lambda: not lab.ledger.missing(), PATIENCE_SECONDS), "it does not go on"
        second.thaw()


@dataclass
class FrozenServer:
    """SIGSTOP and SIGCONT of every process of a server: connections stand, and nobody answers."""

    where: Where

    def begin(self, lab: Lab) -> None:
        freeze_processes(*(daemon.pid for daemon in server_of(lab.deployment, self.where).processes()))

    def end(self, lab: Lab) -> None:
        for daemon in server_of(lab.deployment, self.where).processes():
            daemon.send(signal.SIGCONT)


@dataclass
class KilledServer:
    """SIGKILL of a server, which is started again at the end."""

    where: Where

    def begin(self, lab: Lab) -> None:
        server_of(lab.deployment, self.where).kill()

    def end(self, lab: Lab) -> None:
        server_of(lab.deployment, self.where).start()


@dataclass
class RestartedServer:
    """A server is stopped in good order, and started again at the end."""

    where: Where

    def begin(self, lab: Lab) -> None:
        server_of(lab.deployment, self.where).stop()

    def end(self, lab: Lab) -> None:
        server_of(lab.deployment, self.where).start()


# --- the network ------------------------------------------------------------------------------------------------------


@dataclass
class CutLink:
    """Connections are reset, and new ones refused."""

    where: Where

    def begin(self, lab: Lab) -> None:
        link_of(lab, self.where).cut()

    def end(self, lab: Lab) -> None:
        link_of(lab, self.where).restore()


@dataclass
class BlackHole:
    """Bytes and new connections are accepted, and nothing is carried; at the end what waited arrives.

    Args:
        where: whose link.
        replies_only: the server hears everything, and is not heard.
    """

    where: Where
    replies_only: bool = False

    def begin(self, lab: Lab) -> None:
        link_of(lab, self.where).stall(replies_only=self.replies_only)

    def end(self, lab: Lab) -> None:
        link_of(lab, self.where).restore()


@dataclass
class ForgottenConnections:
    """The connections that are open are never carried again, nor ended, while new ones work."""

    where: Where

    def begin(self, lab: Lab) -> None:
        link_of(lab, self.where).forget()

    def end(self, lab: Lab) -> None:
        """It does not end."""


@dataclass
class SlowLink:
    """Everything arrives later, in each direction."""

    where: Where
    by: timedelta

    def begin(self, lab: Lab) -> None:
        link_of(lab, self.where).delay(self.by)

    def end(self, lab: Lab) -> None:
        link_of(lab, self.where).restore()


class TerminatedConnections:
    """``pg_terminate_backend`` for every connection of the services, at the beginning and at the end."""

    def begin(self, lab: Lab) -> None:
        lab.deployment.query(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{deployments.ROLE}'"
        )

    def end(self, lab: Lab) -> None:
        self.begin(lab)


# --- time -------------------------------------------------------------------------------------------------------------


@dataclass
class SteppedClocks:
    """The wall clocks of the services are set while they run, and set again at the end; one duration a service."""

    begin_at: Sequence[timedelta]
    end_at: Sequence[timedelta]

    def begin(self, lab: Lab) -> None:
        self._set(lab, self.begin_at)

    def end(self, lab: Lab) -> None:
        self._set(lab, self.end_at)

    @staticmethod
    def _set(lab: Lab, all_ahead: Sequence[timedelta]) -> None:
        for service, ahead in zip(lab.services, all_ahead, strict=True):
            assert service.clock is not None, "the case gives its services clocks of their own"
            service.clock.set(ahead)


# --- the broker -------------------------------------------------------------------------------------------------------


def broker_of(lab: Lab) -> Any:
    assert isinstance(lab.deployment, deployments.ToRabbitMq)
    return lab.deployment.broker


class MemoryAlarm:
    """RabbitMQ is low on memory: it blocks every connection that publishes."""

    def begin(self, lab: Lab) -> None:
        broker_of(lab).control("set_vm_memory_high_watermark", "0.00001")

    def end(self, lab: Lab) -> None:
        broker_of(lab).control("set_vm_memory_high_watermark", "0.4")


@dataclass
class FullQueue:
    """A queue holds so many messages and refuses others; nobody takes any out before the end.

    Args:
        holds: how many, to the end of the case.
    """

    holds: int

    def begin(self, lab: Lab) -> None:
        queue = lab.ledger.queue
        for observer in lab.observers:
            observer.pause()
        definition = f'{{"max-length": {self.holds}, "overflow": "reject-publish"}}'
        broker_of(lab).control("set_policy", "--apply-to", "queues", queue, f"^{queue}$", definition)

    def end(self, lab: Lab) -> None:
        for observer in lab.observers:
            observer.resume()


class MissingQueues:
    """The destination is deleted, and the error queue with it; both are there again at the end."""

    def begin(self, lab: Lab) -> None:
        for observer in lab.observers:
            observer.pause()
        with channel_of(broker_of(lab).url) as channel:
            for queue in (lab.ledger.error_queue, lab.ledger.queue):
                channel.queue_delete(queue)

    def end(self, lab: Lab) -> None:
        with channel_of(broker_of(lab).url) as channel:
            for queue in (lab.ledger.queue, lab.ledger.error_queue):
                channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
        for observer in lab.observers:
            observer.resume()


# --- the database -----------------------------------------------------------------------------------------------------


@dataclass
class RevokedRight:
    """The role of the services loses a right on a table of PostgreSQL, and has it back at the end."""

    right: str
    table: Callable[[deployments.Deployment], str]

    def begin(self, lab: Lab) -> None:
        lab.deployment.query(f"REVOKE {self.right} ON {self.table(lab.deployment)} FROM {deployments.ROLE}")

    def end(self, lab: Lab) -> None:
        lab.deployment.query(f"GRANT {self.right} ON {self.table(lab.deployment)} TO {deployments.ROLE}")


@dataclass
class LockedTable:
    """Somebody holds a lock on a table, as an index that is built or a backup does.

    Args:
        table: of the deployment.
        mode: of PostgreSQL, ``SHARE`` or ``ACCESS EXCLUSIVE``, or of MariaDB, ``WRITE``.
        role_setting: a time limit of the services' role in PostgreSQL, such as ``lock_timeout = '500ms'``.
    """

    table: Callable[[deployments.Deployment], str]
    mode: str
    role_setting: str = ""

    def begin(self, lab: Lab) -> None:
        deployment = lab.deployment
        if self.role_setting:
            assert isinstance(deployment, deployments.InPostgres)
            deployment.query(f"ALTER ROLE {deployments.ROLE} SET {self.role_setting}")
            for service in lab.services:  # a role's settings are those of new connections
                service.stop()
            lab.start_services()
        if isinstance(deployment, deployments.InPostgres):
            locking: Any = psycopg.connect(deployment.url)
            locking.execute(f"LOCK TABLE {self.table(deployment)} IN {self.mode} MODE".encode())
        else:
            assert isinstance(deployment, deployments.InMariaDb)
            locking = deployment.connect()
            locking.query(f"LOCK TABLES {self.table(deployment)} {self.mode}")
        lab.kept["locking"] = locking

    def end(self, lab: Lab) -> None:
        lab.kept.pop("locking").close()


class LockedFile:
    """Another process writes to the file, and does not end its transaction."""

    def begin(self, lab: Lab) -> None:
        assert isinstance(lab.deployment, deployments.OneFile)
        other = sqlite3.connect(lab.deployment.path, isolation_level=None, timeout=20)
        other.execute("BEGIN IMMEDIATE")
        lab.kept["locking"] = other

    def end(self, lab: Lab) -> None:
        lab.kept.pop("locking").close()


class FullDisk:
    """The disk of the store is full, and has room again at the end."""

    def begin(self, lab: Lab) -> None:
        assert isinstance(lab.deployment, deployments.OnSmallDisk)
        lab.deployment.disk.fill([service.pid for service in lab.services])

    def end(self, lab: Lab) -> None:
        assert isinstance(lab.deployment, deployments.OnSmallDisk)
        lab.deployment.disk.empty([service.pid for service in lab.services])


# --- rows and files ---------------------------------------------------------------------------------------------------


@dataclass
class DamagedRow:
    """The headers of one message that waits are cut off, or its due time is outside the calendar; they stay so.

    Args:
        sql: an UPDATE with the places {waiting}, {content} and {key}; the message is ``m-00007``.
    """

    sql: str

    def begin(self, lab: Lab) -> None:
        deployment = lab.deployment
        lab.ledger.unread.add("m-00007")
        lab.deployment.query(
            self.sql.format(waiting=deployment.waiting_table, content=deployment.content_table, id="m-00007")
        )

    def end(self, lab: Lab) -> None:
        """It stays damaged."""


class NeverDue:
    """A message is due in the last microsecond of the calendar, and the service is started anew."""

    def begin(self, lab: Lab) -> None:
        lab.sender.store([NEVER])
        for service in lab.services:
            service.stop()
        lab.start_services()

    def end(self, lab: Lab) -> None:
        """It waits on."""


class ReplacedFile:
    """The file of the store is put back from a copy, as a restore does it: by renaming the copy over it."""

    def begin(self, lab: Lab) -> None:
        assert isinstance(lab.deployment, deployments.OneFile)
        path = lab.deployment.path
        copy = path.with_suffix(".copy")
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        lab.ledger.acknowledged &= _ids_in(copy)
        lab.ledger.arrivals = [each for each in lab.ledger.arrivals if each.message_id not in _waiting_in(copy)]
        copy.rename(path)
        stopped = until(lambda: not any(service.is_running for service in lab.services), PATIENCE_SECONDS)
        assert stopped, "it does not notice"
        lab.sender.begin_anew(lab.deployment.sender)
        lab.start_services()

    def end(self, lab: Lab) -> None:
        """It stays replaced."""


class TornFile:
    """Half of the file is gone when the service starts, as after a crash of the disk; at the end it is whole again."""

    def begin(self, lab: Lab) -> None:
        assert isinstance(lab.deployment, deployments.OneFile)
        path, service = lab.deployment.path, lab.services[0]
        service.stop()
        with closing(
            sqlite3.connect(path, timeout=20)
        ) as connection:  # others have it open: it is not yet all in there
            assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        whole = path.with_suffix(".whole")
        shutil.copy(path, whole)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        service.start(lab.deployment.environment())

    def end(self, lab: Lab) -> None:
        assert isinstance(lab.deployment, deployments.OneFile)
        path, service = lab.deployment.path, lab.services[0]
        told = until(lambda: service.says("malformed") or service.says("damaged"), PATIENCE_SECONDS)
        assert told, service.said()[-1_000:]
        service.kill()
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        path.with_suffix(".whole").rename(path)
        lab.sender.begin_anew(lab.deployment.sender)
        lab.start_services()


def _ids_in(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {id_ for (id_,) in connection.execute("SELECT message_id FROM record WHERE kind = 1")}


def _waiting_in(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {id_ for (id_,) in connection.execute("SELECT message_id FROM delayed_message")}
