"""A service on an Azure table: ``python dispatching.py TABLE FILE LEASES``, the connection string in the environment.

It puts what falls due into the queue ``orders`` of a file that other processes use, too, says ``ready`` when it works,
logs to the standard output which leases it takes, and ends at SIGTERM, finishing what is in hand.
"""

import logging
import os
import signal
import sys
from contextlib import AsyncExitStack

import anyio

from postdate import DelayedDelivery, Endpoint, LocalTransport, TransactionMode
from postdate.stores.azure_table import AzureTableStore


async def serve(table: str, file: str, leases: str) -> None:
    """Run until terminated."""
    store = AzureTableStore(os.environ["POSTDATE_AZURITE_CONNECTION"], table=table, leases=int(leases))
    transport = LocalTransport(file, synchronous="normal")
    endpoint = Endpoint(
        "service",
        transport=transport,
        delayed_delivery=DelayedDelivery(store, 5),
        transaction_mode=TransactionMode.RECEIVE_ONLY,
        send_only=True,
    )
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(transport.close)
            stack.push_async_callback(store.close)
            await stack.enter_async_context(endpoint)
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            async for _ in signals:
                return


if __name__ == "__main__":
    _, table_name, queue_file, number_of_leases = sys.argv
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    of_leases = logging.getLogger("postdate.azure.lease")
    of_leases.setLevel(logging.INFO)
    of_leases.addHandler(logging.StreamHandler(sys.stdout))
    of_leases.propagate = False
    anyio.run(serve, table_name, queue_file, number_of_leases)
