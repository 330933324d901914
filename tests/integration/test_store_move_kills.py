"""``postdate move`` is killed with -9, again and again, while the new store delivers: nothing lost, nothing twice."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.pipeline.old_timeouts import by_id, ids, messages
from tests.integration.store_places import StorePlace, place_in

COUNT = 30_000

pytestmark = pytest.mark.soak(
    "a command is killed with -9, and started again",
    part="kills",
    proven_by="tests/integration/test_store_move.py::"
    "test_whenever_a_move_ends_another_one_finishes_it_and_each_message_is_delivered_once",
)


def run_until(old: StorePlace, new: StorePlace, is_time: Callable[[], bool], eventually) -> None:
    """Run the command, and kill it as soon as it is time."""
    options = {"--from": old.spec.address, "--from-schema": old.spec.schema, "--from-table": old.table}
    given = [part for name, value in options.items() if value is not None for part in (name, value)]
    command = [sys.executable, "-m", "postdate.cli", "move", *given, "--to", new.spec.address, "--services-stopped"]
    folder = Path(new.spec.address.removeprefix("sqlite:///")).parent
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            eventually(lambda: run.poll() is not None or is_time(), "it is time to kill")
        finally:
            run.kill()


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb", "redis"])
def test_after_kills_each_message_is_delivered_once(request: pytest.FixtureRequest, kind: str, eventually) -> None:
    waiting = messages(COUNT)
    with place_in(kind, request) as old, place_in("sqlite", request, "postdate") as new:
        for first in range(0, COUNT, 5_000):
            old.add(waiting[first : first + 5_000])
        delivered = list[str]()
        assert old.pending() == COUNT
        for kills, some in enumerate((2_000, 6_000, 11_000, 17_000), 1):
            already = len(delivered)
            run_until(old, new, lambda some=some - already: new.pending() >= some, eventually)
            delivered += new.deliver(waiting[some - 1_500].due)
            here, there = {*ids(old.waiting())}, {*delivered, *ids(new.waiting())}
            assert (len(here & there) <= kills * 1_000, here | there == {*ids(waiting)}) == (True, True)
        result = old.move_to(new)
        assert (result.is_complete, result.refused, old.waiting()) == (True, 0, [])
        left = [each for each in waiting if each.message_id not in {*delivered}]
        assert by_id(new.waiting()) == by_id(left)
        assert sorted([*delivered, *new.deliver()]) == ids(waiting)
