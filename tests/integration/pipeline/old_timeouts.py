"""The tables of a timeout manager, as upstream's SQL persistence lays them out, and what a test asks of them."""

import json
import sqlite3
import uuid
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from postdate.backends.sql.timeouts_layout import text_time
from postdate.clock import SystemClock
from postdate.messages import DelayedMessage
from postdate.pipeline.migrate import OriginSpec

COLUMNS = '"Id", "Destination", "SagaId", "State", "Time", "Headers", "PersistenceVersion"'
NO_SAGA = str(uuid.UUID(int=0))


def messages(count: int, first_due: datetime | None = None, destination: str = "orders") -> list[DelayedMessage]:
    """Return messages a second apart; each differs from all others in everything, and some are awkward."""
    begin = first_due or SystemClock().now().replace(microsecond=0) + timedelta(days=1)
    return [
        DelayedMessage(
            str(uuid.uuid4()),
            begin + timedelta(seconds=n, microseconds=n % 7),
            destination,
            {"NServiceBus.MessageId": str(n), "text": 'é "quoted" \\ ☃' if n % 3 == 0 else "plain"},
            b"" if n % 5 == 0 else bytes(range(n % 256)) + b"\0" + str(n).encode(),
        )
        for n in range(count)
    ]


@dataclass(frozen=True)
class OldFile:
    """A timeout manager's SQLite file, with one table for each endpoint.

    Args:
        path: of the file.
    """

    path: Path

    @property
    def origin(self) -> OriginSpec:
        return OriginSpec(f"sqlite:///{self.path}")

    def add(self, endpoint: str, timeouts: Iterable[DelayedMessage]) -> None:
        """Store timeouts as their manager does; the table is made when it is missing."""
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute(
                f'CREATE TABLE IF NOT EXISTS "{endpoint}_TimeoutData" ("Id" TEXT NOT NULL PRIMARY KEY, '
                '"Destination" TEXT, "SagaId" TEXT, "State" BLOB, "Time" TEXT, "Headers" TEXT NOT NULL, '
                '"PersistenceVersion" TEXT NOT NULL)'
            )
            connection.execute(f'CREATE INDEX IF NOT EXISTS "{endpoint}_Time" ON "{endpoint}_TimeoutData" ("Time")')
            rows = [
                (m.message_id, m.destination, NO_SAGA, m.body, text_time(m.due), json.dumps(dict(m.headers)), "7.0.0")
                for m in timeouts
            ]
            connection.executemany(
                f'INSERT INTO "{endpoint}_TimeoutData" ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)', rows
            )

    def spoil(self, endpoint: str, message_id: str) -> None:
        """Give a timeout headers that are none."""
        self._rows(f'UPDATE "{endpoint}_TimeoutData" SET "Headers" = \'[1]\' WHERE "Id" = ?', message_id)

    def seen(self, endpoint: str) -> list[str]:
        """Return the ids that the manager sees, whenever they are due, in order."""
        return sorted(row[0] for row in self._rows(f'SELECT "Id" FROM "{endpoint}_TimeoutData"'))

    def rows(self, endpoint: str) -> list[tuple]:
        """Return all that the manager has."""
        return self._rows(f'SELECT {COLUMNS} FROM "{endpoint}_TimeoutData" ORDER BY "Id"')

    def batches(self) -> list[int]:
        """Return the status of each batch of all migrations; none before there was one."""
        try:
            return [row[0] for row in self._rows('SELECT "Status" FROM "TimeoutsMigration_Batches"')]
        except sqlite3.OperationalError:
            return []

    def dump(self) -> list[str]:
        """Return everything that is in the file."""
        with closing(sqlite3.connect(self.path)) as connection:
            return list(connection.iterdump())

    def _rows(self, statement: str, *values: object) -> list[tuple]:
        with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
            return connection.execute(statement, values).fetchall()


def ids(of: Sequence[DelayedMessage]) -> list[str]:
    return sorted(message.message_id for message in of)


def by_id(of: Iterable[DelayedMessage]) -> dict[str, tuple]:
    """Return what is in messages, by id."""
    return {m.message_id: (m.due.astimezone(UTC), m.destination, dict(m.headers), bytes(m.body)) for m in of}
