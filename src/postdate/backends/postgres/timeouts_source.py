"""Tables of timeouts in PostgreSQL as a source of a migration."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from typing_extensions import override

from postdate.backends.postgres.access import Access
from postdate.backends.postgres.names import DEFAULT_SCHEMA as STORE_SCHEMA
from postdate.backends.postgres.names import quote_name
from postdate.backends.postgres.names import sql as bytes_of
from postdate.backends.sql.timeouts_layout import ID, TIME
from postdate.backends.sql.timeouts_migration.dialect import NUMBER, TURN_SECONDS, Dialect, HideRequest, Session
from postdate.errors import PostdateError, StoreError, StoreUnavailable, StoreUnreachable

DEFAULT_SCHEMA: Final = "public"
"""The schema of upstream's tables by default."""

_TURN_KEY: Final = -1
"""Second key of the lock of :meth:`PostgresDialect.acquire_turn`; keys above 0 are numbers of live processes."""

_LATEST_TIME: Final = "'9999-12-31 23:59:59.999999'"


class PostgresSession:
    """One connection; see :class:`Session`."""

    def __init__(self, database: Access) -> None:
        self._database = database
        self._connection = database.connect()
        # The session's planner settings suit the statements of a store; these statements read whole tables, each once.
        self.change("SET enable_sort = on", {})
        self._connection.prepare_threshold = None

    def rows(self, sql: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        with self._translate_errors():
            return self._connection.execute(bytes_of(sql), values).fetchall()

    def change(self, sql: str, values: Mapping[str, Any]) -> int:
        with self._translate_errors():
            return max(self._connection.execute(bytes_of(sql), values).rowcount, 0)

    def pages(self, sql: str, values: dict[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield pages of rows, with a cursor of the server."""
        with self._translate_errors(), self._connection.transaction():
            self._connection.execute("SET LOCAL enable_seqscan = on")
            with self._connection.cursor(name="postdate_migration") as cursor:
                cursor.execute(bytes_of(sql), values)
                while rows := cursor.fetchmany(page):
                    yield rows

    def begin(self) -> None:
        self.change("BEGIN", {})

    def commit(self) -> None:
        self.change("COMMIT", {})

    def rollback(self) -> None:
        self.change("ROLLBACK", {})

    @contextmanager
    def _translate_errors(self) -> Generator[None]:
        try:
            with self._database.translate_errors():
                yield
        except StoreError as error:
            if self._connection.closed and not isinstance(error, StoreUnreachable):
                # The server has ended the connection, for example because of one of our limits.
                raise StoreUnreachable(str(error)) from error
            if not self._connection.closed and isinstance(error, StoreUnreachable):
                # The wait for a lock was too long; the connection is open.
                raise StoreUnavailable(str(error)) from error
            raise

    def close(self) -> None:
        with suppress(PostdateError), self._database.translate_errors():
            self._connection.close()


class PostgresDialect(Dialect):
    """The SQL of PostgreSQL.

    Args:
        url: of the database.
        schema: of upstream's tables; ``None``: ``public``.
    """

    lock_clause, skip_locked_clause = " FOR UPDATE", " FOR UPDATE SKIP LOCKED"
    names_of_tables = "SELECT tablename FROM pg_tables WHERE schemaname = %(schema)s"

    def __init__(self, url: str, schema: str | None) -> None:
        self._database = Access(url, DEFAULT_SCHEMA if schema is None else schema)
        super().__init__(DEFAULT_SCHEMA if schema is None else schema, self._database.where)

    @property
    def database(self) -> Access:
        return self._database

    @override
    def connect(self) -> Session:
        return PostgresSession(self._database)

    @override
    def now(self, session: Session) -> datetime:
        ((now,),) = session.rows("SELECT clock_timestamp()", {})
        return now.astimezone(UTC)

    @override
    def has_store(self, session: Session) -> bool:
        """Return whether there is a store; the default schema of stores is searched, too."""
        if super().has_store(session):
            return True
        default = f"{quote_name(STORE_SCHEMA)}.{quote_name('store')}"
        return session.rows("SELECT to_regclass(%(default)s) IS NOT NULL", {"default": default})[0][0]

    @override
    def columns(self, session: Session, table: str) -> Sequence[str]:
        rows = session.rows(
            "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%(table)s) AND attnum > 0 "
            "AND NOT attisdropped ORDER BY attnum",
            {"table": f"{quote_name(self.schema)}.{quote_name(table)}"},
        )
        return [name for (name,) in rows]

    @override
    def limit_waits(self, session: Session, margin: timedelta) -> None:
        """Limit waits for locks; the server also ends a transaction whose client is suspended."""
        for setting, share in (
            ("statement_timeout", 4),
            ("lock_timeout", 8),
            ("idle_in_transaction_session_timeout", 4),
        ):
            session.change(f"SET {setting} = {max(margin // timedelta(milliseconds=share), 1)}", {})

    @override
    def reset_limits(self, session: Session) -> None:
        for setting in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
            session.change(f"SET {setting} = 0", {})

    @override
    def acquire_turn(self, session: Session) -> None:
        """Acquire a lock, which is held until the end of the transaction."""
        session.change(f"SET LOCAL lock_timeout = '{TURN_SECONDS}s'", {})
        session.rows(
            "SELECT pg_advisory_xact_lock(%(key)s, %(turn)s)",
            {"key": self._database.names.lock_class, "turn": _TURN_KEY},
        )

    @override
    def readable_column(self, column: str) -> str:
        """Return SQL that is NULL for times that Python cannot represent: infinity, and years beyond 1 to 9999."""
        name = self.quote_name(column)
        if column == TIME:
            return f"CASE WHEN {name} BETWEEN '0001-01-01' AND {_LATEST_TIME} THEN {name} END"
        return f"{name}::text" if column == ID else name

    @override
    def quote_name(self, name: str) -> str:
        return quote_name(name).replace("%", "%%")

    @override
    def staging_table_statements(self, staging: str, live: str, columns: Sequence[str]) -> Sequence[str]:
        key = f"PRIMARY KEY ({self.list_of((NUMBER, ID))})"
        return (
            (
                f"CREATE TABLE IF NOT EXISTS {self.qualified_table(staging)} "
                f"(LIKE {self.qualified_table(live)}, {self.quote_name(NUMBER)} integer NOT NULL, {key})"
            ),
        )

    @override
    def hide(self, session: Session, request: HideRequest, floor: datetime) -> int:
        """Hide rows, see :class:`Dialect`, in one statement, which reads and writes each row once."""
        return session.change(self._move_statement(request), {"floor": self.floor_of(floor)})

    def _move_statement(self, request: HideRequest) -> str:
        columns, live = self.list_of(request.columns), self.qualified_table(request.live)
        all_of = ", ".join(f"t.{self.quote_name(column)}" for column in request.columns)
        number = f"({request.first} + (row_number() OVER (ORDER BY due) - 1) / {request.batch_size})::integer"
        return (
            f"WITH earliest AS MATERIALIZED "
            f"({self._earliest_query(request, f'ctid AS place, {self.quote_name(TIME)} AS due')}), "
            f"numbered AS MATERIALIZED (SELECT place, {number} AS number FROM earliest), "
            f"gone AS (DELETE FROM {live} AS t USING numbered AS n WHERE t.ctid = n.place "
            f"RETURNING {all_of}, n.number) "
            f"INSERT INTO {self.qualified_table(request.staging)} ({columns}, {self.quote_name(NUMBER)}) "
            f"SELECT {columns}, number FROM gone"
        )
