"""Publishing for a transport: one connection and one channel for all senders, opened again after they were lost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta

import anyio

from postdate import errors
from postdate.backends.rabbitmq import connection as rabbitmq_connection
from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import EVENT_PREFIX, OR_QUEUE_PREFIX, PREFIXES, exchange_address, parse_address
from postdate.backends.rabbitmq.content import redirect
from postdate.backends.rabbitmq.publishing import Answers, PublishingChannel, SendBatch
from postdate.backends.rabbitmq.topology import declare_exchange_passively
from postdate.messages import Envelope

_ACCESS_REFUSED = 403
_ABOUT_CONTENT = frozenset({rabbitmq_connection.PRECONDITION_FAILED, 501, 502, 503})
"""Reply codes about the message: an invalid property, or a frame, syntax or command that cannot be read.

Each other reply is an outage of the destination: no permission, locked by another connection, out of resources, not
allowed, not implemented, a fault of the server. Source: the reply codes of AMQP 0-9-1, and ADR 50.
"""

_MOST_PARTS_IN_FLIGHT = 8  # each part has a channel of its own


class Publisher:
    """Publishes for a transport, and renews channels and connections."""

    def __init__(
        self, connection: rabbitmq_connection.PersistentConnection, window: int, confirms_within: timedelta
    ) -> None:
        self.connection = connection
        self._window, self._confirm_seconds = window, confirms_within.total_seconds()
        self._channel: PublishingChannel | None = None
        self._exchanges: set[str] = set()
        self._exchanges_link: rabbitmq_connection.AmqpConnection | None = None

    async def send(self, envelopes: Sequence[Envelope], now: datetime, limit: int) -> Answers:
        """Send each message or return its error, all within the time for confirms.

        If the broker closes the channel because of one message, the other messages in flight fail, too, and the broker
        does not state which message it was. So all of them are sent again on other channels, in halves, until that
        message is alone. It gets the error; the others arrive, some of them twice.
        """
        batch = SendBatch(envelopes, now, limit)
        with anyio.move_on_after(self._confirm_seconds):
            try:
                await self._send_all(batch)
            except anyio.get_cancelled_exc_class():
                if batch.is_open:
                    batch.abandon(self._timeout_error(batch))
                # True if an enclosing scope was cancelled: then the next wait of the caller is cancelled, too.
                is_final = anyio.current_effective_deadline() == -math.inf
                if not is_final or None not in batch.answers:
                    raise
                # Return the confirms so far: without them all messages would be sent again.
        return [
            None
            if isinstance(answer, errors.QueueNotFound) and envelope.destination.startswith(EVENT_PREFIX)
            else answer
            for envelope, answer in zip(envelopes, batch.answers, strict=True)
        ]  # an event without subscribers is published

    async def _send_all(self, batch: SendBatch) -> None:
        """Send; if this is cancelled, abandon the unconfirmed messages and keep the answers so far."""
        try:
            await self._publish_and_isolate(batch)
        except BaseException:
            for index in _unrouted_indexes(batch):  # unrouted messages, for which the queue itself was not tried yet
                batch.answers[index] = self._timeout_error(batch)
            raise
        if unrouted := _unrouted_indexes(batch):
            await self._send_to_queues(unrouted, batch)

    async def _send_to_queues(self, indexes: Sequence[int], batch: SendBatch) -> None:
        """Send unrouted messages to the queues that their routing keys name."""
        envelopes_by_index: list[tuple[int, Envelope]] = []
        for index in indexes:
            envelope = batch.envelopes[index]
            with suppress(errors.QueueNotFound):  # a malformed address has its error already
                key = parse_address(envelope.destination).routing_key
                envelopes_by_index.append((index, redirect(envelope, exchange_address("", key))))
        queue_batch = SendBatch([envelope for _, envelope in envelopes_by_index], batch.now, batch.limit)
        try:
            await self._publish_and_isolate(queue_batch)
        finally:
            for (index, _), answer in zip(envelopes_by_index, queue_batch.answers, strict=True):
                first_error = batch.answers[index]
                combined_error = errors.QueueNotFound(f"{first_error}; and {answer}")
                batch.answers[index] = combined_error if isinstance(answer, errors.QueueNotFound) else answer

    async def _publish_and_isolate(self, batch: SendBatch) -> None:
        if not batch.envelopes:
            return
        await self._publish(batch)
        suspects = [
            index for index, answer in enumerate(batch.answers) if isinstance(answer, rabbitmq_connection.ChannelClosed)
        ]
        if suspects:
            self._exchanges.clear()
            await self._isolate_refused(batch, suspects)

    async def _publish(self, batch: SendBatch, *, is_separate: bool = False) -> None:
        """Publish the messages and set all answers, on the shared channel or (``is_separate``) on a new one."""
        channel: PublishingChannel | None = None
        try:
            link = await self.connection.get_link()
            batch.started_at = link.loop.time()
            await self._answer_missing_exchanges(link, batch)
            channel = await (self._new_channel(link) if is_separate else self._get_channel(link))
            await channel.publish(batch)
        except errors.PostdateError as error:
            batch.abandon(error)
        finally:
            if batch.is_open:
                batch.abandon(self._timeout_error(batch))
            if is_separate and channel is not None:
                channel.close(errors.TransportUnreachable("this channel has done its work"))

    async def _isolate_refused(self, batch: SendBatch, suspects: Sequence[int]) -> None:
        """Find the messages because of which the broker closes a channel, by halving; send the others."""
        error_by_destination: dict[str, errors.PostdateError] = {}
        parts = deque([suspects])

        async def send_parts() -> None:
            while parts:
                part = parts.popleft()
                for index in part:
                    batch.answers[index] = error_by_destination.get(
                        batch.envelopes[index].destination, batch.answers[index]
                    )
                if remaining := [
                    index for index in part if isinstance(batch.answers[index], rabbitmq_connection.ChannelClosed)
                ]:
                    await self._send_part(batch, remaining)
                suspect_indexes = [
                    index
                    for index in remaining
                    if isinstance(answer := batch.answers[index], rabbitmq_connection.ChannelClosed)
                ]
                if len(remaining) > 1 and suspect_indexes:
                    half = (len(suspect_indexes) + 1) // 2
                    parts.extend(each for each in (suspect_indexes[:half], suspect_indexes[half:]) if each)
                elif suspect_indexes:
                    answer = batch.answers[suspect_indexes[0]]
                    assert isinstance(answer, rabbitmq_connection.ChannelClosed)
                    destination = batch.envelopes[suspect_indexes[0]].destination
                    error = batch.answers[suspect_indexes[0]] = _refusal(answer, destination)
                    # caused by the address, so it holds for other messages to it
                    if answer.reply_code in {rabbitmq_connection.NOT_FOUND, _ACCESS_REFUSED}:
                        error_by_destination[destination] = error

        while parts:  # one round; halves that are added meanwhile are sent in the next one
            async with anyio.create_task_group() as tasks:
                for _ in range(min(_MOST_PARTS_IN_FLIGHT, len(parts))):
                    tasks.start_soon(send_parts)

    async def _send_part(self, batch: SendBatch, indexes: Sequence[int]) -> None:
        """Send some of the messages on a separate channel; keep their answers even when that fails."""
        part = SendBatch([batch.envelopes[index] for index in indexes], batch.now, batch.limit)
        try:
            await self._publish(part, is_separate=True)
        finally:
            for index, answer in zip(indexes, part.answers, strict=True):
                batch.answers[index] = answer

    async def _get_channel(self, link: rabbitmq_connection.AmqpConnection) -> PublishingChannel:
        """Return the shared channel; a new one when it was closed."""
        if not self._has_channel_of(link):
            channel = await self._new_channel(link)
            if self._has_channel_of(link):  # Another task has opened it meanwhile.
                channel.close(errors.TransportUnreachable("this channel is not needed"))
            else:
                self._channel = channel
        assert self._channel is not None
        return self._channel

    def _has_channel_of(self, link: rabbitmq_connection.AmqpConnection) -> bool:
        return self._channel is not None and self._channel.link is link and self._channel.end_error is None

    async def _new_channel(self, link: rabbitmq_connection.AmqpConnection) -> PublishingChannel:
        channel = await link.open_channel(
            lambda link, number: PublishingChannel(link, number, self._window), _remaining_seconds()
        )
        try:
            await channel.call(wire.CONFIRM_SELECT, b"\0", wire.CONFIRM_SELECT_OK, _remaining_seconds())
        except BaseException:
            channel.close(errors.TransportUnreachable("this channel was not waited for"))
            raise
        return channel

    def _timeout_error(self, batch: SendBatch) -> errors.TransportUnavailable:
        """Return why there are no confirms: the server is blocked, or silent, or one queue does not confirm.

        A silent server's connection is abandoned. Otherwise the server would read the written messages when it
        continues, long after they were sent again.
        """
        timeout_text = f"{self.connection.login.description} did not confirm within {self._confirm_seconds:g} s"
        link = None if self._channel is None else self._channel.link
        if link is None or link.end_error is not None:
            return errors.TransportUnreachable(timeout_text)
        if link.blocked is not None:
            return errors.TransportUnreachable(f"{timeout_text}; it has blocked publishers: {link.blocked}")
        if link.last_read_at > batch.started_at and not link.is_silent:
            return errors.DestinationUnavailable(
                f"{timeout_text}, although it sends heartbeats or answers; a queue may have no leader, or be full"
            )
        silence_error = errors.TransportUnreachable(f"{timeout_text}, and sends nothing")
        if link.is_silent:
            link.abandon(silence_error)
        return silence_error

    async def _answer_missing_exchanges(self, link: rabbitmq_connection.AmqpConnection, batch: SendBatch) -> None:
        """Answer messages to missing exchanges: publishing one would close the channel for all."""
        if self._exchanges_link is not link:
            self._exchanges_link, self._exchanges = link, set()
        for destination in {envelope.destination for envelope in batch.envelopes}:
            if destination.startswith(PREFIXES) and (error := await self._exchange_error(link, destination)):
                batch.set_error(destination, error)

    async def _exchange_error(
        self, link: rabbitmq_connection.AmqpConnection, destination: str
    ) -> errors.PostdateError | None:
        try:
            exchange = parse_address(destination).exchange
            if exchange and exchange not in self._exchanges:
                await declare_exchange_passively(link, exchange, _remaining_seconds())
                self._exchanges.add(exchange)
        except errors.QueueNotFound as error:
            return error
        except rabbitmq_connection.ChannelClosed as error:
            return _refusal(error, destination)
        return None


def _unrouted_indexes(batch: SendBatch) -> list[int]:
    """Return the indexes of unrouted messages that may go to a queue instead."""
    return [
        index
        for index, answer in enumerate(batch.answers)
        if isinstance(answer, errors.QueueNotFound) and batch.envelopes[index].destination.startswith(OR_QUEUE_PREFIX)
    ]


def _remaining_seconds() -> float:
    """Return the limit for a call that cannot be interrupted: no longer than the send that it is part of."""
    return min(
        rabbitmq_connection.ANSWERS_WITHIN_SECONDS, max(0.0, anyio.current_effective_deadline() - anyio.current_time())
    )


def _refusal(error: rabbitmq_connection.ChannelClosed, destination: str) -> errors.PostdateError:
    """Return the error for the only message on a channel that the broker closed."""
    text = f"RabbitMQ refuses the message to {destination!r}: {error.reply_code} {error.text}"
    if (away_error := rabbitmq_connection.node_away_error(error, destination)) is not None:
        return away_error
    if error.reply_code == rabbitmq_connection.NOT_FOUND:
        return errors.QueueNotFound(text)
    if error.reply_code == rabbitmq_connection.CONTENT_TOO_LARGE or "message size" in error.text:
        return errors.MessageTooLarge(text)
    return (errors.TransportError if error.reply_code in _ABOUT_CONTENT else errors.DestinationUnavailable)(text)
