"""A PostgreSQL server, with a schema of its own for store and queues."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Self

from postdate.bench.limits import postgres as limits
from postdate.bench.places.place import ReceivedPlace, ScannedPlace
from postdate.bench.result import Lateness
from postdate.bench.site import Opening, application_name
from postdate.bench.system import cpu_seconds, family_cpu_seconds, parent_of
from postdate.config import Address
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.errors import ConfigurationError, StoreUnavailable

_SETTINGS = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size")

_MAY_COMMIT_LATE = 2_000
_NOTHING_CAME_SECONDS = 1.0

_OF_QUEUE = "queue_id = (SELECT queue_id FROM {schema}.queue WHERE name = %(queue)s)"
_ARRIVED = f"SELECT message_id FROM {{schema}}.queue_message WHERE {_OF_QUEUE}"
_ANY = f"SELECT 1 FROM {{schema}}.queue_message WHERE {_OF_QUEUE} LIMIT 1"
_TAKE = f"""
    WITH taken AS (
        DELETE FROM {{schema}}.queue_message WHERE {_OF_QUEUE} AND number = ANY (ARRAY(
            SELECT number FROM {{schema}}.queue_message WHERE {_OF_QUEUE} AND number > %(after)s
            ORDER BY number LIMIT %(limit)s))
        RETURNING message_id, number, content),
    emptied AS (DELETE FROM {{schema}}.content WHERE number IN (SELECT content FROM taken))
    SELECT message_id, number FROM taken
"""


class PostgresPlace(ScannedPlace, ReceivedPlace):
    """A schema that is made for the run and dropped after it.

    Args:
        run: see :class:`Place`.
        url: of the server.
        recording: how much the store records.
    """

    name = "postgres"

    def __init__(self, run: str, url: str, recording: str) -> None:
        super().__init__(run)
        self._url, self._recording = url, recording
        self._schema = f"postdate_bench_{run}"
        self._opened: limits.Connection | None = None
        self._taken_up_to, self._taken_at = 0, time.monotonic()

    def __enter__(self) -> Self:
        try:
            self._opened = limits.connect(self._url, application_name=application_name("itself"))
            self._opened.execute(f"CREATE SCHEMA {self._schema}".encode())
        except limits.OperationalError as error:
            raise StoreUnavailable(f"cannot reach PostgreSQL at {Address(self._url)!r}: {error}") from error
        except limits.Error as error:
            self._close()
            raise ConfigurationError(f"cannot make a schema at {Address(self._url)!r}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()  # an interrupted statement leaves the connection unusable
        with limits.connect(self._url) as connection:
            connection.execute(f"DROP SCHEMA {self._schema} CASCADE".encode())

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    @property
    def _connection(self) -> limits.Connection:
        assert self._opened is not None, "entered"
        return self._opened

    @property
    def store(self) -> Opening:
        """See :class:`StorePlace`."""
        settings = {"schema": self._schema, "recording": self._recording}
        return Opening(self._url, settings, name_parameter="application_name")

    @property
    def transport(self) -> Opening:
        """See :class:`QueuePlace`."""
        return self.store

    @property
    def fillers(self) -> int:
        """Two: one is busy with making messages while the server takes those of the other."""
        return 2

    # --- the server ---------------------------------------------------------------------------------------------

    def facts(self) -> Mapping[str, str]:
        """See :class:`Place`."""
        select = "SELECT current_setting('server_version'), " + ", ".join(f"current_setting('{s}')" for s in _SETTINGS)
        row = self._connection.execute(select.encode()).fetchone()
        assert row is not None
        return dict(zip(("version", *_SETTINGS), map(str, row), strict=True))

    def cpu_seconds(self) -> float | None:
        """See :class:`Place`: of the whole server, all its connections and workers."""
        postmaster = self._postmaster()
        return None if postmaster is None else family_cpu_seconds(postmaster)

    def cpu_seconds_by_role(self) -> Mapping[str, float]:
        """See :class:`Place`."""
        if self._postmaster() is None:
            return {}
        select = "SELECT pid, application_name FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        found: dict[str, float] = {}
        for pid, name in self._connection.execute(select).fetchall():
            said = str(name or "").partition(" postdate ")[0]  # behind it, adapters say which process they are of
            role = said.removeprefix(application_name(""))
            if role != said:
                found[role] = found.get(role, 0.0) + cpu_seconds(pid)
        return found

    def _postmaster(self) -> int | None:
        return parent_of(self._connection.info.backend_pid, "postgres")

    # --- the store ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """See :class:`Place`."""
        limits.settle(self._connection, self._schema)

    def insert_limit(self, n: int, batch: int) -> float:
        """See :class:`StorePlace`."""
        return limits.copy_limit(self._connection, self._schema, n, batch)

    def scan_limit(self, endpoint: str) -> float:
        """See :class:`ScannedPlace`."""
        return limits.copy_out_limit(self._connection, self._schema, timeouts_queue(endpoint))

    def idle_transaction(self) -> AbstractContextManager[None]:
        """See :class:`StorePlace`."""
        return self._idle_transaction()

    @contextmanager
    def _idle_transaction(self) -> Generator[None]:
        with limits.connect(self._url, application_name=application_name("idle")) as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT count(*) FROM pg_class")  # the first query takes the snapshot
            yield

    # --- the queues ---------------------------------------------------------------------------------------------

    def move_limit(self, n: int) -> float:
        """See :class:`QueuePlace`."""
        return limits.move_limit(self._connection, self._schema, n)

    def receive_limit(self, queue: str, n: int) -> float:
        """See :class:`ReceivedPlace`."""
        return limits.receive_limit(self._connection, self._schema, queue, n)

    def is_empty(self, queue: str) -> bool:
        """See :class:`ReceivedPlace`."""
        found = self._connection.execute(limits.in_schema(_ANY, self._schema), {"queue": queue}, prepare=True)
        return found.fetchone() is None

    def floor(self, rate: int, seconds: float) -> Lateness:
        """See :class:`QueuePlace`."""
        return limits.floor(self._connection, self._schema, rate, seconds)

    def arrived(self, queue: str) -> Iterator[str]:
        """See :class:`QueuePlace`."""
        rows = self._connection.execute(limits.in_schema(_ARRIVED, self._schema), {"queue": queue}).fetchall()
        return (message_id for (message_id,) in rows)

    def take(self, queue: str, limit: int) -> list[str]:
        """See :class:`QueuePlace`.

        Takes from a little before where it stopped: a consumer that begins with the oldest again meets all that it
        has deleted and nobody has cleaned up yet. When nothing comes for a second, it looks at everything once.
        """
        statement = limits.in_schema(_TAKE, self._schema)
        values = {"queue": queue, "after": self._taken_up_to - _MAY_COMMIT_LATE, "limit": limit}
        rows = self._connection.execute(statement, values, prepare=True).fetchall()
        now = time.monotonic()
        if rows:
            self._taken_up_to, self._taken_at = max(self._taken_up_to, *(number for _, number in rows)), now
        elif now - self._taken_at > _NOTHING_CAME_SECONDS:
            self._taken_up_to, self._taken_at = 0, now
        return [message_id for message_id, _ in rows]
