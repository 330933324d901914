"""Cooperation of threads and an event loop: blocking calls, wake-ups, and group commit.

Blocking calls have threads of their own, not the common threads of the event loop, because the application may use all
of those. Group commit sends a slow server or disk few calls, each with the work of many callers. A fast one gets each
call at once.
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
_POLL_SECONDS: Final = 0.001
_LIMITER: RunVar[anyio.CapacityLimiter] = RunVar("postdate.runtime.threads")


def thread_limiter() -> anyio.CapacityLimiter:
    try:
        return _LIMITER.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(_AT_ONCE)
        _LIMITER.set(limiter)
        return limiter


async def run_in_thread(function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
    """Call a blocking function in one of Postdate's own threads; a cancelled caller waits until it ends."""
    check_process()
    return await to_thread.run_sync(function, *arguments, limiter=thread_limiter())


class WakeUp:
    """Wakes a task from any thread. Create the alarm in the event loop of the task; ring it from any thread."""

    def __init__(self) -> None:
        self.event = anyio.Event()
        """The event that the next ring sets; only :meth:`reset` replaces it."""
        self._loop = current_token().native_token

    def wake(self) -> None:
        """Wake the waiting task; no effect once its event loop has ended."""
        call_soon = getattr(self._loop, "call_soon_threadsafe", None) or self._loop.run_sync_soon  # type: ignore[attr-defined]
        with suppress(RuntimeError):  # asyncio and trio: the loop has ended, so no task waits any more
            call_soon(self._set)

    def _set(self) -> None:
        self.event.set()

    def reset(self) -> None:
        """Forget earlier rings. Call this before polling for work: then a ring during the poll is not lost."""
        if self.event.is_set():
            self.event = anyio.Event()

    async def wait(self) -> None:
        await self.event.wait()


@dataclass(slots=True, eq=False)
class Job(Generic[W, T]):
    """A piece of work; its result or its error is set before ``is_done``."""

    work: W
    result: T | None = None
    error: BaseException | None = None
    is_done: bool = False

    def get_result(self) -> T:
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]


class _JobGroup(Generic[W, T]):
    """Jobs that are done together.

    The first caller leads and waits for ``start_event``; ``end_event`` wakes all others at once.
    """

    __slots__ = ("end_event", "is_done", "jobs", "lock", "start_event")

    def __init__(self) -> None:
        self.jobs: list[Job[W, T]] = []
        self.start_event, self.end_event = anyio.Event(), anyio.Event()
        self.lock = threading.Lock()
        """Held by the thread that does the jobs, or by a leader that was cancelled before the thread began."""
        self.is_done = False
        """Whether the thread has done the jobs. Written by that thread, read by the event loop."""


_GROUPS: RunVar[WeakKeyDictionary[object, GroupCommit[Any, Any]]] = RunVar("postdate.runtime.threads.groups")


def group_of(owner: object, at_once: int) -> GroupCommit[Any, Any]:
    """Return the group commit of ``owner`` in this event loop; ``owner`` is the object that does the work."""
    try:
        groups = _GROUPS.get()
    except LookupError:
        groups = WeakKeyDictionary[object, GroupCommit[Any, Any]]()
        _GROUPS.set(groups)
    group = groups.get(owner)
    if group is None:
        group = groups[owner] = GroupCommit[Any, Any](at_once)
    return group


async def run_in_group(
    owner: object, run_works: Callable[[Sequence[W]], Sequence[T | Exception]], work: W, at_once: int = 500
) -> T:
    """Do ``work`` with ``run_works``, together with other work for ``owner`` that arrives meanwhile.

    See :func:`run_jobs`.
    """
    return await group_of(owner, at_once).run(lambda jobs: run_jobs(jobs, run_works), work)


