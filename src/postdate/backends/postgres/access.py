"""A database that this process has open, and the access of one adapter to it.

All adapters that are made from one :class:`OpenDatabase` share its connections, one listener thread and one number
under which this process claims messages. Each adapter is closed by itself. Source: ADR 0007, ADR 0021, ADR 0054.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import psycopg
from typing_extensions import override

from postdate.backends.postgres import names as postgres_names
from postdate.backends.postgres.answering import ANSWERS_WITHIN, Answers, BoundedAsyncConnection, BoundedConnection
from postdate.backends.postgres.errors import is_conflict, translate, translate_errors
from postdate.backends.postgres.expiring import Reaper
from postdate.backends.postgres.listening import HOLDS_AT_MOST, HeartbeatSettings, Listener
from postdate.backends.postgres.objects import find_missing_objects, restore_indexes
from postdate.backends.postgres.pool import PostgresPool
from postdate.backends.postgres.sessions import check_unpooled, mark
from postdate.backends.sql.migrations import Step, missing_tables_error, run_migrations
from postdate.errors import ConfigurationError, StoreUnavailable
from postdate.ports import Recording, Scripted
from postdate.runtime import forks
from postdate.runtime.resource import Resource, resource_at
from postdate.runtime.threads import run_in_thread

log = logging.getLogger("postdate.stores")

T = TypeVar("T")
Connection = psycopg.Connection[Any]

_MAX_ATTEMPTS: Final = 5  # of a transaction that has conflicts
_SHORT_WAIT: Final = "lock_timeout=5s"
"""For the connection of the listener, which must send heartbeats also while other sessions have locked tables."""


class OpenDatabase(forks.ForkAware):
    """One schema of a database, with the connections, the listener thread and the number of this process.

    The first use opens connections, and closing the last adapter closes all of them. The arguments are those of
    :class:`postdate.Postgres`.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = postgres_names.DEFAULT_SCHEMA,
        recording: Recording = Recording.ALL,
        answers_within: timedelta = ANSWERS_WITHIN,
        holds_at_most: timedelta = HOLDS_AT_MOST,
    ) -> None:
        super().__init__()
        self.names, self.pool = postgres_names.SchemaNames(schema), PostgresPool(url)
        self.recording, self.answers_within, self.holds_at_most = recording, answers_within, holds_at_most
        self._life = HeartbeatSettings(mark(), holds_at_most)
        self.resource = resource_at(self.pool.address.identity, self.pool.address.shown)
        self._reaper = Reaper(self.names, self.identity)
        self._answers = Answers(answers_within, self.pool.abandoned)
        self._lock = forks.lock()
        self._accesses = 0
        self._listener: Listener | None = None
        forks.register(self)

    @property
    def schema(self) -> str:
        return self.names.schema

    @property
    def identity(self) -> tuple[str, ...]:
        return (*self.pool.address.identity, self.names.schema)

    def ensure_connections(self, concurrency: int) -> None:
        """Raise the limit of connections for one more endpoint that handles ``concurrency`` messages at once."""
        self.pool.raise_limit(concurrency)

    def attach_adapter(self) -> None:
        with self._lock:
            self._accesses += 1
            if self._accesses == 1:
                self._answers = Answers(self.answers_within, self.pool.abandoned)
                self.pool.open()

    def listener(self) -> Listener:
        """Return the listener thread, which is started at first use. It also removes expired messages from queues."""
        with self._lock:
            if self._listener is None:
                self._listener = Listener(
                    partial(self.connect, _SHORT_WAIT),
                    self.pool.abandoned,
                    self.names,
                    self._reaper,
                    self._life,
                    self.resource,
                )
                self._listener.start()
            return self._listener

    def connect(self, *options: str) -> BoundedConnection:
        with translate_errors(f"{self.pool.address.shown}, schema {self.names.schema}"):
            return self.pool.connect(self._answers, *options)

    def shorten_deadlines_if_last(self) -> None:
        """Shorten the deadlines if the last adapter is about to close."""
        if self._accesses == 1:
            self._answers.shorten_deadlines()

    def detach_adapter(self, answers: Answers, *, in_doubt: bool) -> None:
        """Unregister an adapter that is closed. The last one closes all connections, which releases all claims.

        Args:
            answers: of the adapter that is closing.
            in_doubt: the adapter may have left claims; only a new number of this process releases them.
        """
        with self._lock:
            self._accesses -= 1
            if self._accesses == 0:
                stopped_listener, self._listener = self._listener, None
                self._answers.shorten_deadlines()
                self.pool.close()
            else:
                stopped_listener = None
                if in_doubt and self._listener is not None:
                    self._listener.renew_holder()
        if stopped_listener is not None:
            stopped_listener.stop()
        if self.pool.abandoned:  # connecting ends these sessions; otherwise they would keep their claims
            with suppress(psycopg.Error):
                self.pool.connect(answers).close()

    @override
    def after_fork_in_child(self) -> None:
        """Forget connections, thread and number, which belong to the parent."""
        self.pool.reset_after_fork()
        self._life = HeartbeatSettings(mark(), self.holds_at_most)
        self._answers = Answers(self.answers_within, self.pool.abandoned)
        if self._listener is not None:
            self._listener.detach_after_fork()
        self._listener = None


