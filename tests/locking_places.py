"""Where stores on row locks are tested: MariaDB always, SQL Server where POSTDATE_SQLSERVER_URL names one."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from tests.mariadb_subjects import MariaDbStoreSubject
from tests.sqlserver_subjects import SqlServerStoreSubject, sqlserver_subjects

from postdate.backends.mariadb.connection import MariaDbServer, MariaDbSession
from postdate.backends.mariadb.schema import MariaDbNames
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.sql.row_locks.store import LockingStore
from postdate.backends.sqlserver.connection import SqlServerInstance, SqlServerSession
from postdate.backends.sqlserver.schema import SqlServerNames, literal
from postdate.backends.sqlserver.store import SqlServerStore

TABLE = "sales.`timeouts`"


class LockingPlace(ABC):
    """A server, and a schema of its own there that has to be quoted.

    Attributes:
        store_class: ``module:class`` of the store, for other processes.
        session_class: of connections.
    """

    store_class: ClassVar[str]
    session_class: ClassVar[type]

    url: str
    schema: str

    @abstractmethod
    def store(self, table: str | None = TABLE, **settings: Any) -> MariaDbStore | SqlServerStore:
        """Return a handle on a store there."""

    @abstractmethod
    def connect(self) -> Any:
        """Return a connection that looks at the store from outside."""

    @abstractmethod
    def names(self, table: str = TABLE) -> Any:
        """Return the names of the store's tables."""

    @abstractmethod
    def end_holders(self, session: Any) -> None:
        """End the connections by which processes hold messages."""

    @abstractmethod
    def end_idle(self, store: LockingStore, session: Any) -> None:
        """End the connections that a store keeps for later."""

    @abstractmethod
    def rename(self, session: Any, table: str, new: str) -> None:
        """Give a table another name."""

    @abstractmethod
    def add_dead_holder(self, session: Any) -> None:
        """Write down a holder whose connection is gone."""

    @abstractmethod
    def wait_for_no_lock(self, session: Any) -> None:
        """Have a connection give up at once where somebody has a row locked."""

    @abstractmethod
    def run_script(self, session: Any, script: str) -> None:
        """Run an administrator's script."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the schema."""


class MariaDbPlace(LockingPlace):
    """A database of MariaDB."""

    store_class = "postdate.backends.mariadb.store:MariaDbStore"
    session_class = MariaDbSession

    def __init__(self, url: str) -> None:
        self.subject = MariaDbStoreSubject(url)
        self.url, self.schema = url, self.subject.schema

    def store(self, table: str | None = TABLE, **settings: Any) -> MariaDbStore:
        return MariaDbStore(self.url, schema=self.schema, table=table, **settings)

    def connect(self) -> MariaDbSession:
        return MariaDbServer(self.url).connect()

    def names(self, table: str = TABLE) -> MariaDbNames:
        return MariaDbNames(self.schema, table)

    def end_holders(self, session: MariaDbSession) -> None:
        for (connection,) in session.rows(f"SELECT IS_USED_LOCK(lock_name) FROM {self.names().name_of('holder')}"):
            session.change(f"KILL {connection}")

    def end_idle(self, store: LockingStore, session: MariaDbSession) -> None:
        for kept, _ in store._pool._connections.idle:
            session.change(f"KILL {kept._connection.thread_id()}")

    def rename(self, session: MariaDbSession, table: str, new: str) -> None:
        session.change(f"RENAME TABLE {self.names().qualified_name(table)} TO {self.names().qualified_name(new)}")

    def add_dead_holder(self, session: MariaDbSession) -> None:
        session.change(
            f"INSERT INTO {self.names().qualified_name('postdate_holder')} (store_id, lock_name, pid, machine, "
            f"started_at) "
            f"VALUES (1, 'of a dead process', 1, 'machine', 1)"
        )

    def wait_for_no_lock(self, session: MariaDbSession) -> None:
        session.change("SET SESSION innodb_lock_wait_timeout = 0")

    def run_script(self, session: MariaDbSession, script: str) -> None:
        for statement in script.split(";\n\n"):
            if statement.strip():
                session.change(statement)

    def drop(self) -> None:
        self.subject.drop()


class SqlServerPlace(LockingPlace):
    """A schema of SQL Server."""

    store_class = "postdate.backends.sqlserver.store:SqlServerStore"
    session_class = SqlServerSession

    def __init__(self, url: str) -> None:
        self.subject = SqlServerStoreSubject(url)
        self.url, self.schema = url, self.subject.schema

    def store(self, table: str | None = TABLE, **settings: Any) -> SqlServerStore:
        return SqlServerStore(self.url, schema=self.schema, table=table, **settings)

    def connect(self) -> SqlServerSession:
        return SqlServerInstance(self.url).connect()

    def names(self, table: str = TABLE) -> SqlServerNames:
        return SqlServerNames(self.schema, table)

    def end_holders(self, session: SqlServerSession) -> None:
        held = session.rows(
            "SELECT DISTINCT l.request_session_id FROM sys.dm_tran_locks AS l WHERE l.resource_type = 'APPLICATION' "
            "AND l.resource_database_id = DB_ID() AND l.request_session_id <> @@SPID"
        )
        for (number,) in held:
            session.change(f"KILL {number}")

    def end_idle(self, store: LockingStore, session: SqlServerSession) -> None:
        for kept, _ in store._pool._connections.idle:
            ((number,),) = kept.rows("SELECT @@SPID")
            session.change(f"KILL {number}")

    def rename(self, session: SqlServerSession, table: str, new: str) -> None:
        session.change(f"EXEC sp_rename {literal(self.names().qualified_name(table))}, {literal(new)}")

    def add_dead_holder(self, session: SqlServerSession) -> None:
        session.change(
            f"INSERT INTO {self.names().qualified_name('postdate_holder')} (store_id, lock_name, pid, machine, "
            f"started_at) "
            f"VALUES (1, 'of a dead process', 1, 'machine', 1)"
        )

    def wait_for_no_lock(self, session: SqlServerSession) -> None:
        session.change("SET LOCK_TIMEOUT 0")

    def run_script(self, session: SqlServerSession, script: str) -> None:
        session.change(script)

    def drop(self) -> None:
        self.subject.drop()


def locking_places() -> list[str]:
    """Return the names of the stores whose server there is: as the conformance suite has them."""
    return ["MariaDbStore", *sqlserver_subjects()]


def locking_place(name: str, mariadb_url: str) -> LockingPlace:
    """Return a fresh schema for the tests of the store called ``name``."""
    return MariaDbPlace(mariadb_url) if name == "MariaDbStore" else SqlServerPlace(sqlserver_subjects()[name])
