"""Room for ``postdate bench``: queues of the run, which are deleted after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import anyio
from typing_extensions import override

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import parse_url
from postdate.backends.rabbitmq.connection import AmqpConnection
from postdate.ports.benchmarks import BenchmarkTarget

_QUEUE_DELETE: Final = (50, 40)
_QUEUE_DELETE_OK: Final = (50, 41)
_CONNECTS_WITHIN_SECONDS: Final = 10.0


class RabbitMqTarget(BenchmarkTarget):
    """A virtual host with the queues of the run. Plain sends are the only limit to compare with."""

    def __exit__(self, *_error: object) -> None:
        anyio.run(self._delete, self.run.queues)

    @override
    def remove_queue(self, queue: str) -> None:
        anyio.run(self._delete, [queue])

    async def _delete(self, queues: Sequence[str]) -> None:
        link = await AmqpConnection.open(parse_url(self.address), _CONNECTS_WITHIN_SECONDS)
        for queue in queues:
            await link.ask(_QUEUE_DELETE, b"\0\0" + wire.short_text(queue) + b"\0", _QUEUE_DELETE_OK)
        await link.close()
