"""Queues of Azure Storage, in upstream's envelope, so that both kinds of endpoint can share them.

A received message is hidden while it is handled, and deleted after the messages sent with it have arrived. Delivery is
at least once, with stable message ids. Messages may overtake each other. Every answer about a message has a new pop
receipt, and only the latest one is valid. Therefore requests about one message wait for each other. Source:
docs/guides/azure.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
from typing_extensions import override

from postdate import ports
from postdate.backends.azure.envelope import (
    LARGEST_MESSAGE_BYTES,
    UNREADABLE,
    add_failure_counts,
    from_text,
    read_failure_counts,
)
from postdate.backends.azure.errors import QUEUES, suppress_error_code, translate_errors
from postdate.backends.azure.login import (
    LEAVES_WITHIN_SECONDS,
    AzureLogin,
    RequestAttempts,
    fetch_headers,
    parse_login,
    run_concurrently,
    track_attempts,
)
from postdate.backends.azure.queues import PRECISION, EncodedMessage, QueueSender, QueueService, Sanitizer, sanitizer_of
from postdate.errors import ClaimLost, ConfigurationError, PostdateError, QueueNotFound, TransportError
from postdate.messages import Envelope
from postdate.runtime.bounded import Bounded

if TYPE_CHECKING:
    from azure.storage.queue import QueueMessage


class AzureStorageQueueTransport(ports.Transport):
    """Queues of an account of Azure Storage.

    Args:
        address: of the account, or its connection string; see :mod:`postdate.backends.azure.login`.
        sanitizer: for names that Azure does not accept: ``dashes``, ``strict``, ``legacy``, or a function; see
            :mod:`postdate.backends.azure.queues`.
        largest_message_bytes: of headers and body together; default and maximum: the size that always fits.
        concurrent_sends: the most requests in flight at once; with 1 a queue gets messages in the order of sending.
        hold_for: how long a received message is hidden; renewed while it is claimed, so the messages of a dead process
            are visible after this time. Whole seconds, 1 s to 7 days.
        peek_interval: added to the pause each time a queue is found empty.
        longest_idle_wait: the longest such pause, and so the latency of messages from other processes.
    """

    def __init__(  # noqa: PLR0913 - settings
        self,
        address: str | AzureLogin,
        *,
        sanitizer: str | Sanitizer = "dashes",
        largest_message_bytes: int | None = None,
        concurrent_sends: int = 32,
        hold_for: timedelta = timedelta(seconds=30),
        peek_interval: timedelta = timedelta(milliseconds=125),
        longest_idle_wait: timedelta = timedelta(seconds=1),
    ) -> None:
        if concurrent_sends < 1:
            raise ConfigurationError(f"concurrent_sends must be 1 or more, not {concurrent_sends}")
        if not SHORTEST_HOLD <= hold_for <= LONGEST_HOLD or hold_for % PRECISION:
            raise ConfigurationError(f"hold_for must be whole seconds, 1 s to 7 days, not {hold_for}")
        if peek_interval <= timedelta(0) or longest_idle_wait < peek_interval:
            raise ConfigurationError(
                f"peek_interval must be above zero and longest_idle_wait no shorter, not {peek_interval} and "
                f"{longest_idle_wait}"
            )
        login = address if isinstance(address, AzureLogin) else parse_login(address)
        login.endpoint("queue")
        self.service = QueueService(login, sanitizer_of(sanitizer))
        self._sender = QueueSender(self.service, concurrent_sends, largest_message_bytes)
        self.hold_for, self.peek_interval, self.longest_idle_wait = hold_for, peek_interval, longest_idle_wait
        self.handled_ids = Bounded[tuple[str, str], None](10_000)
        """Messages that were handled and could not be deleted: queue, and Azure's id."""
        self.receivers: set[AzureQueueReceiver] = set()
        self._capabilities = ports.TransportCapabilities(
            durable=True,
            transaction_modes=frozenset({ports.TransactionMode.NONE, ports.TransactionMode.RECEIVE_ONLY}),
            largest_message_bytes=min(largest_message_bytes or LARGEST_MESSAGE_BYTES, LARGEST_MESSAGE_BYTES),
            expires_messages=True,
            time_to_be_received_precision=PRECISION,
            queue_names_fold_case=True,
            queue_name_separator="-",
        )

    def __repr__(self) -> str:
        return f"AzureStorageQueueTransport({self.service.description})"

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        for name in names:
            with translate_errors(QUEUES, self.service.describe_queue(name)), suppress_error_code("QueueAlreadyExists"):
                await self.service.queue(name).create_queue()

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        """Send messages; an expired message is not sent, but logged."""
        ports.check_no_work(work, "of Azure Storage")
        return await self._sender.send(envelopes, now)

    @override
    def receiver(self, queue: str) -> AzureQueueReceiver:
        receiver = AzureQueueReceiver(self, queue)
        self.receivers.add(receiver)
        return receiver

    async def send_all(self, envelopes: Sequence[Envelope], now: datetime) -> None:
        """Send all messages; raise before sending any if one is certain to fail."""
        for envelope in envelopes:
            message_or_error = self._sender.encode_message(envelope, now)
            if not isinstance(message_or_error, EncodedMessage):
                raise message_or_error
        for error in await self._sender.send(envelopes, now):
            if error is not None:
                raise error

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the number of messages in each queue.

        It is exact while fewer than 32 messages are visible. Otherwise it is Azure's estimate, which counts received
        messages, too.
        """
        lengths: dict[str, int] = {}
        for name in names:
            with suppress(QueueNotFound):
                lengths[name] = await self._length_of(name)
        return lengths

    async def _length_of(self, name: str) -> int:
        queue = self.service.queue(name)
        with self.service.guard_request(name):
            if (visible := len(await queue.peek_messages(max_messages=LARGEST_BATCH))) < LARGEST_BATCH:
                return visible
            properties = await queue.get_queue_properties()
        return max(visible, properties.approximate_message_count or 0)

    @override
    async def server_facts(self) -> ports.ServerFacts:
        """Return facts about the server.

        Its time has whole seconds and decides about expiry only, so it is a setting, not the clock.
        """
        with translate_errors(QUEUES, self.service.description):
            headers = await fetch_headers(self.service.client)
        facts = {name: headers[name] for name in ("date", "server") if name in headers}
        return ports.ServerFacts("Azure Storage", headers.get("x-ms-version", "without a version"), settings=facts)

    @override
    async def close(self) -> None:
        """Close open receivers concurrently."""
        async with AsyncExitStack() as exit_stack:
            exit_stack.push_async_callback(self.service.close)
            receivers = [receiver.close() for receiver in self.receivers]
            for outcome in await asyncio.gather(*receivers, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome


# --- receiving: a message is hidden again and again until it is deleted -----------------------------------------------


log = logging.getLogger("postdate.azure")

LARGEST_BATCH: Final = 32
"""Azure's limit of one request."""

