"""Operations on queues of MSMQ, in the thread of their COM objects; there is no event loop here.

Every received message has an internal transaction of MSMQ. It was received in this transaction, and its handler's
messages are sent in it. Source: docs/msmq.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack, cast

import anyio

from postdate.backends.msmq import com as msmq_com
from postdate.backends.msmq.address import QueueAddress
from postdate.backends.msmq.content import MessageProperties, decode_message, id_of
from postdate.errors import ConfigurationError, PostdateError
from postdate.messages import Envelope

log = logging.getLogger("postdate.msmq")

WAIT_MILLISECONDS = 1_000
"""How long a receiver waits for a message before it checks whether it was closed."""
_AT_ONCE: Final = 0  # milliseconds: do not wait
_MOST_OPEN_QUEUES: Final = 64  # of one thread; queues not used for long are closed
_MESSAGE_ABSENT_CODES: Final = frozenset({msmq_com.MESSAGE_NOT_FOUND, msmq_com.MESSAGE_ALREADY_RECEIVED})


@dataclass(slots=True)
class ReceivedMessage:
    """A received message; it belongs to the apartment that received it.

    ``lookup_id`` is its place in the queue, for receiving it again. Without a ``transaction`` its queue is not
    transactional: the message has left it, and is rejected by sending the COM object ``com_message``.
    """

    source: QueueAddress
    envelope: Envelope
    lookup_id: Any
    transaction: msmq_com.MsmqTransaction | None
    com_message: msmq_com.Message | None
    is_lost: bool = False
    """Whether a transaction failed and the message could not be received again: then it is free."""


class MsmqSession:
    """Opens queues, sends and receives; for one thread."""

    def __init__(self, com: msmq_com.Com) -> None:
        self._com = com
        self._open_queues: OrderedDict[tuple[str, int], msmq_com.Queue] = OrderedDict()
        self._dispenser: msmq_com.Dispenser | None = None

    # --- queues -------------------------------------------------------------------------------------------------------

    def create(self, address: QueueAddress, transactional: bool) -> None:
        """Create a queue; an existing one is not changed, and must be transactional or not as requested."""
        info: msmq_com.QueueInfo = self._com.create(msmq_com.QUEUE_INFO)
        info.PathName = address.path_name
        info.Label = address.name
        try:
            info.Create(transactional, False)
        except self._com.errors as error:
            if msmq_com.code_of(error) != msmq_com.QUEUE_EXISTS:
                raise msmq_com.translate(error, self._address_text(address)) from error
            self._check_transactional(address, transactional)

    def _check_transactional(self, address: QueueAddress, transactional: bool) -> None:
        with self._translate_errors(address):
            info: msmq_com.QueueInfo = self._com.create(msmq_com.QUEUE_INFO)
            info.PathName = address.path_name
            info.Refresh()
            is_transactional = bool(info.IsTransactional)
        if is_transactional is not transactional:
            raise ConfigurationError(
                f"queue {self._address_text(address)} is there and is "
                f"{'' if is_transactional else 'not '}transactional, which cannot be changed; open the transport "
                f"with transactional={is_transactional}, or delete the queue"
            )

    def _open_queue(self, address: QueueAddress, access: int) -> msmq_com.Queue:
        """Return an open queue; close queues that were not used for long."""
        key = (address.format_name.lower(), access)
        if (queue := self._open_queues.get(key)) is None:
            with self._translate_errors(address):
                info: msmq_com.QueueInfo = self._com.create(msmq_com.QUEUE_INFO)
                info.FormatName = address.format_name
                queue = self._open_queues[key] = info.Open(access, msmq_com.MQ_DENY_NONE)
            if len(self._open_queues) > _MOST_OPEN_QUEUES:
                self._close_queue(self._open_queues.popitem(last=False)[1])
        self._open_queues.move_to_end(key)
        return queue

    def _forget_queue(self, address: QueueAddress) -> None:
        """Forget an open queue, so that it is opened again: after an error its handle may be invalid."""
        for access in (msmq_com.MQ_SEND_ACCESS, msmq_com.MQ_RECEIVE_ACCESS):
            if (queue := self._open_queues.pop((address.format_name.lower(), access), None)) is not None:
                self._close_queue(queue)

    def _close_queue(self, queue: msmq_com.Queue) -> None:
        try:
            queue.Close()
        except self._com.errors as error:  # After a restart of the service a handle cannot even be closed.
            log.debug("a queue cannot be closed: %s", error)

    def close(self) -> None:
        while self._open_queues:
            self._close_queue(self._open_queues.popitem()[1])
        self._dispenser = None

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(
        self, messages: Sequence[MessageProperties | PostdateError | None], transactional: bool
    ) -> list[PostdateError | None]:
        """Send each message by itself; return each one's error, earlier errors included."""
        transaction = msmq_com.MQ_SINGLE_MESSAGE if transactional else msmq_com.MQ_NO_TRANSACTION
        return [
            self._send_or_error(message, transaction) if isinstance(message, MessageProperties) else message
            for message in messages
        ]

    def _send_or_error(self, message: MessageProperties, transaction: int) -> PostdateError | None:
        try:
            self._send(message, transaction)
        except PostdateError as error:
            msmq_com.release_objects(error)
            return error
        return None

    def _send(self, message: MessageProperties, transaction: msmq_com.MsmqTransaction | int) -> None:
        queue = self._open_queue(message.address, msmq_com.MQ_SEND_ACCESS)
        with self._translate_errors(message.address):
            self._build_message(message).Send(queue, transaction)

    def _build_message(self, message: MessageProperties) -> msmq_com.Message:
        native: msmq_com.Message = self._com.create(msmq_com.MESSAGE)
        native.Label = message.label
        native.Delivery = msmq_com.MQMSG_DELIVERY_RECOVERABLE
        native.Journal = message.journal
        native.MaxTimeToReceive = message.seconds_to_be_received
        native.Extension = self._com.byte_array(message.extension)
        if message.body:
            native.Body = self._com.byte_array(message.body)
        if message.correlation_id is not None:
            native.CorrelationId = self._com.byte_array(message.correlation_id)
        return native

    # --- receiving ----------------------------------------------------------------------------------------------------

    def wait_for_message(self, address: QueueAddress) -> bool:
        """Wait briefly for a message; return whether there is one, without receiving it."""
        queue = self._open_queue(address, msmq_com.MQ_RECEIVE_ACCESS)
        with self._translate_errors(address, ignored_code=msmq_com.IO_TIMEOUT):
            return queue.Peek(False, False, WAIT_MILLISECONDS) is not None
        return False

    def receive(self, address: QueueAddress, name: str, transactional: bool) -> ReceivedMessage | None:
        """Receive the first message, if there is one now; ``name`` is the envelope's destination."""
        queue = self._open_queue(address, msmq_com.MQ_RECEIVE_ACCESS)
        return self._receive_in_transaction(
            address,
            name,
            transactional,
            msmq_com.IO_TIMEOUT,
            lambda transaction: queue.Receive(transaction, False, True, _AT_ONCE),
        )

    def receive_by_id(
        self, address: QueueAddress, name: str, message_id: str, transactional: bool
    ) -> ReceivedMessage | None:
        """Receive a message by its id; ``None`` when it is missing or being handled."""
        queue = self._open_queue(address, msmq_com.MQ_RECEIVE_ACCESS)
        with self._translate_errors(address):
            message = next((each for each in self._messages(queue) if id_of(each, name) == message_id), None)
            if message is None:
                return None
            lookup_id = message.LookupId
        return self._receive_in_transaction(
            address,
            name,
            transactional,
            msmq_com.MESSAGE_NOT_FOUND,
            lambda transaction: queue.ReceiveByLookupId(lookup_id, transaction, False, True),
        )

    def _receive_in_transaction(
        self,
        address: QueueAddress,
        name: str,
        transactional: bool,
        absence_code: int,
        receive: Callable[[msmq_com.MsmqTransaction | int], msmq_com.Message | None],
    ) -> ReceivedMessage | None:
        """Receive the message that ``receive`` returns, in a new transaction.

        ``absence_code`` means that there is none.
        """
        transaction = self._begin_transaction(address) if transactional else None
        try:
            with self._translate_errors(address, ignored_code=absence_code):
                message = receive(msmq_com.MQ_NO_TRANSACTION if transaction is None else transaction)
                if message is not None:
                    com_message = message if transaction is None else None
                    return ReceivedMessage(
                        address, decode_message(name, message), message.LookupId, transaction, com_message
                    )
        except BaseException:
            self._abort_transaction(transaction)
            raise
        self._abort_transaction(transaction)
        return None

    def count(self, address: QueueAddress) -> int:
        """Return the number of messages that are not being handled; peeks at each."""
        queue = self._open_queue(address, msmq_com.MQ_RECEIVE_ACCESS)
        with self._translate_errors(address):
            return sum(1 for _ in self._messages(queue))

    def _messages(self, queue: msmq_com.Queue) -> Generator[msmq_com.Message]:
        """Yield the messages without their bodies; they stay in the queue."""
        queue.Reset()
        peek = queue.PeekCurrent
        while True:
            try:
                message = peek(False, False, _AT_ONCE)
            except self._com.errors as error:
                if msmq_com.code_of(error) == msmq_com.IO_TIMEOUT:
                    return
                if msmq_com.code_of(error) not in _MESSAGE_ABSENT_CODES:
                    raise
            else:
                if message is None:
                    return
                yield message
            peek = queue.PeekNext

    # --- settling -----------------------------------------------------------------------------------------------------

    def commit(self, received: ReceivedMessage, messages: Sequence[MessageProperties]) -> None:
        """Remove a message from its queue and send others, in its transaction.

        After an error nothing was sent, and the message is still received; or ``received.is_lost`` is set.
        """
        for message in messages:  # a missing queue is found before anything must be undone
            self._open_queue(message.address, msmq_com.MQ_SEND_ACCESS)
        if received.transaction is None:
            for message in messages:
                self._send(message, msmq_com.MQ_NO_TRANSACTION)
        else:
            try:
                for message in messages:
                    self._send(message, received.transaction)
                with self._translate_errors(received.source):
                    received.transaction.Commit()
            except PostdateError:
                self._receive_again(received)
                raise
        self.forget_objects(received)

    def _receive_again(self, received: ReceivedMessage) -> None:
        """Undo a transaction that already has sends, and receive its message again in a new one.

        If another receiver is faster, or MSMQ does not answer, the message is free.
        """
        self._abort_transaction(received.transaction)
        received.transaction = transaction = None
        try:
            transaction = self._begin_transaction(received.source)
            queue = self._open_queue(received.source, msmq_com.MQ_RECEIVE_ACCESS)
            with self._translate_errors(received.source):
                queue.ReceiveByLookupId(received.lookup_id, transaction, False, False)
            received.transaction = transaction
        except PostdateError as error:
            log.debug("message %s is not held any more: %s", received.envelope.message_id, error)
            self._abort_transaction(transaction)
            received.is_lost = True

    def reject(self, received: ReceivedMessage) -> None:
        """Return a message to its place; without a transaction, to the end of its queue."""
        if received.transaction is not None:
            self._abort_transaction(received.transaction)
        elif received.com_message is not None:
            queue = self._open_queue(received.source, msmq_com.MQ_SEND_ACCESS)
            with self._translate_errors(received.source):
                self._copy_message(received.com_message).Send(queue, msmq_com.MQ_NO_TRANSACTION)
        self.forget_objects(received)

    def forget_objects(self, received: ReceivedMessage) -> None:
        """Release a message's COM objects in this thread, not in a thread that has the received message."""
        received.transaction = received.com_message = None

    def _copy_message(self, message: msmq_com.Message) -> msmq_com.Message:
        """Return a copy to send, without its time limit in the queue."""
        native: msmq_com.Message = self._com.create(msmq_com.MESSAGE)
        native.Label = message.Label
        native.Delivery = msmq_com.MQMSG_DELIVERY_RECOVERABLE
        native.Journal = message.Journal
        native.MaxTimeToReceive = msmq_com.INFINITE
        for name in ("Extension", "CorrelationId", "Body"):
            content: Any = getattr(message, name)
            if isinstance(content, bytes | bytearray | memoryview | tuple):  # pywin32's forms of an array of bytes
                content_bytes = bytes(cast("bytes", content))
                content = self._com.byte_array(content_bytes) if content_bytes else None
            if content is not None:
                setattr(native, name, content)
        return native

    def _begin_transaction(self, address: QueueAddress) -> msmq_com.MsmqTransaction:
        with self._translate_errors(address):
            dispenser: msmq_com.Dispenser = self._dispenser or self._com.create(msmq_com.TRANSACTION_DISPENSER)
            self._dispenser = dispenser
            return dispenser.BeginTransaction()

    def _abort_transaction(self, transaction: msmq_com.MsmqTransaction | None) -> None:
        if transaction is None:
            return
        try:
            transaction.Abort()
        except self._com.errors as error:  # A transaction that MSMQ does not know any more is undone already.
            log.warning("a transaction of MSMQ cannot be aborted: %s", error)

    # --- errors -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _translate_errors(self, address: QueueAddress, *, ignored_code: int = 0) -> Generator[None]:
        """Translate errors of COM; the code ``ignored_code`` ends the block without an error."""
        try:
            yield
        except self._com.errors as error:
            if not ignored_code or msmq_com.code_of(error) != ignored_code:
                self._forget_queue(address)
                raise msmq_com.translate(error, self._address_text(address)) from error

    def _address_text(self, address: QueueAddress) -> str:
        return address.text(self._com.machine)


