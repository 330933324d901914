"""Stores and queues as a process sees them; every call goes over the network to a site."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, Final

from tests.simulator.clock import true_now
from tests.simulator.ledger import origin_of, origin_of_row
from tests.simulator.network import LATE_IN_DOUBT_SECONDS, NOT_YET, Connection, Request
from tests.simulator.site import HOLDS_AT_MOST
from typing_extensions import override

from postdate import ports
from postdate.errors import DestinationUnavailable, PostdateError
from postdate.messages import MARKERS, OWN_PREFIX, DelayedMessage, Envelope
from postdate.ports.changing import CreateMessage
from postdate.ports.limits import LimitingStore, LimitsInUse, StoredLimits

BY_HAND: Final = ContextVar("by_hand", default=False)
"""Whether an operator does what is done."""


class SimulatedStore(ports.ClaimingStore, ports.AdministrableStore):
    """A claiming store on a site; in the promise it keeps, like any of ours.

    Args:
        connection: to the site.
        shares: its database is that of the queues.
        has_clock: it is on a server that has one.
        version: of the rules of the zone, the oldest by which this life of a process may go.
    """

    def __init__(self, connection: Connection, *, shares: bool, has_clock: bool, version: int) -> None:
        self._connection, self._site = connection, connection.site
        self.version = version
        self._changes: dict[str, int] = {}
        """How often operators had changed a message when this process last looked at it."""
        modes = frozenset(ports.TransactionMode)
        self._capabilities = ports.StoreCapabilities(
            durable=True,
            shared=True,
            time_precision=timedelta(microseconds=1),
            transaction_modes=modes if shares else modes - {ports.TransactionMode.TRANSACTION_SCOPE},
            database=connection.site if shares else None,
            holds_at_most=HOLDS_AT_MOST,
            has_clock=has_clock,
        )

    @override
    async def initialize(self, endpoint: str, mode: ports.TransactionMode) -> None:
        await self._connection.call("initialize", lambda: None)

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        await self._connection.call("store", lambda: self._site.store(message, self.version), [origin_of_row(message)])

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        origins = [origin_of_row(message) for message in messages]
        return await self._connection.call("store_many", lambda: self._site.store_many(messages, self.version), origins)

    @override
    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        raise AssertionError("the core claims in batches")

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        raise AssertionError("the core finishes claims in batches")

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        raise AssertionError("the core counts failures of claims")

    @override
    async def next_due(self) -> datetime | None:
        return await self._connection.call(
            "next_due", lambda: min((row.message.due for row in self._site.rows.values()), default=None)
        )

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        session = self._connection.session

        def give_back(claims: Sequence[ports.Claim]) -> None:
            self._site.release(claims, None)
            self._site.wake()  # who has looked meanwhile has not seen them

        return await self._connection.call("claim_due", lambda: self._site.claim(session, now, limit), undo=give_back)

    @override
    async def finish(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> int:
        return await self._connection.call("finish", lambda: self._site.finish(claims, outcome), about=claims)

    @override
    async def retry_later(self, claim: ports.Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        return await self._connection.call(
            "retry_later", lambda: self._site.retry_later(claim, attempt_at, reason), about=[claim]
        )

    @override
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        return await self._connection.call("release", lambda: self._site.release(claims, attempt_at), about=claims)

    @override
    async def next_attempt(self) -> datetime | None:
        return await self._connection.call("next_attempt", self._site.next_attempt)

    @override
    async def listen(self, wake: ports.Wake) -> Callable[[], None]:
        session = self._connection.session

        def listen() -> Callable[[], None]:
            self._site.listeners[id(wake)] = (session, wake)
            return lambda: self._site.listeners.pop(id(wake), None) and None

        return await self._connection.call("listen", listen)

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        return await self._connection.call("cancel", lambda: self._site.cancel(message_id))

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        changes = None if BY_HAND.get() else self._changes[message_id]
        return await self._connection.call(
            "reschedule",
            lambda: self._site.reschedule(message_id, due, wall_time, self.version, changes),
            needed_by=() if BY_HAND.get() else [message_id],
        )

    @override
    async def read_pending(self, message_filter: ports.MessageFilter, limit: int) -> ports.PendingPage:
        needed_by = self._needed_by(OWN_PREFIX) if message_filter.destination == MARKERS else ()
        return await self._connection.call(
            "read_pending", lambda: self._site.read_pending(message_filter, limit), needed_by=needed_by
        )

    @override
    async def get(self, message_id: str) -> DelayedMessage | None:
        def get() -> tuple[DelayedMessage | None, int]:
            return self._site.get(message_id), self._site.changes[message_id]

        message, changes = await self._connection.call("get", get, needed_by=self._needed_by(message_id))
        self._changes[message_id] = changes
        return message

    @override
    def observer(self) -> ports.Observer:
        return _SimulatedObserver(self._connection)

    @override
    async def history(self, message_id: str) -> Sequence[ports.Record]:
        return await self._connection.call(
            "history", lambda: list(self._site.records.get(message_id, ())), needed_by=[message_id]
        )

    def _needed_by(self, message_id: str) -> Sequence[str]:
        """Return the messages that wait for the answer: to a question about a marker, any that follow its zone."""
        is_own = message_id.startswith(OWN_PREFIX)
        return list(self._connection.server.ledger.wall_times) if is_own else [message_id]

    @override
    async def statistics(self, now: datetime) -> ports.StoreStatistics:
        raise AssertionError("services do not count")

    @override
    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        raise AssertionError("services do not count")

    @override
    async def record_counts(self) -> Mapping[ports.RecordKind, int]:
        raise AssertionError("services do not count")

    @override
    async def close(self) -> None:
        """Nothing to close."""

    @override
    async def server_now(self) -> datetime:
        return await self._connection.call("server_now", true_now)

    @override
    async def report_clock(self, ahead: timedelta) -> None:
        await self._connection.call("report_clock", lambda: self._site.clocks.update({self._life: ahead}))

    @override
    async def reported_clocks(self) -> Mapping[str, timedelta]:
        return await self._connection.call("reported_clocks", lambda: dict(self._site.clocks))

    @property
    def _life(self) -> str:
        return self._connection.session.life


class _SimulatedObserver(ports.Observer):
    """Tells whether a message is held."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @override
    async def processes(self) -> Sequence[ports.Process]:
        return ()

    @override
    async def pending_state_of(self, message_id: str) -> ports.PendingState | None:
        return await self._connection.call(
            "pending_state_of", lambda: self._connection.site.pending_state_of(message_id), needed_by=[message_id]
        )


