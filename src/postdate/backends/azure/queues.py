"""The queues of one account: names, clients, wake-ups, the pause that the account asked for; sending to them.

Azure takes names of 3 to 63 lower-case letters, digits and dashes, with no dash at either end and no two in a row.
Names are lower-cased; all endpoints that share queues must choose the same sanitizer for the rest:

``strict``
    Refuses other characters. Only the dots in the names of an endpoint's own queues, which are not the user's, become
    dashes as with upstream: ``sales-timeouts``, ``sales-timeoutsdispatcher``.
``dashes``
    Dots become dashes: ``sales.timeouts`` is ``sales-timeouts``, as with upstream. Otherwise like ``strict``.
``legacy``
    As version 7 of upstream: every other character becomes a dash, runs of dashes become one, and a name that is too
    long is cut and gets a hash of all of it.

Source: docs/guides/azure.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from postdate.backends.azure.envelope import to_text
from postdate.backends.azure.errors import QUEUES, retry_after, translate_errors
from postdate.backends.azure.login import AzureLogin
from postdate.errors import (
    ConfigurationError,
    InvalidMessage,
    MessageError,
    PostdateError,
    QueueNotFound,
    TransportUnreachable,
)
from postdate.messages import Envelope, Headers, encode_headers, too_large_error
from postdate.runtime import forks

if TYPE_CHECKING:
    from azure.storage.queue.aio import QueueClient, QueueServiceClient

Sanitizer = Callable[[str], str]
"""A function from a name in lower case to the name of the queue."""

SHORTEST_NAME, LONGEST_NAME = 3, 63
_NAME: Final = re.compile(r"[a-z0-9](?:-?[a-z0-9])*")
_FORBIDDEN: Final = re.compile(r"[^a-z0-9-]")
_DASHES: Final = re.compile(r"-{2,}")
_NUMBER_LENGTH: Final = 36  # of a GUID as text
_OWN_QUEUE: Final = re.compile(r"\.(timeouts|timeoutsdispatcher)$")


def _sanitize_legacy(name: str) -> str:
    clean = _DASHES.sub("-", _FORBIDDEN.sub("-", name))
    if len(clean) <= LONGEST_NAME:
        return clean
    # Upstream makes a GUID of the digest: its first three parts are numbers, lowest byte first.
    digest = hashlib.md5(name.encode(), usedforsecurity=False).digest()
    return f"{clean[: LONGEST_NAME - _NUMBER_LENGTH - 1]}-{uuid.UUID(bytes_le=digest)}"


SANITIZERS: Final[Mapping[str, Sanitizer]] = {
    "strict": lambda name: _OWN_QUEUE.sub(r"-\1", name),
    "dashes": lambda name: name.replace(".", "-"),
    "legacy": _sanitize_legacy,
}


def sanitizer_of(choice: str | Sanitizer) -> Sanitizer:
    if callable(choice):
        return choice
    if choice not in SANITIZERS:
        raise ConfigurationError(f"sanitizer must be one of {', '.join(SANITIZERS)}, or a function, not {choice!r}")
    return SANITIZERS[choice]


def queue_name(name: str, sanitizer: Sanitizer) -> str:
    """Return Azure's name of a queue; raise `ConfigurationError` for a name that Azure does not accept."""
    try:
        clean = sanitizer(name.lower())
    except Exception as error:
        raise ConfigurationError(f"the sanitizer of queue names failed for {name!r}: {error}") from error
    if _is_valid_name(clean):
        return clean
    name_text = repr(name) if clean == name else f"{name!r}, which becomes {clean!r},"
    raise ConfigurationError(
        f"{name_text} cannot be the name of a queue in Azure: {SHORTEST_NAME} to {LONGEST_NAME} letters, digits and "
        f"single "
        f"dashes, beginning and ending with a letter or digit; {_advice_for(name)}"
    )


def _advice_for(name: str) -> str:
    """Return advice about a name that Azure does not accept."""
    for choice in ("dashes", "legacy"):
        clean = SANITIZERS[choice](name.lower())
        if _is_valid_name(clean):
            return f"choose another, or sanitizer={choice!r}, which changes it to {clean!r}"
    return "choose another"


def _is_valid_name(name: str) -> bool:
    return SHORTEST_NAME <= len(name) <= LONGEST_NAME and _NAME.fullmatch(name) is not None


# --- clients, and waiting for a message -------------------------------------------------------------------------------


