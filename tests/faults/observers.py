"""What is in the queues, seen through ordinary drivers, never through Postdate."""

import base64
import json
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pika
import psycopg
from azure.core.exceptions import AzureError
from azure.storage.queue import QueueServiceClient
from pika.exceptions import AMQPError
from tests.faults.ledger import Arrival

from postdate import SystemClock
from postdate.backends.sqlite.connection import has_leftover_log

_ENDS_WITHIN_SECONDS = 60.0
_AMQP_ANSWERS_WITHIN_SECONDS = 5


def now() -> datetime:
    """Return the time of the machine: of the ledger, and of all servers of the lab."""
    return SystemClock().now()


class Observer(ABC):
    """Looks into queues again and again, in a thread, and notes what is new there.

    Args:
        noted: called with what is new, in the thread.
    """

    pause_seconds: ClassVar[float] = 0.05

    def __init__(self, noted: Callable[[Iterable[Arrival]], None]) -> None:
        self._noted = noted
        self._ended, self._looks, self._rests = threading.Event(), threading.Event(), threading.Event()
        self._looks.set()
        self._thread = threading.Thread(target=self._run, name="observer")

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def pause(self) -> None:
        """Let what comes lie in the queues; nothing is taken any more when this returns."""
        self._looks.clear()
        assert self._rests.wait(_ENDS_WITHIN_SECONDS), "an observer does not pause"

    def resume(self) -> None:
        """Look again."""
        self._looks.set()

    def stop(self) -> None:
        """End, after a last look at all there is, which must succeed."""
        self.resume()
        self._ended.set()
        self._thread.join(_ENDS_WITHIN_SECONDS)
        assert not self._thread.is_alive(), "an observer does not end"
        self._noted(self.look_at_all())
        self.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            if not self._looks.is_set():
                self.close()
                self._rests.set()
                self._looks.wait()
            with suppress(*self.faults):  # what it looks at is broken on purpose; the last look must succeed
                self._noted(self.look())
            self._ended.wait(self.pause_seconds)

    faults: ClassVar[tuple[type[Exception], ...]]

    @abstractmethod
    def look(self) -> Sequence[Arrival]:
        """Return what is new."""

    def look_at_all(self) -> Sequence[Arrival]:
        """Return what is new, and was overlooked."""
        return self.look()

    @abstractmethod
    def close(self) -> None:
        """Close its connections; the next look opens new ones."""


class RowsObserver(Observer):
    """Queues that are tables: rows stay where they are, and each is noted once."""

    def __init__(self, noted: Callable[[Iterable[Arrival]], None]) -> None:
        super().__init__(noted)
        self._seen: set[object] = set()

    def _new(self, rows: Iterable[tuple[Any, str, str, datetime]]) -> Sequence[Arrival]:
        found: list[Arrival] = []
        for key, queue, message_id, at in rows:
            if key not in self._seen:
                self._seen.add(key)
                found.append(Arrival(queue, message_id, at))
        return found


