"""Deadlines for the calls of an adapter, and the translation of its errors to errors of Postdate.

An adapter of a user may raise any error and may never return. The core treats both as outages: they are logged, counted
by the circuit breaker, and retried. They neither end the service nor block it. Source: ADR 49.

A loop has one :class:`Deadlines` for each adapter that it calls. There are two ways to make a call:

- :meth:`Deadlines.call_in_task` makes the call in a separate task. A call that does not end after its cancellation is
  *abandoned*: its task goes on alone, and its late result goes to a callback. Used for stores and for sends of due
  messages.
- :meth:`Deadlines.call` makes the call in the task of the caller. It costs a thirtieth, but a call that does not end
  blocks its caller. Used for calls that are made for each received message.

:func:`translate_store_errors` is for calls without a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Generic, NamedTuple, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import anyio

from postdate.clock import Clock, in_real_time, time_until
from postdate.core.recoverability import text_of
from postdate.errors import (
    PostdateError,
    StoreUnavailable,
    StoreUnreachable,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.runtime.cancellation import is_cancelled, is_scope_cancelled

CALL_DEADLINE: Final = timedelta(seconds=40)
"""The usual deadline of a call. Adapters of Postdate have shorter ones at their connections.

Only the connection can end a blocked read.
"""

STOP_DEADLINE: Final = timedelta(seconds=5)
"""The deadline of calls while the service stops. A call whose caller is cancelled has the same time to end."""

GRACE: Final = timedelta(seconds=1)
"""The time that a call has to end after it was cancelled at its deadline."""

_NO_ANSWER: Final = (ConnectionError, TimeoutError, asyncio.CancelledError)
"""Errors after which it is unknown whether the call took effect."""

_REMEMBERED_FAILURES: Final = 100
"""The number of different failures of an adapter that are logged with a traceback only once.

After more different ones, all are logged again.
"""

T = TypeVar("T")

log = logging.getLogger("postdate.adapters")


# --- translation of errors --------------------------------------------------------------------------------------------


class _Errors(NamedTuple):
    """The errors of Postdate that replace foreign errors of one kind of adapter."""

    unavailable: type[PostdateError]
    """The adapter refused the call."""
    unreachable: type[PostdateError]
    """The adapter did not answer, so the call may have taken effect."""


_STORE_ERRORS: Final = _Errors(StoreUnavailable, StoreUnreachable)
_TRANSPORT_ERRORS: Final = _Errors(TransportUnavailable, TransportUnreachable)

_logged_failures = WeakKeyDictionary[object, set[str]]()
"""The failures that were logged with their traceback, by adapter. The callers of one adapter share them."""

_logged_foreign_failures = set[str]()
"""The same for adapters that cannot be weak keys."""


@contextmanager
def translate_store_errors(store: object) -> Generator[None]:
    """Turn errors of a store that are no ``PostdateError`` into ``StoreUnavailable`` or ``StoreUnreachable``."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - raised again
        _raise_translated(store, error, _STORE_ERRORS)


def _raise_translated(adapter: object, error: BaseException, errors: _Errors) -> NoReturn:
    """Raise the error of a call; a foreign error is translated.

    A cancellation is foreign if this task is not being cancelled: then it comes from a task or scope inside the
    adapter. If it were raised as it is, it would end the loop that made the call, without any message.
    """
    is_foreign = isinstance(error, Exception) and not isinstance(error, PostdateError)
    if is_foreign or (isinstance(error, asyncio.CancelledError) and not is_cancelled()):
        raise _translate(adapter, error, errors) from error
    raise error


def _translate(adapter: object, error: BaseException, errors: _Errors) -> PostdateError:
    """Return the error of Postdate for a foreign one; log its traceback, once for each adapter and text."""
    text = f"{type(adapter).__name__} failed with {type(error).__name__}: {text_of(error)}"
    try:
        logged = _logged_failures.setdefault(adapter, set())
    except TypeError:
        logged = _logged_foreign_failures
    if text not in logged:  # callers treat it as an outage, and log that without a traceback
        log.error(text, exc_info=error)
        if len(logged) >= _REMEMBERED_FAILURES:
            logged.clear()
        logged.add(text)
    return (errors.unreachable if isinstance(error, _NO_ANSWER) else errors.unavailable)(text)


# --- calls that can be abandoned --------------------------------------------------------------------------------------


