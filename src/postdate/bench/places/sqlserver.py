"""A SQL Server, with a schema of its own for the store."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from postdate.backends.sqlserver.connection import SqlServerInstance, SqlServerSession
from postdate.bench.limits import sqlserver as limits
from postdate.bench.places.place import StorePlace
from postdate.bench.site import Opening

_FACTS = (
    "SELECT CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(128)), recovery_model_desc, delayed_durability_desc, "
    "CAST(is_read_committed_snapshot_on AS int) FROM sys.databases WHERE database_id = DB_ID()"
)
_NAMES = ("version", "recovery_model", "delayed_durability", "read_committed_snapshot")


class SqlServerPlace(StorePlace):
    """A schema that is made for the run, in the database of the address, and dropped after it.

    Args:
        run: see :class:`Place`.
        url: of the database.
        recording: how much the store records.
    """

    name = "mssql"

    def __init__(self, run: str, url: str, recording: str) -> None:
        super().__init__(run)
        self._url, self._recording = url, recording
        self._schema = f"postdate_bench_{run}"
        self._opened: SqlServerSession | None = None

    def __enter__(self) -> Self:
        self._opened = SqlServerInstance(self._url).connect()
        self._opened.change(f"CREATE SCHEMA [{self._schema}]")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()  # an interrupted statement leaves the connection unusable
        session = SqlServerInstance(self._url).connect()
        found = session.rows(
            "SELECT name FROM sys.tables WHERE schema_id = SCHEMA_ID(%(schema)s)", {"schema": self._schema}
        )
        for (table,) in found:
            session.change(f"DROP TABLE [{self._schema}].[{table}]")
        session.change(f"DROP SCHEMA [{self._schema}]")
        session.close()

    @property
    def _session(self) -> SqlServerSession:
        assert self._opened is not None, "entered"
        return self._opened

    @property
    def store(self) -> Opening:
        """See :class:`StorePlace`."""
        return Opening(self._url, {"recording": self._recording, "schema": self._schema})

    @property
    def fillers(self) -> int:
        """Two: one is busy with making messages while the server takes those of the other."""
        return 2

    def facts(self) -> Mapping[str, str]:
        """See :class:`Place`."""
        ((*found,),) = self._session.rows(_FACTS)
        return dict(zip(_NAMES, map(str, found), strict=True))

    def insert_limit(self, n: int, batch: int) -> float:
        """See :class:`StorePlace`."""
        return limits.insert_limit(self._session, self._schema, n, batch)
