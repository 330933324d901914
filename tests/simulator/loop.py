"""An event loop without real time and without chance of its own: a seed decides who runs next.

It selects nothing and sleeps never: when nobody can run, its clock jumps to the next timer. Among those who can run the
seed picks one, so that tasks meet in orders in which they seldom meet on a machine; what one task does stays in order.
Tasks belong to processes, which can be frozen (their tasks stand still while time goes on) or killed.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from asyncio import TimerHandle
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, Final

STEPS_AT_ONE_INSTANT: Final = 2_000
"""More of them, and somebody spins: time goes on all the same, and it is counted."""

_ROUNDS_OF_CLEARING_UP: Final = 20
_ENDS_WITHIN_SECONDS: Final = 1_000.0


class Tag:
    """What the loop knows of one process.

    Args:
        name: in traces.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_frozen = self.is_dead = False
        self.stalled: list[_Step | _Timer] = []
        """What would have run while it was frozen."""


_OWNER: ContextVar[Tag | None] = ContextVar("process", default=None)
_TASK: ContextVar[int] = ContextVar("task", default=0)


class _Step(asyncio.Handle):
    """A callback with the process and the task that it belongs to."""

    __slots__ = ("owner", "task")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: SeededLoop, context: Context | None
    ) -> None:
        context = context or copy_context()
        super().__init__(callback, args, loop, context)
        self.owner, self.task = context.get(_OWNER), context.get(_TASK, 0)

    def run(self) -> None:
        self._run()


class _Timer(TimerHandle):
    """The same at a time."""

    __slots__ = ("owner", "task")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: SeededLoop,
        context: Context | None,
    ) -> None:
        context = context or copy_context()
        super().__init__(when, callback, args, loop, context)
        self.owner, self.task = context.get(_OWNER), context.get(_TASK, 0)

    def run(self) -> None:
        self._run()


class SeededLoop(asyncio.BaseEventLoop):
    """See the module.

    Args:
        chance: decides; the same seed makes the same order.
        window: among how many of those who can run it chooses; 1: first come, first served.
    """

    def __init__(self, chance: Random, window: int) -> None:
        super().__init__()
        self._chance, self._window = chance, window
        self._now = 0.0
        self._numbers, self._task_numbers = itertools.count(), itertools.count(1)
        self._timers: list[tuple[float, int, _Timer]] = []
        self._runnable: list[_Step | _Timer] = []
        self._fresh: list[_Step | _Timer] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._processes: list[Tag] = []
        self._steps_here = 0
        self.steps = 0
        """Callbacks that have run."""
        self.spins = 0
        """How often time went on although somebody still wanted to run."""
        self.set_task_factory(_new_task)
        self.set_exception_handler(_forget)  # of tasks that died with their process

    # --- asyncio --------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the virtual seconds since the loop began."""
        return self._now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        """See :meth:`asyncio.loop.call_soon`."""
        step = _Step(callback, args, self, context)
        self._fresh.append(step)
        return step

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Do the same: there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        """See :meth:`asyncio.loop.call_later`."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        """See :meth:`asyncio.loop.call_at`."""
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def new_task_number(self) -> int:
        """Return the number of the next task: the order in which what one step has set off comes to run."""
        return next(self._task_numbers)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a task until the end: what dies with its process must not end when memory happens to be collected."""
        self._tasks.append(task)

    def _run_once(self) -> None:
        """Run one callback; called by asyncio until the loop is to stop."""
        self._take_in()
        if not self._runnable:
            self._jump()
        elif self._steps_here > STEPS_AT_ONE_INSTANT and self._timers:
            self.spins += 1
            self._jump()
        step = self._pick()
        if step is None:
            return
        self.steps += 1
        self._steps_here += 1
        step.run()

    def _take_in(self) -> None:
        """Let what the last step has set off run, in the order of tasks: sets of tasks have no order of their own."""
        fresh = self._fresh
        if len(fresh) > 1:
            fresh.sort(key=lambda step: step.task)
        self._runnable += fresh
        fresh.clear()

    def _jump(self) -> None:
        """Go on to the next instant at which something happens."""
        timers = self._timers
        while timers:
            when, _, timer = heapq.heappop(timers)
            if timer.cancelled() or (timer.owner is not None and timer.owner.is_dead):
                continue
            self._now, self._steps_here = max(self._now, when), 0
            self._runnable.append(timer)
            while timers and timers[0][0] <= self._now:
                self._runnable.append(heapq.heappop(timers)[2])
            return
        if not self._runnable:
            raise RuntimeError("nothing will ever happen again: everybody waits, and nobody for a time")

    def _pick(self) -> _Step | _Timer | None:
        runnable = self._runnable
        if not runnable:
            return None
        at = self._chance.randrange(min(len(runnable), self._window)) if self._window > 1 else 0
        task = runnable[at].task
        if task and at:
            at = next(index for index in range(at + 1) if runnable[index].task == task)
        step = runnable.pop(at)
        owner = step.owner
        if step.cancelled():
            return None
        if owner is not None and (owner.is_frozen or owner.is_dead):
            owner.stalled.append(step)
            return None
        return step

    # --- processes ------------------------------------------------------------------------------------------------

    def spawn(self, process: Tag, main: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin the first task of a process; what it begins belongs to the process, too."""
        if process not in self._processes:
            self._processes.append(process)
        context = copy_context()
        context.run(_OWNER.set, process)
        return self.create_task(main, context=context)

    def freeze(self, process: Tag) -> None:
        """Let none of its tasks run until :meth:`thaw`."""
        process.is_frozen = True

    def thaw(self, process: Tag) -> None:
        """Let it go on with all that would have run meanwhile."""
        process.is_frozen = False
        self._runnable += process.stalled
        process.stalled.clear()

    def kill(self, process: Tag) -> None:
        """Let none of its tasks ever run again."""
        process.is_dead = True

    # --- the end --------------------------------------------------------------------------------------------------

    def clear_up(self) -> None:
        """End every task, those of dead processes, too, and close the loop.

        What were left to be ended when memory is collected would say so, at some time, in the middle of something else.
        """
        for process in self._processes:
            process.is_dead = False
            self.thaw(process)
        self.run_until_complete(self._end_tasks())
        for task in self._tasks[:-1]:  # the last is what ended them
            if not task.done():
                raise RuntimeError(f"a task cannot be ended: {task!r}")
        self._tasks.clear()
        self.close()

    async def _end_tasks(self) -> None:
        for _ in range(_ROUNDS_OF_CLEARING_UP):
            left = [task for task in self._tasks if not task.done() and task is not asyncio.current_task()]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=_ENDS_WITHIN_SECONDS)


def _forget(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report nothing: what a process leaves behind when it dies is no news."""


def _new_task(loop: asyncio.AbstractEventLoop, main: Any, **options: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, SeededLoop)
    context: Context = options.pop("context", None) or copy_context()
    context.run(_TASK.set, loop.new_task_number())
    task = asyncio.Task[Any](main, loop=loop, context=context, **options)
    loop.keep(task)
    return task
