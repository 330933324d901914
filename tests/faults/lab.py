"""One case: services at work, a fault among it, and the accounts of every message. Run by ``test_faults.py``."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.faults.deployments import DEPLOYMENTS, ClaimingStore, Deployment, Servers
from tests.faults.ledger import Arrival, Figures, Ledger, Promise
from tests.faults.observers import Observer, now
from tests.faults.services import Service
from tests.machine import until
from tests.waiting import PATIENCE_SECONDS

from postdate import DelayedMessage, TransactionMode
from postdate.errors import DuplicateMessage, PostdateError
from postdate.ports import RecordKind

SECOND = timedelta(seconds=1)
_BODY = b"x" * 100
_STORES_WITHIN_SECONDS = 60.0
_STORED_BEFORE_DUE = 3 * SECOND
"""Where they all fall due at once, they are stored by then."""
T = TypeVar("T")


class Fault(Protocol):
    """What goes wrong."""

    def begin(self, lab: "Lab") -> None:
        """Let it go wrong."""
        ...

    def end(self, lab: "Lab") -> None:
        """Set it right."""
        ...


@dataclass(frozen=True)
class Case:
    """One row of ``docs/faults.md``.

    Args:
        title: what goes wrong, in words.
        fault: what goes wrong.
        deployment: where; a key of ``DEPLOYMENTS``.
        tests: what is tested, in words.
        promise: what must be kept.
        messages: stored before the fault; they fall due from its beginning until a second after its end.
        at_once: they all fall due in one instant, just after it began.
        lasts: from the beginning to the end of the fault, where nothing else says when it is over.
        over: it ends as soon as this holds instead.
        quiet: so long after the last message it is watched whether any comes again.
        services: how many processes.
        settings: of the services, by section, beside those of the deployment.
        clocks: how far the wall clock of each service is ahead at the start; empty: they have the machine's.
        stores_meanwhile: store more while it lasts.
        in_gate: what is different of it in ``make test``; None: it has no short form there.
    """

    title: str
    fault: Fault
    deployment: str
    tests: str
    promise: Promise = field(default_factory=Promise)
    messages: int = 300
    at_once: bool = False
    lasts: timedelta = 4 * SECOND
    over: "Callable[[Lab], bool] | None" = None
    services: int = 1
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    clocks: Sequence[timedelta] = ()
    quiet: timedelta = 1.5 * SECOND
    stores_meanwhile: bool = True
    in_gate: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """Title and deployment: unique."""
        return f"{self.title}: {self.deployment}"

    def in_short(self) -> "Case":
        """Return it as ``make test`` runs it: it waits for states alone, and how long they take says nothing."""
        promise = replace(self.promise, recovers_within=timedelta(seconds=PATIENCE_SECONDS))
        return replace(self, promise=promise, quiet=timedelta(0), **(self.in_gate or {}))


class Sender:
    """An application that stores messages: at once, or one after the other while something lasts.

    Args:
        store: opened on a way without faults; closed with this.
        ledger: where it is noted what was acknowledged.
        endpoint: the name of the service's.
        chance: when what is stored one after the other falls due.
    """

    def __init__(self, store: ClaimingStore, ledger: Ledger, endpoint: str, chance: random.Random) -> None:
        self._store, self._ledger, self._chance = store, ledger, chance
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sender")
        self._thread.start()
        self._ended = threading.Event()
        self._number = 0
        self._steady: Any = None
        self._endpoint = endpoint
        self._do(store.initialize(endpoint, TransactionMode.RECEIVE_ONLY))

    def begin_anew(self, opened: Callable[[], ClaimingStore]) -> None:
        """Go on with another store, as an application does that is started again."""
        self._do(self._store.close())
        self._store = opened()
        self._do(self._store.initialize(self._endpoint, TransactionMode.RECEIVE_ONLY))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_STORES_WITHIN_SECONDS)

    def store(self, dues: Iterable[datetime]) -> list[str]:
        """Store one message for each due time, and return their ids when all are acknowledged."""
        messages = [self._message(due) for due in dues]
        self._do(self._store_all(messages))
        return [message.message_id for message in messages]

    def begin_steady(self) -> None:
        """Store a message every tenth of a second, due within the next second, until :meth:`end_steady`."""
        self._steady = asyncio.run_coroutine_threadsafe(self._store_steadily(), self._loop)

    def end_steady(self) -> None:
        """Wait for the acknowledgement of the last one."""
        self._ended.set()
        if self._steady is not None:
            self._steady.result(_STORES_WITHIN_SECONDS)

    def in_hand(self) -> int:
        """Return how many messages services hold."""
        return self._do(self._store.statistics(now())).claimed

    def waiting(self) -> int:
        """Return how many messages the store keeps, held or not."""
        return self._do(self._store.statistics(now())).pending

    def close(self) -> None:
        """Close the store."""
        self._ended.set()
        with suppress(PostdateError):
            self._do(self._store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _message(self, due: datetime) -> DelayedMessage:
        self._number += 1
        message = DelayedMessage(f"m-{self._number:05d}", due, self._ledger.queue, {"lab": "yes"}, _BODY)
        self._ledger.due[message.message_id] = due
        return message

    async def _store_all(self, messages: Sequence[DelayedMessage]) -> None:
        for first in range(0, len(messages), 1_000):
            batch = messages[first : first + 1_000]
            await self._store.store_many(batch, now())
            self._ledger.acknowledged.update(message.message_id for message in batch)

    async def _store_steadily(self) -> None:
        while not self._ended.is_set():
            message = self._message(now() + self._chance.random() * SECOND)
            while message.message_id not in self._ledger.acknowledged:
                try:
                    await self._store.store(message, now())
                except DuplicateMessage:  # the acknowledgement of the first try was lost
                    pass
                except PostdateError:
                    if self._ended.is_set():
                        return  # it was never acknowledged
                    await asyncio.sleep(0.1)
                    continue
                self._ledger.acknowledged.add(message.message_id)
            await asyncio.sleep(0.1)


def watch(lasts: timedelta) -> None:
    """Let time pass, in which something might happen that must not, or does that nobody can see."""
    over = now() + lasts
    until(lambda: now() >= over, PATIENCE_SECONDS)


class Lab:
    """One case on its deployment; what faults have at hand.

    Args:
        case: to run.
        folder: for files.
        servers: the private ones.
        chance: when what is stored meanwhile falls due.
    """

    def __init__(self, case: Case, folder: Path, servers: Servers, chance: random.Random) -> None:
        self.case, self.folder, self._chance = case, folder, chance
        self.deployment: Deployment = DEPLOYMENTS[case.deployment](folder, servers)
        self.ledger = Ledger(self.deployment.queue, self.deployment.error_queue)
        self.kept: dict[str, Any] = {}
        self._closing = ExitStack()
        self._closing.callback(self.deployment.close)
        configuration = folder / "postdate.toml"
        configuration.write_text(_toml(self.deployment.settings(case.settings)), encoding="utf-8")
        self.services = [Service(folder / f"service-{number}", configuration) for number in range(case.services)]
        for service, ahead in zip(self.services, case.clocks, strict=False):
            service.has_a_clock_of_its_own(ahead)
        self.observers: Sequence[Observer] = ()
        self._mended = False

    def start_services(self) -> None:
        """Start those that do not run, and return when all deliver."""
        for service in self.services:
            if not service.is_running:
                service.start(self.deployment.environment())
                self._closing.callback(service.kill)
        for service in self.services:
            service.wait_until_ready()

    def note(self, arrivals: Iterable[Arrival]) -> None:
        """Enter what came into the ledger."""
        self.ledger.arrivals.extend(arrivals)

    def run(self) -> Figures:
        """Run the case; return what it came to."""
        with self._closing:
            self._begin_work()
            case = self.case
            self.sender.store(self._dues())
            begun = now()
            self._closing.callback(self._mend)
            case.fault.begin(self)
            if case.stores_meanwhile:
                self.sender.begin_steady()
            assert until(lambda: self._is_over(begun), PATIENCE_SECONDS), "the fault does not show"
            self._mend()
            ended = now()
            self.sender.end_steady()
            since = begun if case.promise.while_it_lasts else ended
            until(lambda: not self.ledger.missing(), self._patience())
            assert until(self._nothing_waits, PATIENCE_SECONDS), f"{self.sender.waiting()} are still in the store"
            watch(case.quiet)
            return self._finish(since)

    def _nothing_waits(self) -> bool:
        return self.sender.waiting() <= self.ledger.kept()

    def _is_over(self, begun: datetime) -> bool:
        case = self.case
        return now() >= begun + case.lasts if case.over is None else case.over(self)

    def _dues(self) -> list[datetime]:
        case = self.case
        if case.at_once:
            return [now() + _STORED_BEFORE_DUE] * case.messages
        first, spread = now() + 0.3 * SECOND, case.lasts + SECOND
        return [first + spread * number / case.messages for number in range(case.messages)]

    def _mend(self) -> None:
        """End the fault, once: also where the case breaks off."""
        if not self._mended:
            self._mended = True
            self.case.fault.end(self)

    def _patience(self) -> float:
        last = max(self.ledger.due[message_id] for message_id in self.ledger.promised())
        return max((last - now()) / SECOND, 0.0) + self.case.promise.recovers_within / SECOND

    def _begin_work(self) -> None:
        self.start_services()
        self.sender = Sender(self.deployment.sender(), self.ledger, self.deployment.name, self._chance)
        self._closing.callback(self.sender.close)
        self.observers = self.deployment.observers(self.note)
        for observer in self.observers:
            observer.start()
            self._closing.callback(observer.stop)
        self.sender.store([now()])
        assert until(lambda: not self.ledger.missing(), PATIENCE_SECONDS), "nothing is delivered, without a fault"

    def _finish(self, since: datetime) -> Figures:
        cpu = sum(service.cpu_seconds() for service in self.services)
        seconds = [service.stop() for service in self.services]
        stopped = [each for each in seconds if each is not None]
        retried = self.deployment.records(RecordKind.RETRIED)
        self._closing.close()  # with a last look at the queues
        said = "".join(service.said() for service in self.services)
        return replace(
            self.ledger.judge(since),
            stopped_seconds=round(max(stopped), 2) if len(stopped) == len(seconds) else None,
            cpu_seconds=round(cpu, 2),
            retried=retried,
            log_lines=said.count("\n"),
            tracebacks=said.count("Traceback (most recent call last)"),
        )


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"
