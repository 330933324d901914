"""Forks of processes that have stores, queues and endpoints open: what is acknowledged is there, and nobody hangs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from tests.integration.test_client import client_of

WITHIN_SECONDS: Final = 270
PROGRAM: Final = Path(__file__).with_name("forking.py")

_CHILD: Final = [f"child-{number}" for number in range(5)]
EVERYWHERE: Final = {
    "the_parent_closes": ["done", ["before", "child, parent open", *_CHILD]],
    "the_parent_is_killed": ["before", "child, parent alive", "child, parent killed"],
    "other_threads_send": [["done"] * 4, 5, _CHILD[:4]],
    "another_thread_opens_it": [["done"] * 6, 12],
    "a_grandchild": ["done", ["before", "child", "child again", "grandchild", "parent"]],
    "inside_an_event_loop_and_a_thread": [
        ["done", "done"],
        ["child of the loop", "loop", "loop, after", "of a thread"],
    ],
    "multiprocessing_forks": [[0] * 3, ["before", "worker-0", "worker-1", "worker-2"]],
    "a_subprocess_with_a_function_before_it": [0, ["after", "before"]],
    "an_adapter_of_the_parent": [["an_adapter_of_the_parent/child", "True"], ["before", "child", "held"]],
}
AT_SERVERS: Final = {"a_fork_in_c": ["done", ["after", "before", "child"]]}
WITH_QUEUES: Final = {"a_handler_forks": [["done"], ["delayed", "end", "fork", "run", "sent"]]}
IN_A_FILE: Final = {
    "a_fork_in_c": ["StoreError", ["after", "before"]],
    "the_application_has_the_file_open": ["StoreError", "done", ["before", "child, closed"]],
    "a_handler_with_a_transaction_forks": [["StoreError", "None"], [["lamp"]], []],
    "the_child_outlives_a_killed_receiver": ["m"],
}
CASES: Final = {
    "sqlite": EVERYWHERE | WITH_QUEUES | IN_A_FILE,
    "postgres": EVERYWHERE | WITH_QUEUES | AT_SERVERS,
    "mariadb": EVERYWHERE | AT_SERVERS,
    "redis": EVERYWHERE | AT_SERVERS,
}


@pytest.mark.parametrize("kind", CASES)
def test_nothing_acknowledged_is_lost_by_a_fork(kind: str, request: pytest.FixtureRequest) -> None:
    with client_of(kind, request) as (_, url, more):
        assert _ran(CASES[kind], url, more) == CASES[kind]


def _ran(cases: Sequence[str] | dict[str, Any], url: str, more: dict[str, Any]) -> dict[str, Any]:
    """Run cases in a process of their own, where warnings are errors, and return what they showed."""
    arguments = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", str(PROGRAM), ",".join(cases), url]
    ran = subprocess.run(
        [*arguments, json.dumps(more)], capture_output=True, text=True, timeout=WITHIN_SECONDS, check=False
    )
    assert (ran.returncode, "Exception ignored" in ran.stderr) == (0, False), ran.stderr
    return dict(map(json.loads, ran.stdout.splitlines()))
