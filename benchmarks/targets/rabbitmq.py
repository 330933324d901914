"""What RabbitMQ does without us: frames made beforehand, on a bare socket, to a queue of the same type."""

import re
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager

from benchmarks.targets.amqp import Confirms, RawConnection, publishing_frames
from benchmarks.targets.target import BareRow, BenchmarkRun, BenchmarkTarget, Mover
from postdate.backends.rabbitmq.address import parse_url
from postdate.backends.rabbitmq.properties import properties_of
from postdate.cli.bench.messages import BODY, headers_of, id_of
from postdate.clock import SystemClock
from postdate.messages import Envelope
from postdate.ports.backends import Scratch

_WINDOW = 1_000
_AT_LEAST_AT_ONCE = 100
_RUN = "0" * 12
_QUIET_SECONDS = 0.3


class RawRabbitMq(BenchmarkTarget):
    """A virtual host, spoken to on a bare socket."""

    def __init__(self, scratch: Scratch, run: BenchmarkRun) -> None:
        super().__init__(scratch, run)
        self._login = parse_url(scratch.address)
        self._limit_queue = f"postdate-bench-{run.name}.bare"
        self._id = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-7000-8000-[0-9a-f]{12}")
        self._consumer: RawConnection | None = None

    def __exit__(self, *error: object) -> None:
        if self._consumer is not None:
            self._consumer.__exit__(None, None, None)

    @contextmanager
    def _queue(self) -> Generator[RawConnection]:
        with RawConnection(self._login) as connection:
            connection.declare(self._limit_queue, self.run.settings["queue_type"])
            try:
                yield connection
            finally:  # what interrupted us may have left this connection in the middle of a frame
                with RawConnection(self._login) as another:
                    another.delete(self._limit_queue)

    def _message(self, number: int) -> bytes:
        message_id, now, queue = id_of(number, _RUN), SystemClock().now(), self._limit_queue
        envelope = Envelope(queue, message_id, headers_of(message_id), BODY, due=now)
        return publishing_frames(queue, properties_of(envelope, now, self._login.user), BODY)

    def moved_per_second(self, n: int) -> float:
        """Return persistent messages a second, of the usual size, with at most 1,000 unconfirmed at any time."""
        messages = [self._message(number) for number in range(_WINDOW)]
        with self._queue() as connection:
            confirms, sent = Confirms(connection), 0
            started = time.perf_counter()
            while sent < n:
                room = min(_WINDOW - (sent - confirms.count), n - sent)
                if room < min(_AT_LEAST_AT_ONCE, n - sent):
                    confirms.wait()
                    continue
                first = sent % _WINDOW
                sending = messages[first : first + room]
                connection.send(b"".join(sending))
                sent += len(sending)
            while confirms.count < n:
                confirms.wait()
            return n / (time.perf_counter() - started)

    @contextmanager
    def mover(self, rows: Iterable[BareRow], at_once: int) -> Generator[Mover]:
        """Publish a message for each row that is due, and wait for the confirms."""
        dues = [row.due for row in rows]
        with self._queue() as connection:
            confirms, message, sent = Confirms(connection), self._message(0), 0

            def move(before: int) -> int:
                nonlocal sent
                due = sum(each < before for each in dues[sent : sent + at_once])
                connection.send(message * due)
                sent += due
                while confirms.count < sent:
                    confirms.wait()
                return due

            yield move

    def arrived(self, queue: str) -> Iterator[str]:
        """Yield the id of every message in a queue; they are gone from it then."""
        consumer = self._consuming(queue)
        while True:
            found = self._ids(consumer)
            yield from found
            if not found and not consumer.length(queue) and not consumer.has_unread:
                return

    def take(self, queue: str, limit: int) -> list[str]:
        """Take messages off a queue: as many as the server has sent."""
        del limit
        return self._ids(self._consuming(queue))

    def _ids(self, consumer: RawConnection) -> list[str]:
        """Return the ids of messages that have arrived, wherever in the properties they stand."""
        matches = [self._id.search(properties) for properties in consumer.properties_of_arrivals(_QUIET_SECONDS)]
        return [match[0].decode() for match in matches if match]

    def _consuming(self, queue: str) -> RawConnection:
        if self._consumer is None:
            self._consumer = RawConnection(self._login)
            self._consumer.consume(queue)
        return self._consumer