class Access:
    """The access of one adapter to a database, until the adapter is closed.

    ``database`` is an object that other adapters share, or an address that is opened for this adapter only. The other
    arguments are those of :class:`postdate.PostgresStore`. Raises `ConfigurationError` if one is invalid or contradicts
    the database. ``claims``: the adapter claims messages, and so needs the schema of its database object.
    """

    def __init__(
        self,
        database: str | OpenDatabase,
        schema: str | None = None,
        *,
        recording: Recording | None = None,
        answers_within: timedelta | None = None,
        holds_at_most: timedelta | None = None,
        claims: bool = False,
    ) -> None:
        if isinstance(database, str):
            database = OpenDatabase(
                database,
                schema=postgres_names.DEFAULT_SCHEMA if schema is None else schema,
                recording=recording or Recording.ALL,
                answers_within=ANSWERS_WITHIN if answers_within is None else answers_within,
                holds_at_most=HOLDS_AT_MOST if holds_at_most is None else holds_at_most,
            )
        elif holds_at_most not in {None, database.holds_at_most}:
            raise ConfigurationError(
                f"the database was opened with holds_at_most={database.holds_at_most}, which is for the whole process: "
                f"set holds_at_most={holds_at_most} there, or leave it out here"
            )
        elif claims and schema not in {None, database.names.schema}:
            # Processes of that schema would take the claims for those of a dead process.
            raise ConfigurationError(
                f"schema={schema!r} is not the schema of the database object, {database.names.schema!r}, in which it "
                f"shows other processes that it lives: leave schema= out here, or open another object"
            )
        self.shared, self.release, self.close_connection = (
            database,
            database.pool.release,
            database.pool.close_connection,
        )
        self.names = database.names if schema is None else postgres_names.SchemaNames(schema)
        self.recording, self.holds_at_most = recording or database.recording, database.holds_at_most
        self.identity = (*database.pool.address.identity, self.names.schema)
        self.where = f"{database.pool.address.shown}, schema {self.names.schema}"
        self.resource = database.resource
        self.reaper = Reaper(self.names, self.identity)
        within = database.answers_within if answers_within is None else answers_within
        self._answers = Answers(within, database.pool.abandoned)
        self._closed = False
        database.attach_adapter()

    # --- connections --------------------------------------------------------------------------------------------

    @property
    def conninfo(self) -> str:
        """The connection string for other drivers on libpq; it contains the password."""
        return self.shared.pool.address.conninfo

    def connect(self, **settings: Any) -> Connection:
        """Open an unpooled connection in autocommit mode, without a deadline for answers. The caller closes it."""
        with translate_errors(self.where):
            connection = psycopg.Connection[Any].connect(self.conninfo, autocommit=True, **settings)
            check_unpooled(connection)
            connection.prepare_threshold = 2
            return forks.register_connection(connection)

    @property
    def is_outcome_known(self) -> bool:
        """Return ``False`` while an abandoned session may still execute its last statement."""
        return not self.shared.pool.abandoned

    def acquire(self, *, brief: bool = False) -> BoundedConnection:
        """Acquire a live connection; put it back with :meth:`release`. See :meth:`PostgresPool.acquire`."""
        self._check_open()
        with translate_errors(self.where):
            return self.shared.pool.acquire(self._answers, brief=brief)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"{self.where}: closed")

    def roll_back_and_close(self, connection: BoundedConnection) -> None:
        """Roll back the transaction of an acquired connection and close it, without waiting for a silent server."""
        abandoned = self.shared.pool.abandoned
        if not connection.closed and abandoned.is_distrusted(connection):
            abandoned.add(connection, silent=False)
        with suppress(psycopg.Error):  # releases the locks now, and not when the server notices the closed connection
            connection.execute("ROLLBACK")
        self.close_connection(connection)

    async def acquire_for_application(self) -> BoundedAsyncConnection:
        self._check_open()
        return await self.shared.pool.acquire_for_application(self._answers)

    def set_answer_deadline(self, connection: BoundedAsyncConnection) -> None:
        """Set a deadline for answers on a handler's connection before statements of Postdate (record and commit)."""
        connection.answers = self._answers

    async def release_for_application(self, connection: BoundedAsyncConnection) -> None:
        await self.shared.pool.release_for_application(connection, self._answers)

    def translate_errors(self) -> AbstractContextManager[None]:
        return translate_errors(self.where)

    @contextmanager
    def lend_connection(self) -> Generator[BoundedConnection]:
        """Acquire a connection in autocommit mode for brief work; errors of the driver are translated."""
        connection = self.acquire(brief=True)
        try:
            with translate_errors(self.where):
                yield connection
        finally:
            self.release(connection)

    def run_blocking(self, work: Callable[[Connection], T], *, patiently: bool = False) -> T:
        """Run ``work`` on a connection in autocommit mode; repeat it after a conflict with another transaction.

        ``patiently``: the work reads or writes whole tables, and may take minutes.
        """
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            connection = self.acquire(brief=not patiently)
            connection.patient = patiently
            try:
                return work(connection)
            except psycopg.Error as error:
                if not is_conflict(error) or attempt == _MAX_ATTEMPTS:
                    raise translate(error, self.where) from error
            finally:
                self.release(connection)
        raise AssertionError

    async def run(self, work: Callable[[Connection], T], *, patiently: bool = False) -> T:
        """Call :meth:`run_blocking` in a thread. A caller that is cancelled waits until the work has ended."""
        return await run_in_thread(partial(self.run_blocking, patiently=patiently), work)

    query_blocking = run_blocking

    async def query(self, work: Callable[[Connection], T], *, patiently: bool = False) -> T:
        return await self.run(work, patiently=patiently)

    async def transaction(self, work: Callable[[Connection], T], *, patiently: bool = False) -> T:
        return await run_in_thread(partial(self.transaction_blocking, patiently=patiently), work)

    def transaction_blocking(self, work: Callable[[Connection], T], *, patiently: bool = False) -> T:
        def run_in_transaction(connection: Connection) -> T:
            with connection.transaction():
                return work(connection)

        return self.run_blocking(run_in_transaction, patiently=patiently)

    # --- heartbeats ---------------------------------------------------------------------------------------------

    def listener(self) -> Listener:
        self._check_open()
        return self.shared.listener()

    def shorten_deadlines(self) -> None:
        """Shorten the deadlines for answers, as the adapter is closing."""
        self._answers.shorten_deadlines()
        if not self._closed:
            self.shared.shorten_deadlines_if_last()

    def close_blocking(self, *, in_doubt: bool = False) -> None:
        """Close the access of this adapter. Idempotent; it does not wait for a silent server.

        ``in_doubt``: the adapter may have left claims under the number of this process.
        """
        self.shorten_deadlines()
        was_closed, self._closed = self._closed, True
        if not was_closed:
            self.shared.detach_adapter(self._answers, in_doubt=in_doubt)

    # --- set-up -------------------------------------------------------------------------------------------------

    def setup_blocking(self, table: str | None = None) -> None:
        """Create missing tables of the schema, and of a store (``table``); several processes may do so at once."""
        self.apply_migrations(postgres_names.steps(self.names.schema, table))

    def apply_migrations(self, required: Sequence[Step]) -> None:
        """Apply the missing migrations of ``required``, and create missing indexes again.

        Several processes may do so at once. Raises `StoreNotSetUp` if a table is missing although its migration was
        applied: an empty one in its place would hide that its rows are lost.
        """
        schema = self.names.schema
        with self.translate_errors(), self.connect() as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s, 0)", (self.names.lock_class,))
            marks = connection.execute(
                "SELECT to_regclass(%s)", (f"{postgres_names.quote_name(schema)}.migration",)
            ).fetchone()
            if marks == (None,):  # only if they are missing, so that later starts need no right to create tables
                connection.execute(postgres_names.sql(postgres_names.foundation(schema)))
            run_migrations(
                required,
                connection.execute(
                    postgres_names.sql(f"SELECT subject, version FROM {self.names.name_of('migration')}"), ()
                ).fetchall(),
                self.where,
                execute=lambda text: connection.execute(postgres_names.sql(text)),
                mark_statement=lambda step: postgres_names.mark_statement(schema, step),
            )
            missing = find_missing_objects(connection, schema, dict.fromkeys(step.subject for step in required))
            if missing.relations:
                raise missing_tables_error(self.where, missing.relations)
            if missing.indexes:
                log.warning("%s lacks %s: creating them again", self.where, ", ".join(missing.texts()))
                restore_indexes(connection, missing)


class SchemaPart(Scripted):
    """An adapter with a table of its own in a schema, beside those of stores and queues."""

    def _set_database(self, database: Access, required: Sequence[Step]) -> None:
        self._schema, self._required_steps = database, required

    @property
    def resource(self) -> Resource:
        """The resource of the database."""
        return self._schema.resource

    @override
    def setup_statements(self, endpoint: str) -> str:
        return self._schema.names.script(self._required_steps)

    async def setup(self) -> None:
        await run_in_thread(self._schema.apply_migrations, self._required_steps)

    async def close(self) -> None:
        await run_in_thread(self._schema.close_blocking)