SHORTEST_HOLD, LONGEST_HOLD = timedelta(seconds=1), timedelta(days=7)

_RENEWALS_IN_A_HOLD: Final = 3  # one of them may fail before the message becomes visible
_CLOCK_GRAIN_SECONDS: Final = 1.0
"""The precision of Azure's times, which are whole seconds."""


@dataclass(eq=False, slots=True)
class MessageWithReceipt:
    """A message that this process has received.

    Args:
        native_id: Azure's id.
        receipt: the latest pop receipt.
        hidden_until: when it becomes visible again, by the loop's clock.
        expiry_time: when the queue drops it, by the same clock, give or take a second; infinite: never.
        received: the object that the endpoint gets.
        times_received: number of deliveries, including this one.
        text: of the message.
        lost_reason: why this process no longer has it.
    """

    native_id: str
    receipt: str
    hidden_until: float
    expiry_time: float
    received: ports.Received
    times_received: int
    text: str
    lost_reason: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AzureQueueReceiver(ports.Receiver):
    def __init__(self, transport: AzureStorageQueueTransport, queue: str) -> None:
        self._transport, self._service, self._queue = transport, transport.service, queue
        self._messages_by_token: dict[object, MessageWithReceipt] = {}
        self._renewal_task: asyncio.Task[None] | None = None
        self._reject_tasks: set[asyncio.Task[None]] = set()

    # --- receiving ----------------------------------------------------------------------------------------------------

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        """Receive messages; an empty queue is polled less and less often."""
        pause = timedelta(0)
        with self._service.listen(self._queue) as sent_event:
            while True:
                sent_event.clear()
                messages = await self._receive_batch(min(limit, LARGEST_BATCH))
                if messages or not wait:
                    return [message.received for message in messages]
                pause = min(pause + self._transport.peek_interval, self._transport.longest_idle_wait)
                with suppress(TimeoutError):
                    await asyncio.wait_for(sent_event.wait(), pause.total_seconds())

    async def _receive_batch(self, count: int) -> list[MessageWithReceipt]:
        """Poll once; if cancelled, reject at once the messages that the request still brings."""
        request = asyncio.ensure_future(self._request_messages(count))
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            task = asyncio.ensure_future(self._reject_response(request))
            self._reject_tasks.add(task)
            task.add_done_callback(self._reject_tasks.discard)
            raise

    async def _request_messages(self, count: int) -> list[MessageWithReceipt]:
        requested_at, seconds = asyncio.get_running_loop().time(), round(self._transport.hold_for.total_seconds())
        with self._service.guard_request(self._queue):
            pages = self._service.queue(self._queue).receive_messages(
                messages_per_page=count, visibility_timeout=seconds
            )
            page = await anext(pages.by_page(), None)
            messages: list[QueueMessage] = [] if page is None else [message async for message in page]
        received_messages = [self._remember(message, requested_at + seconds, seconds) for message in messages]
        if handled_messages := [
            hold for hold in received_messages if (self._queue, hold.native_id) in self._transport.handled_ids
        ]:
            await run_concurrently([partial(self._delete_handled, hold) for hold in handled_messages])
        if self._messages_by_token and self._renewal_task is None:
            self._renewal_task = asyncio.ensure_future(self._renew_repeatedly())
        return [hold for hold in received_messages if hold not in handled_messages]

    def _remember(self, message: QueueMessage, until: float, seconds: int) -> MessageWithReceipt:
        native_id, receipt, text = str(message.id), str(message.pop_receipt), str(message.content)
        envelope, times_received = from_text(self._queue, native_id, text), message.dequeue_count or 1
        failures, unanswered = read_failure_counts(text, times_received - 1) if times_received > 1 else (0, 0)
        expiry_time = float("inf")
        if message.expires_on is not None and message.next_visible_on is not None:
            # Both times are by Azure's clock; only their difference is used, because our clock may differ.
            expiry_time = until + (message.expires_on - message.next_visible_on).total_seconds()
        received = ports.Received(envelope, failures, object(), unanswered)
        message_with_receipt = MessageWithReceipt(
            native_id, receipt, until, expiry_time, received, times_received, text
        )
        self._messages_by_token[message_with_receipt.received.token] = message_with_receipt
        return message_with_receipt

    async def _delete_handled(self, message: MessageWithReceipt) -> None:
        """Delete a message that was handled before but could not be deleted."""
        try:
            await self._delete(message)
        except TransportError as error:
            log.warning(
                "message %s in %s, handled before, cannot be deleted now: %s", message.native_id, self._queue, error
            )
        self._forget(message)

    async def _reject_response(self, request: asyncio.Future[list[MessageWithReceipt]]) -> None:
        with suppress(PostdateError):
            await run_concurrently([partial(self._reject, hold, failed=False) for hold in await request])

    # --- hiding -------------------------------------------------------------------------------------------------------

    async def _renew_repeatedly(self) -> None:
        interval = self._transport.hold_for.total_seconds() / _RENEWALS_IN_A_HOLD
        try:
            while self._messages_by_token:
                await asyncio.sleep(interval)
                renew_before = asyncio.get_running_loop().time() + 2 * interval
                await run_concurrently(
                    [
                        partial(self._renew, hold)
                        for hold in self._messages_by_token.values()
                        if hold.hidden_until < renew_before
                    ]
                )
        finally:
            self._renewal_task = None

    async def _renew(self, message: MessageWithReceipt) -> None:
        """Hide a message for longer, unless it has expired: then no receiver gets it any more.

        Azure hides no message beyond its expiry and counts in whole seconds. In its last two seconds a received message
        may be delivered once more.
        """
        try:
            async with message.lock:
                await self._extend_hiding(message)
        except TransportError as error:  # It is retried until another receiver has the message.
            log.warning("message %s in %s cannot be held for longer now: %s", message.native_id, self._queue, error)

    async def _extend_hiding(self, message: MessageWithReceipt) -> None:
        now = asyncio.get_running_loop().time()
        if (
            message.lost_reason
            or message.received.token not in self._messages_by_token
            or message.expiry_time <= message.hidden_until
        ):
            return
        remaining_seconds = message.expiry_time - now - _CLOCK_GRAIN_SECONDS
        seconds = int(min(round(self._transport.hold_for.total_seconds()), remaining_seconds))
        if now + seconds <= message.hidden_until:
            return
        try:
            await self._update_visibility(message, seconds)
            message.hidden_until = now + seconds
        except (ClaimLost, QueueNotFound) as error:
            message.lost_reason = str(error)
            log.warning("message %s in %s is no longer held: %s", message.native_id, self._queue, error)

    async def _renew_if_uncertain(self, message: MessageWithReceipt) -> None:
        """Hide a message again whose time has passed, in a process that was frozen or a handler that blocked its loop.

        Raises:
            ClaimLost: another receiver has it.
            TransportError: without an answer.
        """
        async with message.lock:
            if asyncio.get_running_loop().time() >= message.hidden_until - _CLOCK_GRAIN_SECONDS:
                await self._extend_hiding(message)
        self._message_of(message.received)

    async def _update_visibility(self, message: MessageWithReceipt, seconds: int, text: str | None = None) -> None:
        with self._service.guard_request(self._queue):
            answer = await self._service.queue(self._queue).update_message(
                message.native_id, message.receipt, text, visibility_timeout=seconds
            )
        message.receipt = str(answer.pop_receipt)

    def _message_of(self, received: ports.Received) -> MessageWithReceipt:
        message = self._messages_by_token.get(received.token)
        if message is None or message.received is not received or message.lost_reason:
            reason = "" if message is None else message.lost_reason
            raise ClaimLost.of(received.envelope.message_id, queue=self._queue, reason=reason)
        return message

    def _forget(self, message: MessageWithReceipt) -> None:
        self._messages_by_token.pop(message.received.token, None)

    # --- settling -----------------------------------------------------------------------------------------------------

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        """Send the outgoing messages first, then delete the message.

        After an interruption in between, this process only deletes the message when it receives it again; another
        process handles it a second time.
        """
        ports.check_no_work(completion.work, "of Azure Storage")
        message = self._message_of(received)
        if completion.outgoing:
            await self._renew_if_uncertain(message)
            await self._transport.send_all(completion.outgoing, now)
        try:
            await self._delete(message)
        except TransportError as error:
            self._transport.handled_ids[self._queue, message.native_id] = None
            if not error.transient:
                self._forget(message)
            raise
        self._forget(message)
        self._transport.handled_ids.pop((self._queue, message.native_id), None)

    async def _delete(self, message: MessageWithReceipt) -> None:
        async with message.lock:
            if message.lost_reason:
                raise ClaimLost.of(message.native_id, queue=self._queue, reason=message.lost_reason)
            attempts = RequestAttempts()
            try:
                with track_attempts(attempts), self._service.guard_request(self._queue):
                    await self._service.queue(self._queue).delete_message(message.native_id, message.receipt)
            except QueueNotFound as error:  # the message is gone, or the queue
                if attempts.is_repeated:
                    return  # An earlier attempt, whose answer was lost, has deleted it.
                if asyncio.get_running_loop().time() < message.expiry_time - _CLOCK_GRAIN_SECONDS:
                    raise ClaimLost(f"message {message.native_id} in {self._queue!r} is gone: {error}") from error

    @override
    async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
        """Reject the message; a message that is no longer hidden is visible already."""
        with suppress(ClaimLost):
            await self._reject(self._message_of(received), failed=failed)

    async def _reject(self, message: MessageWithReceipt, *, failed: bool) -> None:
        """Make a message visible now, with its number of returns in its text; do nothing if its claim was lost.

        After `TransportError` the message is still claimed.
        """
        text, received = None, message.received
        if set(received.envelope.headers) != {UNREADABLE}:  # an undecodable text stays unchanged
            text = add_failure_counts(
                message.text, message.times_received, received.failures + failed, received.unanswered
            )
        async with message.lock:
            if not message.lost_reason:
                with suppress(ClaimLost, QueueNotFound):
                    await self._update_visibility(message, 0, text)  # visible at once
            self._forget(message)
        self._service.announce(self._queue)

    @override
    async def close(self) -> None:
        """Close the receiver. A message that cannot be rejected becomes visible when its time has passed."""
        close_task = asyncio.ensure_future(self._close())
        try:
            await asyncio.shield(close_task)
        except asyncio.CancelledError:
            await close_task
            raise

    async def _close(self) -> None:
        if self._renewal_task is not None:
            self._renewal_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewal_task
        with anyio.move_on_after(LEAVES_WITHIN_SECONDS) as close_scope:
            while self._reject_tasks:
                await asyncio.wait(self._reject_tasks)
            await run_concurrently([partial(self._reject_at_close, hold) for hold in self._messages_by_token.values()])
        for task in list(self._reject_tasks):
            task.cancel()
        if close_scope.cancelled_caught:
            log.warning(
                "what is held of %s cannot be returned to its queue now; it is free within %s",
                self._queue,
                self._transport.hold_for,
            )
        self._messages_by_token.clear()
        self._transport.receivers.discard(self)

    async def _reject_at_close(self, message: MessageWithReceipt) -> None:
        try:
            await self._reject(message, failed=False)
        except TransportError as error:
            log.warning(
                "message %s in %s cannot be returned to its queue now (%s); it is free within %s",
                message.native_id,
                self._queue,
                error,
                self._transport.hold_for,
            )
