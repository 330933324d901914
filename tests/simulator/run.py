"""One run: the endpoint as it is, in several processes, through everything that a seed has in store for them."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import Any, Final, cast

from tests.simulator.clock import ProcessClock, at_second
from tests.simulator.ledger import REMEMBERED, Ledger, Promises, Violation
from tests.simulator.loop import SeededLoop, Tag
from tests.simulator.network import SERVER, Connection, NetworkFaults, Server, Weather
from tests.simulator.ports import (
    BY_HAND,
    SimulatedLimits,
    SimulatedMovingLimits,
    SimulatedMovingStore,
    SimulatedMovingZones,
    SimulatedMovingZonesWithLimits,
    SimulatedStore,
    SimulatedTransport,
    SimulatedZones,
    SimulatedZonesWithLimits,
)
from tests.simulator.scenario import (
    FROZEN_AT_MOST_SECONDS,
    LOOKS_AGAIN_WITHIN_SECONDS,
    WINDOW,
    Happening,
    Kind,
    ScenarioEvent,
    scenario,
)
from tests.simulator.site import HOLDS_AT_MOST, Breaks, Site, SiteSession
from tests.simulator.zones import ZONE, files_of, instants_of

from postdate import operations
from postdate.clock import LATEST, later
from postdate.config import load_settings
from postdate.core import changes
from postdate.core.due.poller import LONGEST_SLEEP
from postdate.core.limits import NO_LIMITS, Limits, change_limits, limiting_store
from postdate.core.recoverability import Recoverability
from postdate.core.upkeep.wall_times import WallTime, ZoneMarkers
from postdate.core.zones import SOURCE, ZoneFiles, ZoneSource, zone_files
from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.handler_context import HandlerContext
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import DuplicateMessage, PostdateError, StoreUnreachable, TransportUnreachable
from postdate.messages import DelayedMessage, Headers
from postdate.wiring import OpenDeployment

NAME: Final = "sales"
OTHERS: Final = "billing"

_LOOKED_AT_EVERY_SECONDS: Final = 5.0
_STARTED_AGAIN_AFTER_SECONDS: Final = 1.0
_STOPPED_WITHIN_SECONDS: Final = 60.0
_QUEUES_BACK_SECONDS: Final = 15.0
_DOWN_AT_MOST_SECONDS: Final = 20.0
_SPINS_AT_MOST: Final = 50
_PAUSED: Final = Limits(paused=True)
_SETTINGS: Final = load_settings(None, {})
_FILES_OF_MACHINE: Final = zone_files()
_LOOKS_WITHIN_SECONDS: Final = 5.0
"""A process that has started moves what new rules of a zone move, unless something fails."""

_STORES: Final = {
    (False, False, False): SimulatedStore,
    (True, False, False): SimulatedMovingStore,
    (False, True, False): SimulatedLimits,
    (True, True, False): SimulatedMovingLimits,
    (False, False, True): SimulatedZones,
    (True, False, True): SimulatedMovingZones,
    (False, True, True): SimulatedZonesWithLimits,
    (True, True, True): SimulatedMovingZonesWithLimits,
}
"""By whether it shares its database with the queues, whether it keeps limits, and whether messages follow a zone."""


@dataclass
class Order:
    """A message.

    Args:
        number: which.
        kind: what its handler does.
    """

    number: int
    kind: str


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of a run.

    Args:
        seed: of it.
        profile: which troubles it had.
        violation: the first, or ``None``.
        trace: the last events, or all if they were asked for.
        calls: of ports.
        steps: of the loop.
        seconds: of virtual time.
    """

    seed: int
    profile: str
    violation: Violation | None
    trace: Sequence[str]
    calls: int
    steps: int
    seconds: float


def run(seed: int, *, breaks: Breaks | None = None, traced: bool = False) -> RunResult:
    """Live through what a seed stands for; the same seed does the same every time.

    Args:
        seed: any number.
        breaks: promises that the simulated adapters are not to keep.
        traced: keep every event.
    """
    with _undisturbed():
        return _Run(seed, breaks or Breaks(), traced=traced).live()


@contextmanager
def _undisturbed() -> Generator[None]:
    """Log nothing, and collect no memory before the end: what is collected may say so, when no seed decides it."""
    logger, collecting = logging.getLogger("postdate"), gc.isenabled()
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    gc.disable()
    try:
        yield
    finally:
        logger.setLevel(level)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # tasks that were never begun, because others ended first
            gc.collect(0)
        if collecting:
            gc.enable()


