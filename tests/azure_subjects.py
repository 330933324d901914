"""Adapters of Azure Storage as subjects of the conformance suite, each with names of its own in one account."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from postdate.backends.azure.login import AzureLogin, parse_login
from postdate.backends.azure.queues import SANITIZERS
from postdate.backends.azure.transport import AzureStorageQueueTransport
from postdate.ports import Transport
from postdate.testing import TransportSubject


class AzureStorageQueueTransportSubject(TransportSubject):
    """Queues whose names begin with a word of their own, so that tests may run side by side.

    The suite asks for messages in the order of sending, and Azurite keeps it; so they are sent one after the other.

    Args:
        connection: string of the account.
    """

    def __init__(self, connection: str) -> None:
        self._login = parse_login(connection)
        self._prefix = f"t{uuid.uuid4().hex[:12]}-"

    def open(self, **settings) -> Transport:
        return AzureStorageQueueTransport(self._login, sanitizer=self._name, concurrent_sends=1, **settings)

    def open_elsewhere(self) -> Transport:
        return self.open()

    def _name(self, queue: str) -> str:
        return self._prefix + SANITIZERS["dashes"](queue)

    def drop(self) -> None:
        in_a_loop_of_its_own(lambda: delete_queues(self._login, self._prefix))


async def delete_queues(login: AzureLogin, prefix: str) -> None:
    """Delete all queues whose names begin so."""
    async with login.create_queue_service() as service:
        names = [queue.name async for queue in service.list_queues(name_starts_with=prefix)]
        for name in names:
            await service.delete_queue(name)


def in_a_loop_of_its_own(work: Callable[[], Awaitable[Any]]) -> None:
    """Do something asynchronous where the event loop of the test may be running or gone."""

    async def do() -> None:
        await work()

    with ThreadPoolExecutor(1, thread_name_prefix="azure-cleaning") as pool:
        pool.submit(asyncio.run, do()).result()
