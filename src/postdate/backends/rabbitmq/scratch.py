"""A place for ``postdate bench`` on RabbitMQ: the queues of a run."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import anyio

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import parse_url
from postdate.backends.rabbitmq.connection import AmqpConnection
from postdate.ports.backends import Scratch

_QUEUE_DELETE: Final = (50, 40)
_QUEUE_DELETE_OK: Final = (50, 41)
_CONNECTS_WITHIN_SECONDS: Final = 10.0


@contextmanager
def scratch(address: str, run: str, queues: Sequence[str]) -> Generator[Scratch]:
    """Yield the virtual host of the address; delete the queues of the run afterwards."""
    del run  # The names of the queues begin with it.
    try:
        yield Scratch(address)
    finally:
        anyio.run(delete_queues, address, queues)


async def delete_queues(address: str, queues: Sequence[str]) -> None:
    """Delete queues with all messages in them; ignore queues that do not exist."""
    link = await AmqpConnection.open(parse_url(address), _CONNECTS_WITHIN_SECONDS)
    for queue in queues:
        await link.request(_QUEUE_DELETE, b"\0\0" + wire.short_text(queue) + b"\0", _QUEUE_DELETE_OK)
    await link.close()
