"""Saga instances on database servers that have no queues. Source: ADR 0016, 0030."""

from __future__ import annotations

from datetime import timedelta

from postdate.backends.rowlocks.database import KeptOnServer, RowLockSchema
from postdate.backends.sql.sagas import SqlSagaStore


class ServerSagaStore(KeptOnServer, SqlSagaStore):
    """Keeps saga instances in the table ``postdate_saga`` of a schema; several processes may use it at once.

    Args:
        url: of the database, or its database object, whose connections and ``schema`` it uses. With an outbox in the
            same schema, changes of instances are part of the outbox's commit.
        schema: of the table; ``None``: the default of the server.
        answers_within: a connection is given up after so long a silence of the server; above 0. ``None``: 30 s.

    Raises:
        ConfigurationError: the address, the schema or the duration is invalid.
    """

    part, table = "sagas", "saga"

    def __init__(
        self, url: str | RowLockSchema, *, schema: str | None = None, answers_within: timedelta | None = None
    ) -> None:
        self._use(url, schema, answers_within)
        super().__init__(self._pool, self._database.dialect, self._names.of(self.table), self._database.identity)
