"""Addresses and names for every process of a benchmark; passed as JSON on standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import quote

from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.ports import ClaimingStore, Transport
from postdate.wiring import open_store, open_transport


def application_name(role: str) -> str:
    return f"postdate bench {role}"


@dataclass(frozen=True, slots=True)
class Opening:
    """How to open one adapter; the address may hold a password, and ``name_parameter`` names the client in it."""

    address: str = field(repr=False)
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    name_parameter: str = ""

    def seen_as(self, name: str) -> Opening:
        """Return a copy whose connections carry ``name`` on the server, where the backend can show one."""
        if not self.name_parameter:
            return self
        separator = "&" if "?" in self.address else "?"
        return replace(self, address=f"{self.address}{separator}{self.name_parameter}={quote(name)}")


class QueueNames(NamedTuple):
    """Queue names of a run; an endpoint's name is also that of its input queue."""

    endpoint: str
    timeouts: str
    arrived: str
    error: str
    limit: str


def names_of(run: str) -> QueueNames:
    endpoint = f"postdate-bench-{run}"
    return QueueNames(
        endpoint, timeouts_queue(endpoint), f"{endpoint}.arrived", f"{endpoint}.error", f"{endpoint}.limit"
    )


@dataclass(frozen=True, slots=True)
class Deployment:
    """Store and queues of one run, removed afterwards; ``run`` is twelve hexadecimal digits."""

    run: str
    store: Opening
    transport: Opening

    @property
    def endpoint(self) -> str:
        return names_of(self.run).endpoint

    @property
    def queue(self) -> str:
        return names_of(self.run).arrived

    @property
    def error_queue(self) -> str:
        return names_of(self.run).error

    @property
    def limit_queue(self) -> str:
        """Queue for measuring the limit alone."""
        return names_of(self.run).limit

    def open_store(self) -> ClaimingStore:
        return open_store(self.store.address, **self.store.settings)

    def open_transport(self) -> Transport:
        return open_transport(self.transport.address, **self.transport.settings)

    def seen_as(self, role: str) -> Deployment:
        name = application_name(role)
        return replace(self, store=self.store.seen_as(name), transport=self.transport.seen_as(name))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Deployment:
        found = json.loads(line)
        return cls(found["run"], Opening(**found["store"]), Opening(**found["transport"]))