class QueueService(forks.ForkAware):
    """The queues of one account, by their names among endpoints."""

    def __init__(self, login: AzureLogin, sanitizer: Sanitizer) -> None:
        self.login = login
        self._sanitizer = sanitizer
        self._service: QueueServiceClient | None = None
        self._clients: dict[str, QueueClient] = {}
        self._send_events: dict[str, set[asyncio.Event]] = {}
        self._throttled_until = 0.0
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Leave the connections to the parent; the next call opens new ones."""
        forks.prevent_destruction((self._service, self._clients, self._send_events))
        self._service, self._clients, self._send_events, self._throttled_until = None, {}, {}, 0.0

    @property
    def description(self) -> str:
        return self.login.describe_service("queue")

    def describe_queue(self, queue: str) -> str:
        """Return the description of a queue for error messages."""
        return f"queue {queue_name(queue, self._sanitizer)!r} of {self.description}"

    @property
    def client(self) -> QueueServiceClient:
        """The client of the account, created at first use, in the event loop that uses it."""
        if self._service is None:
            self._service = self.login.create_queue_service()
        return self._service

    def queue(self, name: str) -> QueueClient:
        """Return the client of a queue; raise `QueueNotFound` when no queue can have this name."""
        if (client := self._clients.get(name)) is None:
            try:
                clean = queue_name(name, self._sanitizer)
            except ConfigurationError as error:
                raise QueueNotFound(str(error)) from error
            client = self._clients[name] = self.client.get_queue_client(clean)
        return client

    @contextmanager
    def guard_request(self, queue: str) -> Generator[None]:
        """Wrap a request to a queue: translate errors, and refuse it during a pause that the account asked for."""
        self.queue(queue)
        description = self.describe_queue(queue)
        if (remaining_seconds := self._throttled_until - asyncio.get_running_loop().time()) > 0:
            raise TransportUnreachable(
                f"{description} is throttled; it asked for a pause, which lasts another {remaining_seconds:.1f} s"
            )
        try:
            with translate_errors(QUEUES, description):
                yield
        except PostdateError as error:
            if (pause := retry_after(error)) is not None:
                self._throttled_until = asyncio.get_running_loop().time() + pause.total_seconds()
            raise

    # --- waiting for a message ----------------------------------------------------------------------------------------

    @contextmanager
    def listen(self, queue: str) -> Generator[asyncio.Event]:
        """Yield an event that is set whenever this process sends to the queue."""
        sent_event = asyncio.Event()
        events = self._send_events.setdefault(queue, set())
        events.add(sent_event)
        try:
            yield sent_event
        finally:
            events.discard(sent_event)

    def announce(self, queue: str) -> None:
        for event in self._send_events.get(queue, ()):
            event.set()

    async def close(self) -> None:
        service, self._service = self._service, None
        self._clients.clear()
        if service is not None:
            await service.close()


# --- the time to live in a queue --------------------------------------------------------------------------------------


LONGEST_LIFE: Final = timedelta(days=30)
"""The longest time to live, which is upstream's limit and its default."""

FOR_EVER: Final = -1
"""Azure's value for a message that never expires."""

PRECISION: Final = timedelta(seconds=1)


def time_to_live(envelope: Envelope, now: datetime) -> int | None:
    """Return the queue's time to live in seconds, rounded up; ``None`` for an expired message, which is not sent.

    Copies in an error queue never expire. Raises `InvalidMessage` for more than 30 days.
    """
    if Headers.FAILED_QUEUE in envelope.headers:
        return FOR_EVER
    span = envelope.time_to_be_received
    if span is not None and span > LONGEST_LIFE:
        raise InvalidMessage(
            f"message {envelope.message_id!r} to {envelope.destination} has a time to be received of {span}; a "
            f"queue in Azure allows at most 30 days: send the message with a shorter one, or without"
        )
    lifetime = envelope.time_left(now)
    shortest = LONGEST_LIFE if lifetime is None else min(LONGEST_LIFE, lifetime)
    return None if shortest <= timedelta(0) else -(-shortest // PRECISION)


# --- sending: one request a message, many in flight at once -----------------------------------------------------------


log = logging.getLogger("postdate.azure")


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """A message ready to be sent.

    ``time_to_live`` is in seconds; -1: for ever; ``None``: the message has expired and is not sent.
    """

    text: str
    time_to_live: int | None


class QueueSender(forks.ForkAware):
    """Sends to the queues of an account, with up to ``at_once`` requests over all calls; with 1 they stay in order.

    ``limit`` is in bytes of headers and body together, besides Azure's own limit.
    """

    def __init__(self, service: QueueService, concurrent_sends: int, largest_message_bytes: int | None) -> None:
        self._service, self._largest_message_bytes = service, largest_message_bytes
        self._concurrent_sends, self._send_slots = concurrent_sends, asyncio.Semaphore(concurrent_sends)
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        self._send_slots = asyncio.Semaphore(self._concurrent_sends)

    async def send(self, envelopes: Sequence[Envelope], now: datetime) -> list[PostdateError | None]:
        """Send messages; a message that cannot be encoded costs no request."""
        encoded_messages = [self.encode_message(envelope, now) for envelope in envelopes]
        outages: list[PostdateError] = []
        tasks = [
            asyncio.ensure_future(self._send(envelope, encoded, outages))
            for envelope, encoded in zip(envelopes, encoded_messages, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def encode_message(self, envelope: Envelope, now: datetime) -> EncodedMessage | PostdateError:
        """Return a message ready to be sent, or the error that forbids sending it."""
        try:
            self._service.queue(envelope.destination)
            if self._largest_message_bytes is not None and (
                size_error := too_large_error(envelope, encode_headers(envelope.headers), self._largest_message_bytes)
            ):
                return size_error
            return EncodedMessage(to_text(envelope), time_to_live(envelope, now))
        except (MessageError, QueueNotFound) as error:
            return error

    async def _send(
        self, envelope: Envelope, encoded: EncodedMessage | PostdateError, outages: list[PostdateError]
    ) -> PostdateError | None:
        if isinstance(encoded, PostdateError):
            return encoded
        if encoded.time_to_live is None:
            log.warning(
                "message %s to %s was not sent: its time to be received had run out",
                envelope.message_id,
                envelope.destination,
            )
            return None
        async with self._send_slots:
            if outages:  # The other messages would wait just as long for the same error.
                return TransportUnreachable(f"not sent: {outages[0]}")
            try:
                with self._service.guard_request(envelope.destination):
                    queue = self._service.queue(envelope.destination)
                    await queue.send_message(encoded.text, time_to_live=encoded.time_to_live)
            except PostdateError as error:
                if isinstance(error, TransportUnreachable):
                    outages.append(error)
                return error
        self._service.announce(envelope.destination)
        return None
