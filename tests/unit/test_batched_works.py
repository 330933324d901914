"""Works of several messages in one transaction: those that belong together are done in one call."""

from typing import Any

from postdate.ports import BatchedWork, run_works


class Store:
    """Notes what it is asked to do."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.calls = name, calls

    def apply(self, transaction: object, items: Any) -> None:
        self.calls.append((self.name, transaction, list(items)))


def test_batched_works_are_done_last_those_of_one_store_in_one_call() -> None:
    calls = list[Any]()
    one, other = Store("one", calls), Store("other", calls)
    works = [
        BatchedWork(one.apply, 1),
        BatchedWork(other.apply, 2),
        lambda tx: calls.append(("plain", tx)),
        BatchedWork(one.apply, 3),
    ]
    run_works("tx", works)
    assert calls == [("plain", "tx"), ("one", "tx", [1, 3]), ("other", "tx", [2])]


def test_a_batched_work_is_done_alone_by_whoever_knows_of_no_batches() -> None:
    calls = list[Any]()
    BatchedWork(Store("one", calls).apply, 1)("tx")
    assert calls == [("one", "tx", [1])]
