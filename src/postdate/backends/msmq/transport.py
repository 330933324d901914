"""Queues of MSMQ on Windows, through its COM objects.

Receiving a message and sending its handler's messages is one internal transaction of MSMQ. Source:
docs/msmq.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cached_property
from typing import Final, NamedTuple

import anyio
from typing_extensions import override

from postdate import errors, ports
from postdate.backends.msmq import BACKEND
from postdate.backends.msmq.address import QueueAddress, parse_address, parse_machine, receiving_address
from postdate.backends.msmq.com import Com, PyWin32
from postdate.backends.msmq.content import (
    LARGEST_MESSAGE_BYTES,
    LARGEST_NATIVE_BYTES,
    MessageProperties,
    SendingRules,
    encode_message,
)
from postdate.backends.msmq.queues import Apartment, MsmqSession, ReceivedMessage
from postdate.messages import Envelope
from postdate.ports.backends import DatabaseObject
from postdate.runtime.bounded import Bounded

log = logging.getLogger("postdate.msmq")

_REMEMBERED_FAILURES: Final = 1_000
_APARTMENTS: Final = 16
"""The most threads of one receiver; up to this number, each received message has its own."""


class MsmqTransport(ports.Transport):
    """Private queues of MSMQ, on this machine or, for sending, on any other that it can reach.

    Only on Windows, with the extra ``msmq``. There are no distributed transactions: the mode ``transaction_scope`` is
    refused, and so is work in a database. MSMQ does not count a message's failures. This process counts them for the
    latest 1,000 messages that failed, and forgets them when it ends.

    Args:
        address: ``msmq:`` for queues of this machine; ``msmq://machine`` for those of another machine, where a
            destination names none.
        transactional: whether the queues are transactional, including those that are created. Other queues have the
            mode ``none`` only: a process that dies loses the messages that it was handling, and a rejected message goes
            to the end.
        largest_message_bytes: of headers and body together; MSMQ accepts 4 MB with its own properties.
        disable_native_time_to_be_received_in_transactions: in a transaction, leave a time to be received to the
            receiver instead of refusing the send: see :class:`postdate.ports.ExpiryRules`.
        use_dead_letter_queue: see there.
        use_dead_letter_queue_for_messages_with_time_to_be_received: see there.
        use_journal_queue: keep a copy of sent messages in the journal of this machine.
        com: COM; by default that of Windows.

    Raises:
        ConfigurationError: this is not Windows, or pywin32 is missing, or a setting is wrong.
    """

    def __init__(  # noqa: PLR0913 - settings of MSMQ
        self,
        address: str = "msmq:",
        *,
        transactional: bool = True,
        largest_message_bytes: int = LARGEST_MESSAGE_BYTES,
        disable_native_time_to_be_received_in_transactions: bool = False,
        use_dead_letter_queue: bool = True,
        use_dead_letter_queue_for_messages_with_time_to_be_received: bool = False,
        use_journal_queue: bool = False,
        com: Com | None = None,
    ) -> None:
        if not 0 < largest_message_bytes <= LARGEST_NATIVE_BYTES:
            raise errors.ConfigurationError(
                f"largest_message_bytes must be from 1 to {LARGEST_NATIVE_BYTES:,}, which is the limit of MSMQ, not "
                f"{largest_message_bytes:,}"
            )
        self._default_machine = parse_machine(address)
        if com is None:
            BACKEND.warn_if_untested()
        self.com: Com = PyWin32() if com is None else com
        self.transactional = transactional
        self._rules = SendingRules(
            ports.ExpiryRules(
                transactional,
                disable_native_time_to_be_received_in_transactions,
                use_dead_letter_queue,
                use_dead_letter_queue_for_messages_with_time_to_be_received,
            ),
            use_journal_queue,
            largest_message_bytes,
        )
        modes = {ports.TransactionMode.NONE}
        if transactional:
            modes |= {ports.TransactionMode.RECEIVE_ONLY, ports.TransactionMode.SENDS_ATOMIC_WITH_RECEIVE}
        self._capabilities = ports.TransportCapabilities(
            durable=True,
            transaction_modes=frozenset(modes),
            largest_message_bytes=largest_message_bytes,
            expires_messages=True,
            time_to_be_received_in_transactions=not transactional,
            time_to_be_received_precision=timedelta(seconds=1),
            dead_letters=True,
            queue_names_fold_case=True,
            receives_by_id=True,
        )
        self.failures = Bounded[tuple[str, str], int](_REMEMBERED_FAILURES)
        self.receivers: set[MsmqReceiver] = set()
        self._send_apartment: Apartment | None = None

    def __repr__(self) -> str:
        return f"MsmqTransport({self._default_machine!r}, transactional={self.transactional})"

    def _get_send_apartment(self) -> Apartment:
        if self._send_apartment is None:
            self._send_apartment = Apartment(self.com, "send")
        return self._send_apartment

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        """Create queues; MSMQ creates private queues on their own machine only."""
        for name in names:
            try:
                address = self.receiving_address(name)
            except errors.QueueNotFound as error:
                raise errors.ConfigurationError(f"queue {name!r} cannot be created: {error}") from error
            await self._get_send_apartment().run(MsmqSession.create, address, self.transactional)

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[errors.PostdateError | None]:
        """Send each message in a transaction of its own.

        A queue on another machine is not checked: if it is missing, the message goes to the dead-letter queue of this
        machine.
        """
        ports.check_no_work(work, "of MSMQ")
        if not (messages := [self._encode_or_error(envelope, now) for envelope in envelopes]):
            return []
        return await self._get_send_apartment().run(MsmqSession.send, messages, self.transactional)

    def _encode_or_error(self, envelope: Envelope, now: datetime) -> MessageProperties | errors.PostdateError | None:
        try:
            return self.encode(envelope, now, in_transaction=False)
        except (
            errors.QueueNotFound,
            errors.MessageTooLarge,
            errors.InvalidHeaders,
            errors.TimeToBeReceivedInTransaction,
        ) as error:
            return error

    def encode(self, envelope: Envelope, now: datetime, *, in_transaction: bool) -> MessageProperties | None:
        """Return a message in the form that MSMQ sends, or ``None`` when it has expired."""
        address = parse_address(envelope.destination, self._default_machine)
        address_text = address.text(self.com.machine)
        return encode_message(envelope, address, address_text, now, self._rules, in_transaction=in_transaction)

    def receiving_address(self, queue: str) -> QueueAddress:
        return receiving_address(queue, self._default_machine, self.com.machine)

    @override
    def receiver(self, queue: str) -> MsmqReceiver:
        return MsmqReceiver(self, queue)

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the lengths of queues; peeks at every message, without its body."""
        lengths: dict[str, int] = {}
        for name in names:
            with suppress(errors.QueueNotFound):
                lengths[name] = await self._get_send_apartment().run(MsmqSession.count, self.receiving_address(name))
        return lengths

    @override
    async def close(self) -> None:
        """Close the receivers first, which reject their messages."""
        for receiver in list(self.receivers):
            await receiver.close()
        apartment, self._send_apartment = self._send_apartment, None
        if apartment is not None:
            apartment.stop()


