"""Guards the calls of ports: foreign errors become a ``PostdateError``, and calls that do not answer are left behind.

An adapter of a user may raise anything, and may never return. To the core both are outages: logged, counted by the
breaker, tried again; they neither end the service nor hold it up. Source: ADR 0019.

Calls of a store, and sends of what is due, are made by a :class:`Guard`, each in a task of its own. Calls for each
message that is received go through a :class:`CallWatch`, of the receiver's wrapper. :func:`calling_store` translates
what is called without either: it makes no call, or its caller waits for it as long as it takes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import anyio

from postdate.clock import Clock, in_real_time, time_left
from postdate.core.recoverability import text_of
from postdate.errors import (
    PostdateError,
    StoreUnavailable,
    StoreUnreachable,
    TransportUnavailable,
    TransportUnreachable,
)

ANSWERS_WITHIN = timedelta(seconds=40)
"""For every call. Our adapters have deadlines of their own, at the connection and shorter: only they can end a read."""

LETTING_GO = timedelta(seconds=5)
"""When the service stops, calls get so long to be answered; and calls that are cancelled, to end."""

GRACE = timedelta(seconds=1)
"""How long a call that was cancelled at its deadline gets to end."""

_NO_ANSWER = (ConnectionError, TimeoutError, asyncio.CancelledError)
"""Errors that leave open what became of a call."""

_SAID = 100
"""Failures of an adapter that are logged once with their traceback; with more different ones all are logged anew."""

T = TypeVar("T")

Errors: TypeAlias = tuple[type[PostdateError], type[PostdateError]]
"""What the errors of an adapter become that are none of ours: it cannot do something; it has not answered."""

OF_STORES: Errors = (StoreUnavailable, StoreUnreachable)
OF_TRANSPORTS: Errors = (TransportUnavailable, TransportUnreachable)

log = logging.getLogger("postdate.adapters")

_said = WeakKeyDictionary[object, set[str]]()
_said_by_others = set[str]()


@contextmanager
def calling_store(store: object) -> Generator[None]:
    """Turn an exception of a store that is no ``PostdateError`` into ``StoreUnavailable`` or ``StoreUnreachable``."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - all of it is raised again
        raise_ours(store, error, OF_STORES)


def is_ending() -> bool:
    """Return whether a scope of anyio around this is being cancelled."""
    return anyio.current_effective_deadline() == -math.inf


def cancelled_task() -> asyncio.Task[object] | None:
    """Return this task if it was cancelled by asyncio's own means, also where nothing has raised that yet."""
    task = asyncio.current_task()
    return task if task is not None and task.cancelling() else None


def is_being_cancelled() -> bool:
    """Return whether this task is being cancelled: through anyio, or by asyncio's own means."""
    return is_ending() or cancelled_task() is not None


def raise_ours(adapter: object, error: BaseException, errors: Errors) -> NoReturn:
    """Raise an error translated; a cancellation that was not asked for here is an error of the adapter."""
    is_foreign = isinstance(error, Exception) and not isinstance(error, PostdateError)
    if not (is_foreign or (isinstance(error, asyncio.CancelledError) and not is_being_cancelled())):
        raise error
    raise _ours(adapter, error, errors) from error


def ours(adapter: object, error: Exception, errors: Errors) -> PostdateError:
    """Return an error, translated where it is none of ours."""
    return error if isinstance(error, PostdateError) else _ours(adapter, error, errors)


def _ours(adapter: object, error: BaseException, errors: Errors) -> PostdateError:
    unavailable, unreachable = errors
    text = f"{type(adapter).__name__} failed with {type(error).__name__}: {text_of(error)}"
    said = _said_of(adapter)
    if text not in said:  # once, with its traceback: from here on it is an outage like any other
        log.error(text, exc_info=error)
        if len(said) >= _SAID:
            said.clear()
        said.add(text)
    return (unreachable if isinstance(error, _NO_ANSWER) else unavailable)(text)


def _said_of(adapter: object) -> set[str]:
    try:
        return _said.setdefault(adapter, set())
    except TypeError:  # an adapter that cannot be a key: these share one set
        return _said_by_others


_left_behind = set[asyncio.Task[Any]]()
"""Calls that were given up and do not end: held here, or they would be garbage-collected."""


def leave_behind(task: asyncio.Task[Any]) -> None:
    """Let a task go on by itself; should it fail at last, that is logged."""
    _left_behind.add(task)
    task.add_done_callback(_ended)


def left_behind() -> int:
    """Return how many such calls of this process have not ended: its ordinary end would wait for their threads."""
    return len(_left_behind)


