"""A MariaDB server, with a database of its own for the store."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from postdate.bench.limits import mariadb as limits
from postdate.bench.places.place import StorePlace
from postdate.bench.site import Opening
from postdate.bench.system import LOOPBACK, cpu_seconds, listening_pid
from postdate.config import Address
from postdate.errors import ConfigurationError, StoreUnavailable

_SETTINGS = ("version", "innodb_flush_log_at_trx_commit", "sync_binlog", "log_bin", "innodb_buffer_pool_size")


class MariaDbPlace(StorePlace):
    """A database that is made for the run and dropped after it.

    Args:
        run: see :class:`Place`.
        url: of the server; the database in it is not used.
        recording: how much the store records.
    """

    name = "mariadb"

    def __init__(self, run: str, url: str, recording: str) -> None:
        super().__init__(run)
        self._url, self._recording = url, recording
        self._database = f"postdate_bench_{run}"
        self._opened: limits.Connection | None = None

    def __enter__(self) -> Self:
        try:
            with limits.connect(self._url) as connection:
                _execute(connection, f"CREATE DATABASE {self._database}")
            self._opened = limits.connect(self._url, self._database)
        except limits.OperationalError as error:
            raise StoreUnavailable(f"cannot make a database at {Address(self._url)!r}: {error}") from error
        except limits.Error as error:
            raise ConfigurationError(f"cannot make a database at {Address(self._url)!r}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None and self._opened.open:
            self._opened.close()  # an interrupted statement leaves the connection unusable
        with limits.connect(self._url) as connection:
            _execute(connection, f"DROP DATABASE {self._database}")

    @property
    def _connection(self) -> limits.Connection:
        assert self._opened is not None, "entered"
        return self._opened

    @property
    def store(self) -> Opening:
        """See :class:`StorePlace`."""
        parts = urlsplit(self._url)
        return Opening(parts._replace(path=f"/{self._database}").geturl(), {"recording": self._recording})

    @property
    def fillers(self) -> int:
        """Two: one is busy with making messages while the server takes those of the other."""
        return 2

    def facts(self) -> Mapping[str, str]:
        """See :class:`Place`."""
        names = ", ".join(f"'{name}'" for name in _SETTINGS)
        return dict(_execute(self._connection, f"SHOW VARIABLES WHERE Variable_name IN ({names})"))

    def cpu_seconds(self) -> float | None:
        """See :class:`Place`."""
        parts = urlsplit(self._url)
        pid = listening_pid(parts.port or limits.DEFAULT_PORT) if parts.hostname in LOOPBACK else None
        return None if pid is None else cpu_seconds(pid)

    def insert_limit(self, n: int, batch: int) -> float:
        """See :class:`StorePlace`."""
        return limits.insert_limit(self._connection, n, batch)


def _execute(connection: limits.Connection, sql: str) -> list[tuple[str, str]]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return [(str(row[0]), str(row[1])) for row in cursor.fetchall() if len(row) > 1]
