"""What is asked to be quiet before a fork goes on after it; whatever goes wrong there is logged, and never raised."""

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typing_extensions import override

from postdate.runtime import forks


class Told(forks.ForkAware):
    """Notes what it is told; ``fails``: raises, too."""

    def __init__(self, *, fails: bool = False) -> None:
        self.told, self._fails = list[str](), fails
        forks.register(self)

    def _note(self, what: str) -> None:
        self.told.append(what)
        if self._fails:
            raise KeyboardInterrupt(what)

    @override
    def before_fork(self, deadline: float) -> None:
        self._note("before")

    @override
    def after_fork_in_parent(self) -> None:
        self._note("parent")

    @override
    def after_fork_in_child(self) -> None:
        self._note("child")


def in_child(work: Callable[[], object]) -> str:
    """Return what ``work`` returns in a child of this process."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(writing, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text


def test_parent_and_child_are_told_in_turn() -> None:
    told = Told()
    assert in_child(lambda: told.told) == "['before', 'child']"
    assert told.told == ["before", "parent"]


def test_a_failure_is_logged_and_keeps_nobody_from_being_told(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python prints what a hook raises, and forgets it."""
    several = [Told(fails=number == 1) for number in range(3)]
    assert in_child(lambda: [each.told for each in several]) == str([["before", "child"]] * 3)
    assert [each.told for each in several] == [["before", "parent"]] * 3
    assert [record.name for record in caplog.records] == ["postdate.forks"] * 2
    assert "Exception ignored" not in capfd.readouterr().err


def test_what_is_gone_is_told_nothing_and_kept_by_nobody() -> None:
    before = len(forks._fork_aware)
    Told()
    gc.collect()
    assert len(forks._fork_aware) <= before


@pytest.mark.parametrize("make", [forks.lock, forks.rlock])
def test_a_lock_that_another_thread_has_is_free_in_the_child(make: Callable[[], threading.Lock]) -> None:
    lock, taken, over = make(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    assert in_child(lambda: lock.acquire(timeout=0)) == "True"
    assert not lock.acquire(blocking=False)
    over.set()
    thread.join()


def test_a_connection_leads_nowhere_in_the_child_and_on_in_the_parent(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        forks.register_connection(file)
        assert in_child(lambda: (os.write(file.fileno(), b"child"), os.fstat(file.fileno()).st_size)) == "(5, 0)"
        file.write(b"parent")
        assert (tmp_path / "file").read_bytes() == b"parent"


def test_threads_fork_one_after_the_other() -> None:
    told, came = Told(), list[str]()
    threads = [threading.Thread(target=lambda: came.append(in_child(lambda: told.told[-2:]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == ["['before', 'child']"] * 4
    assert told.told == ["before", "parent"] * 4
