"""Queues of MSMQ on Windows, through its COM objects.

Receiving a message and sending its handler's messages is one internal transaction of MSMQ. Source: specification 1.5,
2, 6; docs/msmq.md.
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

from postdate.backends.msmq import BACKEND
from postdate.backends.msmq.address import QueueAddress, parse_address, parse_place, receiving_address
from postdate.backends.msmq.com import Com, PyWin32
from postdate.backends.msmq.content import (
    LARGEST_MESSAGE_BYTES,
    LARGEST_NATIVE_BYTES,
    MessageProperties,
    SendingRules,
    outgoing,
)
from postdate.backends.msmq.queues import Apartment, Desk, MessageInHand
from postdate.errors import (
    ClaimLost,
    ConfigurationError,
    InvalidHeaders,
    MessageTooLarge,
    PostdateError,
    QueueNotFound,
    TimeToBeReceivedInTransaction,
)
from postdate.messages import Envelope
from postdate.ports import (
    HANDLED,
    End,
    ExpiryRules,
    Received,
    Receiver,
    TransactionMode,
    Transport,
    TransportCapabilities,
    Work,
    refuse_work,
)
from postdate.ports.backends import DatabaseObject
from postdate.runtime.bounded import Bounded

log = logging.getLogger("postdate.msmq")

_REMEMBERED_FAILURES: Final = 1_000
_APARTMENTS: Final = 16
"""The most threads of one receiver; up to this number, each message in progress has its own."""


class MsmqTransport(Transport):
    """Private queues of MSMQ, on this machine or, for sending, on any other that it can reach.

    Only on Windows, with the extra ``msmq``. Without distributed transactions: the mode ``transaction_scope`` is
    refused, and so is work in a database. MSMQ does not count a message's failures; this process counts them for the
    latest 1,000 messages that failed, and forgets them when it ends.

    Args:
        address: ``msmq:`` for queues of this machine; ``msmq://machine`` for another one's, where a destination names
            none.
        transactional: whether the queues are transactional, those that are created included. Other queues have the mode
            ``none`` only: a process that dies loses the messages that it was handling, and a message that is given back
            goes to the end.
        largest_message_bytes: of headers and body together; MSMQ takes 4 MB with all that it adds.
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
            raise ConfigurationError(
                f"largest_message_bytes must be from 1 to {LARGEST_NATIVE_BYTES:,}, which is what MSMQ takes, "
                f"not {largest_message_bytes:,}"
            )
        self._default_machine = parse_place(address)
        if com is None:
            BACKEND.announce()
        self.com: Com = PyWin32() if com is None else com
        self.transactional = transactional
        self._rules = SendingRules(
            ExpiryRules(
                transactional,
                disable_native_time_to_be_received_in_transactions,
                use_dead_letter_queue,
                use_dead_letter_queue_for_messages_with_time_to_be_received,
            ),
            use_journal_queue,
            largest_message_bytes,
        )
        modes = {TransactionMode.NONE}
        if transactional:
            modes |= {TransactionMode.RECEIVE_ONLY, TransactionMode.SENDS_ATOMIC_WITH_RECEIVE}
        self._capabilities = TransportCapabilities(
            durable=True,
            transaction_modes=frozenset(modes),
            largest_message_bytes=largest_message_bytes,
            expires_messages=True,
            time_to_be_received_in_transactions=not transactional,
            time_to_be_received_precision=timedelta(seconds=1),
            dead_letters=True,
            queue_names_fold_case=True,
            takes_by_id=True,
        )
        self.failures = Bounded[tuple[str, str], int](_REMEMBERED_FAILURES)
        self.receivers: set[MsmqReceiver] = set()
        self._sending: Apartment | None = None

    def __repr__(self) -> str:
        return f"MsmqTransport({self._default_machine!r}, transactional={self.transactional})"

    def _apartment(self) -> Apartment:
        if self._sending is None:
            self._sending = Apartment(self.com, "send")
        return self._sending

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        """MSMQ creates private queues on their own machine only."""
        for name in names:
            try:
                address = self.receiving_address(name)
            except QueueNotFound as error:
                raise ConfigurationError(f"queue {name!r} cannot be created: {error}") from error
            await self._apartment().do(Desk.create, address, self.transactional)

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        """Each message is a transaction of its own.

        A queue on another machine is not checked: if it is missing, the message goes to the dead-letter queue of this
        machine.
        """
        refuse_work(work, "of MSMQ")
        if not (messages := [self._outgoing_or_error(envelope, now) for envelope in envelopes]):
            return []
        return await self._apartment().do(Desk.send, messages, self.transactional)

    def _outgoing_or_error(self, envelope: Envelope, now: datetime) -> MessageProperties | PostdateError | None:
        try:
            return self.outgoing(envelope, now, in_transaction=False)
        except (QueueNotFound, MessageTooLarge, InvalidHeaders, TimeToBeReceivedInTransaction) as error:
            return error

    def outgoing(self, envelope: Envelope, now: datetime, *, in_transaction: bool) -> MessageProperties | None:
        """Return a message as MSMQ sends it, or ``None`` when it has expired."""
        address = parse_address(envelope.destination, self._default_machine)
        shown = address.shown(self.com.machine)
        return outgoing(envelope, address, shown, now, self._rules, in_transaction=in_transaction)

    def receiving_address(self, queue: str) -> QueueAddress:
        return receiving_address(queue, self._default_machine, self.com.machine)

    @override
    def receiver(self, queue: str) -> MsmqReceiver:
        return MsmqReceiver(self, queue)

    @override
    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Looks at every message, without its body."""
        lengths: dict[str, int] = {}
        for name in names:
            with suppress(QueueNotFound):
                lengths[name] = await self._apartment().do(Desk.count, self.receiving_address(name))
        return lengths

    @override
    async def close(self) -> None:
        """Closes its receivers first, which give back their messages."""
        for receiver in list(self.receivers):
            await receiver.close()
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.end()


class _ClaimedMessage(NamedTuple):
    received: Received
    hold: MessageInHand
    apartment: Apartment


class MsmqReceiver(Receiver):
    """Receives from one queue.

    A thread of its own waits for messages without taking them, so a cancelled wait holds nothing. Each message taken
    has a transaction, which stays in its thread; the threads share the messages evenly.
    """

    def __init__(self, transport: MsmqTransport, queue: str) -> None:
        self._transport, self._queue = transport, queue
        self._lookout: Apartment | None = None
        self._looking: Future[bool] | None = None
        self._apartments: list[Apartment] = []
        self._claims: dict[object, _ClaimedMessage] = {}

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[Received]:
        address = self._transport.receiving_address(self._queue)
        self._transport.receivers.add(self)
        while not (received := await self._take_some(address, limit)) and wait:
            while not await self._look(address):
                pass
        return received

    async def _look(self, address: QueueAddress) -> bool:
        """Wait briefly for a message; a cancelled wait goes on for the next caller."""
        if self._lookout is None:
            self._lookout = Apartment(self._transport.com, "wait")
        looking = self._looking = self._looking or self._lookout.start(Desk.has_message, address)
        try:
            return await asyncio.wrap_future(looking)
        finally:
            if looking.done():
                self._looking = None

    async def _take_some(self, address: QueueAddress, limit: int) -> list[Received]:
        received: list[Received] = []
        transactional = self._transport.transactional
        try:
            while len(received) < limit:
                one = await self._take(lambda desk: desk.take(address, self._queue, transactional))
                if one is None:
                    break
                received.append(one)
        except PostdateError:
            if not received:
                raise
            # Return the messages so far; the next call meets the error again.
        return received

    @override
    async def take(self, message_id: str) -> Received | None:
        """Looks at the messages before it, without their bodies."""
        address = self._transport.receiving_address(self._queue)
        transactional = self._transport.transactional
        self._transport.receivers.add(self)
        return await self._take(lambda desk: desk.take_by_id(address, self._queue, message_id, transactional))

    async def _take(self, take: Callable[[Desk], MessageInHand | None]) -> Received | None:
        apartment = self._least_busy()
        taking = apartment.start(take)
        receiving = asyncio.wrap_future(taking)
        try:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([receiving])
        except BaseException:
            # Cancelled, though not through anyio: the thread puts back any message that it still takes.
            taking.add_done_callback(lambda done: _put_back(apartment, done))
            raise
        hold = receiving.result()
        return None if hold is None else self._hold(hold, apartment)

    def _least_busy(self) -> Apartment:
        best = min(self._apartments, key=lambda each: each.message_count, default=None)
        if best is None or (best.message_count and len(self._apartments) < _APARTMENTS):
            best = Apartment(self._transport.com, f"work-{len(self._apartments)}")
            self._apartments.append(best)
        return best

    def _hold(self, hold: MessageInHand, apartment: Apartment) -> Received:
        token = object()
        failures = self._transport.failures.get((self._queue, hold.envelope.message_id), 0)
        received = Received(hold.envelope, failures, token)
        self._claims[token] = _ClaimedMessage(received, hold, apartment)
        apartment.message_count += 1
        return received

    def _what_holds(self, received: Received) -> _ClaimedMessage:
        claim = self._claims.get(received.token)
        if claim is None or claim.received is not received:
            raise ClaimLost.of(received.envelope.message_id, queue=self._queue)
        return claim

    def _forget_claim(self, claim: _ClaimedMessage) -> None:
        if self._claims.pop(claim.received.token, None) is not None:
            claim.apartment.message_count -= 1

    @override
    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        """One transaction of MSMQ if its queues are transactional."""
        refuse_work(end.work, "of MSMQ")
        claim = self._what_holds(received)
        transport = self._transport
        messages = [transport.outgoing(each, now, in_transaction=transport.transactional) for each in end.outgoing]
        to_send = [message for message in messages if message is not None]
        try:
            await claim.apartment.do(Desk.commit, claim.hold, to_send)
        except PostdateError:
            if claim.hold.is_lost:
                self._forget_claim(claim)
            raise
        self._forget_claim(claim)
        transport.failures.pop((self._queue, received.envelope.message_id), None)

    @override
    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        """A message that is no longer held is in its queue already."""
        with suppress(ClaimLost):
            claim = self._what_holds(received)
            if failed:  # before others can receive it
                self._transport.failures[self._queue, received.envelope.message_id] = received.failures + 1
            await self._give_back(claim)

    async def _give_back(self, claim: _ClaimedMessage) -> None:
        await claim.apartment.do(Desk.give_back, claim.hold)
        self._forget_claim(claim)

    @override
    async def close(self) -> None:
        """Without a transaction, a message that MSMQ does not take back is lost."""
        with anyio.CancelScope(shield=True):
            for claim in list(self._claims.values()):
                try:
                    await self._give_back(claim)
                except PostdateError as error:
                    message_id, queue = claim.received.envelope.message_id, self._queue
                    log.error("message %s cannot be given back to %s: %s", message_id, queue, error)
                    await claim.apartment.do(Desk.let_go, claim.hold)
        self._claims.clear()
        apartments, self._apartments = self._apartments, []
        lookout, self._lookout, self._looking = self._lookout, None, None
        for apartment in (*apartments, lookout):
            if apartment is not None:
                apartment.end()
        self._transport.receivers.discard(self)


def _put_back(apartment: Apartment, receiving: Future[MessageInHand | None]) -> None:
    if receiving.cancelled() or receiving.exception() is not None:
        return
    if (hold := receiving.result()) is not None:
        apartment.start(Desk.give_back, hold)


class Msmq(DatabaseObject):
    """The message queues of a Windows machine. They keep no messages until these are due: give an endpoint a store.

    Args:
        address: ``msmq:`` for this machine, or ``msmq://machine``.
        transactional: whether queues and sends are.
    """

    def __init__(self, address: str = "msmq:", *, transactional: bool = True) -> None:
        super().__init__()
        self._address, self._transactional = address, transactional

    @cached_property
    def queues(self) -> MsmqTransport:
        """The transport."""
        return self.made(MsmqTransport(self._address, transactional=self._transactional))