_abandoned = set[asyncio.Task[None]]()
"""Tasks of abandoned calls that have not ended.

The event loop keeps only weak references to tasks, so without this set a task could be garbage-collected while it runs.
"""


def count_abandoned_calls() -> int:
    """Return how many abandoned calls of this process have not ended.

    The threads of such calls would block an ordinary end of the process.
    """
    return len(_abandoned)


class SeparateCall(Generic[T]):
    """A call that starts at once in a separate task, so that it can be abandoned.

    Use it in the event loop that made it. Cancel scopes of anyio around the caller do not cancel the task: it ends by
    itself, or by :meth:`cancel`.
    """

    def __init__(self, start_call: Callable[[], Awaitable[T]]) -> None:
        self.ended = anyio.Event()
        """Set when the call has a result or an error."""
        self.attention = anyio.Event()
        """Set when the call has ended, and when the deadline has changed, so that the caller reads it again."""
        self._start_call = start_call
        # A scope and not Task.cancel(): that would also interrupt calls that an adapter shields, such as its threads.
        self._scope = anyio.CancelScope()
        self._results: list[T] = []  # empty or one element: a list, as the result may be None
        self.error: BaseException | None = None
        """The error of the call; ``None``: it has a result, has not ended, or was cancelled by this object."""
        self._is_abandoned = False
        # Called with the result of an abandoned call.
        self._on_late_result: Callable[[T], Awaitable[None]] | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            with self._scope:
                self._results.append(await self._start_call())
        except BaseException as error:
            self.error = error  # for the caller
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
        finally:
            self.ended.set()
            self.attention.set()
        if self._is_abandoned:
            await self._handle_late_result()

    @property
    def has_result(self) -> bool:
        return bool(self._results)

    def result(self) -> T:
        """Return the result. Only if :attr:`has_result`."""
        return self._results[0]

    def cancel(self) -> None:
        self._scope.cancel()

    def abandon(self, on_late_result: Callable[[T], Awaitable[None]] | None = None) -> None:
        """Let the call go on alone. ``on_late_result`` is called with its result; a failure is logged."""
        self._is_abandoned, self._on_late_result = True, on_late_result
        task = self._task
        if self.ended.is_set():  # `_run` is over, so a new task must pass on the result
            task = asyncio.get_running_loop().create_task(self._handle_late_result())
        _abandoned.add(task)
        task.add_done_callback(_abandoned.discard)

    async def _handle_late_result(self) -> None:
        try:
            if self._results and self._on_late_result is not None:
                await self._on_late_result(self._results[0])
        except Exception as error:  # noqa: BLE001 - no caller waits for this task
            log.warning("the late result of an abandoned call could not be dealt with: %s", text_of(error))
        if isinstance(self.error, Exception):
            log.warning("an abandoned call failed: %s", text_of(self.error))


# --- deadlines --------------------------------------------------------------------------------------------------------


