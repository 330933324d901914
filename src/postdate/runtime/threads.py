"""Between threads and an event loop: blocking calls, wake-ups, and group commit.

Blocking calls have threads apart from the event loop's common ones: the application may hold all of those. With group
commit a slow server or disk is asked seldom, for many at once; a quick one at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar, TypeVarTuple, Unpack
from weakref import WeakKeyDictionary

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar, current_token

from postdate.errors import StoreUnreachable
from postdate.runtime.forks import check_process

T = TypeVar("T")
W = TypeVar("W")
Arguments = TypeVarTuple("Arguments")

_AT_ONCE = 32
_LOOK_SECONDS: Final = 0.001
_LIMITER: RunVar[anyio.CapacityLimiter] = RunVar("postdate.runtime.threads")


def our_threads() -> anyio.CapacityLimiter:
    try:
        return _LIMITER.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(_AT_ONCE)
        _LIMITER.set(limiter)
        return limiter


async def in_thread(function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
    """Call a blocking function in one of our threads; a cancelled caller waits for its end."""
    check_process()
    return await to_thread.run_sync(function, *arguments, limiter=our_threads())


class Alarm:
    """Create it in the event loop whose task will wait; ring it from any thread."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._loop = current_token().native_token

    @property
    def event(self) -> anyio.Event:
        """The event that the next ring sets."""
        return self._event

    def ring(self) -> None:
        """Wake the waiting task; without effect once its event loop has ended."""
        soon = getattr(self._loop, "call_soon_threadsafe", None) or self._loop.run_sync_soon  # type: ignore[attr-defined]
        with suppress(RuntimeError):  # asyncio and trio: the loop has ended, nobody waits any more
            soon(self._set)

    def _set(self) -> None:
        self._event.set()

    def reset(self) -> None:
        """Forget earlier rings. Call it before looking for work, so that a ring during the look is kept."""
        if self._event.is_set():
            self._event = anyio.Event()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(slots=True, eq=False)
class Job(Generic[W, T]):
    """A piece of work, in which a result or an error is filled in when it is ``done``."""

    work: W
    result: T | None = None
    error: BaseException | None = None
    done: bool = False

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]


class _Turn(Generic[W, T]):
    """Jobs that are done together. The first waits for ``begin``, to lead; ``end`` wakes all others at once."""

    __slots__ = ("begin", "end", "is_over", "jobs", "lock")

    def __init__(self) -> None:
        self.jobs: list[Job[W, T]] = []
        self.begin, self.end = anyio.Event(), anyio.Event()
        self.lock = threading.Lock()
        """Held by the thread that does the jobs, or by a leader that was cancelled before that began."""
        self.is_over = False
        """Whether that thread has done them."""


_GROUPS: RunVar[WeakKeyDictionary[object, GroupCommit[Any, Any]]] = RunVar("postdate.runtime.threads.groups")


def group_of(owner: object, at_once: int) -> GroupCommit[Any, Any]:
    """Return the group commit of ``owner``, which does the work, in this event loop."""
    try:
        groups = _GROUPS.get()
    except LookupError:
        groups = WeakKeyDictionary[object, GroupCommit[Any, Any]]()
        _GROUPS.set(groups)
    group = groups.get(owner)
    if group is None:
        group = groups[owner] = GroupCommit[Any, Any](at_once)
    return group


async def together(
    owner: object, do: Callable[[Sequence[W]], Sequence[T | Exception]], work: W, at_once: int = 500
) -> T:
    """Have ``do`` do ``work`` with what comes to the group of ``owner`` meanwhile, as :func:`do_jobs` says."""
    return await group_of(owner, at_once).run(lambda jobs: do_jobs(jobs, do), work)