class _Run:
    def __init__(self, seed: int, breaks: Breaks, *, traced: bool) -> None:
        self.seed = seed
        self.chance = Random(seed)
        self.plot = plot = scenario(self.chance)
        profile = plot.profile
        # Nobody wakes a pump, or an intake, when what it waits for is back.
        pumps = _QUEUES_BACK_SECONDS if profile.weathers else 0.0
        bounds = Promises(
            standstill=max(profile.standstill, pumps) if plot.same_database else profile.standstill,
            in_queues=max(profile.standstill, pumps),
            early=timedelta(seconds=0.2 if profile.store_clock else 0),
            same_database=plot.same_database,
            calls=600 + 60 * len(plot.kinds),
            stopping=_STOPPED_WITHIN_SECONDS,
        )
        self.loop = SeededLoop(self.chance, plot.window)
        self.ledger = ledger = Ledger(bounds, None if traced else REMEMBERED)
        ledger.seconds, ledger.on_violation = self.loop.time, self.loop.stop
        plan = NetworkFaults(self.chance, profile.calls, plot.rate, plot.trouble_until)
        store_site = Site(ledger, self.latest_now, breaks)
        queue_site = store_site if plot.same_database else Site(ledger, self.latest_now, breaks)
        self.queues = Server(queue_site, "broker", plan, ledger, TransportUnreachable)
        self.store = Server(store_site, "store", plan, ledger, StoreUnreachable)
        for name in (OTHERS, "error", f"{NAME}.timeouts", NAME):
            queue_site.queues[name] = []
        queue_site.sinks.update({OTHERS: None, "error": None})
        queue_site.limited, queue_site.taken_at = store_site.limited, store_site.taken_at
        queue_site.is_alone = plot.same_database
        queue_site.counts_unanswered = plot.counts_unanswered
        queue_site.clock_is_set = lambda: self.was_set
        store_site.instants = self._instants
        self.breaks = breaks
        self.processes = [
            SimulatedService(self, f"{NAME}{number}", plot.ahead[number]) for number in range(plot.processes)
        ]
        self.is_over = False
        self.starts: list[tuple[float, int]] = []
        """When processes were started, and with which version of the zone files."""
        self.ahead = timedelta(0)
        """How far the clock of the machine was set, on which all processes are."""
        self.was_set_back = self.was_set = False
        self.latest = self.machine_now()

    def true_now(self) -> datetime:
        """Return the true time, UTC."""
        return at_second(self.loop.time())

    def machine_now(self) -> datetime:
        """Return what is judged by: the clock of the server where the store has one, else that of the machine."""
        return self.true_now() if self.plot.profile.store_clock else later(self.true_now(), self.ahead)

    def latest_now(self) -> datetime:
        """Return the latest that the clock ever showed: what was due then may arrive, though it was set back since."""
        self.latest = max(self.latest, self.machine_now())
        return self.latest

    @property
    def sites(self) -> Sequence[Site]:
        return list(dict.fromkeys([self.store.site, self.queues.site]))

    # --- the run --------------------------------------------------------------------------------------------------

    def live(self) -> RunResult:
        asyncio.set_event_loop(self.loop)
        director = self.loop.create_task(self._direct(), context=SERVER.copy())
        director.add_done_callback(self._end)
        try:
            self.loop.run_forever()
            ledger = self.ledger
            if director.done() and not director.cancelled() and (error := director.exception()) is not None:
                raise error
            if ledger.error is not None:
                raise ledger.error
            if self.loop.spins > _SPINS_AT_MOST:
                ledger.fail("no busy loop", f"tasks ran without end at {self.loop.spins} instants")
            return RunResult(
                self.seed,
                self.plot.profile.name,
                ledger.violation,
                tuple(ledger.events),
                ledger.calls,
                self.loop.steps,
                self.loop.time(),
            )
        finally:
            self.store.is_over = self.queues.is_over = True
            self.ledger.on_violation = lambda: None
            self.is_over = True
            self.loop.clear_up()
            asyncio.set_event_loop(None)

    def _end(self, _: object) -> None:
        if not self.is_over:
            self.loop.stop()

    async def _direct(self) -> None:
        """Let everything happen at its time, and look from time to time whether all goes on."""
        for process in self.processes:
            process.start()
        for event in self.plot.events:
            await self._pass_until(event.at)
            self._happen(event)
        await self._pass_until(self.plot.trouble_until)
        self._heal()
        if self.plot.rules:
            await self._pass_until(self.ledger.trouble_until)
            await (self._wait_for_looks() if self.plot.is_patient else self._deploy_everywhere())
        await self._pass_until(self.plot.end)
        everything = max(self.plot.end, self.ledger.trouble_until) + self.ledger.bounds.in_queues
        await self._pass_until(everything + _LOOKED_AT_EVERY_SECONDS)
        await self._stop_all()

    async def _wait_for_looks(self) -> None:
        """Wait until each process has moved what new rules move, by itself."""
        while (until := self.ledger.trouble_until + LOOKS_AGAIN_WITHIN_SECONDS) > self.loop.time():
            await self._pass_until(until)
        for process in self.processes:
            self.rules_are_looked_at(process, process.life, process.up_since, self.loop.time())

    async def _deploy_everywhere(self) -> None:
        """Have all processes start again with the newest rules: what had kept one from following them is over."""
        for process in self.processes:
            process.has_files(len(self.plot.rules) - 1)
            await process.end()
            await self._pass_until(self.ledger.trouble_until)
            process.start_if_down()

    async def _pass_until(self, second: float) -> None:
        while self.loop.time() < second:
            await asyncio.sleep(min(_LOOKED_AT_EVERY_SECONDS, second - self.loop.time()))
            self._look()

    def _look(self) -> None:
        if self.is_bad:
            return
        for site in self.sites:
            waiting = site.waiting(self.machine_now(), self.loop.time(), set_back=self.was_set_back)
            self.ledger.check_progress(waiting)

    @property
    def is_bad(self) -> bool:
        """Whether nobody can expect that all goes on."""
        weathers = self.store.weather, self.queues.weather
        return any(each is not Weather.FAIR for each in weathers) or not any(each.is_well for each in self.processes)

    async def _stop_all(self) -> None:
        well = [process for process in self.processes if process.is_well]
        if not well:
            return
        for process in well:
            process.stop()
        await asyncio.wait([process.has_ended for process in well], timeout=self.ledger.bounds.stopping)
        for process in well:
            if process.is_running:
                text = f"{process.life} was told to stop {self.ledger.bounds.stopping:g} s ago"
                self.ledger.fail("stopping waits for nobody", text)

    def _heal(self) -> None:
        self.ledger.note("nothing fails from here on")
        self.ledger.trouble(self.loop.time())
        self.store.site.lift_limits(self.machine_now())
        for server in (self.store, self.queues):
            if server.weather is not Weather.FAIR:
                server.change(Weather.FAIR)
            server.full.clear()
            server.refused.clear()
        for process in self.processes:
            if not process.is_running:
                process.start()

    # --- what happens ---------------------------------------------------------------------------------------------

    def _happen(self, event: ScenarioEvent) -> None:
        process, soon = self.processes[event.process], min(event.seconds, _DOWN_AT_MOST_SECONDS)
        match event.what:
            case Happening.KILL:
                process.kill()
                self.loop.call_later(soon, process.start_if_down)
            case Happening.STOP:
                process.stop()
                self.loop.call_later(soon, process.start_if_down)
            case Happening.FREEZE:
                process.freeze(event.seconds)
            case Happening.STEP:
                self._set_clock(timedelta(seconds=event.seconds))
            case Happening.NEW_FILES:
                process.has_files(event.message)
            case Happening.DEPLOY:
                process.has_files(event.message)
                process.stop()
                self.loop.call_later(soon, process.start_if_down)
            case _ if (work := self._work(process, event)) is not None:
                if process.is_well:
                    process.do(work())
            case _:
                self._happen_to_servers(event)

    def _work(self, process: SimulatedService, event: ScenarioEvent) -> Callable[[], Coroutine[Any, Any, None]] | None:
        """Return what an application or an operator does through a process; ``None``: nothing."""
        match event.what:
            case Happening.LIMIT:
                return partial(self._limit, process, event)
            case Happening.RETURN:
                return partial(self._return_all, process)
            case Happening.SEND | Happening.STORE | Happening.CANCEL | Happening.RESCHEDULE:
                return partial(self._operate, process, event)
            case Happening.SEND_BY_CLOCKS | Happening.RESCHEDULE_BY_CLOCKS | Happening.FIX:
                return partial(self._operate_by_clocks, process, event)
            case _:
                return None

    def _happen_to_servers(self, event: ScenarioEvent) -> None:
        """Let something happen to one server, or to both where they are one; what is one refuses nothing."""
        is_one = self.plot.same_database
        match event.what:
            case Happening.STORE_WEATHER | Happening.QUEUES_WEATHER:
                chosen = self.store if event.what is Happening.STORE_WEATHER else self.queues
                for server in (self.store, self.queues) if is_one else (chosen,):
                    self._weather(server, event)
            case Happening.NOT_LISTED:
                self._refuse(self.store.refused, "read_pending", event.seconds)
            case Happening.FULL if not is_one:
                self._refuse(self.queues.full, OTHERS, event.seconds)
            case Happening.NOT_REMOVED if not is_one:
                self._refuse(self.store.refused, "finish", event.seconds)
            case _:
                pass

    def _refuse(self, refused: dict[str, None], what: str, seconds: float) -> None:
        self.ledger.note(f"{what} is refused")
        refused[what] = None
        until = min(self.loop.time() + seconds, self.plot.trouble_until)
        self.ledger.trouble(until)
        self.loop.call_at(until, lambda: refused.pop(what, None))

    def _set_clock(self, by: timedelta) -> None:
        self.ledger.note(f"the clock of the machine is set by {by.total_seconds():+g} s")
        self.latest_now()
        self.ahead += by
        self.was_set_back |= by < timedelta(0)
        self.was_set = True
        for process in self.processes:
            process.clock.ahead += by
        # Who sleeps until an instant that has come by this finds out at the next look.
        unnoticed = LONGEST_SLEEP.total_seconds() if by > timedelta(0) else 0.0
        self.ledger.trouble(self.loop.time() + unnoticed)

    def _weather(self, server: Server, event: ScenarioEvent) -> None:
        if server.weather is not Weather.FAIR or self.loop.time() >= self.plot.trouble_until:
            return
        server.change(event.weather)
        until = min(self.loop.time() + event.seconds, self.plot.trouble_until)
        self.ledger.trouble(until)
        self.loop.call_at(until, self._clear, server)

    def _clear(self, server: Server) -> None:
        if server.weather is not Weather.FAIR:
            server.change(Weather.FAIR)
            self.ledger.trouble(self.loop.time())

    async def _operate(self, process: SimulatedService, event: ScenarioEvent) -> None:
        """Do what an application or an operator does, through a process."""
        origin = f"m{event.message}"
        kind = self.plot.kinds[event.message]
        now = self.machine_now()
        due = LATEST if kind is Kind.NEVER else now + timedelta(seconds=event.seconds)
        ledger = self.ledger
        try:
            match event.what:
                case Happening.SEND:
                    ledger.is_sent(origin, due)
                    message = Order(event.message, kind.value)
                    await process.endpoint.send(message, destination=_queue(kind), deliver_at=due, message_id=origin)
                    self._must_be_there(origin)
                case Happening.STORE:
                    ledger.is_sent(origin, due)
                    await process.store.store(self._row(process, event, due), process.clock.now())
                    self._must_be_there(origin)
                case Happening.CANCEL:
                    await process.store.cancel(origin, process.clock.now())
                case _:
                    BY_HAND.set(True)
                    await process.store.reschedule(origin, due, process.clock.now())
        except DuplicateMessage:
            self._must_be_there(origin)
        except (PostdateError, OSError, asyncio.CancelledError) as error:
            ledger.note(f"{origin}: {event.what.value} comes to nothing: {type(error).__name__} {error}")

    async def _operate_by_clocks(self, process: SimulatedService, event: ScenarioEvent) -> None:
        """Do what an application or an operator does with a message that has a wall time, or gets one."""
        origin, kind = f"m{event.message}", self.plot.kinds[event.message]
        local = self.plot.rules[0].local(later(self.machine_now(), timedelta(seconds=event.seconds)))
        assert isinstance(process.store, SimulatedZones)
        process.use_own_files()
        BY_HAND.set(event.what is not Happening.SEND_BY_CLOCKS)
        try:
            match event.what:
                case Happening.SEND_BY_CLOCKS:
                    instants = instants_of(local, self.plot.rules)
                    self.ledger.follows_clocks(origin, instants, process.version, is_there=False)
                    order, queue = Order(event.message, kind.value), _queue(kind)
                    await process.endpoint.send(
                        order, destination=queue, deliver_at=local, zone=ZONE, message_id=origin
                    )
                    self._must_be_there(origin)
                case Happening.RESCHEDULE_BY_CLOCKS:
                    wall_time = WallTime.parse(local, ZONE)
                    await ZoneMarkers(process.store).ensure_marker(ZONE, process.clock.now())
                    due, now = wall_time.instant(), process.clock.now()
                    await changes.reschedule(process.store, origin, due, now, str(wall_time))
                case _:
                    message = await process.store.get(origin)
                    if message is not None:
                        await changes.reschedule(process.store, origin, message.due, process.clock.now())
        except DuplicateMessage:
            self._must_be_there(origin)
        except (PostdateError, OSError, asyncio.CancelledError) as error:
            self.ledger.note(f"{origin}: {event.what.value} comes to nothing: {type(error).__name__} {error}")

    def _instants(self, header: str) -> Sequence[datetime]:
        """Return when the wall time of a header is, by each version of the rules."""
        local, _, _ = header.rpartition(" ")
        return instants_of(datetime.fromisoformat(local), self.plot.rules)

    def rules_are_looked_at(self, process: SimulatedService, life: str, begin: float, no_trouble_since: float) -> None:
        """Note that a process has moved what new rules move, unless something kept it from doing so.

        Of two that look at once, with other rules, the one that is behind may move messages after the other.

        Args:
            process: that has looked for new rules.
            life: of it.
            begin: when it was up, in seconds of the run.
            no_trouble_since: the last trouble that did not keep it from that.
        """
        is_newest = process.version == self.ledger.newest_rules
        versions = {version for second, version in self.starts if second > begin - _LOOKS_WITHIN_SECONDS}
        is_clear = is_newest and versions <= {process.version} and self.ledger.trouble_until <= no_trouble_since
        if process.life == life and process.is_well and is_clear:
            self.ledger.rules_hold(process.version, begin, self.latest_now())

    async def _limit(self, process: SimulatedService, event: ScenarioEvent) -> None:
        """Pause a queue, slow it down, or let everything through."""
        if event.seconds == WINDOW:
            opens = self.machine_now() + timedelta(minutes=1)
            limits = Limits(windows=(f"{opens:%H:%M}-{opens + timedelta(minutes=1):%H:%M} UTC",))
        else:
            limits = NO_LIMITS if event.seconds < 0 else Limits(per_second=event.seconds) if event.seconds else _PAUSED
        try:
            store = limiting_store(process.store)
            await change_limits(store, (OTHERS, NAME)[event.message], lambda _: limits, process.clock.now())
        except (PostdateError, OSError, asyncio.CancelledError) as error:
            self.ledger.note(f"limits come to nothing: {type(error).__name__} {error}")

    async def _return_all(self, process: SimulatedService) -> None:
        """Return all that is in the error queue, as an operator does."""
        here = OpenDeployment(_SETTINGS, process.store, process.transport, None, None)
        try:
            results = await operations.return_all(here, "error", process.clock.now())
            self.ledger.note(f"{sum(each.done for each in results)} of {len(results)} failed messages were returned")
        except (PostdateError, OSError, asyncio.CancelledError) as error:
            self.ledger.note(f"returning comes to nothing: {type(error).__name__} {error}")

    def _row(self, process: SimulatedService, event: ScenarioEvent, due: datetime) -> DelayedMessage:
        kind, origin = self.plot.kinds[event.message], f"m{event.message}"
        if kind is Kind.UNREADABLE:
            self.store.site.damaged[origin] = None
        made = process.endpoint.outgoing.create(Order(event.message, kind.value), _options(_queue(kind), due, origin))
        return DelayedMessage(origin, due, made.destination, made.headers, made.body)

    def _must_be_there(self, origin: str) -> None:
        if origin not in self.ledger.seen:
            self.ledger.fail("nothing is lost", f"{origin} was sent, as its sender was told, and was never anywhere")

    async def handle(self, message: Order, context: HandlerContext) -> None:
        """Do what a message is for."""
        kind = Kind(message.kind)
        origin = context.headers[Headers.MESSAGE_ID]
        if kind is Kind.FAILS or (kind is Kind.FAILS_ONCE and not self.ledger.blamed[origin]):
            self.ledger.blame([origin], "its handler fails")
            raise ValueError(kind.value)
        if kind is Kind.SENDS:
            number = len(self.plot.kinds) + message.number
            delay, next_one = timedelta(seconds=3), Order(number, Kind.TO_OTHERS.value)
            self.ledger.senders[f"m{number}"] = origin
            self.ledger.is_sent(f"m{number}", self.machine_now() + delay)
            await context.send(next_one, destination=OTHERS, delay=delay, message_id=f"m{number}")


