"""The client of a store of delayed messages: an application sends, changes and reads messages with it.

A client runs no handlers and delivers nothing: a service does that, ``postdate run`` or an endpoint. Each method exists
twice, for ``await`` and for blocking code. Both make the same call (``calls``), and run it in the open store, or in a
transaction of the application. Source: ADR 31.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar, Unpack, cast

from postdate.client.background import Background
from postdate.client.calls import ClientCall, ClientCalls
from postdate.config import Settings, load_settings
from postdate.core.changes import EVERYTHING, Pending
from postdate.core.limits import Limits, add_pause, limit_change, remove_pause
from postdate.endpoint.send_options import SendKeywords, SendOptions, read_send_options
from postdate.messages import DelayedMessage
from postdate.ports import Answer, NativeTransaction
from postdate.runtime.threads import run_in_thread
from postdate.wiring import check_store, name_setting_in_errors, with_absolute_files

if TYPE_CHECKING:
    from postdate.operations import Explanation

T = TypeVar("T")

_MOST_ADDRESSES = 16
"""The most addresses of a function whose settings are kept."""


def connect(
    url: str | Callable[[], str] | None = None,
    *,
    endpoint: str | None = None,
    transport: str | None = None,
    schema: str | None = None,
    create: bool = True,
) -> Client:
    """Return a client of the store at ``url``. It opens the store at first use, and again in each child process.

    Arguments that are ``None`` come from the file and the environment, as for the command line.

    Args:
        url: such as ``postgresql://user@host/database`` or ``sqlite:///shop.db``. ``None``: ``store.address``. A
            relative path counts from the working directory of this call. A
            function that returns the address is called at each use of the client: so tests can name another database
            after the client was created. See also :func:`postdate.client.django.database_url`.
        endpoint: name of the service or endpoint that delivers the messages. ``None``: ``endpoint.name``, whose default
            is ``postdate``.
        transport: address of the queues; only :meth:`Client.explain` reads them. ``None``: in the store's database, or
            ``transport.address``.
        schema: schema of the tables. ``None``: ``store.schema``.
        create: create missing tables of the store.

    Raises:
        ConfigurationError: a setting is invalid. The server is not called; the first use shows whether it answers. With
            a function, each use may raise it.
    """

    def read_settings(address: str | None) -> Settings:
        options = {
            "store.address": address,
            "transport.address": transport,
            "endpoint.name": endpoint,
            "store.schema": schema,
        }
        settings = load_settings(None, os.environ, options, origin="an argument of connect")
        with name_setting_in_errors("store.address", settings.store.address, settings):
            check_store(settings.store.address)
        return with_absolute_files(settings)

    if callable(url):
        find_address, settings_of = url, lru_cache(maxsize=_MOST_ADDRESSES)(read_settings)
        name = load_settings(None, os.environ, {"endpoint.name": endpoint}).endpoint.name
        return Client(name, lambda: settings_of(find_address()), create=create)
    settings = read_settings(url)
    return Client(settings.endpoint.name, lambda: settings, create=create)


class Client(AbstractAsyncContextManager["Client"]):
    """A client of one store: sends, cancels, reschedules and reads its messages. Created by :func:`postdate.connect`.

    One object may be used from any thread and any event loop, and before and after a fork. It delivers nothing itself,
    and warns once in each process if no other process delivers, or if a destination queue is missing in its database.

    ``transaction`` is a transaction of the application: a connection, or a session, on the store's database. The
    commit of the transaction makes the changes visible, and its roll-back undoes them.

    Every method raises `StoreUnavailable` and `StoreUnreachable`, and `ConfigurationError` for a ``transaction`` that
    the store cannot be part of.
    """

    def __init__(self, endpoint: str, read_settings: Callable[[], Settings], *, create: bool) -> None:
        self._background, self._calls = Background(read_settings, create=create), ClientCalls(endpoint)

    @property
    def blocking(self) -> BlockingClient:
        """The same client for code without an event loop."""
        return BlockingClient(self._background, self._calls)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the store; the next use opens it again. A process that ends without this call loses nothing."""
        await run_in_thread(self._background.close)

    async def _run(self, call: ClientCall[T], transaction: NativeTransaction | None) -> T:
        if transaction is None:
            return await self._background.run(call.run)
        store, clock = await self._background.run(partial(self._calls.prepare_join, call))
        result = await store.join(transaction, call.steps(store, clock))
        return cast("T", await self._background.run(call.find_unseen)) if call.can_be_unseen(result) else result

    async def send(
        self,
        message: object,
        *,
        transaction: NativeTransaction | None = None,
        **keywords: Unpack[SendKeywords],
    ) -> str:
        """Send a message to ``destination``, and return its id; options are those of :meth:`postdate.Endpoint.send`.

        Without ``delay`` and ``deliver_at`` the message is due at once. Every message goes into the store, and the
        service delivers it.

        The message has the name of its type: see :func:`postdate.message`. For a class that is not yours, give the name
        with ``headers={Headers.ENCLOSED_MESSAGE_TYPES: "remind"}``.

        Raises:
            DelayConflict, InvalidMessage, InvalidHeaders, InvalidTimestamp, MessageTooLarge: nothing was sent.
            DuplicateMessage: ``message_id`` was used before, and nothing was sent. The first message is unchanged:
                pending, delivered or cancelled. A message in the error queue is an exception: without ``transaction``,
                a new message is sent under its id and delivered.
        """
        return (await self._run(self._calls.send([(message, read_send_options("send", keywords))]), transaction))[0]

    async def send_many(
        self, messages: Iterable[tuple[object, SendOptions]], *, transaction: NativeTransaction | None = None
    ) -> list[str]:
        """Send messages, each with its :class:`postdate.SendOptions`; return their ids. One transaction for all.

        Raises:
            DuplicateMessage: some ids were used before; all other messages were sent.
        """
        return await self._run(self._calls.send(list(messages)), transaction)

    async def cancel(self, message_id: str, *, transaction: NativeTransaction | None = None) -> Answer:
        """Remove a pending message, so that it is never delivered; return what the store answers."""
        return await self._run(self._calls.cancel(message_id), transaction)

    async def reschedule(
        self,
        message_id: str,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | str | None = None,
        zone: str | None = None,
        transaction: NativeTransaction | None = None,
    ) -> Answer:
        """Change the due time of a pending message. Raises `InvalidMessage` if the message expires before that.

        With ``zone``, ``deliver_at`` is a local time there, as in :meth:`send`, and the message follows the clocks of
        that zone from now on. Without ``zone``, the message follows the clocks of no zone any more.
        """
        return await self._run(self._calls.reschedule(message_id, delay, deliver_at, zone), transaction)

    async def replace(
        self,
        message: object,
        *,
        key: str,
        longest_wait: timedelta | None = None,
        transaction: NativeTransaction | None = None,
        **keywords: Unpack[SendKeywords],
    ) -> str:
        """Send a message that replaces the pending message under ``key``, if there is one; return its id.

        Use it for a message that is wanted once, some time after the last of several events. A message that is being
        delivered, was delivered, or is being changed in another transaction stays as it is, and the new message waits
        beside it.

        Other arguments are as in :meth:`send`. The application chooses ``key``; the ids are made from it,
        ``{key}~00000001`` and so on. With ``longest_wait`` the message is due at the latest this long after the first
        message that was sent under the key since the last delivery.

        Raises:
            NotSupported: the store cannot do this; PostgreSQL, SQLite, MariaDB and memory can.
        """
        return await self._run(
            self._calls.replace(message, key, longest_wait, read_send_options("replace", keywords)), transaction
        )

    async def get(self, message_id: str, *, transaction: NativeTransaction | None = None) -> DelayedMessage | None:
        """Return a pending message, or ``None``."""
        return await self._run(self._calls.get(message_id), transaction)

    async def list(
        self,
        where: Pending | None = None,
        *,
        limit: int = 100,
        after: str | None = None,
        transaction: NativeTransaction | None = None,
    ) -> list[DelayedMessage]:
        """Return pending messages that match, the first due first.

        The store compares destinations and due times. For conditions on headers and bodies, the client reads all
        messages with these destinations and due times.

        Without ``where``, all pending messages are listed, whatever their :attr:`~postdate.DelayedMessage.origin`.
        ``after`` is the :attr:`~postdate.DelayedMessage.cursor` of the last message of an earlier list. The new list
        starts after that message, even if it is not pending any more. Raises `InvalidMessage` if ``after`` is no
        cursor.
        """
        return await self._run(self._calls.list(EVERYTHING if where is None else where, limit, after), transaction)

    async def cancel_where(
        self, where: Pending, *, dry_run: bool = False, transaction: NativeTransaction | None = None
    ) -> Counter[Answer]:
        """Cancel all messages that match; return the number of messages for each answer.

        With ``dry_run``, nothing is changed, and the numbers are those that would result. Retries, and timeouts of
        sagas, are not changed unless ``where`` names their origin. The messages are listed first, and then changed by
        their ids. So a message that begins to match meanwhile may be left out, and a message that does not match any
        more is changed all the same. Raises `InvalidMessage` for a ``where`` without a condition.
        """
        return await self._run(self._calls.cancel_where(where, dry_run=dry_run), transaction)

    async def reschedule_where(  # noqa: PLR0913 - which, when, and how
        self,
        where: Pending,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | str | None = None,
        zone: str | None = None,
        later_by: timedelta | None = None,
        dry_run: bool = False,
        transaction: NativeTransaction | None = None,
    ) -> Counter[Answer]:
        """Change the due time of all messages that match; see :meth:`cancel_where`.

        With ``later_by``, the new due time of each message is its old one plus ``later_by``.
        """
        call = self._calls.reschedule_where(where, delay, deliver_at, later_by, zone, dry_run=dry_run)
        return await self._run(call, transaction)

    async def pause(self, destination: str) -> Limits:
        """Stop all services of the store from sending to ``destination`` until :meth:`resume`; return its limits.

        If the queues are in the store's database, no message is moved from now on. Else the pause starts within a
        second. Messages that are being sent are still sent. Raises `NotSupported` if the store cannot do this;
        PostgreSQL, SQLite, MariaDB and memory can.
        """
        return await self._background.run(self._calls.change_limits(destination, add_pause))

    async def resume(self, destination: str) -> Limits:
        """End the effect of :meth:`pause`; other limits stay. Messages that waited are sent, the first due first."""
        return await self._background.run(self._calls.change_limits(destination, remove_pause))

    async def limit(
        self, destination: str, *, per_second: float | None = None, windows: str | Sequence[str] = ()
    ) -> Limits:
        """Set the limits of ``destination`` for all services of the store together; they replace earlier limits.

        Limits apply to delayed messages only: a message that an endpoint sends without a delay does not pass through
        the store. Without ``per_second`` and ``windows`` the limits are lifted. A pause stays in force.

        Args:
            destination: queue.
            per_second: number of messages a second, on average, spread over each second.
            windows: times in which messages are sent, such as ``"mon-fri 09:00-17:00 Europe/Paris"``.

        Raises:
            InvalidMessage, InvalidTimestamp: the rate, a window or a zone is invalid.
            NotSupported: see :meth:`pause`.
        """
        return await self._background.run(self._calls.change_limits(destination, limit_change(per_second, windows)))

    async def limits(self) -> dict[str, Limits]:
        """Return the limits of all destinations that have some, by name."""
        return await self._background.run(self._calls.limits)

    async def explain(self, message_id: str) -> Explanation:
        """Return where a message is, why, and what to do about it, as ``postdate messages explain`` shows it."""
        return await self._background.run(lambda _: self._calls.explain(self._background.read_settings(), message_id))