# --- threads for COM objects, with the queues that are open in them ---------------------------------------------------


T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Apartment:
    """A thread with a `MsmqSession`, because COM objects are used only in the thread that created them."""

    def __init__(self, com: msmq_com.Com, name: str) -> None:
        self._com = com
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"postdate-msmq-{name}")
        self._session: MsmqSession | None = None
        self.message_count = 0
        """The number of received messages in this apartment, for choosing among apartments."""

    def start(self, work: Callable[[MsmqSession, Unpack[Arguments]], T], *arguments: *Arguments) -> Future[T]:
        """Start ``work`` in the apartment after all earlier work."""
        return self._thread.submit(self._run_in_thread, work, *arguments)

    async def run(self, work: Callable[[MsmqSession, Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """Run short work as `start` does; a cancelled caller waits for its end."""
        future = asyncio.wrap_future(self.start(work, *arguments))
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    def _run_in_thread(self, work: Callable[[MsmqSession, Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        try:
            if self._session is None:
                self._com.initialize()
                self._session = MsmqSession(self._com)
            return work(self._session, *arguments)
        except BaseException as error:
            msmq_com.release_objects(error)
            raise

    def stop(self) -> None:
        """Close the session and end the thread after all earlier work; do not wait."""
        self._thread.submit(self._close_session)
        self._thread.shutdown(wait=False)

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
            del session
            self._com.uninitialize()
