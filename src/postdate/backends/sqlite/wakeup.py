"""Signals between processes on one machine: a datagram on the loopback interface, sent after the commit, never before.

A datagram carries only the name of a topic. A lost one costs a poll interval, never a message: all listeners also
look by themselves from time to time.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress

from postdate.ports import Wake

_LOOPBACK = "127.0.0.1"
_LONGEST_TOPIC_BYTES = 2048
_LOOK_UP_SECONDS = 1.0
"""How often the listening thread checks whether it is to end, as the datagram that says so may be lost."""

log = logging.getLogger("postdate.embedded")


class Wakeups:
    """The topics that this process listens to, and the socket by which it hears other processes."""

    def __init__(self) -> None:
        self._subscribers: dict[str, list[Wake]] = defaultdict(list)
        self._lock = threading.Lock()
        self._sender: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """UDP port on the loopback interface; the first call starts the listening thread."""
        with self._lock:
            if self._listener is None:
                self._listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                self._listener.bind((_LOOPBACK, 0))
                self._listener.settimeout(_LOOK_UP_SECONDS)
                self._thread = threading.Thread(target=self._listen, name="postdate-wakeups", daemon=True)
                self._thread.start()
            port: int = self._listener.getsockname()[1]
            return port

    @property
    def topics(self) -> list[str]:
        with self._lock:
            return [topic for topic, wakes in self._subscribers.items() if wakes]

    def subscribe(self, topic: str, wake: Wake) -> Callable[[], None]:
        """Call ``wake`` at each signal of ``topic`` until the returned function is called."""
        with self._lock:
            self._subscribers[topic].append(wake)

        def unsubscribe() -> None:
            with self._lock:
                if wake in self._subscribers[topic]:
                    self._subscribers[topic].remove(wake)

        return unsubscribe

    def signal(self, topics: Iterable[str], elsewhere: Iterable[tuple[str, int]]) -> None:
        """Wake subscribers in this process, and processes ``elsewhere``, given as (topic, port)."""
        for topic in topics:
            self._wake(topic)
        for topic, port in elsewhere:
            self._send(topic, port)

    def _send(self, topic: str, port: int) -> None:
        with self._lock:
            try:
                if self._sender is None:
                    self._sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                    self._sender.bind((_LOOPBACK, 0))
                self._sender.sendto(topic.encode(), (_LOOPBACK, port))
            except OSError as error:  # no loopback, or its buffers are full: the listener's own poll finds the message
                log.debug("no datagram to port %d: %s", port, error)

    def stop_listening(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            self._send("", listener.getsockname()[1])
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()
            listener.close()

    def close(self) -> None:
        with self._lock:
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _wake(self, topic: str) -> None:
        with self._lock:
            subscribers = list(self._subscribers.get(topic, ()))
        for wake in subscribers:
            wake()

    def _listen(self) -> None:
        while (listener := self._listener) is not None:
            with suppress(TimeoutError):
                self._wake(listener.recv(_LONGEST_TOPIC_BYTES).decode(errors="replace"))