def _queue(kind: Kind) -> str:
    if kind is Kind.NO_QUEUE:
        return "nowhere"
    return OTHERS if kind in {Kind.TO_OTHERS, Kind.UNREADABLE, Kind.NEVER} else NAME


def _options(destination: str, due: Any, message_id: str) -> Any:
    from postdate.endpoint.send_options import SendOptions

    return SendOptions(destination=destination, deliver_at=due, message_id=message_id)


class SimulatedService:
    """One service, in one life after the other.

    Args:
        world: the run.
        name: of it.
        ahead: of its clock, in seconds.
    """

    def __init__(self, world: _Run, name: str, ahead: float) -> None:
        self._world, self.name = world, name
        self.clock = ProcessClock(timedelta(seconds=ahead))
        self.lives = 0
        self.life = name
        self.files = self.version = 0
        """Number of the version of its zone files, and of the oldest that it has had since it started."""
        self.up_since = 0.0
        self.is_running = self.is_up = False
        self._is_told_to_stop = False

    @property
    def is_well(self) -> bool:
        """Whether it runs, and is not frozen."""
        return self.is_up and not self.tag.is_frozen and not self._is_told_to_stop

    def start_if_down(self) -> None:
        """Start it again, unless it runs."""
        if not self.is_running:
            self.start()

    def start(self) -> None:
        """Begin a life."""
        world = self._world
        self.lives += 1
        self.life = life = f"{self.name}.{self.lives}"
        world.ledger.note(f"{life} starts")
        self.tag, self._stop = Tag(life), asyncio.Event()
        self.is_running, self.is_up, self._is_told_to_stop = True, False, False
        self.has_ended: asyncio.Future[None] = world.loop.create_future()
        shares = world.plot.same_database
        session = SiteSession(life)
        self._connections = [Connection(world.queues, session)]
        self._connections.append(Connection(world.store, session if shares else SiteSession(life)))
        queues, stored = self._connections
        self.transport = transport = SimulatedTransport(queues, pipelines=world.plot.pipelines, shares=shares)
        self.version = self.files
        world.starts.append((world.loop.time(), self.version))
        kind = _STORES[shares, world.plot.is_limited, bool(world.plot.rules)]
        has_clock = world.plot.profile.store_clock
        self.store = kind(stored, shares=shares, has_clock=has_clock, version=self.version)
        self._zones = ZoneSource(self._zone_files, world.loop.time)
        self.endpoint = Endpoint(
            NAME,
            transport=transport,
            delayed_delivery=DelayedDelivery(
                self.store, number_of_retries=world.plot.retries, missing_queue_wait=timedelta(0)
            ),
            recoverability=Recoverability(immediate_retries=1, delayed_retries=1, time_increase=timedelta(seconds=5)),
            clock=self.clock,
            critical_error=self._is_critical,
        )

        async def handle(message: Order, context: HandlerContext) -> None:
            await world.handle(message, context)

        self.endpoint.handler(Order)(handle)
        world.loop.spawn(self.tag, self._live(life, self._stop))

    def _is_critical(self, text: str, error: BaseException) -> None:
        self._world.ledger.note(f"{self.life} critical error: {text}")

    def _zone_files(self) -> list[ZoneFiles]:
        return [files_of(self._world.plot.rules[self.files]), *_FILES_OF_MACHINE]

    def has_files(self, version: int) -> None:
        """Give it other zone files; it sees them within a minute, or at its next start."""
        self._world.ledger.note(f"{self.name} has version {version} of the zone files")
        self.files = version
        if self.is_running:
            self.version = self.store.version = min(self.version, version)
        self._world.ledger.newest_rules = max(self._world.ledger.newest_rules, version)

    async def _live(self, life: str, stop: asyncio.Event) -> None:
        problem: BaseException | None = None
        self.use_own_files()
        try:
            async with self.endpoint:
                if not any(each.is_well for each in self._world.processes):
                    self._world.ledger.trouble(self._world.loop.time())  # nobody was there to go on
                self.is_up = True
                if self._world.plot.rules:
                    self.up_since = begin = self._world.loop.time()
                    look = partial(self._world.rules_are_looked_at, self, life, begin, begin)
                    SERVER.run(self._world.loop.call_later, _LOOKS_WITHIN_SECONDS, look)
                await stop.wait()
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever ends a service
            problem = error
        SERVER.run(self._world.loop.call_soon, self._has_ended, life, problem)

    def _has_ended(self, life: str, problem: BaseException | None) -> None:
        world = self._world
        if life != self.life or not self.is_running:
            return
        world.ledger.note(f"{life} ends{'' if problem is None else f': {_first(problem)!r}'}")
        if self.is_up and not (self._is_told_to_stop and problem is None):
            world.ledger.fail("a service does not end by itself", f"{life} ended by {_first(problem)!r}")
        was_up, self.is_running, self.is_up = self.is_up, False, False
        self.has_ended.set_result(None)
        self._leave()
        if not was_up:
            world.ledger.trouble(world.loop.time() + _STARTED_AGAIN_AFTER_SECONDS)
            world.loop.call_later(_STARTED_AGAIN_AFTER_SECONDS, self.start_if_down)

    def _leave(self) -> None:
        for connection in self._connections:
            connection.die()
        for connection in self._connections:
            if connection.session.is_alive:
                connection.site.end(connection.session)

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it do something besides."""
        self._world.loop.spawn(self.tag, work)

    def use_own_files(self) -> None:
        """Have the task that calls this read the zone files of this process."""
        if self._world.plot.rules:
            SOURCE.set(self._zones)

    def stop(self) -> None:
        """Tell it to stop."""
        if self.is_running and self.is_up:
            self._world.ledger.note(f"{self.life} is told to stop")
            self._world.ledger.trouble(self._world.loop.time() + 1)
            self._is_told_to_stop = True
            self._stop.set()

    async def end(self) -> None:
        """Stop it and wait for its end, also if it is frozen; one that cannot start is left alone."""
        self.stop()
        if self._is_told_to_stop and self.is_running:
            await asyncio.wait([self.has_ended], timeout=FROZEN_AT_MOST_SECONDS + _STOPPED_WITHIN_SECONDS)

    def kill(self) -> None:
        """End it without a word; what it held is free."""
        if not self.is_running:
            return
        world = self._world
        world.ledger.note(f"{self.life} is killed")
        world.ledger.trouble(world.loop.time() + 1)
        world.loop.kill(self.tag)
        self.is_running = self.is_up = False
        self._leave()

    def freeze(self, seconds: float) -> None:
        """Let it stand still for some time; what it holds it loses after a while."""
        if not self.is_running or self.tag.is_frozen:
            return
        world, tag = self._world, self.tag
        world.ledger.note(f"{self.life} freezes for {seconds:.0f} s")
        held = min(seconds, HOLDS_AT_MOST.total_seconds())
        others = any(each.is_well for each in world.processes if each is not self)
        world.ledger.trouble(world.loop.time() + (held if others else seconds))
        world.loop.freeze(tag)
        world.loop.call_later(seconds, self._thaw, tag)
        if seconds > held and not world.breaks.holds_for_ever:
            world.loop.call_later(held, self._lose, tag, self._connections)

    def _lose(self, tag: Tag, connections: Sequence[Connection]) -> None:
        if tag.is_frozen:
            for site, session in {each.site: each.session for each in connections}.items():
                site.lose(session)

    def _thaw(self, tag: Tag) -> None:
        if tag.is_frozen:
            self._world.ledger.note(f"{tag.name} thaws")
            self._world.ledger.trouble(self._world.loop.time())
            self._world.loop.thaw(tag)


def _first(problem: BaseException | None) -> BaseException | None:
    """Return what is in a group of exceptions, first of all."""
    while isinstance(problem, BaseExceptionGroup):
        problem = cast("BaseExceptionGroup[BaseException]", problem).exceptions[0]
    return problem
