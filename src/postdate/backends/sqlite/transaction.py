"""An open write transaction on the file, its topics, and its SQL dialect."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.dialect import SqlDialect
from postdate.clock import Clock, SystemClock, to_microseconds
from postdate.ports import Recording
from postdate.ports.transports import ExpiryRules

DUE: Final = "due"
"""Topic: a message was stored that is due before all others."""

_THE_MACHINE: Final = SystemClock()


def queue_topic(queue: str) -> str:
    return f"queue:{queue}"


@dataclass(frozen=True, slots=True)
class QueueRules:
    """How the queues of a file treat expired messages.

    ``clock`` is the machine's; ``expiry`` the rules of MSMQ, or ``None``: every message has its own time, and expired
    ones are deleted.
    """

    clock: Clock = _THE_MACHINE
    expiry: ExpiryRules | None = None

    def agrees_with(self, other: QueueRules) -> bool:
        clocks = (self.clock, other.clock)
        same_clock = self.clock == other.clock or all(isinstance(clock, SystemClock) for clock in clocks)
        return same_clock and self.expiry == other.expiry

    def now(self) -> int:
        return to_microseconds(self.clock.now())

    @property
    def keeps_expired(self) -> bool:
        """Whether a message without a setting of its own becomes a dead letter when it expires in its queue."""
        return self.expiry is not None and self.expiry.use_dead_letter_queue_for_messages_with_time_to_be_received


class Transaction:
    """An open write transaction on the file, given to :data:`postdate.ports.Work`.

    Args:
        connection: in a transaction; do not commit or roll back.
        claimant: number under which this process holds messages.
        recording: how much is recorded.
        rules: of the queues.
    """

    def __init__(self, connection: sqlite3.Connection, claimant: int, recording: Recording, rules: QueueRules) -> None:
        self.connection = connection
        self.claimant = claimant
        self.recording = recording
        self.rules = rules
        self.topics: set[str] = set()

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        return self.connection.execute(sql, parameters)

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> sqlite3.Cursor:
        return self.connection.executemany(sql, rows)

    def signal(self, topic: str) -> None:
        """Wake the listeners of ``topic`` after the commit."""
        self.topics.add(topic)


class SqliteSqlDialect(SqlDialect):
    """SQLite's form of the common statements: a value is named ``:name``."""

    @override
    def spelled(self, template: str) -> str:
        return re.sub(r"%%|%\((\w+)\)s", lambda found: f":{found[1]}" if found[1] else "%", template)

    @override
    def delete_first(self, table: str, where: str, order: str) -> str:
        first = f"SELECT rowid FROM {table} WHERE {where} ORDER BY {order} LIMIT %(limit)s"
        return f"DELETE FROM {table} WHERE rowid IN ({first})"