class Deadlines:
    """The deadlines of the calls that one loop makes to one adapter. Use it in one event loop only.

    Deadlines are in real time, also with a scaled clock: a scaled clock does not make a network faster.

    A service that stops calls :meth:`shorten`. After that, the first unanswered call is the last call that is made. So
    stopping waits for a silent adapter once, and not once for each call.
    """

    def __init__(self, adapter: object, clock: Clock, errors: _Errors, deadline: timedelta) -> None:
        self._adapter = adapter
        self._clock = clock
        self._monotonic = clock.monotonic  # bound once: `call` reads it for each message
        self._errors = errors
        self._deadline = deadline
        # The deadline that is in force, in real time: `_deadline`, or a shorter one.
        self._limit = deadline
        self._is_short = False
        # Monotonic seconds at which deadlines were shortened; -inf while they are not short.
        self._short_since = -math.inf
        # Monotonic seconds at which a call last showed that the adapter is silent: the call was not answered within a
        # short deadline, or did not end when it was cancelled.
        self._silent_at = -math.inf
        # Calls by `call_in_task` whose caller still waits.
        self._separate_calls = set[SeparateCall[Any]]()
        # Calls by `call`: the task of each, and the monotonic seconds at which it began. The oldest is the first, as a
        # task makes one call at a time.
        self._start_times: dict[asyncio.Task[Any], float] = {}
        # Tasks whose call was cancelled by `cancel_overdue_calls`, until that call ends.
        self._overdue_tasks = set[asyncio.Task[Any]]()
        # Whether `cancel_overdue_calls` waits for the next call, without a timer.
        self._is_idle = True
        # Wakes `cancel_overdue_calls`.
        self._attention = anyio.Event()

    @classmethod
    def of_store(cls, store: object, clock: Clock, deadline: timedelta = CALL_DEADLINE) -> Deadlines:
        return cls(store, clock, _STORE_ERRORS, deadline)

    @classmethod
    def of_transport(cls, transport: object, clock: Clock, deadline: timedelta = CALL_DEADLINE) -> Deadlines:
        """Return deadlines of a transport, or of a receiver."""
        return cls(transport, clock, _TRANSPORT_ERRORS, deadline)

    # --- when the service stops -------------------------------------------------------------------------------------

    def shorten(self) -> None:
        """Shorten all deadlines to :data:`STOP_DEADLINE`; for calls that have begun it counts from now."""
        if self._is_short:
            return
        self._is_short, self._short_since = True, self._monotonic()
        self._limit = min(self._deadline, STOP_DEADLINE)
        self._attention.set()
        for call in self._separate_calls:
            call.attention.set()

    def restore(self) -> None:
        """Undo :meth:`shorten`, when the loop begins again."""
        self._is_short, self._short_since = False, -math.inf
        self._limit = self._deadline

    def _is_silent(self) -> bool:
        """Return whether deadlines are short, and the adapter was silent since then or just before."""
        return self._is_short and self._silent_at >= self._short_since - self._seconds(STOP_DEADLINE)

    # --- calls in a separate task -----------------------------------------------------------------------------------

    async def call_in_task(
        self, start_call: Callable[[], Awaitable[T]], on_late_result: Callable[[T], Awaitable[None]] | None = None
    ) -> T:
        """Make a call and return its result.

        A call without an answer at its deadline is cancelled; if that does not end it, it is abandoned. If the caller
        is cancelled, this cancels the call and waits for its end, at most for :data:`STOP_DEADLINE`. If the call ends
        with a result then, the result is returned and the caller is cancelled at its next wait. So the caller knows,
        for example, which claims it has.

        Args:
            start_call: makes the call.
            on_late_result: called with a result that the caller cannot get any more. An error that it raises is logged.

        Raises:
            StoreUnreachable, TransportUnreachable: no answer in time.
            StoreUnavailable, TransportUnavailable: the call failed with an error that is no ``PostdateError``.
        """
        if self._is_silent():
            raise self._no_answer_error(self._adapter)
        call = SeparateCall(start_call)
        self._separate_calls.add(call)
        try:
            await self._wait_until_deadline(call)
        except BaseException:  # the caller is cancelled
            await self._cancel_call(call, STOP_DEADLINE, on_late_result)
            if call.has_result and is_scope_cancelled():
                return call.result()
            if call.has_result and on_late_result is not None:
                # asyncio's own cancellation is not raised a second time, so the caller cannot get the result.
                call.abandon(on_late_result)
            raise
        finally:
            self._separate_calls.discard(call)
        if not call.ended.is_set():
            await self._cancel_call(call, GRACE, on_late_result)
            if not call.has_result:
                if self._is_short:
                    self._silent_at = self._monotonic()
                raise self._no_answer_error(self._adapter)
        if isinstance(call.error, asyncio.CancelledError):  # the adapter cancelled it: no other code knows this task
            raise _translate(self._adapter, call.error, self._errors) from call.error
        if call.error is not None:
            self.raise_translated(call.error)
        return call.result()

    async def _wait_until_deadline(self, call: SeparateCall[Any]) -> None:
        limit = self._limit
        await self._clock.wait_for(call.attention, in_real_time(self._clock, limit))
        if self._limit < limit and not call.ended.is_set():  # deadlines were shortened meanwhile
            await self._clock.wait_for(call.ended, in_real_time(self._clock, self._limit))

    async def _cancel_call(
        self, call: SeparateCall[T], grace: timedelta, on_late_result: Callable[[T], Awaitable[None]] | None
    ) -> None:
        """Cancel a call and wait for its end; abandon it if that does not come within ``grace``."""
        call.cancel()
        try:
            with anyio.CancelScope(shield=True):
                await self._clock.wait_for(call.ended, in_real_time(self._clock, grace))
        finally:
            if not call.ended.is_set():
                call.abandon(on_late_result)
                self._silent_at = self._monotonic()

    # --- calls in the task of their caller --------------------------------------------------------------------------

    async def call(self, awaitable: Awaitable[T], adapter: object | None = None) -> T:
        """Await a call and return its result. A task makes one such call at a time.

        A cancel scope of anyio, or a task, for each call would cost an eighth of handling a message (ADR 49). So this
        only remembers when the call began, and :meth:`cancel_overdue_calls`, which must be running, cancels the task of
        the caller at the deadline.

        Args:
            awaitable: the call.
            adapter: the adapter that is called, if it is another one of the same technology: the transport of a
                receiver.

        Raises:
            StoreUnreachable, TransportUnreachable: no answer in time.
            StoreUnavailable, TransportUnavailable: the call failed with an error that is no ``PostdateError``.
        """
        if self._is_short and self._is_silent():
            if isinstance(awaitable, Coroutine):
                awaitable.close()  # or Python would warn that it was never awaited
            raise self._no_answer_error(self._adapter if adapter is None else adapter)
        task = asyncio.current_task()
        assert task is not None
        self._start_times[task] = self._monotonic()
        if self._is_idle:
            self._is_idle = False
            self._attention.set()
        try:
            return await awaitable
        except BaseException as error:  # noqa: BLE001 - raised again
            adapter = self._adapter if adapter is None else adapter
            if task in self._overdue_tasks and _is_cancelled_once(task, error):
                if self._is_short:
                    self._silent_at = self._monotonic()
                raise self._no_answer_error(adapter) from None
            _raise_translated(adapter, error, self._errors)
        finally:
            del self._start_times[task]
            if task in self._overdue_tasks:
                # Undo the cancellation by `cancel_overdue_calls`, however the call ended: it must not hit the next step
                # of this task.
                self._overdue_tasks.discard(task)
                task.uncancel()

    async def cancel_overdue_calls(self) -> None:
        """Cancel calls by :meth:`call` at their deadlines, until this method itself is cancelled."""
        while True:
            self._attention = anyio.Event()
            oldest_start = next(
                (started_at for task, started_at in self._start_times.items() if task not in self._overdue_tasks), None
            )
            if oldest_start is None:
                self._is_idle = True
                await self._attention.wait()
                continue
            await self._clock.wait_for(self._attention, time_until(self._deadline_of(oldest_start), self._monotonic()))
            now = self._monotonic()
            for task, begin in list(self._start_times.items()):
                if self._deadline_of(begin) > now:
                    break
                if task not in self._overdue_tasks:
                    self._overdue_tasks.add(task)
                    task.cancel()

    def count_overdue_calls(self) -> int:
        """Return how many calls by :meth:`call` have not ended although their deadline is over.

        It compares times, and does not count the tasks that :meth:`cancel_overdue_calls` has cancelled:
        `cancel_overdue_calls` ends with the loop, and these calls may outlive it.
        """
        now = self._monotonic()
        return sum(self._deadline_of(begin) <= now for begin in self._start_times.values())

    def _deadline_of(self, started_at: float) -> float:
        """Return the deadline, in monotonic seconds, of a call that began at ``started_at``."""
        return max(started_at, self._short_since) + self._seconds(self._limit)

    def _seconds(self, duration: timedelta) -> float:
        """Return the seconds of the clock that pass in a ``duration`` of real time."""
        return in_real_time(self._clock, duration).total_seconds()

    # --- errors -----------------------------------------------------------------------------------------------------

    def translate_error(self, error: Exception) -> PostdateError:
        """Return an error of the adapter, translated if it is foreign."""
        return error if isinstance(error, PostdateError) else _translate(self._adapter, error, self._errors)

    def raise_translated(self, error: BaseException) -> NoReturn:
        """Raise an error of the adapter, translated if it is foreign or a stray cancellation."""
        _raise_translated(self._adapter, error, self._errors)

    def _no_answer_error(self, adapter: object) -> PostdateError:
        text = f"{type(adapter).__name__} did not answer within {self._limit.total_seconds():g} s"
        return self._errors.unreachable(text)


def _is_cancelled_once(task: asyncio.Task[Any], error: BaseException) -> bool:
    """Return whether an error is a single cancellation of the task, as by `Deadlines`, and not one by a scope."""
    return isinstance(error, asyncio.CancelledError) and task.cancelling() <= 1 and not is_scope_cancelled()
