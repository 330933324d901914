"""The consumer process of the demo: an endpoint with a handler for each kind of message.

Run as ``python -m examples.flights.consumer FILE [STARTS_AT REAL_START SPEED]``. SIGTERM stops it after its messages.
"""

from __future__ import annotations

import signal
import sys
from datetime import datetime

import anyio
import msgspec

from examples.flights import QUEUE
from postdate import Clock, Endpoint, HandlerContext, LocalTransport, ScaledClock, SystemClock

_CONCURRENCY = 100


class FlightMessage(msgspec.Struct):
    """Fields of every message; times are local, with their offset."""

    kind: str
    flight: str
    origin: str
    dest: str
    scheduled_departure: datetime
    scheduled_arrival: datetime


class CheckInReminder(FlightMessage):
    """Due 24 hours before departure."""


class BoardingCall(FlightMessage):
    """Due 40 minutes before departure, at which it expires."""


class FollowUp(FlightMessage):
    """Due 3 hours after arrival."""


def passengers(file: str, clock: Clock) -> Endpoint:
    """Return the endpoint that receives the messages for passengers."""
    endpoint = Endpoint(QUEUE, transport=LocalTransport(file), concurrency=_CONCURRENCY, clock=clock)

    @endpoint.handler(CheckInReminder, name="flights.CheckInReminder")
    @endpoint.handler(BoardingCall, name="flights.BoardingCall")
    @endpoint.handler(FollowUp, name="flights.FollowUp")
    async def tell(message: FlightMessage, context: HandlerContext) -> None:
        """Would tell the passenger; here it only checks that the message is not early."""
        if context.due is not None and context.due > clock.now():
            raise AssertionError(f"{message.kind} of {message.flight} arrived early: due {context.due}")

    return endpoint


async def run(file: str, clock: Clock) -> None:
    endpoint = passengers(file, clock)
    async with endpoint:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await anext(signals)
    await endpoint.transport.close()


def _clock(arguments: list[str]) -> Clock:
    if not arguments:
        return SystemClock()
    starts_at, real_start, speed = arguments
    return ScaledClock(datetime.fromisoformat(starts_at), float(real_start), float(speed))


if __name__ == "__main__":
    anyio.run(run, sys.argv[1], _clock(sys.argv[2:]))
