"""A client of a store of delayed messages: what an application does with messages that wait, and nothing else.

It runs no handlers and delivers nothing: a service does, ``postdate run`` or an endpoint. Each method is there twice,
for ``await`` and for code that blocks; both make the same call (``calls``) and do it in the open store, or in a
transaction of the application. Source: ADR 31.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar, Unpack, cast

from postdate.client.background import Background
from postdate.client.calls import ClientCall, ClientCalls
from postdate.config import Settings, load_settings
from postdate.core.changes import EVERYTHING, Pending
from postdate.core.limits import Limits, limited, paused, resumed
from postdate.endpoint.send_options import SendKeywords, SendOptions
from postdate.messages import DelayedMessage
from postdate.ports import Answer, NativeTransaction
from postdate.runtime.threads import in_thread
from postdate.wiring import check_store, naming

if TYPE_CHECKING:
    from postdate.operations import Explanation

T = TypeVar("T")


def connect(
    url: str | None = None,
    *,
    endpoint: str | None = None,
    transport: str | None = None,
    schema: str | None = None,
    create: bool = True,
) -> Client:
    """Return a client of the store at ``url``. It opens the store at first use, in each process anew.

    What is not said here is taken from the file and the environment, as by the command line.

    Args:
        url: such as ``postgresql://user@host/database`` or ``sqlite:///shop.db``. ``None``: ``store.address``.
        endpoint: whose messages: the name of the service or endpoint that delivers. ``None``: ``endpoint.name``, which
            is ``postdate``.
        transport: where the queues are; only :meth:`Client.explain` looks there. ``None``: in the store's database, or
            ``transport.address``.
        schema: of the tables. ``None``: ``store.schema``.
        create: create what is missing of the store's tables.

    Raises:
        ConfigurationError: a setting that cannot be; whether the server is there, the first use tells.
    """
    options = {
        "store.address": url,
        "transport.address": transport,
        "endpoint.name": endpoint,
        "store.schema": schema,
    }
    settings = load_settings(None, os.environ, options, origin="an argument of connect")
    with naming("store.address", settings.store.address, settings):
        check_store(settings.store.address)
    return Client(settings, create=create)


class Client(AbstractAsyncContextManager["Client"]):
    """Messages that wait in one store: sent, cancelled, rescheduled, looked at. Made by :func:`postdate.connect`.

    One object may be used from any thread and any event loop, and before and after a fork. It delivers nothing by
    itself, and warns once where nobody does. An application's own transaction is handed over as ``transaction``: a
    connection, or a session, on the store's database; what is done in it is done with its commit, and never was with
    its roll-back. Every method raises `StoreUnavailable` and `StoreUnreachable`, and `ConfigurationError` for a
    ``transaction`` of which the store cannot be a part.
    """

    def __init__(self, settings: Settings, *, create: bool) -> None:
        self._settings, self._background = settings, Background(settings, create=create)
        self._calls = ClientCalls(settings.endpoint.name)

    @property
    def blocking(self) -> BlockingClient:
        """The same for code without an event loop."""
        return BlockingClient(self._settings, self._background, self._calls)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the store; the next use opens it again. A process that ends without this loses nothing."""
        await in_thread(self._background.close)

    async def _do(self, call: ClientCall[T], transaction: NativeTransaction | None) -> T:
        if transaction is None:
            return await self._background.run(call.run)
        store, clock = await self._background.run(partial(self._calls.joining, call))
        done = await store.join(transaction, call.joined(store, clock))
        return cast("T", await self._background.run(call.seen)) if call.may_be_unseen(done) else done

    async def send(
        self,
        message: object,
        *,
        transaction: NativeTransaction | None = None,
        **how: Unpack[SendKeywords],
    ) -> str:
        """Send a message to ``destination``, and return its id; how is said as to :meth:`postdate.Endpoint.send`.

        Without ``delay`` and ``deliver_at`` it is due at once. All go by way of the store, and by the service.

        Raises:
            DelayConflict, InvalidMessage, InvalidHeaders, InvalidTimestamp, MessageTooLarge: nothing was sent.
            DuplicateMessage: ``message_id`` was used before, and nothing was sent. The first message is as it was:
                waiting, delivered or cancelled. One that is in the error queue is no such: without ``transaction``,
                what is sent under its id is delivered.
        """
        return (await self._do(self._calls.send([(message, SendOptions(**how))]), transaction))[0]

    async def send_many(
        self, messages: Iterable[tuple[object, SendOptions]], *, transaction: NativeTransaction | None = None
    ) -> list[str]:
        """Send messages, each with its :class:`postdate.SendOptions`; return their ids. One transaction for all.

        Raises:
            DuplicateMessage: some ids were used before; all other messages were sent.
        """
        return await self._do(self._calls.send(list(messages)), transaction)

    async def cancel(self, message_id: str, *, transaction: NativeTransaction | None = None) -> Answer:
        """Remove a waiting message for good."""
        return await self._do(self._calls.cancel(message_id), transaction)

    async def reschedule(
        self,
        message_id: str,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | str | None = None,
        zone: str | None = None,
        transaction: NativeTransaction | None = None,
    ) -> Answer:
        """Give a waiting message another due time. Raises `InvalidMessage` if it expires before that.

        With ``zone``, ``deliver_at`` is what the clocks there show, as in :meth:`send`, and the message follows them
        from now on. Without, it follows those of no zone any more.
        """
        return await self._do(self._calls.reschedule(message_id, delay, deliver_at, zone), transaction)

    async def replace(
        self,
        message: object,
        *,
        key: str,
        longest_wait: timedelta | None = None,
        transaction: NativeTransaction | None = None,
        **how: Unpack[SendKeywords],
    ) -> str:
        """Send a message in place of the one that waits under ``key``, if one does: the last one wins. Return its id.

        For what is wanted once, some time after the last of several events. A message that is being delivered, has
        left, or is being changed in somebody else's transaction stays as it is, and this one waits beside it.

        What is not said here is as in :meth:`send`. ``key`` is of your own; the ids are made of it, ``{key}~00000001``
        and so on. With ``longest_wait`` it is due no later than this after the first that was sent since the last
        delivery.

        Raises:
            NotSupported: the store cannot; PostgreSQL, SQLite, MariaDB and memory can.
        """
        return await self._do(self._calls.replace(message, key, longest_wait, SendOptions(**how)), transaction)

    async def get(self, message_id: str, *, transaction: NativeTransaction | None = None) -> DelayedMessage | None:
        """Return a waiting message, or ``None``."""
        return await self._do(self._calls.get(message_id), transaction)

    async def list(
        self,
        where: Pending | None = None,
        *,
        limit: int = 100,
        after: str | None = None,
        transaction: NativeTransaction | None = None,
    ) -> list[DelayedMessage]:
        """Return waiting messages that match, the first due first. Of headers and bodies the client reads all.

        Without ``where`` all that waits is listed, whatever its :attr:`~postdate.DelayedMessage.origin`.
        ``after``: go on behind the last one of a list before, by its :attr:`~postdate.DelayedMessage.cursor`, also when
        that message has gone. Raises `InvalidMessage`: it is no cursor.
        """
        return await self._do(self._calls.list(EVERYTHING if where is None else where, limit, after), transaction)

    async def cancel_where(
        self, where: Pending, *, dry_run: bool = False, transaction: NativeTransaction | None = None
    ) -> Counter[Answer]:
        """Cancel all that match; return how many there were of each answer. ``dry_run``: only count what would be.

        Messages that wait to be tried again, and timeouts of sagas, are left alone unless ``where`` names their origin.
        They are listed first, and then changed by their ids: what begins to match meanwhile may be left out, and what
        ceases to match is changed all the same. Raises `InvalidMessage` for a ``where`` without a condition.
        """
        return await self._do(self._calls.cancel_where(where, dry_run=dry_run), transaction)

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
        """Give all that match another due time, ``later_by`` each its own; see :meth:`cancel_where`."""
        call = self._calls.reschedule_where(where, delay, deliver_at, later_by, zone, dry_run=dry_run)
        return await self._do(call, transaction)

    async def pause(self, destination: str) -> Limits:
        """Have all services of the store hold what is due for ``destination``, until :meth:`resume`; return its limits.

        Where queues are in the store's database, nothing moves from now on; elsewhere within a second. What is being
        sent goes out. Raises `NotSupported`: the store cannot; PostgreSQL, SQLite, MariaDB and memory can.
        """
        return await self._background.run(self._calls.change_limits(destination, paused))

    async def resume(self, destination: str) -> Limits:
        """Take :meth:`pause` back; other limits stay. What was held goes out, the first due first."""
        return await self._background.run(self._calls.change_limits(destination, resumed))

    async def limit(
        self, destination: str, *, per_second: float | None = None, windows: str | Sequence[str] = ()
    ) -> Limits:
        """Have all services of the store together keep these limits of ``destination``, instead of those of before.

        Of delayed messages only: what an endpoint sends without a delay does not come by. Without anything the limits
        are lifted; what is paused stays so.

        Args:
            destination: queue.
            per_second: so many messages on average, spread over each second.
            windows: only then, such as ``"mon-fri 09:00-17:00 Europe/Paris"``.

        Raises:
            InvalidMessage, InvalidTimestamp: no such rate, window or zone.
            NotSupported: see :meth:`pause`.
        """
        return await self._background.run(self._calls.change_limits(destination, limited(per_second, windows)))

    async def limits(self) -> dict[str, Limits]:
        """Return the limits of all destinations that have some, by name."""
        return await self._background.run(self._calls.limits)

    async def explain(self, message_id: str) -> Explanation:
        """Say where a message is, why, and what to do about it, as ``postdate messages explain`` does."""
        return await self._background.run(lambda _: self._calls.explain(self._settings, message_id))