class BlockingClient(AbstractContextManager["BlockingClient"]):
    """:class:`Client` for code without an event loop; see there. It may be used from any thread."""

    def __init__(self, background: Background, calls: ClientCalls) -> None:
        self._background, self._calls = background, calls

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """See :meth:`Client.close`."""
        self._background.close()

    def _run(self, call: ClientCall[T], transaction: NativeTransaction | None) -> T:
        if transaction is None:
            return self._background.submit(call.run).result()
        store, clock = self._background.submit(partial(self._calls.prepare_join, call)).result()
        result = store.join_blocking(transaction, call.steps(store, clock))
        return cast("T", self._background.submit(call.find_unseen).result()) if call.can_be_unseen(result) else result

    def send(
        self,
        message: object,
        *,
        transaction: NativeTransaction | None = None,
        **keywords: Unpack[SendKeywords],
    ) -> str:
        """See :meth:`Client.send`."""
        return self._run(self._calls.send([(message, read_send_options("send", keywords))]), transaction)[0]

    def send_many(
        self, messages: Iterable[tuple[object, SendOptions]], *, transaction: NativeTransaction | None = None
    ) -> list[str]:
        """See :meth:`Client.send_many`."""
        return self._run(self._calls.send(list(messages)), transaction)

    def cancel(self, message_id: str, *, transaction: NativeTransaction | None = None) -> Answer:
        """See :meth:`Client.cancel`."""
        return self._run(self._calls.cancel(message_id), transaction)

    def reschedule(
        self,
        message_id: str,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | str | None = None,
        zone: str | None = None,
        transaction: NativeTransaction | None = None,
    ) -> Answer:
        """See :meth:`Client.reschedule`."""
        return self._run(self._calls.reschedule(message_id, delay, deliver_at, zone), transaction)

    def replace(
        self,
        message: object,
        *,
        key: str,
        longest_wait: timedelta | None = None,
        transaction: NativeTransaction | None = None,
        **keywords: Unpack[SendKeywords],
    ) -> str:
        """See :meth:`Client.replace`."""
        return self._run(
            self._calls.replace(message, key, longest_wait, read_send_options("replace", keywords)), transaction
        )

    def get(self, message_id: str, *, transaction: NativeTransaction | None = None) -> DelayedMessage | None:
        """See :meth:`Client.get`."""
        return self._run(self._calls.get(message_id), transaction)

    def list(
        self,
        where: Pending | None = None,
        *,
        limit: int = 100,
        after: str | None = None,
        transaction: NativeTransaction | None = None,
    ) -> list[DelayedMessage]:
        """See :meth:`Client.list`."""
        return self._run(self._calls.list(EVERYTHING if where is None else where, limit, after), transaction)

    def cancel_where(
        self, where: Pending, *, dry_run: bool = False, transaction: NativeTransaction | None = None
    ) -> Counter[Answer]:
        """See :meth:`Client.cancel_where`."""
        return self._run(self._calls.cancel_where(where, dry_run=dry_run), transaction)

    def reschedule_where(  # noqa: PLR0913 - which, when, and how
        self,
        where: Pending,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | str | None = None,
        zone: str | None = None,
        later_by: timedelta | None = None,
        dry_run: bool = False,
        transaction: NativeTransaction | None = None,
    ) -> Counter[Answer]:
        """See :meth:`Client.reschedule_where`."""
        call = self._calls.reschedule_where(where, delay, deliver_at, later_by, zone, dry_run=dry_run)
        return self._run(call, transaction)

    def pause(self, destination: str) -> Limits:
        """See :meth:`Client.pause`."""
        return self._background.submit(self._calls.change_limits(destination, add_pause)).result()

    def resume(self, destination: str) -> Limits:
        """See :meth:`Client.resume`."""
        return self._background.submit(self._calls.change_limits(destination, remove_pause)).result()

    def limit(self, destination: str, *, per_second: float | None = None, windows: str | Sequence[str] = ()) -> Limits:
        """See :meth:`Client.limit`."""
        return self._background.submit(
            self._calls.change_limits(destination, limit_change(per_second, windows))
        ).result()

    def limits(self) -> dict[str, Limits]:
        """See :meth:`Client.limits`."""
        return self._background.submit(self._calls.limits).result()

    def explain(self, message_id: str) -> Explanation:
        """See :meth:`Client.explain`."""
        return self._background.submit(
            lambda _: self._calls.explain(self._background.read_settings(), message_id)
        ).result()