def _ended(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.warning("a call that nobody waited for any more failed: %s", text_of(error))


class GuardedCall(Generic[T]):
    """One call, in a task of its own, so that it can be left behind."""

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        self._late: Callable[[T], Awaitable[None]] | None = None
        self.scope = anyio.CancelScope()
        self.over, self.told = anyio.Event(), anyio.Event()
        """``over``: the call has ended. ``told``: it has ended, or its caller is to look at the deadline again."""
        self.results: list[T] = []
        self.error: BaseException | None = None
        self.is_left = False

    async def run(self) -> None:
        try:
            with self.scope:
                self.results.append(await self._call())
        except BaseException as error:
            self.error = error  # its caller raises it
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
        finally:
            self.over.set()
            self.told.set()
        if self.is_left:
            await self.come_late()

    def leave(self, late: Callable[[T], Awaitable[None]] | None) -> None:
        """Note that the caller has given up; ``late`` gets the result."""
        self.is_left, self._late = True, late

    async def come_late(self) -> None:
        """Hand a late result to ``late``, or log the failure."""
        try:
            if self.results and self._late is not None:
                await self._late(self.results[0])
        except PostdateError as error:
            log.warning("what a late answer brought could not be dealt with: %s", error)
        if self.error is not None:
            log.warning("a call that nobody waited for any more failed: %s", text_of(self.error))


class Guard:
    """Makes the calls of one adapter, each with a deadline in real time, also on a scaled clock. For one event loop.

    A call that has no answer by then is cancelled. If it does not end, it is left behind: its task goes on by itself,
    and its result goes to ``late``.
    """

    def __init__(self, adapter: object, clock: Clock, errors: Errors, answers_within: timedelta) -> None:
        self._adapter, self._clock, self._errors = adapter, clock, errors
        self._answers_within, self._letting_go, self._grace = (
            in_real_time(clock, each) for each in (answers_within, LETTING_GO, GRACE)
        )
        self._said = answers_within
        self._calls: dict[GuardedCall[Any], asyncio.Task[None]] = {}
        self._hurries, self._hurries_since, self._silent_at = False, 0.0, -math.inf

    @classmethod
    def of_store(cls, store: object, clock: Clock, answers_within: timedelta = ANSWERS_WITHIN) -> Guard:
        return cls(store, clock, OF_STORES, answers_within)

    @classmethod
    def of_transport(cls, transport: object, clock: Clock, answers_within: timedelta = ANSWERS_WITHIN) -> Guard:
        """Return the guard of a transport or a receiver."""
        return cls(transport, clock, OF_TRANSPORTS, answers_within)

    def hurry(self, *, hurries: bool = True) -> None:
        """Shorten all deadlines to :data:`LETTING_GO`, as the service stops; ``False``: it begins again.

        Once a call has not been answered, at the stop or just before, none is made any more.
        """
        self._hurries, self._hurries_since = hurries, self._clock.monotonic()
        if hurries:
            for call in self._calls:
                call.told.set()

    async def call(self, make: Callable[[], Awaitable[T]], late: Callable[[T], Awaitable[None]] | None = None) -> T:
        """Make a call and return its result; one that comes after the call was left behind goes to ``late``.

        A caller that is cancelled waits for the end of the call; a result that was on its way is returned.

        Raises:
            StoreUnreachable, TransportUnreachable: no answer in time.
            StoreUnavailable, TransportUnavailable: it failed with an error that is no ``PostdateError``.
        """
        if self._hurries and self._silent_at >= self._hurries_since - self._letting_go.total_seconds():
            raise self._no_answer(LETTING_GO)
        call = GuardedCall[T](make)
        task = asyncio.get_running_loop().create_task(call.run())
        self._calls[call] = task
        try:
            waited = await self._wait(call)
        except BaseException:
            await self._end(call, task, self._letting_go, late)
            if call.results and is_ending():
                return call.results[0]  # the next wait ends the caller, who knows by then what it has
            if call.results and late is not None:  # cancelled by asyncio's own means
                call.leave(late)
                leave_behind(asyncio.get_running_loop().create_task(call.come_late()))
            raise
        finally:
            del self._calls[call]
        if not call.over.is_set():
            await self._end(call, task, self._grace, late)
            if not call.results:
                raise self._no_answer(waited)
        if call.error is not None:
            if isinstance(call.error, asyncio.CancelledError):
                raise _ours(self._adapter, call.error, self._errors) from call.error
            raise_ours(self._adapter, call.error, self._errors)
        return call.results[0]

    async def _wait(self, call: GuardedCall[T]) -> timedelta:
        """Wait for the end of a call, or its deadline, which is returned."""
        if not self._hurries:
            await self._clock.wait_for(call.told, self._answers_within)
        if not self._hurries:
            return self._said
        await self._clock.wait_for(call.over, self._letting_go)
        return LETTING_GO

    async def _end(
        self,
        call: GuardedCall[T],
        task: asyncio.Task[None],
        grace: timedelta,
        late: Callable[[T], Awaitable[None]] | None,
    ) -> None:
        call.scope.cancel()
        try:
            with anyio.CancelScope(shield=True):
                await self._clock.wait_for(call.over, grace)
        finally:
            if not call.over.is_set():
                call.leave(late)
                leave_behind(task)
                self._silent_at = self._clock.monotonic()

    def _no_answer(self, waited: timedelta) -> PostdateError:
        return self._errors[1](f"{type(self._adapter).__name__} did not answer within {waited.total_seconds():g} s")


class CallWatch:
    """Gives deadlines to calls, without a task or a scope for each.

    A call that is not answered in time is cancelled, as far as it lets itself be; foreign errors are translated. A task
    makes one call at a time. A scope around each call costs an eighth of handling a message: so calls are noted, and
    one task watches all of them.
    """

    def __init__(self, clock: Clock, answers_within: timedelta = ANSWERS_WITHIN) -> None:
        self._clock, self._monotonic, self._said = clock, clock.monotonic, answers_within
        self._within = in_real_time(clock, answers_within).total_seconds()
        self._letting_go = in_real_time(clock, LETTING_GO).total_seconds()
        self._grace = in_real_time(clock, GRACE)
        self._begun: dict[asyncio.Task[object] | None, float] = {}  # in order: the oldest is the first
        self._overdue = set[asyncio.Task[object] | None]()
        self._is_idle = True
        self._one_began, self._look = anyio.Event(), anyio.Event()

    @property
    def overdue(self) -> int:
        """Calls that were cancelled at their deadline and go on nevertheless."""
        return len(self._overdue)

    async def call(self, making: Awaitable[T], adapter: object, errors: Errors) -> T:
        """Await ``making``; raise one of ``errors`` if ``adapter`` does not answer in time, or fails in its own way."""
        task = asyncio.current_task()
        self._begun[task] = self._monotonic()
        if self._is_idle:
            self._is_idle = False
            self._one_began.set()
        try:
            return await making
        except BaseException as error:  # noqa: BLE001 - all of it is raised again
            is_cancelled = isinstance(error, asyncio.CancelledError) and not is_ending()
            if is_cancelled and task is not None and task in self._overdue and task.cancelling() <= 1:  # by nobody else
                text = f"{type(adapter).__name__} did not answer within {self._said.total_seconds():g} s"
                raise errors[1](text) from None
            raise_ours(adapter, error, errors)
        finally:
            del self._begun[task]
            if task is not None and task in self._overdue:
                self._overdue.discard(task)
                task.uncancel()  # however the call has ended: what its task does next is not cancelled

    async def call_apart(self, making: Coroutine[Any, Any, T], adapter: object, errors: Errors) -> T:
        """Do the same in a task of its own, which is left behind when it does not end."""
        return await self.call(self._apart(making), adapter, errors)

    async def _apart(self, making: Coroutine[Any, Any, T]) -> T:
        task = asyncio.get_running_loop().create_task(making)
        try:
            return await asyncio.shield(task)
        finally:
            if not task.done():
                over = anyio.Event()
                task.add_done_callback(lambda _: over.set())
                task.cancel()
                with anyio.CancelScope(shield=True):
                    await self._clock.wait_for(over, self._grace)
                if not task.done():
                    leave_behind(task)

    def hurry(self) -> None:
        """Shorten all deadlines to :data:`LETTING_GO`, as the pump stops."""
        if self._within > self._letting_go:
            self._within, self._said = self._letting_go, LETTING_GO
        self._look.set()

    async def run(self) -> None:
        while True:
            if not self._begun:
                self._is_idle, self._one_began = True, anyio.Event()
                await self._one_began.wait()
            self._look = anyio.Event()
            now = self._monotonic()
            first = next((since for task, since in self._begun.items() if task not in self._overdue), now)
            await self._clock.wait_for(self._look, time_left(first + self._within, now))
            now = self._monotonic()
            for task, since in list(self._begun.items()):
                if since + self._within > now:
                    break
                if task is not None and task not in self._overdue:
                    self._overdue.add(task)
                    task.cancel()