class GroupCommit(Generic[W, T]):
    """Does work that is handed to :meth:`run`, at most ``at_once`` pieces in one call."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._next: _Turn[W, T] | None = None
        self._led = False

    async def run(self, do: Callable[[Sequence[Job[W, T]]], None], work: W) -> T:
        """Have ``work`` done, and return its result or raise its error.

        A caller that is cancelled has it done all the same: half-way it would not know what was committed, or lose what
        was claimed. A task cancelled by asyncio's own means takes back a job that has not begun, and else waits for its
        end. ``do`` is called in a thread, finishes every job it gets, and raises nothing.
        """
        job: Job[W, T] = Job(work)
        with anyio.CancelScope(shield=True):
            while not job.done:
                await self._take_part(do, job)
        return job.outcome()

    async def _take_part(self, do: Callable[[Sequence[Job[W, T]]], None], job: Job[W, T]) -> None:
        turn = self._next
        if turn is None:
            turn = self._next = _Turn()
        turn.jobs.append(job)
        leads = len(turn.jobs) == 1
        try:
            if not leads:
                await turn.end.wait()
            elif self._led:
                await turn.begin.wait()
        except BaseException:  # by asyncio's own means: asyncio.timeout and others
            if turn is self._next:
                self._leave(turn, job)
            else:
                await turn.end.wait()
            raise
        if leads:
            await self._lead(do, turn)

    async def _lead(self, do: Callable[[Sequence[Job[W, T]]], None], turn: _Turn[W, T]) -> None:
        """Do the jobs of a turn, wake their callers, and have the first that came meanwhile lead the next turn."""
        self._led, self._next = True, None
        try:
            await in_thread(Context().run, partial(self._do, do, turn))
        except BaseException:
            # By asyncio's own means a task is cancelled although it waits for a thread.
            if not turn.lock.acquire(blocking=False):
                with anyio.CancelScope(shield=True):
                    while not turn.is_over:
                        with suppress(anyio.get_cancelled_exc_class()):  # again, which changes nothing
                            await anyio.sleep(_LOOK_SECONDS)
            raise
        finally:
            self._led = False
            turn.end.set()
            if self._next is not None:
                self._next.begin.set()

    def _do(self, do: Callable[[Sequence[Job[W, T]]], None], turn: _Turn[W, T]) -> None:
        """Do the jobs in a context of its own: they belong to many callers, and to none of their traces."""
        if not turn.lock.acquire(blocking=False):
            return
        try:
            for start in range(0, len(turn.jobs), self._at_once):
                do(turn.jobs[start : start + self._at_once])
        finally:
            turn.is_over = True

    def _leave(self, turn: _Turn[W, T], job: Job[W, T]) -> None:
        """Take back a job whose turn has not begun; if it was to lead, the others of its turn begin anew."""
        was_first = turn.jobs[0] is job
        turn.jobs.remove(job)
        if was_first:
            self._next = None
            turn.end.set()


def in_parts(works: Sequence[W], do: Callable[[Sequence[W]], Sequence[T]]) -> list[T | Exception]:
    """Do works together; where that fails, each half of them, so that the one to blame is alone in the end.

    ``do`` does all or nothing. :class:`StoreUnreachable` says nothing about any of them, which are then not tried
    again. Returns the result or the error of each.
    """
    try:
        return list(do(works))
    except StoreUnreachable as error:
        return [error] * len(works)
    except Exception as error:  # noqa: BLE001 - told to the one whose fault it is
        if len(works) == 1:
            return [error]
    half = len(works) // 2
    return [*in_parts(works[:half], do), *in_parts(works[half:], do)]


def do_jobs(jobs: Sequence[Job[W, T]], do: Callable[[Sequence[W]], Sequence[T | Exception]]) -> None:
    """Do jobs as :func:`in_parts` does, and fill in what became of each; raises nothing."""
    try:
        results: Sequence[T | BaseException] = in_parts([job.work for job in jobs], do)
    except BaseException as error:  # noqa: BLE001 - handed to each caller, whose thread this is not
        results = [error] * len(jobs)
    for job, each in zip(jobs, results, strict=True):
        if isinstance(each, BaseException):
            job.error = each
        else:
            job.result = each
        job.done = True
