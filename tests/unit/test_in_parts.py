"""Works that are done together, and who is told when one of them cannot be."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from postdate.errors import StoreUnreachable
from postdate.runtime.threads import Job, run_in_halves, run_jobs


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_those_that_can_be_done_are_done_once_and_each_other_is_told(good: list[bool]) -> None:
    done = list[int]()

    def do(works: Sequence[int]) -> Sequence[str]:
        if not all(good[work] for work in works):
            raise ValueError(f"{[work for work in works if not good[work]]}")
        done.extend(works)
        return [f"done {work}" for work in works]

    found = run_in_halves(range(len(good)), do)
    assert done == [work for work, is_good in enumerate(good) if is_good]
    for work, (is_good, result) in enumerate(zip(good, found, strict=True)):
        assert str(result) == (f"done {work}" if is_good else f"[{work}]")


def test_what_is_in_doubt_is_tried_once() -> None:
    tries = list[Sequence[int]]()

    def do(works: Sequence[int]) -> Sequence[None]:
        tries.append(works)
        if len(works) < 4:
            raise StoreUnreachable("it may have been done")
        raise ValueError

    found = run_in_halves(range(4), do)
    assert [len(each) for each in tries] == [4, 2, 2]
    assert all(isinstance(each, StoreUnreachable) for each in found)


def test_jobs_are_told_and_are_done_whatever_was_raised() -> None:
    def do(works: Sequence[int]) -> Sequence[int | Exception]:
        if 3 in works:
            raise KeyboardInterrupt
        return [work or LookupError() for work in works]

    jobs = [Job[int, int](work) for work in range(3)]
    run_jobs(jobs, do)
    assert [(job.result, type(job.error)) for job in jobs] == [
        (None, LookupError),
        (1, type(None)),
        (2, type(None)),
    ]
    last = Job[int, int](3)
    run_jobs([last], do)
    assert last.is_done
    assert isinstance(last.error, KeyboardInterrupt)
