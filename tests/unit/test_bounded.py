"""A memory of a bounded number of things."""

from postdate.runtime.bounded import Bounded


def test_what_was_set_longest_ago_is_forgotten_first() -> None:
    remembered = Bounded[str, int](2)
    remembered["a"] = 1
    remembered["b"] = 1
    remembered["a"] = 2
    remembered["c"] = 1
    assert list(remembered.items()) == [("a", 2), ("c", 1)]
