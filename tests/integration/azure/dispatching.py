"""A service on an Azure table: ``python dispatching.py TABLE FILE [MARK]``, the connection in the environment.

It puts what falls due into the queue ``orders`` of a file that other processes use, too, says ``ready`` when it works,
logs to the standard output when it takes the lease, and ends at SIGTERM, finishing what is in hand. With ``MARK`` it
says ``sending``, and every send to ``orders`` fails once there is such a file; no failure is retried.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial

import anyio

from postdate import DelayedDelivery, Endpoint, Envelope, LocalTransport, TransactionMode
from postdate.backends.azure.store import AzureTableStore
from postdate.errors import PostdateError, TransportError
from postdate.ports import Work


class Refusing(LocalTransport):
    """Queues of which one takes nothing, which it says when a file is there.

    Args:
        path: of the queues.
        mark: the file.
    """

    def __init__(self, path: str, mark: str) -> None:
        super().__init__(path, synchronous="normal")
        self._mark = anyio.Path(mark)

    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        if envelopes[0].destination != "orders":
            return await super().send(envelopes, now, work=work)
        say("sending")
        while True:
            if await self._mark.exists():
                return [TransportError("refused")] * len(envelopes)
            await anyio.sleep(0.05)  # noqa: TID251 - a process of its own, without our ways to wait


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def serve(table: str, file: str, mark: str = "") -> None:
    """Run until terminated."""
    store = AzureTableStore(os.environ["POSTDATE_AZURITE_CONNECTION"], table=table)
    transport = Refusing(file, mark) if mark else LocalTransport(file, synchronous="normal")
    endpoint = Endpoint(
        "service",
        transport=transport,
        delayed_delivery=DelayedDelivery(store, 0 if mark else 5),
        transaction_mode=TransactionMode.RECEIVE_ONLY,
        send_only=True,
    )
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(transport.close)
            stack.push_async_callback(store.close)
            await stack.enter_async_context(endpoint)
            say("ready")
            async for _ in signals:
                return


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    of_lease = logging.getLogger("postdate.azure.lease")
    of_lease.setLevel(logging.INFO)
    of_lease.addHandler(logging.StreamHandler(sys.stdout))
    of_lease.propagate = False
    anyio.run(partial(serve, *sys.argv[1:]))
