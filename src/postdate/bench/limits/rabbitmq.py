"""What RabbitMQ does without us: frames made beforehand, on a bare socket, to a queue of the same type."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Generator
from contextlib import contextmanager

from postdate.backends.rabbitmq.login import Login
from postdate.backends.rabbitmq.properties import properties_of
from postdate.bench.limits.amqp import Confirms, RawConnection, publishing_frames
from postdate.bench.limits.sleep import due_times, moving_floor
from postdate.bench.result import Lateness
from postdate.bench.workload import BODY, headers_of, id_of
from postdate.clock import SystemClock
from postdate.messages import Envelope

_WINDOW = 1_000
_AT_LEAST_AT_ONCE = 100
_RUN = "0" * 12


def publish_limit(login: Login, queue: str, queue_type: str, n: int) -> float:
    """Return persistent messages a second, of the usual size, with at most 1,000 unconfirmed at any time."""
    messages = [_message(queue, number, login.user) for number in range(_WINDOW)]
    with _queue(login, queue, queue_type) as connection:
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


def floor(login: Login, queue: str, queue_type: str, rate: int, seconds: float) -> Lateness:
    """Return how late a bare loop is that sleeps until each due time, publishes what is due, and waits for confirms."""
    with _queue(login, queue, queue_type) as connection:
        confirms, sent = Confirms(connection), 0
        message, dues = _message(queue, 0, login.user), due_times(rate, seconds)

        def move(now: float) -> int:
            nonlocal sent
            due = bisect_left(dues, now) - sent
            connection.send(message * due)
            sent += due
            while confirms.count < sent:
                confirms.wait()
            return due

        return moving_floor(dues, move)


def _message(queue: str, number: int, user: str) -> bytes:
    message_id, now = id_of(number, _RUN), SystemClock().now()
    envelope = Envelope(queue, message_id, headers_of(message_id), BODY, due=now)
    return publishing_frames(queue, properties_of(envelope, now, user), BODY)


@contextmanager
def _queue(login: Login, queue: str, queue_type: str) -> Generator[RawConnection]:
    with RawConnection(login) as connection:
        connection.declare(queue, queue_type)
        try:
            yield connection
        finally:
            with RawConnection(
                login
            ) as another:  # what interrupted us may have left the first in the middle of a frame
                another.delete(queue)
