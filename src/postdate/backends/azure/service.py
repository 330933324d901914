"""The queues of one account: clients, local wake-ups of receivers, and the pause that the account asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from azure.core.exceptions import AzureError

from postdate.backends.azure.errors import QUEUES, retry_after, translated
from postdate.backends.azure.login import AzureLogin
from postdate.backends.azure.queue_names import Sanitizer, queue_name
from postdate.errors import (
    ConfigurationError,
    PostdateError,
    QueueNotFound,
    TransportUnreachable,
)

if TYPE_CHECKING:
    from azure.storage.queue.aio import QueueClient, QueueServiceClient

_SECOND: Final = timedelta(seconds=1)


class QueueService:
    """The queues of one account, by their names among endpoints."""

    def __init__(self, login: AzureLogin, sanitizer: Sanitizer) -> None:
        self.login = login
        self._sanitizer = sanitizer
        self._service: QueueServiceClient | None = None
        self._clients: dict[str, QueueClient] = {}
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._quiet_until = 0.0

    @property
    def place(self) -> str:
        return self.login.place("queue")

    def what(self, queue: str) -> str:
        """Return a queue's name for error messages."""
        name = queue_name(queue, self._sanitizer)
        return f"queue {name!r} of {self.place}"

    @property
    def client(self) -> QueueServiceClient:
        """Made at first use, in the event loop that uses it."""
        if self._service is None:
            self._service = self.login.queue_service()
        return self._service

    def queue(self, name: str) -> QueueClient:
        """Return the client of a queue; raises `QueueNotFound` when no queue can have this name."""
        found = self._clients.get(name)
        if found is None:
            try:
                clean = queue_name(name, self._sanitizer)
            except ConfigurationError as error:
                raise QueueNotFound(str(error)) from error
            found = self._clients[name] = self.client.get_queue_client(clean)
        return found

    @contextmanager
    def asking(self, queue: str) -> Generator[None]:
        """Wrap a request to a queue: translate errors, and refuse it during a pause that the account asked for."""
        self.queue(queue)
        what = self.what(queue)
        wait = self.quiet_seconds
        if wait > 0:
            raise TransportUnreachable(f"{what} is throttled; it asked to be left alone for another {wait:.1f} s")
        try:
            with translated(QUEUES, what):
                yield
        except PostdateError as error:
            pause = retry_after(error) if isinstance(error.__cause__, AzureError) else None
            if pause is not None:
                self._quiet_until = asyncio.get_running_loop().time() + pause / _SECOND
            raise

    @property
    def quiet_seconds(self) -> float:
        """Seconds left of the pause that the account asked for; 0 without one."""
        return max(0.0, self._quiet_until - asyncio.get_running_loop().time())

    # --- who waits for a message --------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, queue: str) -> Generator[asyncio.Event]:
        """Yield an event that is set whenever this process sends to the queue."""
        news = asyncio.Event()
        waiting = self._waiting.setdefault(queue, set())
        waiting.add(news)
        try:
            yield news
        finally:
            waiting.discard(news)

    def announce(self, queue: str) -> None:
        for news in self._waiting.get(queue, ()):
            news.set()

    async def close(self) -> None:
        service, self._service = self._service, None
        self._clients.clear()
        if service is not None:
            await service.close()
