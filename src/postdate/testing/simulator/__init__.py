"""The endpoint in a world that a seed decides: processes, clocks, servers and networks that fail in every way they can.

The poller, the dispatcher, the mover, the intake, the pumps and the endpoint are the real ones. What is simulated is
around them: time and the order of tasks (`loop`, `clock`), a database and queues that keep what the ports promise
(`site`), the way there, on which calls are refused, lost, late or never answered (`ports`), and what happens when
(`scenario`, `run`). Whatever happens, a ledger accounts for every message (`ledger`).

One seed is one life of some minutes; the same seed is the same life. ``python -m postdate.testing.simulator --seed 7``
lives through one, ``--seeds 0:100000`` through many. Source: ADR 0019.
"""

from postdate.testing.simulator.ledger import Violation
from postdate.testing.simulator.mutations import MUTATIONS, first_found
from postdate.testing.simulator.run import RunResult, run
from postdate.testing.simulator.site import Breaks
from postdate.testing.simulator.soak import Found, soak

__all__ = ["MUTATIONS", "Breaks", "Found", "RunResult", "Violation", "first_found", "run", "soak"]