class SimulatedMovingStore(SimulatedStore, ports.MovingStore):
    """The same in the database of the queues."""

    @override
    def storing_work(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.Work:
        return self._site.storing(messages, self.version)

    @override
    def finishing_work(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> ports.Work:
        return self._site.finishing(claims, outcome)

    @override
    async def move_due(self, now: datetime, limit: int, *, listing: bool = False) -> ports.MoveReport:
        return await self._connection.call("move_due", lambda: self._site.move(now, limit))

    @override
    async def yield_to_writers(self) -> None:
        await self._connection.call("pause", lambda: None)


class SimulatedLimits(SimulatedStore, LimitingStore):
    """A store that keeps limits of queues, too."""

    @override
    async def load_limits(self, destinations: Collection[str] | None = None) -> Sequence[StoredLimits]:
        def read() -> list[StoredLimits]:
            kept = self._site.limits.values()
            return [each for each in kept if destinations is None or each.destination in destinations]

        # An intake needs the answer for the message it has in hand, as that of `load_limits_in_use`.
        needed_by = list(self._connection.server.ledger.first_dues)
        return await self._connection.call("load_limits", read, needed_by=needed_by)

    @override
    async def load_limits_in_use(self) -> LimitsInUse:
        # An intake needs the answer for whichever message it has in hand.
        needed_by = list(self._connection.server.ledger.first_dues)
        return await self._connection.call("load_limits_in_use", self._site.limits_in_use, needed_by=needed_by)

    @override
    async def store_limits(self, destination: str, limits: str, free_at: datetime, previous_limits: str = "") -> bool:
        return await self._connection.call(
            "store_limits", lambda: self._site.keep_limits(destination, limits, free_at, previous_limits)
        )

    @override
    async def reserve_slots(self, stored_limits: StoredLimits, free_at: datetime) -> bool:
        return await self._connection.call("reserve_slots", lambda: self._site.take_turns(stored_limits, free_at))

    @override
    async def claim_lane(self, stored_limits: StoredLimits, now: datetime, limit: int) -> Sequence[ports.Claim]:
        session = self._connection.session
        return await self._connection.call(
            "claim_lane",
            lambda: self._site.claim_held(session, stored_limits, limit),
            undo=lambda claims: self._site.release(claims, None),
        )


class SimulatedMovingLimits(SimulatedMovingStore, SimulatedLimits):
    """The same in the database of the queues."""


class SimulatedZones(SimulatedStore, ports.ReplacingStore):
    """A store that can have messages follow the clocks of a zone, too."""

    @override
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        return await self._connection.call(
            "replace", lambda: self._site.replace(key, create_message), needed_by=self._needed_by(key)
        )

    @override
    async def replace_pending(self, message: DelayedMessage, now: datetime) -> bool:
        raise AssertionError("only jobs on Spark replace messages by their ids")

    @override
    async def store_keys(self, message_ids: Sequence[str]) -> None:
        raise AssertionError("only migrations keep keys")


class SimulatedMovingZones(SimulatedMovingStore, SimulatedZones):
    """The same in the database of the queues."""


class SimulatedZonesWithLimits(SimulatedZones, SimulatedLimits):
    """The same with limits of queues."""


class SimulatedMovingZonesWithLimits(SimulatedMovingLimits, SimulatedZones):
    """The same in the database of the queues."""


class SimulatedTransport(ports.Transport):
    """Queues on a site.

    Args:
        connection: to the site.
        pipelines: one send takes messages for any mixture of destinations.
        shares: the store is on this site, too.
    """

    def __init__(self, connection: Connection, *, pipelines: bool, shares: bool) -> None:
        self._connection, self._site = connection, connection.site
        modes = frozenset(ports.TransactionMode)
        self._capabilities = ports.TransportCapabilities(
            durable=True,
            transaction_modes=modes if shares else modes - {ports.TransactionMode.TRANSACTION_SCOPE},
            database=connection.site if shares else None,
            pipelines=pipelines,
            prefetches=shares and pipelines,
        )

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        def create() -> None:
            for name in names:
                self._site.queues.setdefault(name, [])

        await self._connection.call("create_queues", create)

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        life, ledger = self._connection.session.life, self._connection.server.ledger
        origins = [origin_of(each.message_id, each.headers) for each in envelopes]
        final = [
            origin
            for origin, envelope in zip(origins, envelopes, strict=True)
            if not work and envelope.due is not None and envelope.destination != "error"
        ]
        for origin in final:
            ledger.sends(life, origin)
        began = ledger.now
        try:
            errors = await self._connection.call("send", lambda: self._send(envelopes, work), origins)
        except PostdateError as error:
            if work:
                raise
            return [error] * len(envelopes)
        if len(errors) == len(envelopes) and ledger.now - began < LATE_IN_DOUBT_SECONDS:
            for origin, error in zip(origins, errors, strict=True):
                if error is None and origin in final:
                    ledger.knows_sent(life, origin)
        return errors

    def _send(self, envelopes: Sequence[Envelope], work: Sequence[ports.Work]) -> Sequence[PostdateError | None]:
        full = self._connection.server.full
        refused = {each.destination: DestinationUnavailable("full") for each in envelopes if each.destination in full}
        if work and refused:
            raise next(iter(refused.values()))
        taken = [each for each in envelopes if each.destination not in refused]
        answers = iter(self._site.send(taken, work))
        return [refused.get(each.destination) or next(answers) for each in envelopes]

    @override
    def receiver(self, queue: str) -> SimulatedReceiver:
        return SimulatedReceiver(self._connection, queue)

    @override
    async def close(self) -> None:
        """Nothing to close."""


class SimulatedReceiver(ports.Receiver):
    """Receives from one queue.

    Args:
        connection: to the site.
        queue: its name.
    """

    def __init__(self, connection: Connection, queue: str) -> None:
        self._connection, self._site, self._queue = connection, connection.site, queue

    @override
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        connection, site = self._connection, self._site
        future: asyncio.Future[Sequence[ports.Received]] = asyncio.get_running_loop().create_future()

        def give(received: Sequence[ports.Received]) -> bool:
            return connection.server.answer_receive(request, received)

        def receive() -> Any:
            if not wait:
                return ()
            if connection.session.is_alive:
                site.receive(connection.session, self._queue, limit, give)
            return NOT_YET

        request: Request[Sequence[ports.Received]] = Request(
            "receive", receive, future, undo=self._put_back, life=connection.session.life
        )
        return await connection.wait(request)

    def _put_back(self, received: Sequence[ports.Received]) -> None:
        for each in received:
            self._site.roll_back(each, failed=False)

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        ledger, life = self._connection.server.ledger, self._connection.session.life
        envelope = received.envelope
        origins = [origin_of(envelope.message_id, envelope.headers)]
        origins += [origin_of(out.message_id, out.headers) for out in completion.outgoing]

        def commit() -> None:
            full = next((out for out in completion.outgoing if out.destination in self._connection.server.full), None)
            if full is not None:
                raise DestinationUnavailable(f"{full.destination} is full")
            self._site.commit(received, completion)

        ledger.note(f"{life} commits {origins[0]}")
        await self._connection.call("commit", commit, list(dict.fromkeys(origins)))

    @override
    async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
        await self._connection.call("roll_back", lambda: self._site.roll_back(received, failed=failed))

    @override
    async def close(self) -> None:
        self._site.close_receiver(self._connection.session, self._queue)
