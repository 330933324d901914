"""Store and queues to be measured, in places made for one run, each with the target that knows the barest way there."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from benchmarks.deployment import Deployment, Opening, application_name, names_of
from benchmarks.system import LOOPBACK, cpu_seconds, family_cpu_seconds, listening_pid, parent_of
from benchmarks.targets.target import BenchmarkRun, BenchmarkTarget
from postdate.cli.bench.places import Common, Subject, Trial, create_trial
from postdate.ports.backends import Scratch

TARGETS: Mapping[str, str] = {
    "SQLite": "benchmarks.targets.sqlite:SqliteTarget",
    "PostgreSQL": "benchmarks.targets.postgres:PostgresTarget",
    "MariaDB": "benchmarks.targets.mariadb:MariaDbTarget",
    "SQL Server": "benchmarks.targets.sqlserver:SqlServerTarget",
    "Redis": "benchmarks.targets.redis:RedisTarget",
    "RabbitMQ": "benchmarks.targets.rabbitmq:RawRabbitMq",
    "Azure Storage": "benchmarks.targets.azure:PlainAzure",
}
"""The target of each product, imported at first use; a product without one is measured by its adapters alone."""


@dataclass(slots=True)
class Measured:
    """A store or queues in the place that was made for the run; ``facts`` are read in :meth:`Targets.set_up`."""

    subject: Subject
    target: BenchmarkTarget
    facts: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def is_server(self) -> bool:
        return self.subject.address is not None

    def cpu_seconds(self) -> float | None:
        """Return the processor time that the server used so far; ``None`` when it cannot be seen from here."""
        if self.target.server_process:
            parent = parent_of(self.target.connections()[0][0], self.target.server_process)
            return None if parent is None else family_cpu_seconds(parent)
        parts = urlsplit(self.target.address)
        is_near = self.is_server and parts.hostname in LOOPBACK and parts.port is not None
        pid = listening_pid(parts.port) if is_near and parts.port else None
        return None if pid is None else cpu_seconds(pid)

    def cpu_seconds_by_role(self) -> Mapping[str, float]:
        """Return the processor time of the connections of each role of process, as far as they can be told apart."""
        by_role: dict[str, float] = {}
        if self.cpu_seconds() is not None:
            for pid, name in self.target.connections():
                client = name.partition(" postdate ")[0]  # behind it, adapters say which process they are of
                role = client.removeprefix(application_name(""))
                if role != client:
                    by_role[role] = by_role.get(role, 0.0) + cpu_seconds(pid)
        return by_role


@dataclass(frozen=True, slots=True)
class Targets:
    """Store and queues of one run; the same object when they are in the same database."""

    trial: Trial
    store: Measured
    queues: Measured

    @property
    def deployment(self) -> Deployment:
        """What other processes of the run get."""
        made = self.trial
        return Deployment(
            made.run,
            Opening(*made.store.opening_arguments(made.store_scratch, made.settings), self.store.target.name_parameter),
            Opening(
                *made.queues.opening_arguments(made.queues_scratch, made.settings), self.queues.target.name_parameter
            ),
        )

    @property
    def all(self) -> tuple[Measured, ...]:
        return (self.store,) if self.store is self.queues else (self.store, self.queues)

    def facts(self) -> dict[str, Mapping[str, str]]:
        return {each.name: each.facts for each in self.all}

    def cpu_seconds(self) -> float | None:
        """Return the processor time of all servers so far; ``None`` without servers, or when one cannot be seen."""
        used = [each.cpu_seconds() for each in self.all if each.is_server]
        return None if not used or None in used else sum(filter(None, used))

    def cpu_seconds_by_role(self) -> dict[str, float]:
        return {role: used for each in self.all for role, used in each.cpu_seconds_by_role().items()}

    async def set_up(self) -> None:
        facts = await self.trial.set_up()
        for each in self.all:
            each.facts = {**facts[each.name], **each.target.facts()}


@contextmanager
def opened(common: Common, folder: Path) -> Generator[Targets]:
    """Make a place for a run and remove it afterwards, even after errors."""
    with ExitStack() as stack:
        made = stack.enter_context(create_trial(common, folder, names_of))
        store = stack.enter_context(_measured(made.store, made.store_scratch, made, has_store=True))
        queues = store
        if made.queues_scratch is not made.store_scratch:
            queues = stack.enter_context(_measured(made.queues, made.queues_scratch, made, has_store=False))
        yield Targets(made, store, queues)


@contextmanager
def _measured(subject: Subject, scratch: Scratch, made: Trial, *, has_store: bool) -> Generator[Measured]:
    make, reference = BenchmarkTarget, TARGETS.get(subject.kind.backend.product)
    if reference is not None:
        module, _, name = reference.partition(":")
        make = cast("type[BenchmarkTarget]", getattr(importlib.import_module(module), name))
    with make(scratch, BenchmarkRun(made.run, made.settings, has_store)) as target:
        yield Measured(subject, target)
