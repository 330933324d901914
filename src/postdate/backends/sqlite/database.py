"""An SQLite file as one object, from which an endpoint's adapters are made. Source: ADR 0003, ADR 0021."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from postdate.backends.sqlite.connection import absolute_path, setup_script
from postdate.backends.sqlite.outbox import SqliteOutbox
from postdate.backends.sqlite.sagas import SqliteSagaStore
from postdate.backends.sqlite.store import SqliteStore
from postdate.backends.sqlite.timeouts import SqliteTimeouts, setup_statements
from postdate.backends.sqlite.transport import LocalTransport
from postdate.ports import FileScripts, Recording
from postdate.ports.backends import DatabaseObject


class Sqlite(DatabaseObject):
    """One SQLite file, with store, queues, sagas, outbox and timeouts in it. Each is created once, at first use.

    ``Endpoint("sales", Sqlite("sales.db"))`` uses the adapters that it needs. Close it with :meth:`close`, or use it as
    an asynchronous context manager. Any number of processes on one machine may use one file. Several objects on one
    file in one process share its connections.

    Args:
        path: of the file; a relative one counts from the working directory of this call.
        synchronous: ``full``: a commit survives loss of power; ``normal``: it survives any end of the process.
        recording: how much is recorded for audits.
        create: create the file and its tables when they are missing.
        holds_at_most: a process without a heartbeat for this long loses its claims to others; ``None``: a minute.

    Raises:
        ConfigurationError: a setting is invalid, or the file is open in this process with other settings.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
        create: bool = True,
        holds_at_most: timedelta | None = None,
    ) -> None:
        super().__init__()
        self.path = absolute_path(path)
        self._settings: dict[str, Any] = {"synchronous": synchronous, "recording": recording, "create": create}
        self._claiming_settings: dict[str, Any] = {**self._settings, "holds_at_most": holds_at_most}

    @cached_property
    def store(self) -> SqliteStore:
        """The store of delayed messages."""
        return self.register_adapter(SqliteStore(self.path, **self._claiming_settings))

    @cached_property
    def queues(self) -> LocalTransport:
        """The transport for the queues."""
        return self.register_adapter(LocalTransport(self.path, **self._claiming_settings))

    @cached_property
    def sagas(self) -> SqliteSagaStore:
        """The saga store."""
        return self.register_adapter(SqliteSagaStore(self.path, **self._settings))

    @cached_property
    def outbox(self) -> SqliteOutbox:
        """The outbox, whose transactions handlers use."""
        return self.register_adapter(SqliteOutbox(self.path, synchronous=self._settings["synchronous"]))

    @cached_property
    def timeouts(self) -> SqliteTimeouts:
        """The persister of a timeout manager."""
        return self.register_adapter(SqliteTimeouts(self.path, **self._settings))


def scripts() -> FileScripts:
    """Return the SQL that an administrator runs by hand to create a file."""
    return FileScripts(
        database=partial(setup_script, "database"),
        timeouts=setup_statements,
        sagas=partial(setup_script, "sagas"),
        outbox=partial(setup_script, "outbox"),
    )
