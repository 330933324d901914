"""A RabbitMQ server, with queues of its own for the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from postdate.backends.rabbitmq.login import parse_url
from postdate.bench.limits import rabbitmq as limits
from postdate.bench.limits.amqp import RawConnection
from postdate.bench.places.place import QueuePlace
from postdate.bench.result import Lateness
from postdate.bench.site import Opening, names_of
from postdate.bench.system import LOOPBACK, cpu_seconds, listening_pid

_QUIET_SECONDS = 0.3


class RabbitMqPlace(QueuePlace):
    """Queues that are made for the run and deleted after it.

    Args:
        run: see :class:`Place`.
        url: of the server.
        queue_type: ``quorum`` or ``classic``, of our queues and of the limit alike.
    """

    name = "rabbitmq"

    def __init__(self, run: str, url: str, queue_type: str) -> None:
        super().__init__(run)
        self._url, self._queue_type = url, queue_type
        self._login = parse_url(url)
        self._limit_queue = f"postdate-bench-{run}.limit"
        self._id = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-7000-8000-" + run.encode())
        self._facts: dict[str, str] = {}
        self._consumer: RawConnection | None = None

    def __enter__(self) -> Self:
        with RawConnection(self._login) as connection:
            self._facts = {**connection.server, "queue_type": self._queue_type}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._consumer is not None:
            self._consumer.__exit__(None, None, None)
        with RawConnection(self._login) as connection:
            for queue in (*names_of(self.run), self._limit_queue):
                connection.delete(queue)

    @property
    def transport(self) -> Opening:
        """See :class:`QueuePlace`."""
        return Opening(self._url, {"queue_type": self._queue_type})

    def facts(self) -> Mapping[str, str]:
        """See :class:`Place`."""
        return self._facts

    def cpu_seconds(self) -> float | None:
        """See :class:`Place`."""
        pid = listening_pid(self._login.port) if self._login.host in LOOPBACK else None
        return None if pid is None else cpu_seconds(pid)

    def move_limit(self, n: int) -> float:
        """See :class:`QueuePlace`."""
        return limits.publish_limit(self._login, self._limit_queue, self._queue_type, n)

    def floor(self, rate: int, seconds: float) -> Lateness:
        """See :class:`QueuePlace`."""
        return limits.floor(self._login, self._limit_queue, self._queue_type, rate, seconds)

    def arrived(self, queue: str) -> Iterator[str]:
        """See :class:`QueuePlace`."""
        consumer = self._consuming(queue)
        while True:
            found = self._ids(consumer)
            yield from found
            if not found and not consumer.length(queue) and not consumer.has_unread:
                return

    def take(self, queue: str, limit: int) -> list[str]:
        """See :class:`QueuePlace`; may be more than ``limit``, for the server sends what it has."""
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
