"""Works that are done together: each once, and known to whoever asked for it, whoever gives up."""

import asyncio
import threading
from collections.abc import Sequence
from contextvars import ContextVar

import anyio
import anyio.lowlevel
import pytest

from postdate.runtime.threads import GroupCommit, Job


class Doing:
    """Does works in the thread it is called in, when it may, turn by turn; keeps which were done together."""

    def __init__(self) -> None:
        self.turns: list[list[int]] = []
        self.begun, self.may = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, jobs: Sequence[Job[int, int]]) -> None:
        self.begun.release()
        self.may.acquire()
        self.turns.append([job.work for job in jobs])
        for job in jobs:
            if job.work < 0:
                job.error = ValueError(job.work)
            else:
                job.result = 2 * job.work
            job.is_done = True


async def until_begun(doing: Doing) -> None:
    await anyio.to_thread.run_sync(doing.begun.acquire)


async def test_what_arrives_while_others_are_done_is_done_together_next() -> None:
    doing, together, found = Doing(), GroupCommit[int, int](at_once=2), dict[int, int]()

    async def add(work: int) -> None:
        found[work] = await together.run(doing, work)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(add, 1)
        await until_begun(doing)
        for work in (2, 3, 4):
            tasks.start_soon(add, work)
        await anyio.wait_all_tasks_blocked()
        doing.may.release(9)
    assert found == {1: 2, 2: 4, 3: 6, 4: 8}
    assert doing.turns == [[1], [2, 3], [4]]


async def test_an_error_is_raised_where_its_work_came_from_only() -> None:
    doing, together = Doing(), GroupCommit[int, int](at_once=9)
    doing.may.release(9)
    outcomes = await asyncio.gather(*(together.run(doing, each) for each in (1, -2, 3)), return_exceptions=True)
    assert [str(each) for each in outcomes] == ["2", "-2", "6"]


@pytest.mark.parametrize("cancelled", [0, 1], ids=["the one that was to lead", "a follower"])
@pytest.mark.parametrize("natively", [True, False])
async def test_who_is_cancelled_before_the_turn_has_the_work_done_or_natively_takes_it_back(
    cancelled: int, natively: bool
) -> None:
    doing, together, found = Doing(), GroupCommit[int, int](at_once=9), dict[int, int]()
    scopes = [anyio.CancelScope(), anyio.CancelScope()]

    async def add(work: int) -> None:
        with scopes[work - 2]:
            found[work] = await together.run(doing, work)

    first = asyncio.create_task(together.run(doing, 1))
    await until_begun(doing)
    others = [asyncio.create_task(add(work)) for work in (2, 3)]
    await anyio.wait_all_tasks_blocked()
    if natively:
        others[cancelled].cancel()
    else:
        scopes[cancelled].cancel()
    for _ in range(9):
        await anyio.lowlevel.checkpoint()
    doing.may.release(9)
    assert await first == 2
    await asyncio.wait(others)
    kept = [3 - cancelled] if natively else [2, 3]
    assert found == {work: 2 * work for work in kept}
    assert doing.turns == [[1], kept]


@pytest.mark.parametrize("leads", [True, False])
async def test_who_is_cancelled_while_the_work_is_done_waits_for_its_end_and_it_is_done_once(leads: bool) -> None:
    doing, together = Doing(), GroupCommit[int, int](at_once=9)
    before = asyncio.create_task(together.run(doing, 0))  # so that the next two are in one turn
    await until_begun(doing)
    tasks = [asyncio.create_task(together.run(doing, work)) for work in (1, 2)]
    await anyio.wait_all_tasks_blocked()
    doing.may.release()
    await before
    await until_begun(doing)
    task, other = tasks if leads else tasks[::-1]
    for _ in range(2 if leads else 1):  # who leads has the others with it, however often it is cancelled
        task.cancel()
        for _ in range(9):
            await anyio.lowlevel.checkpoint()
        assert not task.done()
    doing.may.release(9)
    assert await other == (4 if leads else 2)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(work for turn in doing.turns for work in turn) == [0, 1, 2]


async def test_works_of_many_run_in_the_context_of_none() -> None:
    caller, together, contexts = ContextVar[str]("caller"), GroupCommit[int, int](at_once=9), list[str]()

    def do(jobs: Sequence[Job[int, int]]) -> None:
        for job in jobs:
            contexts.append(caller.get("nobody"))
            job.result = job.work
            job.is_done = True

    async def add(work: int) -> None:
        caller.set(f"caller {work}")
        assert await together.run(do, work) == work
        assert caller.get() == f"caller {work}"

    await asyncio.gather(*map(add, range(4)))
    assert contexts == ["nobody"] * 4
