"""The context of a handler: headers of its message, sends, and the transaction of the outbox.

Source: ADR 17.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Unpack

from postdate.endpoint.outgoing import Outgoing, OutgoingMessages, reply_options
from postdate.endpoint.send_options import SendKeywords, read_send_options
from postdate.errors import ConfigurationError, InvalidTimestamp, MessageError, NotSupported
from postdate.messages import DelayedMessage, Headers, format_timestamp, parse_timestamp
from postdate.ports import NativeTransaction, OutboxStore, OutboxTransaction, Received, TransactionMode, Work


class BusinessTransaction:
    """The outbox transaction in which a handler runs. ``queues`` is the identity of the queues' database, if any."""

    def __init__(self, transaction: OutboxTransaction, store: OutboxStore, queues: object | None) -> None:
        self.transaction, self._store, self._queues = transaction, store, queues

    def check_isolated_send(self) -> None:
        """Raise an error for an isolated send that would wait for the transaction of its own handler.

        A file has only one writer at a time.
        """
        if self.transaction.has_begun and self._store.has_one_writer and self._store.database == self._queues:
            raise NotSupported(
                "an isolated send into the file in which the handler has a transaction open would wait for itself: "
                "send before context.transaction() is called, or without isolated, or keep the outbox in another file"
            )


class IncomingMessage:
    """The message that a handler handles."""

    received: Received
    _headers: Mapping[str, str]

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the incoming message; read-only, since a retry and the error queue get them unchanged.

        Messages that are sent have separate headers. Pass on single headers, ``headers={"Tenant":
        context.headers["Tenant"]}``, not all: id, type and retries of the incoming message are among them.
        """
        return self._headers

    @property
    def message_id(self) -> str:
        """Id of the incoming message. It is the same each time the message is delivered."""
        return self.headers.get(Headers.MESSAGE_ID, self.received.envelope.message_id)

    @property
    def due(self) -> datetime | None:
        """Due time in UTC of a delayed message, or of a delayed retry.

        ``None`` for other messages, and if the transport does not preserve it.
        """
        return self.received.envelope.due


class HandlerContext(IncomingMessage):
    """The second argument of a handler: headers of its message, sends, and the transaction of the outbox.

    Messages are sent when the handler has succeeded, together with the completion of the incoming message. If the
    handler fails, only messages with ``isolated`` are sent. In transaction mode ``none`` all messages are sent at once.
    """

    def __init__(
        self, messages: OutgoingMessages, received: Received, business: BusinessTransaction | None = None
    ) -> None:
        self._messages, self.received, self._business = messages, received, business
        self._headers = MappingProxyType(received.envelope.headers)
        self.outgoing: list[Outgoing] = []
        self.messages_with_own_id: list[DelayedMessage] = []
        """Delayed messages, to be sent through an outbox, whose ids the application chose.

        Another message may have such an id already.
        """
        self.work: list[Work] = []
        """Work in the transaction in which the messages are sent.

        Only if the queues or the outbox are in the database of the work.
        """
        self.on_completed: list[Callable[[], Awaitable[None]]] = []
        """Called when the message was completed; must not raise."""
        self.saga: Mapping[str, str] = {}
        """Headers that name the saga instance that sends; empty while no saga handles the message."""
        self.has_ended = False
        """Set when the handlers have returned. Later sends are refused."""

    async def transaction(self) -> NativeTransaction:
        """Return a connection of the outbox's database with an open transaction, for data of the application.

        The transaction is committed together with the messages of this handler, and with the mark that the message was
        handled. If the handler fails, it is rolled back. All handlers of a message share it.

        Returns:
            With :class:`~postdate.PostgresOutbox` a ``psycopg.AsyncConnection``, with :class:`~postdate.SqliteOutbox`
            an ``sqlite3.Connection``. It refuses to commit or roll back.

        Raises:
            ConfigurationError: the endpoint has no outbox.
            StoreUnavailable: the database cannot be reached.
        """
        if self._business is None:
            raise ConfigurationError(
                f"endpoint {self._messages.endpoint!r} has no outbox, so its handlers have no transaction: pass "
                f"outbox=Outbox(…) when you create it"
            )
        return await self._business.transaction.begin()

    async def send(
        self,
        message: object,
        *,
        isolated: bool = False,
        **keywords: Unpack[SendKeywords],
    ) -> str:
        """Send a message when the incoming one is completed; return its id. Arguments are as in :meth:`Endpoint.send`.

        With ``isolated`` it is sent at once, even if the handler fails later. A ``message_id`` that was used for
        another delayed message fails the handler when it returns.
        """
        keywords["headers"] = self._add_saga_headers(keywords.get("headers"))
        options = read_send_options("send", keywords)
        outgoing = self._messages.create(message, options, related_to=self.headers)
        if options.message_id is not None and isinstance(outgoing, DelayedMessage):
            outgoing = self._mark_repeatable(outgoing, isolated=isolated)
        return await self._send_or_collect(outgoing, isolated=isolated)

    def _mark_repeatable(self, outgoing: DelayedMessage, *, isolated: bool) -> DelayedMessage:
        """Mark a message with an id of the application if an earlier attempt of this handler may have sent it.

        That is possible if the incoming message was received before and not answered, and if delayed messages are sent
        through a queue before it is acknowledged.
        """
        if self._business is not None:
            self.messages_with_own_id += () if isolated else (outgoing,)
        elif self.received.unanswered and self._messages.has_early_delays:
            with suppress(KeyError, InvalidTimestamp):
                since = self.due or parse_timestamp(self.headers[Headers.TIME_SENT])
                return replace(
                    outgoing, headers={**outgoing.headers, Headers.MAY_REPEAT_SINCE: format_timestamp(since)}
                )
        return outgoing

    async def reply(self, message: object, headers: Mapping[str, str] | None = None) -> str:
        """Send a reply to the reply address of the incoming message, and to the saga instance that sent it, if any.

        A reply cannot be delayed (row 7).

        Raises:
            InvalidMessage: the incoming message has no address for replies.
        """
        options = reply_options(self.headers, self.message_id, self._add_saga_headers(headers))
        return await self._send_or_collect(self._messages.create(message, options, related_to=self.headers))

    async def publish(
        self, message: object, headers: Mapping[str, str] | None = None, *, message_id: str | None = None
    ) -> str:
        """Send a message to all subscribers of its type; see :meth:`Endpoint.publish`."""
        options = self._messages.publish_options(message, self._add_saga_headers(headers), message_id)
        return await self._send_or_collect(self._messages.create(message, options, related_to=self.headers))

    def _add_saga_headers(self, headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
        return {**self.saga, **(headers or {})} if self.saga else headers

    async def _send_or_collect(self, outgoing: Outgoing, *, isolated: bool = False) -> str:
        """Send a message at once, or collect it for the completion of the incoming message; return its id."""
        if self.has_ended:
            raise MessageError(
                f"the handler of message {self.message_id!r} has ended: it cannot send messages any more"
            )
        if isolated or self._messages.mode is TransactionMode.NONE:
            if self._business is not None:
                self._business.check_isolated_send()
            await self._messages.send([outgoing])
        else:
            if Headers.WALL_TIME in outgoing.headers:
                self.on_completed.append(partial(self._messages.ensure_zone_or_log, outgoing))
            self.outgoing.append(outgoing)
        return outgoing.message_id
