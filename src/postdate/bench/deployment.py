"""What every process of a benchmark has to know to find store and queues; as JSON, handed over on standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import quote

from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.ports import ClaimingStore, Transport
from postdate.wiring import open_store, open_transport


def application_name(role: str) -> str:
    """Return the name under which a process of a benchmark shows itself to servers."""
    return f"postdate bench {role}"


@dataclass(frozen=True, slots=True)
class Opening:
    """How to open one adapter.

    Args:
        address: as in the settings; may hold a password.
        settings: of the adapter besides.
        name_parameter: of the address, with which a process tells the server who it is; empty: there is none.
    """

    address: str = field(repr=False)
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    name_parameter: str = ""

    def seen_as(self, name: str) -> Opening:
        """Return how a process opens the adapter that wants to be told apart from others."""
        if not self.name_parameter:
            return self
        separator = "&" if "?" in self.address else "?"
        return replace(self, address=f"{self.address}{separator}{self.name_parameter}={quote(name)}")


class QueueNames(NamedTuple):
    """Names of the queues of a run: that of an endpoint is also that of its input queue."""

    endpoint: str
    timeouts: str
    arrived: str
    error: str
    limit: str


def names_of(run: str) -> QueueNames:
    """Return the names of the queues of a run."""
    endpoint = f"postdate-bench-{run}"
    return QueueNames(
        endpoint, timeouts_queue(endpoint), f"{endpoint}.arrived", f"{endpoint}.error", f"{endpoint}.limit"
    )


@dataclass(frozen=True, slots=True)
class Deployment:
    """Store and queues of one run of a benchmark, which every process of it opens; all are gone afterwards.

    Args:
        run: twelve hexadecimal digits, which all names and ids of the run have in common.
        store: where messages wait.
        transport: where the queues are.
    """

    run: str
    store: Opening
    transport: Opening

    @property
    def endpoint(self) -> str:
        """Name of the endpoint that delivers."""
        return names_of(self.run).endpoint

    @property
    def queue(self) -> str:
        """Name of the destination queue."""
        return names_of(self.run).arrived

    @property
    def error_queue(self) -> str:
        """Name of the queue of what could not be delivered."""
        return names_of(self.run).error

    @property
    def limit_queue(self) -> str:
        """Name of the queue that nothing but the limit sends to."""
        return names_of(self.run).limit

    def open_store(self) -> ClaimingStore:
        """Return the store."""
        return open_store(self.store.address, **self.store.settings)

    def open_transport(self) -> Transport:
        """Return the transport."""
        return open_transport(self.transport.address, **self.transport.settings)

    def seen_as(self, role: str) -> Deployment:
        """Return the deployment as a process with this role has it."""
        name = application_name(role)
        return replace(self, store=self.store.seen_as(name), transport=self.transport.seen_as(name))

    def to_json(self) -> str:
        """Return what :meth:`from_json` takes: one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Deployment:
        """Return the deployment that was written down."""
        found = json.loads(line)
        return cls(found["run"], Opening(**found["store"]), Opening(**found["transport"]))
