"""The way to a site: a call is a request that arrives a moment later, and an answer that comes a moment after that.

On the way the seed may let it be refused, be lost before or after it took effect, be answered late, or never; and the
call that waits for it may be deaf to cancellation, as a thread in a blocked read is.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Generic, TypeVar

import anyio
from tests.simulator.ledger import Ledger, origin_of_row
from tests.simulator.site import Site, SiteSession

from postdate.errors import PostdateError, StoreUnavailable, StoreUnreachable, TransportUnavailable
from postdate.ports import Claim, Received

T = TypeVar("T")

SERVER: Final = Context()
"""What happens at a site belongs to no process: it goes on when a process is frozen or dies."""

LATE_IN_DOUBT_SECONDS: Final = 15.0
ANSWERS_WITHIN_SECONDS: Final = 40.0
"""Nobody waits longer for an answer (ADR 0049); what stands still because of one may do so until then."""

ADAPTERS_WAIT_SECONDS: Final = 20.0
"""How long an adapter of ours waits for the answer of a silent server."""


OF_RECEIVERS: Final = frozenset({"receive", "commit", "roll_back"})
"""Calls that the core makes where it waits for them, as a task for each would be dear: one that is deaf to cancellation
is ended by its adapter alone, and so is waiting for a message (ADR 0049)."""


class Trouble(enum.Enum):
    """What may become of one call."""

    UNREACHABLE = "cannot be reached"
    COUNTED = "is refused"
    FOREIGN = "fails with an error of its driver"
    CANCELLED = "is cancelled by nobody"
    LOST_ANSWER = "takes effect, and its answer is lost"
    SILENT = "is never answered"
    DEAF = "is never answered, and is deaf to cancellation"
    LATE = "is answered late"
    MISCOUNTED = "is answered for fewer messages than were sent"


class Weather(enum.Enum):
    """How a site is."""

    FAIR = "answers"
    DOWN = "is down"
    SILENT = "is silent"
    DEADLINE = "is silent, and its adapter gives up"


@dataclass(slots=True)
class NetworkFaults:
    """Which calls come to no good.

    Args:
        chance: decides.
        kinds: what may happen; empty: nothing.
        rate: share of the calls to which it happens.
        until: seconds of the run after which nothing of it happens any more.
        slowest: seconds a message takes one way at most, in fair weather.
    """

    chance: Random
    kinds: Sequence[Trouble]
    rate: float
    until: float
    slowest: float = 0.002

    def draw(self, now: float) -> Trouble | None:
        """Return what becomes of the next call."""
        if not self.kinds or now >= self.until or self.chance.random() >= self.rate:
            return None
        return self.chance.choice(self.kinds)

    def latency(self) -> float:
        """Return how long a message is on its way."""
        return self.slowest * self.chance.random()


@dataclass(eq=False, slots=True)
class Request(Generic[T]):
    """A call on its way.

    Args:
        method: of the port.
        effect: what it does at the site.
        future: of the answer.
        origins: of the messages that may be doubled by it.
        about: what else it is about, for traces.
        needed_by: messages whose way an answer about this may end besides.
        undo: for what it hands out, when nobody wants it any more.
    """

    method: str
    effect: Callable[[], T]
    future: asyncio.Future[T]
    origins: Sequence[str] = ()
    undo: Callable[[T], object] | None = None
    is_in_doubt: bool = False
    life: str = ""
    about: Sequence[str] = ()
    needed_by: Sequence[str] = ()


class Server:
    """A site behind a network.

    Args:
        site: what is there.
        name: in traces.
        plan: of troubles with single calls.
        ledger: told of calls, troubles and doubts.
        unreachable: the error of an adapter whose server cannot be reached.
    """

    def __init__(
        self, site: Site, name: str, plan: NetworkFaults, ledger: Ledger, unreachable: type[PostdateError]
    ) -> None:
        self.site, self.name, self.plan, self.ledger = site, name, plan, ledger
        self.weather = Weather.FAIR
        self._unreachable = unreachable
        self._counted = StoreUnavailable if issubclass(unreachable, StoreUnavailable) else TransportUnavailable
        self._parked: list[Request[Any]] = []
        self.is_over = False
        self.full: dict[str, None] = {}
        """Queues that take nothing at the moment."""
        self.refused: dict[str, None] = {}
        """Methods that the server refuses at the moment, as it does for want of a right or of a lock."""

    def change(self, weather: Weather) -> None:
        """Let the weather change; what was silent is answered, or never was."""
        self.weather = weather
        self.ledger.note(f"the {self.name} {weather.value}")
        if weather is not Weather.FAIR:
            if weather is Weather.DOWN:
                self.site.break_receives()
            return
        parked, self._parked = self._parked, []
        for request in parked:
            if self.plan.chance.random() < 0.5:
                self._fail(request, self._unreachable(f"the {self.name} was restarted"))
            else:
                self._perform(request)
        self.site.wake()

    def begin(self, request: Request[Any]) -> Trouble | None:
        """Send a request; return what becomes of it."""
        loop = asyncio.get_running_loop()
        trouble = self.plan.draw(self.ledger.now)
        self.ledger.called(request.life, request.method)
        SERVER.run(loop.call_later, self.plan.latency(), self._arrive, request, trouble)
        return trouble

    def _doubt(self, request: Request[Any], why: str) -> None:
        if not request.is_in_doubt:
            request.is_in_doubt = True
            self.ledger.doubt(request.origins, f"{request.method} of {request.life} {why}")

    def _arrive(self, request: Request[Any], trouble: Trouble | None) -> None:
        self.ledger.note(
            f"{request.life} {request.method}{_shown(request.about or request.origins)}{_happens(trouble)}"
        )
        if self.weather is not Weather.FAIR:
            self._in_bad_weather(request)
        elif request.method in self.refused:
            self.ledger.blame(request.needed_by, f"the {self.name} refuses to {request.method}")
            self._fail(request, self._counted(f"the {self.name} refuses to {request.method}"))
        elif trouble is None:
            self._perform(request)
        else:
            self.ledger.trouble(self.ledger.now)
            self._in_trouble(request, trouble)

    def _in_bad_weather(self, request: Request[Any]) -> None:
        if self.weather is Weather.DOWN:
            self._fail(request, self._unreachable(f"the {self.name} is down"))
            return
        self._doubt(request, "is not answered")
        self._parked.append(request)
        if self.weather is Weather.DEADLINE or request.method == "receive":
            self._give_up(request)

    def _give_up(self, request: Request[Any]) -> None:
        """Let the adapter end a call that is not answered in time."""
        error = self._unreachable(f"the {self.name} did not answer")
        self._later(ADAPTERS_WAIT_SECONDS, lambda: self._answer(request, error=error))

    def _in_trouble(self, request: Request[Any], trouble: Trouble) -> None:
        match trouble:
            case Trouble.UNREACHABLE:
                self._fail(request, self._unreachable(f"the {self.name} closed the connection"))
            case Trouble.COUNTED:
                self.ledger.blame([*request.origins, *request.needed_by], f"{request.method} is refused")
                self._fail(request, self._counted(f"the {self.name} refuses"))
            case Trouble.FOREIGN:
                self.ledger.blame([*request.origins, *request.needed_by], f"{request.method} fails in its driver")
                self._fail(request, OSError(f"the driver of the {self.name} failed"))
            case Trouble.CANCELLED:
                self._doubt(request, "is cancelled by nobody")
                self._fail(request, asyncio.CancelledError())
            case Trouble.LOST_ANSWER:
                self._doubt(request, "loses its answer")
                if request.undo is None:
                    self._perform(request, lost=True)
                else:  # an adapter that reports an error has left nothing behind
                    self._fail(request, self._unreachable(f"the {self.name} closed the connection"))
            case Trouble.SILENT | Trouble.DEAF | Trouble.LATE:
                if request.method == "receive" or (request.method in OF_RECEIVERS and trouble is Trouble.DEAF):
                    self._give_up(request)
                self._answer_late(request, never=trouble is not Trouble.LATE)
            case Trouble.MISCOUNTED:
                self._perform(request, miscounted=True)

    def _answer_late(self, request: Request[Any], *, never: bool) -> None:
        chance = self.plan.chance
        late = ANSWERS_WITHIN_SECONDS if never else chance.uniform(0.1, 60)
        self.ledger.trouble(self.ledger.now + min(late, ANSWERS_WITHIN_SECONDS))
        if late > LATE_IN_DOUBT_SECONDS:
            self._doubt(request, "is not answered" if never else "is answered late")
        if not never:
            self._later(late, lambda: self._perform(request))
        elif request.method != "receive" and chance.random() < 0.5:  # it takes effect all the same
            self._later(chance.uniform(1, 200), lambda: self._perform(request))

    def _perform(self, request: Request[Any], *, lost: bool = False, miscounted: bool = False) -> None:
        """Let the request take effect; then the answer is on its way."""
        try:
            result = request.effect()
        except PostdateError as error:
            self._answer_soon(request, error=error)
            return
        except Exception as error:  # noqa: BLE001 - raised at the end of the run, as the loop does not tell
            self.ledger.breaks_down(error)
            return
        if lost:
            self._fail(request, self._unreachable(f"the {self.name} closed the connection"))
        elif result is not NOT_YET:
            if miscounted and request.method == "send":
                self._doubt(request, "is answered for fewer messages")
                self.ledger.blame(request.origins, "the answer was wrong")
                result = result[1:]
            self._answer_soon(request, result)

    def _fail(self, request: Request[Any], error: BaseException) -> None:
        self._answer_soon(request, error=error)

    def _answer_soon(self, request: Request[Any], result: Any = None, error: BaseException | None = None) -> None:
        self._later(self.plan.latency(), lambda: self._answer(request, result, error))

    def _answer(self, request: Request[Any], result: Any = None, error: BaseException | None = None) -> None:
        if request.future.done():
            if error is None and request.undo is not None and result:
                request.undo(result)
        elif isinstance(error, asyncio.CancelledError):
            request.future.cancel()
        elif error is not None:
            request.future.set_exception(error)
        else:
            request.future.set_result(result)

    def answer_receive(self, request: Request[Sequence[Received]], received: Sequence[Received]) -> bool:
        """Answer a receive that waited; return whether somebody still wants it."""
        if request.future.done():
            return False
        if not received:
            self._fail(request, self._unreachable(f"the {self.name} closed the connection"))
        else:
            self._answer_soon(request, received)
        return True

    def _later(self, seconds: float, call: Callable[[], object]) -> None:
        SERVER.run(asyncio.get_running_loop().call_later, seconds, call)


NOT_YET: Final = object()
"""The result of a request that is answered when there is something to answer."""


def _shown(origins: Sequence[str]) -> str:
    return f" ({', '.join(origins[:6])})" if origins else ""


def _happens(trouble: Trouble | None) -> str:
    return "" if trouble is None else f": {trouble.value}"


class Connection:
    """What one life of a process has to do with a server.

    Args:
        server: where its calls go.
        session: of the process there.
    """

    def __init__(self, server: Server, session: SiteSession) -> None:
        self.server, self.session, self.site = server, session, server.site
        self._open: dict[Request[Any], None] = {}

    async def call(
        self,
        method: str,
        effect: Callable[[], T],
        origins: Sequence[str] = (),
        undo: Callable[[T], object] | None = None,
        about: Sequence[Claim] = (),
        needed_by: Sequence[str] = (),
    ) -> T:
        """Make a call and wait for its answer."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        request = Request(method, self._unless_dead(effect), future, origins, undo, life=self.session.life)
        request.about = [origin_of_row(claim.message) for claim in about]
        request.needed_by = needed_by
        return await self.wait(request)

    def _unless_dead(self, effect: Callable[[], T]) -> Callable[[], T]:
        def checked() -> T:
            if not self.session.is_alive:
                raise StoreUnreachable("the process has ended")
            return effect()

        return checked

    async def wait(self, request: Request[T]) -> T:
        """Send a request and wait for its answer."""
        if self.server.is_over:
            raise StoreUnreachable("the run is over")
        self._open[request] = None
        try:
            if self.server.begin(request) is Trouble.DEAF:
                return await _deaf(request.future, lambda: self.server.is_over)
            return await request.future
        except asyncio.CancelledError:
            self._doubt(request, "was not waited for")
            raise
        except Exception:
            if request.method == "commit":  # what was stored or sent before it may be so again
                self._doubt(request, "failed")
            raise
        finally:
            del self._open[request]

    def die(self) -> None:
        """Leave every request that is on its way in doubt."""
        for request in self._open:
            self._doubt(request, "was on its way when it died")

    def _doubt(self, request: Request[Any], why: str) -> None:
        if request.origins and not request.is_in_doubt:
            request.is_in_doubt = True
            self.server.ledger.doubt(request.origins, f"{request.method} of {request.life} {why}")


async def _deaf(future: asyncio.Future[T], is_over: Callable[[], bool]) -> T:
    """Wait for an answer and for nothing else, as a thread in a blocked read does."""
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                if is_over():
                    raise
    return future.result()
