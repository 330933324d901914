"""Sending: one request a message, many on their way at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from postdate.backends.azure.envelope import to_text
from postdate.backends.azure.service import QueueService
from postdate.backends.azure.time_to_live import time_to_live
from postdate.errors import MessageError, PostdateError, QueueNotFound, TransportUnreachable
from postdate.messages import Envelope, encode_headers, why_too_large

log = logging.getLogger("postdate.azure")


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """A message ready to be sent; ``time_to_live`` in seconds, -1: for ever, ``None``: it has expired, is not sent."""

    text: str
    time_to_live: int | None


class QueueSender:
    """Sends to the queues of an account, with up to ``at_once`` requests over all calls; with 1 they stay in order.

    ``limit`` is in bytes of headers and body together, besides Azure's own limit.
    """

    def __init__(self, service: QueueService, at_once: int, limit: int | None) -> None:
        self._service, self._limit = service, limit
        self._places = asyncio.Semaphore(at_once)

    async def send(self, envelopes: Sequence[Envelope], now: datetime) -> list[PostdateError | None]:
        """A message that cannot be encoded costs no request."""
        parcels = [self.packed(envelope, now) for envelope in envelopes]
        outage: list[PostdateError] = []
        sending = [
            asyncio.ensure_future(self._send(envelope, parcel, outage))
            for envelope, parcel in zip(envelopes, parcels, strict=True)
        ]
        try:
            return list(await asyncio.gather(*sending))
        finally:
            for task in sending:
                task.cancel()

    def packed(self, envelope: Envelope, now: datetime) -> EncodedMessage | PostdateError:
        """Return a message ready to be sent, or the error that forbids it."""
        try:
            self._service.queue(envelope.destination)
            if self._limit is not None and (
                refused := why_too_large(envelope, encode_headers(envelope.headers), self._limit)
            ):
                return refused
            return EncodedMessage(to_text(envelope), time_to_live(envelope, now))
        except (MessageError, QueueNotFound) as error:
            return error

    async def _send(
        self, envelope: Envelope, parcel: EncodedMessage | PostdateError, outage: list[PostdateError]
    ) -> PostdateError | None:
        if isinstance(parcel, PostdateError):
            return parcel
        if parcel.time_to_live is None:
            log.warning(
                "message %s to %s was not sent: its time to be received had run out",
                envelope.message_id,
                envelope.destination,
            )
            return None
        async with self._places:
            if outage:  # the others would wait as long for the same error
                return TransportUnreachable(f"not sent: {outage[0]}")
            try:
                await self._put(envelope.destination, parcel.text, parcel.time_to_live)
            except PostdateError as error:
                if isinstance(error, TransportUnreachable):
                    outage.append(error)
                return error
        self._service.announce(envelope.destination)
        return None

    async def _put(self, queue: str, text: str, seconds: int) -> None:
        with self._service.asking(queue):
            await self._service.queue(queue).send_message(text, time_to_live=seconds)
