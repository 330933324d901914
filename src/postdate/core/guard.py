"""Guards the calls of ports: foreign errors become a ``PostdateError``, and calls that do not answer are left behind.

An adapter of a user may raise anything, and may never return. To the core both are outages: logged, counted by the
breaker, tried again; they neither end the service nor hold it up. Source: ADR 0019.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import anyio

from postdate.clock import Clock, in_real_time
from postdate.core.left_behind import leave_behind
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
_Errors = tuple[type[PostdateError], type[PostdateError]]
_OF_STORES: _Errors = (StoreUnavailable, StoreUnreachable)
_OF_TRANSPORTS: _Errors = (TransportUnavailable, TransportUnreachable)

log = logging.getLogger("postdate.adapters")

_said = WeakKeyDictionary[object, set[str]]()
_said_by_others = set[str]()


@contextmanager
def calling_store(store: object) -> Generator[None]:
    """Turn an exception of a store that is no ``PostdateError`` into ``StoreUnavailable`` or ``StoreUnreachable``."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - all of it is raised again
        _raise_ours(store, error, _OF_STORES)


@contextmanager
def calling_transport(transport: object) -> Generator[None]:
    """Turn an exception that is no ``PostdateError`` into ``TransportUnavailable`` or ``TransportUnreachable``."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - all of it is raised again
        _raise_ours(transport, error, _OF_TRANSPORTS)


def raise_of_transport(transport: object, error: BaseException) -> NoReturn:
    """Raise an error of a transport or receiver as :func:`calling_transport` does."""
    _raise_ours(transport, error, _OF_TRANSPORTS)


def _raise_ours(adapter: object, error: BaseException, errors: _Errors) -> NoReturn:
    """Raise an error translated; a cancellation that was not asked for here is an error of the adapter."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if anyio.current_effective_deadline() == -math.inf or (task is not None and task.cancelling()):
            raise error
    elif isinstance(error, PostdateError) or not isinstance(error, Exception):
        raise error
    raise _ours(adapter, error, errors) from error


def _ours(adapter: object, error: BaseException, errors: _Errors) -> PostdateError:
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

    def __init__(self, adapter: object, clock: Clock, errors: _Errors, answers_within: timedelta) -> None:
        self._adapter, self._clock, self._errors = adapter, clock, errors
        self._answers_within, self._letting_go, self._grace = (
            in_real_time(clock, each) for each in (answers_within, LETTING_GO, GRACE)
        )
        self._said = answers_within
        self._calls: dict[GuardedCall[Any], asyncio.Task[None]] = {}
        self._hurries, self._hurries_since, self._silent_at = False, 0.0, -math.inf

    @classmethod
    def of_store(cls, store: object, clock: Clock, answers_within: timedelta = ANSWERS_WITHIN) -> Guard:
        return cls(store, clock, _OF_STORES, answers_within)

    @classmethod
    def of_transport(cls, transport: object, clock: Clock, answers_within: timedelta = ANSWERS_WITHIN) -> Guard:
        """Return the guard of a transport or a receiver."""
        return cls(transport, clock, _OF_TRANSPORTS, answers_within)

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
            if call.results and anyio.current_effective_deadline() == -math.inf:
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
            _raise_ours(self._adapter, call.error, self._errors)
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