class GroupCommit(Generic[W, T]):
    """Does the work that callers pass to :meth:`run`, at most ``at_once`` pieces in one call."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._next: _JobGroup[W, T] | None = None
        self._has_leader = False

    async def run(self, run_batch: Callable[[Sequence[Job[W, T]]], None], work: W) -> T:
        """Do ``work``, together with the work of other callers, and return its result or raise its error.

        The work of a cancelled caller is done all the same. Otherwise the caller would not know which work was
        committed, or would lose messages that were claimed. ``asyncio.Task.cancel()`` ignores the shield: then a job
        that has not begun is withdrawn, and the caller of any other job waits for its end. ``run_batch`` is called in a
        thread, finishes every job that it gets, and raises nothing.
        """
        job: Job[W, T] = Job(work)
        with anyio.CancelScope(shield=True):
            # A turn may end without doing the job: its leader was cancelled before the thread began.
            while not job.is_done:
                await self._join(run_batch, job)
        return job.get_result()

    async def _join(self, run_batch: Callable[[Sequence[Job[W, T]]], None], job: Job[W, T]) -> None:
        group = self._next
        if group is None:
            group = self._next = _JobGroup()
        group.jobs.append(job)
        is_leader = len(group.jobs) == 1
        try:
            if not is_leader:
                await group.end_event.wait()
            elif self._has_leader:
                await group.start_event.wait()
        except BaseException:  # asyncio's own cancellation, as by asyncio.timeout, ignores the shield
            if group is self._next:
                self._withdraw(group, job)
            else:
                await group.end_event.wait()
            raise
        if is_leader:
            await self._run_group(run_batch, group)

    async def _run_group(self, run_batch: Callable[[Sequence[Job[W, T]]], None], group: _JobGroup[W, T]) -> None:
        """Do the jobs of a turn and wake their callers. The first caller that came meanwhile leads the next turn."""
        self._has_leader, self._next = True, None
        try:
            await run_in_thread(Context().run, partial(self._run_locked, run_batch, group))
        except BaseException:
            # asyncio's own cancellation ends the wait for the thread, but not the thread. The jobs belong to other
            # callers, too. So either this task takes the lock before the thread does, and no job is done, or the task
            # waits until the thread has done them.
            if not group.lock.acquire(blocking=False):
                with anyio.CancelScope(shield=True):
                    while not group.is_done:
                        with suppress(anyio.get_cancelled_exc_class()):  # another cancellation changes nothing
                            await anyio.sleep(_POLL_SECONDS)
            raise
        finally:
            self._has_leader = False
            group.end_event.set()
            if self._next is not None:
                self._next.start_event.set()

    def _run_locked(self, run_batch: Callable[[Sequence[Job[W, T]]], None], group: _JobGroup[W, T]) -> None:
        """Do the jobs in an empty context: they belong to many callers, so no trace of a caller may contain them."""
        if not group.lock.acquire(blocking=False):
            return
        try:
            for start in range(0, len(group.jobs), self._at_once):
                run_batch(group.jobs[start : start + self._at_once])
        finally:
            group.is_done = True

    def _withdraw(self, group: _JobGroup[W, T], job: Job[W, T]) -> None:
        """Withdraw a job whose turn has not begun. If its caller was to lead, the others of the turn try again."""
        was_first = group.jobs[0] is job
        group.jobs.remove(job)
        if was_first:
            self._next = None
            group.end_event.set()


def run_in_halves(works: Sequence[W], run_works: Callable[[Sequence[W]], Sequence[T]]) -> list[T | Exception]:
    """Do works together. If that fails, do each half by itself, so that in the end the faulty work is alone.

    ``run_works`` does all works or none. :class:`StoreUnreachable` is no fault of a work, so the works of that call are
    not tried again. Returns the result or the error of each work.
    """
    try:
        return list(run_works(works))
    except StoreUnreachable as error:
        return [error] * len(works)
    except Exception as error:  # noqa: BLE001 - returned to the caller of the faulty work
        if len(works) == 1:
            return [error]
    half = len(works) // 2
    return [*run_in_halves(works[:half], run_works), *run_in_halves(works[half:], run_works)]


def run_jobs(jobs: Sequence[Job[W, T]], run_works: Callable[[Sequence[W]], Sequence[T | Exception]]) -> None:
    """Do jobs as :func:`run_in_halves` does, and set the result or the error of each; raises nothing."""
    try:
        results: Sequence[T | BaseException] = run_in_halves([job.work for job in jobs], run_works)
    except BaseException as error:  # noqa: BLE001 - raised in each caller, as this thread belongs to none of them
        results = [error] * len(jobs)
    for job, each in zip(jobs, results, strict=True):
        if isinstance(each, BaseException):
            job.error = each
        else:
            job.result = each
        job.is_done = True