class SqliteObserver(RowsObserver):
    """The queues of a file, or of those that stand in its place one after the other."""

    faults = (sqlite3.Error,)
    pause_seconds = 0.02
    _sql = "SELECT m.seq, name, message_id FROM queue_message AS m JOIN queue USING (queue_id) WHERE m.seq > ?"

    def __init__(self, path: Path, noted: Callable[[Iterable[Arrival]], None]) -> None:
        super().__init__(noted)
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._file, self._last = 0, 0

    def look(self) -> Sequence[Arrival]:
        return self._rows_after(self._last)

    def look_at_all(self) -> Sequence[Arrival]:
        return self._rows_after(0)

    def _rows_after(self, last: int) -> Sequence[Arrival]:
        if not self._path.exists():
            return []
        file = self._path.stat().st_ino
        if self._connection is None or file != self._file:
            self.close()
            # Opened with the log of the file before, it would spoil it for this process.
            if has_leftover_log(self._path):
                return []
            self._connection = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, check_same_thread=False)
            self._file, last = file, 0
        rows = self._connection.execute(self._sql, (last,)).fetchall()
        at = now()
        self._last = max([self._last, *(row[0] for row in rows)])
        return self._new([(number, queue, message_id, at) for number, queue, message_id in rows])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class PostgresObserver(RowsObserver):
    """The queues of a schema; when a row was committed is what the server says."""

    faults = (psycopg.Error,)
    pause_seconds = 0.1
    # Numbers are drawn before the commit: some that are lower than the last may show up later.
    _LATE_NUMBERS = 3_000
    _sql = """
        SELECT m.number, name, message_id, coalesce(pg_xact_commit_timestamp(m.xmin), clock_timestamp()), m.number
        FROM queue_message AS m JOIN queue USING (queue_id) WHERE m.number > %s"""

    def __init__(self, url: str, schema: str, noted: Callable[[Iterable[Arrival]], None]) -> None:
        super().__init__(noted)
        self._url, self._schema = url, schema
        self._connection: psycopg.Connection[Any] | None = None
        self._last = 0

    def look(self) -> Sequence[Arrival]:
        return self._rows_after(self._last - self._LATE_NUMBERS)

    def look_at_all(self) -> Sequence[Arrival]:
        return self._rows_after(-1)

    def _rows_after(self, last: int) -> Sequence[Arrival]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._url, autocommit=True, connect_timeout=5, options="-c statement_timeout=5000"
            )
            self._connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", (self._schema,))
        rows = self._connection.execute(self._sql.encode(), (last,)).fetchall()
        self._last = max([self._last, *(row[4] for row in rows)])
        return self._new([(number, queue, id_, at.astimezone(UTC)) for number, queue, id_, at, _ in rows])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class RabbitMqObserver(Observer):
    """Consumes queues of RabbitMQ; what it is given again because its own acknowledgement was lost is noted once."""

    faults = (AMQPError, OSError)
    pause_seconds = 0.01
    _PREFETCH = 500

    def __init__(self, url: str, queues: Sequence[str], noted: Callable[[Iterable[Arrival]], None]) -> None:
        super().__init__(noted)
        self._parameters = pika.URLParameters(url)
        self._parameters.socket_timeout = self._parameters.blocked_connection_timeout = _AMQP_ANSWERS_WITHIN_SECONDS
        self._parameters.heartbeat = 0
        self._queues = queues
        self._connection: pika.BlockingConnection | None = None
        self._seen: set[tuple[str, str]] = set()
        self._found: list[Arrival] = []

    def look(self) -> Sequence[Arrival]:
        try:
            if self._connection is None:
                self._connection = pika.BlockingConnection(self._parameters)
                for queue in self._queues:
                    channel = self._connection.channel()
                    channel.basic_qos(prefetch_count=self._PREFETCH)
                    channel.basic_consume(queue, partial(self._take, queue))
            self._connection.process_data_events(0)
        except self.faults:
            self.close()
            raise
        finally:
            found, self._found = self._found, []
            self._noted(found)  # what was taken is not shown again, whatever happened since
        return []

    def look_at_all(self) -> Sequence[Arrival]:
        seen = -1
        while seen < len(self._seen):
            seen = len(self._seen)
            self.look()
        return []

    def _take(self, queue: str, channel: Any, method: Any, properties: Any, _: bytes) -> None:
        key = (queue, properties.message_id or "")
        if not (method.redelivered and key in self._seen):
            self._found.append(Arrival(*key, now()))
        self._seen.add(key)
        channel.basic_ack(method.delivery_tag)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.is_open:
            with suppress(*self.faults):
                connection.close()


class AzureObserver(Observer):
    """Takes what is in queues of Azure Storage."""

    faults = (AzureError,)
    pause_seconds = 0.1

    def __init__(self, connection: str, queues: Sequence[str], noted: Callable[[Iterable[Arrival]], None]) -> None:
        super().__init__(noted)
        self._service = QueueServiceClient.from_connection_string(
            connection, connection_timeout=2, read_timeout=2, retry_total=0
        )
        self._queues = {queue: self._service.get_queue_client(queue) for queue in queues}

    def look(self) -> Sequence[Arrival]:
        return [arrival for queue in self._queues for arrival in self._take(queue)]

    def _take(self, queue: str) -> list[Arrival]:
        found: list[Arrival] = []
        client = self._queues[queue]
        try:
            for message in client.receive_messages(messages_per_page=32, visibility_timeout=600):
                found.append(Arrival(queue, json.loads(base64.b64decode(message.content))["Id"], now()))
                client.delete_message(message)
        except BaseException:
            self._noted(found)
            raise
        return found

    def close(self) -> None:
        with closing(self._service):
            for client in self._queues.values():
                client.close()
