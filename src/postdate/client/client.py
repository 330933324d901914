"""A client of a store of delayed messages: what an application does with messages that wait, and nothing else.

It runs no handlers and delivers nothing: a service does, ``postdate run`` or an endpoint. Each method is there twice,
for ``await`` and for code that blocks; both make the same call (:class:`_Call`) and do it in the open store, or in a
transaction of the application. Source: ADR 31.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast

from postdate.client.background import Background, InUse, log
from postdate.clock import Clock, later
from postdate.config import Settings, load_settings
from postdate.core.changes import (
    EVERYTHING,
    Pending,
    administrable,
    cancel,
    change_all,
    change_steps,
    check_limit,
    count_of,
    count_steps,
    first_of,
    first_steps,
    reschedule,
    standing,
    would_be,
)
from postdate.core.limits import Limits, change_limits, limited, limiting, limits_of, paused, resumed
from postdate.core.upkeep.store_clock import latest_time
from postdate.endpoint.message_types import MessageTypes, TimesToBeReceived
from postdate.endpoint.outgoing import SendKeywords, SendOptions, kept, outgoing_message, sender_headers
from postdate.errors import DelayConflict, DuplicateMessage, InvalidMessage, NotSupported, PostdateError
from postdate.messages import MESSAGE_ID_LIMIT, DelayedMessage, check_id
from postdate.ports import Answer, JoiningStore, NativeTransaction, ReplacingStore, Steps
from postdate.ports.changing import KeyedIds, no_transaction_of_yours
from postdate.runtime.threads import in_thread
from postdate.wiring import check_store, naming, opened, store_observer

if TYPE_CHECKING:
    from postdate.operations import Explanation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    """What a method does: ``alone``, or as the ``joined`` steps in a transaction of the application."""

    alone: Callable[[InUse], Awaitable[T]]
    joined: Callable[[JoiningStore, Clock], Steps[T]]
    zones: frozenset[str | None] = frozenset()
    """Whose clocks messages follow that it stores."""
    changes: str | None = None
    """The id of the message that it changes, and that a transaction may be too old to see."""

    async def ready(self, opened: InUse) -> InUse:
        """Have the store know the zones."""
        for zone in filter(None, self.zones):
            await opened.zones.keep(zone, opened.clock.now())
        return opened

    async def run(self, opened: InUse) -> T:
        """Do it alone."""
        return await self.alone(await self.ready(opened))

    def may_be_unseen(self, answer: object) -> bool:
        """Whether to look outside of the transaction for the message that was not found in it."""
        return answer is Answer.NOT_FOUND and self.changes is not None

    async def seen(self, opened: InUse) -> Answer:
        """Return the answer for a message that a transaction did not see, whose view of the database may be old."""
        assert self.changes is not None
        outside = await standing(administrable(opened.store), self.changes)
        return Answer.NOT_FOUND if outside is Answer.NOT_FOUND else Answer.UNSEEN


class _Calls:
    """The calls of a client, and what both of its kinds have."""

    def __init__(self, endpoint: str) -> None:
        self._types, self._wanted = MessageTypes(), TimesToBeReceived()
        self._sender = sender_headers(endpoint, None)
        self._looked: int | None = None
        """The process in which it was looked whether somebody delivers."""

    async def joining(self, call: _Call[Any], opened: InUse) -> tuple[JoiningStore, Clock]:
        """Return the store, if it can be part of a transaction of the application, and its clock."""
        await call.ready(opened)
        if not isinstance(opened.store, JoiningStore):
            raise no_transaction_of_yours(opened.store)
        await self.warn(opened)
        return opened.store, opened.clock

    async def warn(self, opened: InUse) -> None:
        """Warn, once in each process, where no other delivers what is stored, as far as the store can tell."""
        if self._looked == os.getpid():
            return
        self._looked = os.getpid()
        view = store_observer(opened.store)
        try:
            seen = () if view is None else await view.processes()
        except PostdateError as error:  # what was sent is stored
            log.info("whether somebody delivers cannot be seen: %s", error)
            return
        if view is not None and not any(each.alive and each.delivers for each in seen):
            log.warning(
                "no other process delivers what is sent: unless an endpoint in this one does, start a service with the "
                "same settings: postdate run"
            )

    def send(self, messages: Sequence[tuple[object, SendOptions]]) -> _Call[list[str]]:
        for each in messages:
            match each:
                case (_, SendOptions()):
                    pass
                case _:  # pyright: ignore[reportUnnecessaryComparison] - callers without types
                    raise InvalidMessage(f"send_many takes pairs (message, SendOptions(…)), not {each!r}")

        def made(clock: Clock) -> list[DelayedMessage]:
            return [self._made(message, options, clock) for message, options in messages]

        async def alone(opened: InUse) -> list[str]:
            found, now = made(opened.clock), opened.clock.now()
            if len(found) == 1:
                await opened.store.store(found[0], now)
            elif there := (await opened.store.store_many(found, now)).already_there:
                raise DuplicateMessage.of(*there)
            await self.warn(opened)
            return [each.message_id for each in found]

        def joined(store: JoiningStore, clock: Clock) -> Steps[list[str]]:
            found = made(clock)
            yield from store.storing_steps(found, clock.now())
            return [each.message_id for each in found]

        return _Call(alone, joined, frozenset(options.zone for _, options in messages))

    def _made(self, message: object, options: SendOptions, clock: Clock) -> DelayedMessage:
        destination = options.destination
        if destination is None:
            raise InvalidMessage("a message needs the queue it is meant for: destination='queue'")
        if options.use_dead_letter_queue is not None:
            raise NotSupported("a client's messages go by way of the store, which keeps no use_dead_letter_queue")
        if options.time_to_be_received is None and (span := self._wanted.of(type(message))) is not None:
            options = replace(options, time_to_be_received=span)
        content, body = ({}, message) if isinstance(message, bytes) else self._types.encode(message)
        return kept(outgoing_message(self._sender, content, body, destination, options, clock), clock.now())

    def cancel(self, message_id: str) -> _Call[Answer]:
        check_id(message_id)
        return self._cancel(message_id)

    def _cancel(self, message_id: str) -> _Call[Answer]:
        async def alone(opened: InUse) -> Answer:
            return await cancel(administrable(opened.store), message_id, opened.clock.now())

        return _Call(alone, lambda store, clock: store.cancelling_steps(message_id, clock.now()), changes=message_id)

    def reschedule(
        self, message_id: str, delay: timedelta | None, deliver_at: datetime | str | None, zone: str | None = None
    ) -> _Call[Answer]:
        if (delay is None) == (deliver_at is None):
            raise DelayConflict("say when it is to be delivered: delay=timedelta(…), or deliver_at=datetime(…)")
        options = SendOptions(delay=delay, deliver_at=deliver_at, zone=zone)
        check_id(message_id)
        return self._reschedule(message_id, options)

    def _reschedule(self, message_id: str, options: SendOptions) -> _Call[Answer]:
        wall_time = None if options.zone is None else str(options.wall_time)

        async def alone(opened: InUse) -> Answer:
            due, now = _due(options, opened.clock), opened.clock.now()
            return await reschedule(administrable(opened.store), message_id, due, now, wall_time)

        def joined(store: JoiningStore, clock: Clock) -> Steps[Answer]:
            return store.rescheduling_steps(message_id, _due(options, clock), clock.now(), wall_time)

        return _Call(alone, joined, frozenset({options.zone}), changes=message_id)

    def replace(self, message: object, key: str, longest_wait: timedelta | None, options: SendOptions) -> _Call[str]:
        check_id(key, "key", MESSAGE_ID_LIMIT - len(KeyedIds("").first))
        if longest_wait is not None and options.zone is not None:
            raise InvalidMessage("longest_wait is a span, which clocks of a zone do not keep: leave out one of them")
        if options.message_id is not None:
            raise InvalidMessage("what is sent under a key has an id that is made of the key: leave out message_id")

        def made(message_id: str, stored_at: datetime | None, clock: Clock) -> DelayedMessage:
            how = replace(options, message_id=message_id)
            if longest_wait is not None:
                now, due = clock.now(), _due(options, clock)
                due = min(due, later(now if stored_at is None else stored_at, longest_wait))
                how = replace(how, delay=None, deliver_at=due, window=None, spread=None)
            return self._made(message, how, clock)

        async def alone(opened: InUse) -> str:
            if not isinstance(opened.store, ReplacingStore):
                raise NotSupported(
                    f"{type(opened.store).__name__} does not replace what waits under a key: cancel that by its id, "
                    f"and send anew"
                )
            clock = opened.clock
            id_ = await opened.store.replace(key, lambda id_, stored_at: made(id_, stored_at, clock), clock.now())
            await self.warn(opened)
            return id_

        def joined(store: JoiningStore, clock: Clock) -> Steps[str]:
            return store.replacing_steps(key, lambda id_, stored_at: made(id_, stored_at, clock), clock.now())

        return _Call(alone, joined, frozenset({options.zone}))

    def get(self, message_id: str) -> _Call[DelayedMessage | None]:
        check_id(message_id)

        async def alone(opened: InUse) -> DelayedMessage | None:
            return await administrable(opened.store).get(message_id)

        return _Call(alone, lambda store, _: store.getting_steps(message_id))

    def list(self, where: Pending, limit: int | None, after: str | None = None) -> _Call[list[DelayedMessage]]:
        if not isinstance(where, Pending):  # pyright: ignore[reportUnnecessaryIsInstance] - callers without types
            raise InvalidMessage(f"say which messages with Pending(…), such as Pending('queue'), not {where!r}")
        if limit is not None:
            check_limit(limit)

        async def alone(opened: InUse) -> list[DelayedMessage]:
            return await first_of(administrable(opened.store), where, limit, after)

        return _Call(alone, lambda store, _: first_steps(store, where, limit, after))

    def change(
        self,
        where: Pending,
        change: Callable[[DelayedMessage], _Call[Answer]],
        expected: Callable[[DelayedMessage, datetime], Answer],
        *,
        dry_run: bool,
        zone: str | None = None,
    ) -> _Call[Counter[Answer]]:
        """Change all that match; or count the answers that are ``expected``."""
        listed = self.list(where, None)
        where.check_says_something()

        async def alone(opened: InUse) -> Counter[Answer]:
            if dry_run:
                return await count_of(
                    administrable(opened.store), where, lambda each: expected(each, opened.clock.now())
                )
            found = await listed.alone(opened)
            return await change_all(found, lambda each: change(each).alone(opened))

        def joined(store: JoiningStore, clock: Clock) -> Steps[Counter[Answer]]:
            if dry_run:
                return (yield from count_steps(store, where, lambda each: expected(each, clock.now())))
            found = yield from listed.joined(store, clock)
            return (yield from change_steps(found, lambda each: change(each).joined(store, clock)))

        return _Call(alone, joined, frozenset({zone}))

    def cancel_where(self, where: Pending, *, dry_run: bool) -> _Call[Counter[Answer]]:
        return self.change(
            where, lambda each: self._cancel(each.message_id), lambda each, _: would_be(each, None), dry_run=dry_run
        )

    def reschedule_where(
        self,
        where: Pending,
        delay: timedelta | None,
        deliver_at: datetime | str | None,
        later_by: timedelta | None,
        zone: str | None,
        *,
        dry_run: bool,
    ) -> _Call[Counter[Answer]]:
        if (delay, deliver_at, later_by).count(None) != 2:
            raise DelayConflict("say when they are to be delivered: delay=…, deliver_at=…, or later_by=timedelta(…)")
        if later_by is not None and not isinstance(later_by, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidMessage(f"later_by must be a timedelta, not {type(later_by).__name__} {later_by!r}")
        options = SendOptions(delay=delay, deliver_at=deliver_at, zone=zone)  # refuses what cannot be

        def change(message: DelayedMessage) -> _Call[Answer]:
            how = options if later_by is None else SendOptions(deliver_at=later(message.due, later_by))
            return self._reschedule(message.message_id, how)

        def expected(message: DelayedMessage, now: datetime) -> Answer:
            due = options.due(now) if later_by is None else later(message.due, later_by)
            return would_be(message, due or now)

        return self.change(where, change, expected, dry_run=dry_run, zone=None if dry_run else zone)

    def change_limits(
        self, destination: str, change: Callable[[Limits], Limits]
    ) -> Callable[[InUse], Awaitable[Limits]]:
        return lambda opened: change_limits(limiting(opened.store), destination, change, opened.clock.now())

    async def limits(self, opened: InUse) -> dict[str, Limits]:
        return await limits_of(limiting(opened.store))

    async def explain(self, settings: Settings, message_id: str) -> Explanation:
        from postdate import operations

        async with opened(settings) as deployment:
            return await operations.explain(deployment, message_id, await operations.present(deployment))


def _due(options: SendOptions, clock: Clock) -> datetime:
    """Return when a message is due by these options; one without any, now."""
    now = clock.now()
    return options.due(now, latest_time(clock)) or now


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
        self._calls = _Calls(settings.endpoint.name)

    @property
    def blocking(self) -> BlockingClient:
        """The same for code without an event loop."""
        return BlockingClient(self._settings, self._background, self._calls)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the store; the next use opens it again. A process that ends without this loses nothing."""
        await in_thread(self._background.close)

    async def _do(self, call: _Call[T], transaction: NativeTransaction | None) -> T:
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

    def __init__(self, settings: Settings, background: Background, calls: _Calls) -> None:
        self._settings, self._background, self._calls = settings, background, calls

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """See :meth:`Client.close`."""
        self._background.close()

    def _do(self, call: _Call[T], transaction: NativeTransaction | None) -> T:
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