class BlockingClient(AbstractContextManager["BlockingClient"]):
    """:class:`Client` for code without an event loop; see there. Use it from any thread."""

    def __init__(self, settings: Settings, background: Background, calls: ClientCalls) -> None:
        self._settings, self._background, self._calls = settings, background, calls

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """See :meth:`Client.close`."""
        self._background.close()

    def _do(self, call: ClientCall[T], transaction: NativeTransaction | None) -> T:
        if transaction is None:
            return self._background.submit(call.run).result()
        store, clock = self._background.submit(partial(self._calls.joining, call)).result()
        done = store.join_blocking(transaction, call.joined(store, clock))
        return cast("T", self._background.submit(call.seen).result()) if call.may_be_unseen(done) else done

    def send(
        self,
        message: object,
        *,
        transaction: NativeTransaction | None = None,
        **how: Unpack[SendKeywords],
    ) -> str:
        """See :meth:`Client.send`."""
        return self._do(self._calls.send([(message, SendOptions(**how))]), transaction)[0]

    def send_many(
        self, messages: Iterable[tuple[object, SendOptions]], *, transaction: NativeTransaction | None = None
    ) -> list[str]:
        """See :meth:`Client.send_many`."""
        return self._do(self._calls.send(list(messages)), transaction)

    def cancel(self, message_id: str, *, transaction: NativeTransaction | None = None) -> Answer:
        """See :meth:`Client.cancel`."""
        return self._do(self._calls.cancel(message_id), transaction)

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
        return self._do(self._calls.reschedule(message_id, delay, deliver_at, zone), transaction)

    def replace(
        self,
        message: object,
        *,
        key: str,
        longest_wait: timedelta | None = None,
        transaction: NativeTransaction | None = None,
        **how: Unpack[SendKeywords],
    ) -> str:
        """See :meth:`Client.replace`."""
        return self._do(self._calls.replace(message, key, longest_wait, SendOptions(**how)), transaction)

    def get(self, message_id: str, *, transaction: NativeTransaction | None = None) -> DelayedMessage | None:
        """See :meth:`Client.get`."""
        return self._do(self._calls.get(message_id), transaction)

    def list(
        self,
        where: Pending | None = None,
        *,
        limit: int = 100,
        after: str | None = None,
        transaction: NativeTransaction | None = None,
    ) -> list[DelayedMessage]:
        """See :meth:`Client.list`."""
        return self._do(self._calls.list(EVERYTHING if where is None else where, limit, after), transaction)

    def cancel_where(
        self, where: Pending, *, dry_run: bool = False, transaction: NativeTransaction | None = None
    ) -> Counter[Answer]:
        """See :meth:`Client.cancel_where`."""
        return self._do(self._calls.cancel_where(where, dry_run=dry_run), transaction)

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
        return self._do(call, transaction)

    def pause(self, destination: str) -> Limits:
        """See :meth:`Client.pause`."""
        return self._background.submit(self._calls.change_limits(destination, paused)).result()

    def resume(self, destination: str) -> Limits:
        """See :meth:`Client.resume`."""
        return self._background.submit(self._calls.change_limits(destination, resumed)).result()

    def limit(self, destination: str, *, per_second: float | None = None, windows: str | Sequence[str] = ()) -> Limits:
        """See :meth:`Client.limit`."""
        return self._background.submit(self._calls.change_limits(destination, limited(per_second, windows))).result()

    def limits(self) -> dict[str, Limits]:
        """See :meth:`Client.limits`."""
        return self._background.submit(self._calls.limits).result()

    def explain(self, message_id: str) -> Explanation:
        """See :meth:`Client.explain`."""
        return self._background.submit(lambda _: self._calls.explain(self._settings, message_id)).result()
