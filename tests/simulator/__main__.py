"""The endpoint in a world that a seed decides: processes, clocks, servers and networks that fail in every way they can.

The poller, the dispatcher, the mover, the intake, the pumps and the endpoint are the real ones. What is simulated is
around them: time and the order of tasks (`loop`, `clock`), a database and queues that keep what the ports promise
(`site`), the way there, on which calls are refused, lost, late or never answered (`ports`), and what happens when
(`scenario`, `run`). Whatever happens, a ledger accounts for every message (`ledger`). One seed is one life of some
minutes; the same seed is the same life. Source: ADR 0019.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from typing import Final

from tests.simulator.mutations import MUTATIONS, table
from tests.simulator.run import RunResult, run
from tests.simulator.site import Breaks
from tests.simulator.soak import soak

_LINES: Final = 60


def main() -> int:
    """Run what the command line asks for; 0: every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, help="live through one seed and print its last events")
    parser.add_argument("--trace", action="store_true", help="print all of its events")
    parser.add_argument("--seeds", default="0:2000", help="from the first to before the last (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--without", choices=sorted(MUTATIONS), help="take this fix out, which is then missed")
    parser.add_argument("--table", action="store_true", help="print for each fix the first seed that misses it")
    chosen = parser.parse_args()
    if chosen.table:
        for row in table(range(1_000)):
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
        return 0
    if chosen.seed is not None:
        return _one(chosen.seed, traced=chosen.trace, without=chosen.without)
    first, _, last = chosen.seeds.rpartition(":")
    found = soak(range(int(first or 0), int(last)), chosen.jobs, chosen.without, sys.stdout.write)
    return 1 if found.violations or found.errors else 0


def _one(seed: int, *, traced: bool, without: str | None) -> int:
    with MUTATIONS[without]() if without else nullcontext(Breaks()) as breaks:
        result = run(seed, breaks=breaks, traced=traced)
    sys.stdout.write("".join(f"{line}\n" for line in (result.trace if traced else result.trace[-_LINES:])))
    sys.stdout.write(f"{_said(result)}\n")
    return 1 if result.violation else 0


def _said(result: RunResult) -> str:
    life = f"seed {result.seed} ({result.profile}): {result.seconds:.0f} s, {result.calls} calls of ports"
    bad = result.violation
    return f"{life}: every promise kept" if bad is None else f"{life}: {bad.promise}: {bad.text}"


if __name__ == "__main__":
    sys.exit(main())
