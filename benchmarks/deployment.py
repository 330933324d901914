"""What every process of a benchmark gets as JSON on standard input: addresses, names, and the messages.

The messages are those of ``postdate bench``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import quote

from postdate.cli.bench.messages import BATCH, headers_of, id_of, message_of
from postdate.cli.bench.places import queue_names
from postdate.clock import from_microseconds, to_microseconds
from postdate.messages import DelayedMessage
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


class Names(NamedTuple):
    """Queue names of a run; an endpoint's name is also that of its input queue. ``limit``: for the limit alone."""

    endpoint: str
    timeouts: str
    arrived: str
    error: str
    limit: str


def names_of(run: str) -> Names:
    names = queue_names(run)
    return Names(*names, f"{names.endpoint}.limit")


@dataclass(frozen=True, slots=True)
class Deployment:
    """Store and queues of one run, removed afterwards; ``run`` is twelve hexadecimal digits."""

    run: str
    store: Opening
    transport: Opening

    @property
    def names(self) -> Names:
        return names_of(self.run)

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


# --- messages ---------------------------------------------------------------------------------------------------------


def number_of(message_id: str) -> int:
    """Return the number of a message."""
    return int(message_id[:8] + message_id[9:13], 16)


@dataclass(frozen=True, slots=True)
class Ping:
    """A message for an endpoint to handle: about 200 bytes as JSON."""

    number: int
    text: str = "z" * 170


@dataclass(frozen=True, slots=True)
class Workload:
    """Messages ``start`` to ``start + count``, due one after the other; ``batch`` of them are one commit.

    ``first_due`` is in microseconds since 1970, ``spacing`` in microseconds; due times are whole ones.
    """

    run: str
    queue: str
    start: int
    count: int
    first_due: int
    spacing: float
    batch: int = BATCH

    def due(self, number: int) -> datetime:
        return from_microseconds(self.first_due + int((number - self.start) * self.spacing))

    def dues(self) -> list[float]:
        """Return all due times in seconds since 1970, ascending."""
        return [(self.first_due + int(offset * self.spacing)) / 1_000_000 for offset in range(self.count)]

    def message(self, number: int) -> DelayedMessage:
        return message_of(number, self.run, self.queue, self.due(number))

    def messages(self) -> Iterator[DelayedMessage]:
        """Yield all messages, each made in the usual way."""
        return (self.message(self.start + offset) for offset in range(self.count))

    def batches(self) -> Iterator[list[DelayedMessage]]:
        """Yield all messages in batches.

        Only the first of a batch is made in the usual way, with all its checks: checking five million messages that
        differ only in their number takes longer than storing them.
        """
        end = self.start + self.count
        for first in range(self.start, end, self.batch):
            checked = self.message(first)
            yield [checked, *(self._like(checked, number) for number in range(first + 1, min(first + self.batch, end)))]

    def _like(self, checked: DelayedMessage, number: int) -> DelayedMessage:
        message_id = id_of(number, self.run)
        return DelayedMessage.from_store(
            message_id, self.due(number), checked.destination, headers_of(message_id), checked.body, None, 0
        )


def load(
    deployment: Deployment, numbers: range, first_due: datetime, spacing: timedelta, batch: int = BATCH
) -> Workload:
    """Return the messages of a run with these numbers."""
    apart = spacing / timedelta(microseconds=1)
    return Workload(
        deployment.run, deployment.names.arrived, numbers.start, len(numbers), to_microseconds(first_due), apart, batch
    )


def to_json(load: Workload) -> str:
    """Return messages as a line for another process."""
    return json.dumps(asdict(load))


def from_json(line: str) -> Workload:
    """Return the messages of such a line."""
    return Workload(**json.loads(line))


def parts(load: Workload, number: int) -> list[Workload]:
    """Return messages in so many parts, one after the other."""
    return [
        replace(load, start=load.start + low, count=high - low, first_due=load.first_due + int(low * load.spacing))
        for low, high in pairwise([load.count * part // number for part in range(number + 1)])
    ]
