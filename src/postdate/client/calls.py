"""The calls of clients: the work of each method, alone in the open store or in a transaction of the application.

:class:`postdate.Client` and :class:`postdate.BlockingClient` make the same calls, and differ in how they wait for them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from postdate.client.background import StoreSession, log
from postdate.clock import Clock, later
from postdate.config import Settings
from postdate.core import changes
from postdate.core.limits import Limits, change_limits, limiting_store, load_limits_in_force
from postdate.core.upkeep.store_clock import latest_time
from postdate.endpoint.message_types import MessageTypes, TimesToBeReceived, type_name
from postdate.endpoint.outgoing import delayed_message_of, outgoing_message, sender_headers
from postdate.endpoint.send_options import SendOptions
from postdate.errors import DelayConflict, DuplicateMessage, InvalidMessage, NotSupported, PostdateError, QueueNotFound
from postdate.messages import MESSAGE_ID_LIMIT, DelayedMessage, Headers, check_id
from postdate.ports import Answer, JoiningStore, ReplacingStore, Steps
from postdate.ports.changing import KeyedIds, cannot_join_error
from postdate.runtime.bounded import Bounded
from postdate.wiring import open_deployment, store_observer

if TYPE_CHECKING:
    from postdate.operations import Explanation

T = TypeVar("T")

_MOST_DESTINATIONS: Final = 1000
"""The most queues that a client remembers to have looked for."""


@dataclass(frozen=True, slots=True)
class ClientCall(Generic[T]):
    """The work of one method: ``run_alone``, or ``steps`` in a transaction of the application."""

    run_alone: Callable[[StoreSession], Awaitable[T]]
    steps: Callable[[JoiningStore, Clock], Steps[T]]
    zones: frozenset[str | None] = frozenset()
    """Zones whose clocks the stored messages follow."""
    destinations: frozenset[str] = frozenset()
    """Queues to which the stored messages go."""
    changed_id: str | None = None
    """Id of the message that the call changes. A transaction may be too old to see that message."""

    async def prepare(self, session: StoreSession) -> StoreSession:
        """Store the zones of the call in the store, before the messages that need them."""
        for zone in filter(None, self.zones):
            await session.zones.ensure_marker(zone, session.clock.now())
        return session

    async def run(self, session: StoreSession) -> T:
        """Run the call alone, without a transaction of the application."""
        return await self.run_alone(await self.prepare(session))

    def can_be_unseen(self, answer: object) -> bool:
        """Return whether the message that was not found in the transaction must be searched outside of it."""
        return answer is Answer.NOT_FOUND and self.changed_id is not None

    async def find_unseen(self, session: StoreSession) -> Answer:
        """Return the answer for a message that a transaction did not see.

        The transaction's view of the database may be old. So the message is searched outside of the transaction.
        """
        assert self.changed_id is not None
        answer = await changes.find_refusal(changes.administrable_store(session.store), self.changed_id)
        return Answer.NOT_FOUND if answer is Answer.NOT_FOUND else Answer.UNSEEN


class ClientCalls:
    """The calls of a client, and the state that the async and the blocking client share."""

    def __init__(self, endpoint: str) -> None:
        self._types, self._times_to_be_received = MessageTypes(), TimesToBeReceived()
        self._sender = sender_headers(endpoint, None)
        self._types_of_main = set[type[Any]]()
        """Types of the main program that were warned of."""
        self._checked_pid: int | None = None
        """Number of the process that has checked whether a service delivers; the check is done once in each process."""
        self._checked_destinations = Bounded[str, None](_MOST_DESTINATIONS)
        """Queues that this process has looked for. Each is looked for once, so most messages cost no query."""

    async def prepare_join(self, call: ClientCall[Any], session: StoreSession) -> tuple[JoiningStore, Clock]:
        """Return the store and its clock, if the store can be part of a transaction of the application."""
        await call.prepare(session)
        if not isinstance(session.store, JoiningStore):
            raise cannot_join_error(session.store)
        await self.warn(session, call.destinations)
        return session.store, session.clock

    async def warn(self, session: StoreSession, destinations: frozenset[str]) -> None:
        """Warn, once in each process, if no other process delivers the messages, or if a destination does not exist."""
        if self._checked_pid != os.getpid():
            self._checked_pid = os.getpid()
            self._checked_destinations.clear()
            await self._warn_if_undelivered(session)
        for each in destinations:
            if each not in self._checked_destinations:
                self._checked_destinations[each] = None
                await self._warn_if_missing(session, each)

    async def _warn_if_missing(self, session: StoreSession, destination: str) -> None:
        """Warn if the queue does not exist. It may be created before a message is due, so this is no error."""
        if session.queues is None:
            return
        try:
            await session.queues.browse(destination, 1)
        except QueueNotFound:
            missing = QueueNotFound.of(destination)
            log.warning("%s, or start its consumer; what is due waits for the queue only some minutes", missing)
        except PostdateError as error:  # no error for the caller, because its message is stored already
            log.info("whether the queue %r exists cannot be seen: %s", destination, error)

    async def _warn_if_undelivered(self, session: StoreSession) -> None:
        """Warn if no other process delivers the messages, as far as the store can tell."""
        observer = store_observer(session.store)
        try:
            processes = () if observer is None else await observer.processes()
        except PostdateError as error:  # no error for the caller, because its message is stored already
            log.info("whether somebody delivers cannot be seen: %s", error)
            return
        if observer is not None and not any(each.alive and each.delivers for each in processes):
            log.warning(
                "no other process delivers what is sent: unless an endpoint in this one does, start a service with the "
                "same settings: postdate run"
            )

    def send(self, messages: Sequence[tuple[object, SendOptions]]) -> ClientCall[list[str]]:
        for each in messages:
            match each:
                case (_, SendOptions()):
                    pass
                case _:  # pyright: ignore[reportUnnecessaryComparison] - callers without types
                    raise InvalidMessage(f"send_many takes pairs (message, SendOptions(…)), not {each!r}")

        destinations = frozenset(filter(None, [options.destination for _, options in messages]))

        def create_messages(clock: Clock) -> list[DelayedMessage]:
            return [self.create_message(message, options, clock) for message, options in messages]

        async def run_alone(session: StoreSession) -> list[str]:
            delayed, now = create_messages(session.clock), session.clock.now()
            if len(delayed) == 1:
                await session.store.store(delayed[0], now)
            elif duplicate_ids := (await session.store.store_many(delayed, now)).duplicate_ids:
                raise DuplicateMessage.of(*duplicate_ids)
            await self.warn(session, destinations)
            return [each.message_id for each in delayed]

        def join_steps(store: JoiningStore, clock: Clock) -> Steps[list[str]]:
            delayed = create_messages(clock)
            yield from store.storing_steps(delayed, clock.now())
            return [each.message_id for each in delayed]

        return ClientCall(
            run_alone, join_steps, frozenset(options.zone for _, options in messages), destinations=destinations
        )

    def _warn_of_main(self, message_type: type[Any]) -> None:
        """Warn of a name that only this program can resolve: the service that handles the message is another one."""
        name = type_name(message_type)
        if name.startswith("__main__.") and message_type not in self._types_of_main:
            self._types_of_main.add(message_type)
            log.warning(
                "messages of %s have this name wherever they wait, and no other program has such a class: name it "
                "with @postdate.message(%r), there and here",
                name,
                message_type.__name__,
            )

    def create_message(self, message: object, options: SendOptions, clock: Clock) -> DelayedMessage:
        destination = options.destination
        if destination is None:
            raise InvalidMessage("a message needs a destination: destination='queue'")
        if options.use_dead_letter_queue is not None:
            raise NotSupported(
                "a client stores its messages, and a store does not keep use_dead_letter_queue: leave it out"
            )
        if (
            options.time_to_be_received is None
            and (span := self._times_to_be_received.span_of(type(message))) is not None
        ):
            options = replace(options, time_to_be_received=span)
        content, body = ({}, message) if isinstance(message, bytes) else self._types.encode(message)
        if Headers.ENCLOSED_MESSAGE_TYPES not in (options.headers or {}):
            self._warn_of_main(type(message))
        return delayed_message_of(outgoing_message(self._sender, content, body, destination, options, clock), clock)

    def cancel(self, message_id: str) -> ClientCall[Answer]:
        check_id(message_id)
        return self._cancel(message_id)

    def _cancel(self, message_id: str) -> ClientCall[Answer]:
        async def run_alone(session: StoreSession) -> Answer:
            return await changes.cancel(changes.administrable_store(session.store), message_id, session.clock.now())

        return ClientCall(
            run_alone, lambda store, clock: store.cancelling_steps(message_id, clock.now()), changed_id=message_id
        )

    def reschedule(
        self, message_id: str, delay: timedelta | None, deliver_at: datetime | str | None, zone: str | None = None
    ) -> ClientCall[Answer]:
        if (delay is None) == (deliver_at is None):
            raise DelayConflict("give the time of delivery: delay=timedelta(…), or deliver_at=datetime(…)")
        options = SendOptions(delay=delay, deliver_at=deliver_at, zone=zone)
        check_id(message_id)
        return self._reschedule(message_id, options)

    def _reschedule(self, message_id: str, options: SendOptions) -> ClientCall[Answer]:
        wall_time = None if options.zone is None else str(options.wall_time)

        async def run_alone(session: StoreSession) -> Answer:
            due, now = _due(options, session.clock), session.clock.now()
            return await changes.reschedule(changes.administrable_store(session.store), message_id, due, now, wall_time)

        def join_steps(store: JoiningStore, clock: Clock) -> Steps[Answer]:
            return store.rescheduling_steps(message_id, _due(options, clock), clock.now(), wall_time)

        return ClientCall(run_alone, join_steps, frozenset({options.zone}), changed_id=message_id)

    def replace(
        self, message: object, key: str, longest_wait: timedelta | None, options: SendOptions
    ) -> ClientCall[str]:
        check_id(key, "key", MESSAGE_ID_LIMIT - len(KeyedIds("").first))
        if longest_wait is not None and options.zone is not None:
            raise InvalidMessage("longest_wait and zone exclude each other: leave out one of them")
        if options.message_id is not None:
            raise InvalidMessage("a message with a key has an id that is made of the key: leave out message_id")

        destinations = frozenset(filter(None, [options.destination]))

        def create_message(message_id: str, stored_at: datetime | None, clock: Clock) -> DelayedMessage:
            message_options = replace(options, message_id=message_id)
            if longest_wait is not None:
                now, due = clock.now(), _due(options, clock)
                due = min(due, later(now if stored_at is None else stored_at, longest_wait))
                message_options = replace(message_options, delay=None, deliver_at=due, window=None, spread=None)
            return self.create_message(message, message_options, clock)

        async def run_alone(session: StoreSession) -> str:
            if not isinstance(session.store, ReplacingStore):
                raise NotSupported(
                    f"{type(session.store).__name__} cannot replace a message by its key: cancel the message by its "
                    f"id, and send a new one"
                )
            clock = session.clock
            id_ = await session.store.replace(
                key, lambda id_, stored_at: create_message(id_, stored_at, clock), clock.now()
            )
            await self.warn(session, destinations)
            return id_

        def join_steps(store: JoiningStore, clock: Clock) -> Steps[str]:
            return store.replacing_steps(key, lambda id_, stored_at: create_message(id_, stored_at, clock), clock.now())

        return ClientCall(run_alone, join_steps, frozenset({options.zone}), destinations=destinations)

    def get(self, message_id: str) -> ClientCall[DelayedMessage | None]:
        check_id(message_id)

        async def run_alone(session: StoreSession) -> DelayedMessage | None:
            return await changes.administrable_store(session.store).get(message_id)

        return ClientCall(run_alone, lambda store, _: store.getting_steps(message_id))

    def list(
        self, where: changes.Pending, limit: int | None, after: str | None = None
    ) -> ClientCall[list[DelayedMessage]]:
        if not isinstance(where, changes.Pending):  # pyright: ignore[reportUnnecessaryIsInstance] - callers without types
            raise InvalidMessage(f"select messages with Pending(…), such as Pending('queue'), not {where!r}")
        if limit is not None:
            changes.check_limit(limit)

        async def run_alone(session: StoreSession) -> list[DelayedMessage]:
            return await changes.list_matching(changes.administrable_store(session.store), where, limit, after)

        return ClientCall(run_alone, lambda store, _: changes.list_steps(store, where, limit, after))

    def change(
        self,
        where: changes.Pending,
        change: Callable[[DelayedMessage], ClientCall[Answer]],
        preview: Callable[[DelayedMessage, datetime], Answer],
        *,
        dry_run: bool,
        zone: str | None = None,
    ) -> ClientCall[Counter[Answer]]:
        """Change all messages that match; with ``dry_run``, only count the answers that ``preview`` returns."""
        list_call = self.list(where, None)
        where.check_has_condition()

        async def run_alone(session: StoreSession) -> Counter[Answer]:
            if dry_run:
                return await changes.count_answers(
                    changes.administrable_store(session.store), where, lambda each: preview(each, session.clock.now())
                )
            messages = await list_call.run_alone(session)
            return await changes.change_all(messages, lambda each: change(each).run_alone(session))

        def join_steps(store: JoiningStore, clock: Clock) -> Steps[Counter[Answer]]:
            if dry_run:
                return (yield from changes.count_steps(store, where, lambda each: preview(each, clock.now())))
            messages = yield from list_call.steps(store, clock)
            return (yield from changes.change_steps(messages, lambda each: change(each).steps(store, clock)))

        return ClientCall(run_alone, join_steps, frozenset({zone}))

    def cancel_where(self, where: changes.Pending, *, dry_run: bool) -> ClientCall[Counter[Answer]]:
        return self.change(
            where,
            lambda each: self._cancel(each.message_id),
            lambda each, _: changes.preview_change(each, None),
            dry_run=dry_run,
        )

    def reschedule_where(
        self,
        where: changes.Pending,
        delay: timedelta | None,
        deliver_at: datetime | str | None,
        later_by: timedelta | None,
        zone: str | None,
        *,
        dry_run: bool,
    ) -> ClientCall[Counter[Answer]]:
        if (delay, deliver_at, later_by).count(None) != 2:
            raise DelayConflict("give the time of delivery: delay=…, deliver_at=…, or later_by=timedelta(…)")
        if later_by is not None and not isinstance(later_by, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidMessage(f"later_by must be a timedelta, not {type(later_by).__name__} {later_by!r}")
        options = SendOptions(delay=delay, deliver_at=deliver_at, zone=zone)  # raises for invalid options

        def change(message: DelayedMessage) -> ClientCall[Answer]:
            message_options = options if later_by is None else SendOptions(deliver_at=later(message.due, later_by))
            return self._reschedule(message.message_id, message_options)

        def preview(message: DelayedMessage, now: datetime) -> Answer:
            due = options.due(now) if later_by is None else later(message.due, later_by)
            return changes.preview_change(message, due or now)

        return self.change(where, change, preview, dry_run=dry_run, zone=None if dry_run else zone)

    def change_limits(
        self, destination: str, change: Callable[[Limits], Limits]
    ) -> Callable[[StoreSession], Awaitable[Limits]]:
        return lambda opened: change_limits(limiting_store(opened.store), destination, change, opened.clock.now())

    async def limits(self, session: StoreSession) -> dict[str, Limits]:
        return await load_limits_in_force(limiting_store(session.store))

    async def explain(self, settings: Settings, message_id: str) -> Explanation:
        from postdate import operations

        async with open_deployment(settings) as deployment:
            return await operations.explain(deployment, message_id, await operations.read_present(deployment))


def _due(options: SendOptions, clock: Clock) -> datetime:
    """Return the due time of a message with these options, UTC; now, if the options set no time."""
    now = clock.now()
    return options.due(now, latest_time(clock)) or now