class _ClaimedMessage(NamedTuple):
    received: ports.Received
    message: ReceivedMessage
    apartment: Apartment


class MsmqReceiver(ports.Receiver):
    """Receives from one queue.

    A separate thread waits for messages without receiving them, so a cancelled wait has no message. Each received
    message has a transaction, which stays in its thread; the threads share the messages evenly.
    """

    def __init__(self, transport: MsmqTransport, queue: str) -> None:
        self._transport, self._queue = transport, queue
        self._wait_apartment: Apartment | None = None
        self._pending_wait: Future[bool] | None = None
        self._apartments: list[Apartment] = []
        self._claims: dict[object, _ClaimedMessage] = {}

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        address = self._transport.receiving_address(self._queue)
        self._transport.receivers.add(self)
        while not (received := await self._receive_batch(address, limit)) and wait:
            while not await self._wait_for_message(address):
                pass
        return received

    async def _wait_for_message(self, address: QueueAddress) -> bool:
        """Wait briefly for a message; a cancelled wait continues for the next caller."""
        if self._wait_apartment is None:
            self._wait_apartment = Apartment(self._transport.com, "wait")
        pending_wait = self._pending_wait = self._pending_wait or self._wait_apartment.start(
            MsmqSession.wait_for_message, address
        )
        try:
            return await asyncio.wrap_future(pending_wait)
        finally:
            if pending_wait.done():
                self._pending_wait = None

    async def _receive_batch(self, address: QueueAddress, limit: int) -> list[ports.Received]:
        received: list[ports.Received] = []
        transactional = self._transport.transactional
        try:
            while len(received) < limit:
                message = await self._receive_one(lambda desk: desk.receive(address, self._queue, transactional))
                if message is None:
                    break
                received.append(message)
        except errors.PostdateError:
            if not received:
                raise
            # Return the received messages; the next call meets the error again.
        return received

    @override
    async def receive_by_id(self, message_id: str) -> ports.Received | None:
        """Receive a message by its id; peeks at the messages before it, without their bodies."""
        address = self._transport.receiving_address(self._queue)
        transactional = self._transport.transactional
        self._transport.receivers.add(self)
        return await self._receive_one(lambda desk: desk.receive_by_id(address, self._queue, message_id, transactional))

    async def _receive_one(self, receive: Callable[[MsmqSession], ReceivedMessage | None]) -> ports.Received | None:
        apartment = self._choose_apartment()
        future = apartment.start(receive)
        asyncio_future = asyncio.wrap_future(future)
        try:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([asyncio_future])
        except BaseException:
            # It was cancelled, but not through anyio: the thread rejects any message that it still receives.
            future.add_done_callback(lambda done: _reject_unclaimed(apartment, done))
            raise
        message = asyncio_future.result()
        return None if message is None else self._remember(message, apartment)

    def _choose_apartment(self) -> Apartment:
        apartment = min(self._apartments, key=lambda each: each.message_count, default=None)
        if apartment is None or (apartment.message_count and len(self._apartments) < _APARTMENTS):
            apartment = Apartment(self._transport.com, f"work-{len(self._apartments)}")
            self._apartments.append(apartment)
        return apartment

    def _remember(self, message: ReceivedMessage, apartment: Apartment) -> ports.Received:
        token = object()
        failures = self._transport.failures.get((self._queue, message.envelope.message_id), 0)
        received = ports.Received(message.envelope, failures, token)
        self._claims[token] = _ClaimedMessage(received, message, apartment)
        apartment.message_count += 1
        return received

    def _claim_of(self, received: ports.Received) -> _ClaimedMessage:
        claim = self._claims.get(received.token)
        if claim is None or claim.received is not received:
            raise errors.ClaimLost.of(received.envelope.message_id, queue=self._queue)
        return claim

    def _forget_claim(self, claim: _ClaimedMessage) -> None:
        if self._claims.pop(claim.received.token, None) is not None:
            claim.apartment.message_count -= 1

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        """Remove the message and send the outgoing ones: in one transaction if the queues are transactional.

        Otherwise they are sent one after the other, and the message was removed when it was received.
        """
        ports.check_no_work(completion.work, "of MSMQ")
        claim = self._claim_of(received)
        transport = self._transport
        messages = [transport.encode(each, now, in_transaction=transport.transactional) for each in completion.outgoing]
        outgoing_messages = [message for message in messages if message is not None]  # None: it has expired
        try:
            await claim.apartment.run(MsmqSession.commit, claim.message, outgoing_messages)
        except errors.PostdateError:
            if claim.message.is_lost:
                self._forget_claim(claim)
            raise
        self._forget_claim(claim)
        transport.failures.pop((self._queue, received.envelope.message_id), None)

    @override
    async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
        """Reject a message; a message whose claim was lost is in its queue already."""
        with suppress(errors.ClaimLost):
            claim = self._claim_of(received)
            if failed:  # before other receivers can get it
                self._transport.failures[self._queue, received.envelope.message_id] = received.failures + 1
            await self._reject(claim)

    async def _reject(self, claim: _ClaimedMessage) -> None:
        await claim.apartment.run(MsmqSession.reject, claim.message)
        self._forget_claim(claim)

    @override
    async def close(self) -> None:
        """Close the receiver. Without a transaction, a message that MSMQ does not accept back is lost."""
        with anyio.CancelScope(shield=True):
            for claim in list(self._claims.values()):
                try:
                    await self._reject(claim)
                except errors.PostdateError as error:
                    message_id, queue = claim.received.envelope.message_id, self._queue
                    log.error("message %s cannot be given back to %s: %s", message_id, queue, error)
                    await claim.apartment.run(MsmqSession.forget_objects, claim.message)
        self._claims.clear()
        apartments, self._apartments = self._apartments, []
        wait_apartment, self._wait_apartment, self._pending_wait = self._wait_apartment, None, None
        for apartment in (*apartments, wait_apartment):
            if apartment is not None:
                apartment.stop()
        self._transport.receivers.discard(self)


def _reject_unclaimed(apartment: Apartment, future: Future[ReceivedMessage | None]) -> None:
    if future.cancelled() or future.exception() is not None:
        return
    if (message := future.result()) is not None:
        apartment.start(MsmqSession.reject, message)


class Msmq(DatabaseObject):
    """The message queues of a Windows machine. They do not delay messages, so an endpoint also needs a store.

    Args:
        address: ``msmq:`` for this machine, or ``msmq://machine``.
        transactional: whether queues and sends are transactional.
    """

    def __init__(self, address: str = "msmq:", *, transactional: bool = True) -> None:
        super().__init__()
        self._address, self._transactional = address, transactional

    @cached_property
    def queues(self) -> MsmqTransport:
        """The transport for the queues."""
        return self.register_adapter(MsmqTransport(self._address, transactional=self._transactional))
