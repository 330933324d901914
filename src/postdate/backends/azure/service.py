"""The queues of one account: a client of each, what is being waited for, and a pause when the account asks for one."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
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
    UnsupportedTransactionMode,
)
from postdate.ports import Work

if TYPE_CHECKING:
    from azure.storage.queue.aio import QueueClient, QueueServiceClient

_SECOND: Final = timedelta(seconds=1)


class QueueService:
    """Queues of one account, by the names that endpoints have for them.

    Args:
        login: of the account.
        sanitizer: see :mod:`postdate.backends.azure.queue_names`.
    """

    def __init__(self, login: AzureLogin, sanitizer: Sanitizer) -> None:
        self.login = login
        self._sanitizer = sanitizer
        self._service: QueueServiceClient | None = None
        self._clients: dict[str, QueueClient] = {}
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._quiet_until = 0.0

    @property
    def place(self) -> str:
        """Where this is, without secrets."""
        return self.login.place("queue")

    def what(self, queue: str) -> str:
        """Return a queue as error messages call it.

        Raises:
            ConfigurationError: nothing can have this name.
        """
        name = queue_name(queue, self._sanitizer)
        return f"queue {name!r} of {self.place}"

    @property
    def client(self) -> QueueServiceClient:
        """The client of the account; made at first use, in the event loop that uses it."""
        if self._service is None:
            self._service = self.login.queue_service()
        return self._service

    def queue(self, name: str) -> QueueClient:
        """Return the client of a queue.

        Raises:
            QueueNotFound: nothing can have this name.
        """
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
        """Ask something of a queue: errors become errors of ours, and a pause that is asked for is kept.

        Raises:
            TransportUnreachable: the account does not answer, or has asked to be left alone for longer.
            QueueNotFound: there is no such queue.
        """
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
        """For how long the account still wants to be left alone; 0 when it does not."""
        return max(0.0, self._quiet_until - asyncio.get_running_loop().time())

    # --- who waits for a message --------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, queue: str) -> Generator[asyncio.Event]:
        """Give an event that is set whenever this process puts a message into the queue."""
        news = asyncio.Event()
        waiting = self._waiting.setdefault(queue, set())
        waiting.add(news)
        try:
            yield news
        finally:
            waiting.discard(news)

    def announce(self, queue: str) -> None:
        """Say that there is something in a queue."""
        for news in self._waiting.get(queue, ()):
            news.set()

    async def close(self) -> None:
        """Close all connections."""
        service, self._service = self._service, None
        self._clients.clear()
        if service is not None:
            await service.close()


def refuse_work(work: Sequence[Work]) -> None:
    """Refuse to be part of a database transaction."""
    if work:
        raise UnsupportedTransactionMode("queues of Azure Storage cannot share a transaction with a database")
