"""Queues of Azure Storage, in upstream's envelope, so that both kinds of endpoint can share them.

A received message is hidden while it is handled, and deleted once the messages sent with it have arrived: at least
once, with stable message ids. Messages may overtake each other. Source: specification 2.5, 3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime, timedelta
from typing import Any, Final

from azure.core.exceptions import ResourceExistsError
from typing_extensions import override

from postdate.backends.azure.envelope import LARGEST_MESSAGE_BYTES
from postdate.backends.azure.errors import QUEUES, code_of, translated
from postdate.backends.azure.login import AzureLogin, parse_login
from postdate.backends.azure.queues import PRECISION, EncodedMessage, QueueSender, QueueService, Sanitizer, sanitizer_of
from postdate.backends.azure.receiving import (
    LARGEST_BATCH,
    LONGEST_HOLD,
    SHORTEST_HOLD,
    AzureQueueReceiver,
    ReceiverSettings,
)
from postdate.errors import (
    ConfigurationError,
    PostdateError,
    QueueNotFound,
)
from postdate.messages import Envelope
from postdate.ports import ServerFacts, TransactionMode, Transport, TransportCapabilities, Work, refuse_work
from postdate.runtime.bounded import Bounded

_ALREADY_THERE: Final = "QueueAlreadyExists"


class AzureStorageQueueTransport(Transport):
    """Queues of an account of Azure Storage.

    Args:
        address: of the account, or its connection string; see :mod:`postdate.backends.azure.login`.
        sanitizer: for names that Azure does not take: ``dashes``, ``strict``, ``legacy``, or a function; see
            :mod:`postdate.backends.azure.queues`.
        largest_message_bytes: of headers and body together; default and maximum: the size that always fits.
        concurrent_sends: requests on their way at once; with 1 a queue gets messages in the order of sending.
        hold_for: how long a received message is hidden; renewed while it is held, so the messages of a dead process are
            free after this time. Whole seconds, 1 s to 7 days.
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
        self._pace = ReceiverSettings(hold_for, peek_interval, longest_idle_wait)
        self._memory = Bounded[tuple[str, str], None](10_000)
        self._receivers: set[AzureQueueReceiver] = set()
        self._capabilities = TransportCapabilities(
            durable=True,
            transaction_modes=frozenset({TransactionMode.NONE, TransactionMode.RECEIVE_ONLY}),
            largest_message_bytes=min(largest_message_bytes or LARGEST_MESSAGE_BYTES, LARGEST_MESSAGE_BYTES),
            expires_messages=True,
            time_to_be_received_precision=PRECISION,
            queue_names_fold_case=True,
            queue_name_separator="-",
        )

    def __repr__(self) -> str:
        return f"AzureStorageQueueTransport({self.service.place})"

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        for name in names:
            what = self.service.what(name)
            with translated(QUEUES, what):
                try:
                    await self.service.queue(name).create_queue()
                except ResourceExistsError as error:
                    if code_of(error) != _ALREADY_THERE:
                        raise

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        """An expired message is not sent, and logged."""
        refuse_work(work, "of Azure Storage")
        return await self._sender.send(envelopes, now)

    @override
    def receiver(self, queue: str) -> AzureQueueReceiver:
        receiver = AzureQueueReceiver(
            self.service, queue, self._pace, self._memory, self._send_all, self._receivers.discard
        )
        self._receivers.add(receiver)
        return receiver

    async def _send_all(self, envelopes: Sequence[Envelope], now: datetime) -> None:
        """Send all, or raise before sending any when one is certain to fail."""
        for envelope in envelopes:
            foreseen = self._sender.packed(envelope, now)
            if not isinstance(foreseen, EncodedMessage):
                raise foreseen
        for error in await self._sender.send(envelopes, now):
            if error is not None:
                raise error

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Exact up to 31 messages, without received ones; Azure's estimate for longer queues includes them."""
        lengths: dict[str, int] = {}
        for name in names:
            with suppress(QueueNotFound):
                lengths[name] = await self._length_of(name)
        return lengths

    async def _length_of(self, name: str) -> int:
        queue = self.service.queue(name)
        with self.service.asking(name):
            visible = len(await queue.peek_messages(max_messages=LARGEST_BATCH))
            if visible < LARGEST_BATCH:
                return visible
            properties = await queue.get_queue_properties()
        return max(visible, properties.approximate_message_count or 0)

    @override
    async def server_facts(self) -> ServerFacts:
        """The time has whole seconds and decides about expiry only, so it is given as a setting, not as the clock."""
        headers: dict[str, str] = {}

        def keep(response: Any) -> None:
            headers.update({name.lower(): value for name, value in response.http_response.headers.items()})

        with translated(QUEUES, self.service.place):
            await self.service.client.get_service_properties(raw_response_hook=keep)
        told = {name: headers[name] for name in ("date", "server") if name in headers}
        return ServerFacts("Azure Storage", headers.get("x-ms-version", "without a version"), settings=told)

    @override
    async def close(self) -> None:
        """Closes open receivers side by side."""
        async with AsyncExitStack() as leaving:
            leaving.push_async_callback(self.service.close)
            receivers = [receiver.close() for receiver in self._receivers]
            for outcome in await asyncio.gather(*receivers, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
