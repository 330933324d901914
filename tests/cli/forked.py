"""Runs ``postdate`` in processes that are forked from one that has imported all it needs: ``python forked.py``.

What an order says, a line of JSON on standard input, is run: ``arguments``, in ``folder``, with ``environment``; its
output goes to the file ``log`` there. The answer is its number. An order ``{"wait": number}`` waits for its end: the
answer is its exit code. At the end of the input all that still runs is killed.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any, Final

from postdate.cli.entry import run
from postdate.ports.backends import Role
from postdate.wiring.adapters import adapters_of, load_factory

ROLES: Final[tuple[Role, ...]] = ("store", "transport", "database")


def main() -> None:
    """Import what addresses of all kinds need, and do what is ordered."""
    for role in ROLES:
        for kind in adapters_of(role).values():
            load_factory(kind)
    running = set[int]()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            running.discard(order["wait"])
            _answer(os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if not pid:
            _serve(order)
        running.add(pid)
        _answer(pid)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _serve(order: dict[str, Any]) -> None:
    status = 70
    try:
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        status = run(order["arguments"])
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
