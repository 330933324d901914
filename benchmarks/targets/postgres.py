"""What is done in PostgreSQL without us: taking messages off a queue, COPY out of a store, a forgotten transaction."""

import time
from collections.abc import Generator
from contextlib import contextmanager

from postdate.backends.postgres.benchmark import PostgresTarget
from postdate.endpoint.delayed_delivery import timeouts_queue

_MAY_COMMIT_LATE = 2_000
_NOTHING_CAME_SECONDS = 1.0
_OF_QUEUE = "queue_id = (SELECT queue_id FROM {schema}.queue WHERE name = %(queue)s)"
_TAKE = f"""
    WITH taken AS (
        DELETE FROM {{schema}}.queue_message WHERE {_OF_QUEUE} AND number = ANY (ARRAY(
            SELECT number FROM {{schema}}.queue_message WHERE {_OF_QUEUE} AND number > %(after)s
            ORDER BY number LIMIT %(limit)s))
        RETURNING message_id, number, content),
    emptied AS (DELETE FROM {{schema}}.content WHERE number IN (SELECT content FROM taken))
    SELECT message_id, number FROM taken
"""
_COPY_OUT = """
    COPY (SELECT t.message_id, t.destination, t.due, t.expires_at, c.headers, c.body, t.failures
          FROM {schema}.{table} AS t JOIN {schema}.content AS c USING (number)) TO STDOUT (FORMAT BINARY)"""


class PostgresTaken(PostgresTarget):
    """A schema, from whose queues messages are taken by bare SQL."""

    _taken_up_to, _taken_at = 0, 0.0

    def take(self, queue: str, limit: int) -> list[str]:
        """Take up to ``limit`` messages off a queue and return their ids.

        Takes from a little before where it stopped: a consumer that begins with the oldest again meets all that it
        has deleted and nobody has cleaned up yet. When nothing comes for a second, it looks at everything once.
        """
        values = {"queue": queue, "after": self._taken_up_to - _MAY_COMMIT_LATE, "limit": limit}
        rows = self.connection.execute(self.sql(_TAKE), values, prepare=True).fetchall()
        now = time.monotonic()
        if rows:
            self._taken_up_to, self._taken_at = max(self._taken_up_to, *(number for _, number in rows)), now
        elif now - self._taken_at > _NOTHING_CAME_SECONDS:
            self._taken_up_to, self._taken_at = 0, now
        return [message_id for message_id, _ in rows]

    def scan_limit(self, endpoint: str) -> float:
        """Return rows a second of COPY out of the store, as the planner likes it; the bytes are thrown away."""
        quoted = '"' + timeouts_queue(endpoint).replace('"', '""') + '"'
        started = time.perf_counter()
        with self.connection.cursor() as cursor:
            with cursor.copy(self.sql(_COPY_OUT.replace("{table}", quoted))) as copy:
                for _ in copy:
                    pass
            return cursor.rowcount / (time.perf_counter() - started)

    @contextmanager
    def idle_transaction(self) -> Generator[None]:
        """Hold a snapshot open, as a forgotten transaction does."""
        with self.connect("idle") as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT count(*) FROM pg_class")  # the first query takes the snapshot
            yield
