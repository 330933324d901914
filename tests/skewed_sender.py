"""A program that sends messages with a time to be received; run under a clock that is wrong (tests/faketime.py).

Arguments: address of the transport, settings of it as JSON, messages as JSON: ``[[queue, seconds, native], …]``.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import anyio

from postdate import Endpoint, Envelope, Headers, SendOptions
from postdate.wiring.adapters import open_transport


async def send(address: str, settings: dict[str, str], messages: Sequence[tuple[str, float, bool]]) -> None:
    transport = open_transport(address, **settings)
    sender = Endpoint("skewed", transport=transport, send_only=True)
    for queue, seconds, native in messages:
        options = SendOptions(
            destination=queue,
            time_to_be_received=timedelta(seconds=seconds),
            headers={Headers.ENCLOSED_MESSAGE_TYPES: "Offer"},
        )
        message = sender.outgoing.create(b"{}", options)
        assert isinstance(message, Envelope)
        if not native:
            message = replace(message, time_to_be_received=None)
        await sender.outgoing.send([message])
    sys.stdout.write(sender.clock.now().isoformat())
    await transport.close()


if __name__ == "__main__":
    anyio.run(send, sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
