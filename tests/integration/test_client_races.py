"""Random calls of clients beside two services: each answer is true, and nothing is both cancelled and delivered."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest
from tests.integration.postgres_place import now
from tests.integration.test_client import client_of
from tests.waiting import READY, patience, until

from postdate import Answer, Client, Pending, connect
from postdate.messages import Headers
from postdate.wiring import open_transport

MILLISECOND = timedelta(milliseconds=1)
QUEUE = "q"
AT_ONCE = 12
SPAN_SECONDS = 0.3
"""Messages fall due, and calls are made about them, within this."""
ENDED = {Answer.CANCELLED, Answer.DELIVERED}


Shown = tuple[dict[str, tuple[bool, bool, Any]], list[str], dict[str, int]]


@dataclass
class Told:
    """What became of one message, as far as its callers were told."""

    sent: bool = False
    cancelled: bool = False
    answers: list[Answer] = field(default_factory=list[Answer])
    not_before: Any = None

    def add(self, answer: Answer, *, cancels: bool = False) -> None:
        """Note an answer about a committed change, or none; what has ended has ended."""
        over = next((each for each in self.answers if each in ENDED), None)
        assert over is None or answer is over, (self.answers, answer)
        assert not self.cancelled or answer is Answer.CANCELLED, (self.answers, answer)
        assert answer in {Answer.DONE, Answer.BEING_DELIVERED, *ENDED}, answer
        self.answers.append(answer)
        self.cancelled |= cancels and answer is Answer.DONE


class Race:
    """Calls on messages that fall due meanwhile, by as many tasks, each with a connection of its own."""

    def __init__(self, client: Client, url: str, chance: random.Random, name: str = "m") -> None:
        self._client, self._url, self._random, self._name = client, url, chance, name
        self.told = dict[str, Told]()
        self.keyed = set[str]()
        self.calls = Counter[str]()

    async def run(self, messages: int, *, transactions: bool) -> None:
        numbers = iter(range(messages))
        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(self._work, numbers, transactions)

    async def _work(self, numbers: Any, transactions: bool) -> None:
        async with AsyncExitStack() as stack:
            own = None
            if transactions:
                own = await stack.enter_async_context(await psycopg.AsyncConnection.connect(self._url))
            for number in numbers:
                await self._one(f"{self._name}-{number}", own)

    async def _one(self, id_: str, own: Any) -> None:
        client, told = self._client, self.told.setdefault(id_, Told())
        due = now() + self._some() * MILLISECOND
        own_header = {"told": id_}
        call = partial(client.send, b"", destination=QUEUE, deliver_at=due, message_id=id_, headers=own_header)
        told.sent = await self._do("send", call, own) is not None
        if not told.sent:
            assert await client.get(id_) is None
            return
        for _ in range(self._random.randrange(4)):
            await self._passes(SPAN_SECONDS / 3)
            match self._random.choice(("cancel", "reschedule", "replace", "where")):
                case "cancel":
                    answer = await self._do("cancel", partial(client.cancel, id_), own)
                    if answer is not None:
                        told.add(answer, cancels=True)
                case "reschedule":
                    later = now() + self._some() * MILLISECOND
                    answer = await self._do("reschedule", partial(client.reschedule, id_, deliver_at=later), own)
                    if answer is not None:
                        told.add(answer)
                        told.not_before = later if answer else told.not_before
                case "replace" if self._keeps_keys:
                    key = f"k{self._random.randrange(5)}"
                    make = partial(client.replace, b"", key=key, destination=QUEUE, delay=self._some() * MILLISECOND)
                    keyed = await self._do("replace", make, own)
                    if keyed is not None:
                        self.keyed.add(keyed)
                case _:
                    where = Pending(QUEUE, headers=own_header)  # others may be due at the same microsecond
                    answers = await self._do("where", partial(client.cancel_where, where), own)
                    if answers is not None and answers[Answer.DONE]:
                        assert answers == {Answer.DONE: 1}
                        told.add(Answer.DONE, cancels=True)

    @property
    def _keeps_keys(self) -> bool:
        return not self._url.startswith("redis")

    async def _passes(self, seconds: float) -> None:
        """Wait for a part of the time, by chance."""
        then = now() + timedelta(seconds=self._random.random() * seconds)
        await until(lambda: now() > then)

    def _some(self) -> int:
        return self._random.randrange(int(SPAN_SECONDS * 1_000))

    async def _do(self, what: str, call: Callable[..., Awaitable[Any]], own: Any) -> Any:
        """Make a call, by chance in a transaction; return its answer, or ``None`` where it was rolled back."""
        kind = self._random.choice(("alone", "committed", "rolled back"))
        self.calls[f"{what}, {kind if own else 'alone'}"] += 1
        if own is None or kind == "alone":
            return await call()
        found = await call(transaction=own)
        await self._passes(0.01)
        await (own.commit() if kind == "committed" else own.rollback())
        return found if kind == "committed" else None

    def shown(self) -> Shown:
        """Return what a process of its own tells of its calls; see :meth:`add`."""
        told = {id_: (each.sent, each.cancelled, each.not_before) for id_, each in self.told.items()}
        return told, sorted(self.keyed), dict(self.calls)

    def add(self, shown: Shown) -> None:
        """Add the calls of another process."""
        told, keyed, calls = shown
        for id_, (sent, cancelled, not_before) in told.items():
            then = None if not_before is None else datetime.fromisoformat(not_before)
            self.told[id_] = Told(sent, cancelled, not_before=then)
        self.keyed.update(keyed)
        self.calls.update(calls)

    async def check(self, transport: Any) -> None:
        """Wait until nothing waits any more, and compare what came with what was told."""

        async def all_have_left() -> bool:
            return not await self._client.list(limit=1)

        await until(all_have_left)
        wanted = {id_ for id_, told in self.told.items() if told.sent and not told.cancelled} | self.keyed
        came, receiver = Counter[str](), transport.receiver(QUEUE)
        with patience():
            while came.total() < len(wanted):
                for each in await receiver.receive(500):
                    came[each.envelope.message_id] += 1
                    assert each.envelope.headers[Headers.DELIVER_AT]
                    await receiver.commit(each, now())
        await receiver.close()
        assert came == Counter(wanted)
        assert (await transport.lengths_of([QUEUE]))[QUEUE] == 0
        for id_, told in self.told.items():
            if told.not_before is not None and not told.cancelled:
                history = (await self._client.explain(id_)).history if len(self.told) < 2_000 else ()
                assert all(each.at > told.not_before for each in history if each.what == "delivered"), id_


def _started(environment: dict[str, str], folder: Path, number: int) -> subprocess.Popen[bytes]:
    with (folder / f"run-{number}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "postdate.cli", "run"], cwd=folder, env=environment, stderr=log)


@asynccontextmanager
async def services(environment: dict[str, str], folder: Path, count: int) -> AsyncGenerator[None]:
    """Run services as the command line does, until they are told to stop."""
    started = [_started(environment, folder, number) for number in range(count)]

    def all_are_ready() -> bool:
        logs = [(folder / f"run-{number}.log").read_text() for number in range(count)]
        assert all(each.poll() is None for each in started), logs
        return all(READY in log for log in logs)

    try:
        await until(all_are_ready)
        yield
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait()


async def race(
    kind: str, request: pytest.FixtureRequest, messages: int, chance: random.Random, workers: int = 0
) -> Counter[str]:
    """Make random calls about so many messages, and check what came of them; return the calls.

    ``workers``: that many processes make them, forked from one that makes calls, too; see `racing_workers`.
    """
    folder: Path = request.getfixturevalue("tmp_path")
    with client_of(kind, request) as (maker, url, more):
        queues = f"local:///{folder / 'queues.db'}" if kind == "mariadb" else url
        transport = open_transport(queues, **({} if kind == "mariadb" else more))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("POSTDATE_")}
        environment |= {"POSTDATE_STORE__ADDRESS": url, "POSTDATE_TRANSPORT__ADDRESS": queues}
        environment |= {f"POSTDATE_STORE__{name.upper()}": value for name, value in more.items()}
        if kind != "mariadb":
            environment |= {f"POSTDATE_TRANSPORT__{name.upper()}": value for name, value in more.items()}
        client = connect(url, transport=queues if kind == "mariadb" else None, **more)
        await client.list()
        await transport.create_queues([QUEUE])
        racing = Race(client, url, chance)
        async with services(environment, folder, 2):
            if workers:
                (told := folder / "told").mkdir()
                share, seed = messages // (workers + 1), str(chance.random())
                arguments = [url, json.dumps(more), str(share), str(workers), seed, str(told)]
                await anyio.run_process([sys.executable, "-m", PROGRAM, *arguments], cwd=ROOT, stderr=None)
                for each in told.iterdir():
                    racing.add(json.loads(each.read_text()))
                assert len(racing.told) == share * (workers + 1)
            else:
                await racing.run(messages, transactions=kind == "postgres")
            await racing.check(transport)
        await transport.close()
        await client.close()
        await maker.close()
        return racing.calls


PROGRAM = "tests.integration.racing_workers"
ROOT = Path(__file__).parents[2]
STORES = ["sqlite", "postgres", "mariadb", "redis"]


@pytest.mark.parametrize("kind", STORES)
async def test_each_answer_is_true_beside_two_services(
    kind: str, request: pytest.FixtureRequest, chance: random.Random
) -> None:
    calls = await race(kind, request, 200, chance)
    assert calls.total() > 300


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_each_answer_is_true_in_workers_that_are_forked(
    kind: str, request: pytest.FixtureRequest, chance: random.Random
) -> None:
    calls = await race(kind, request, 200, chance, workers=3)
    assert calls.total() > 300


@pytest.mark.soak(
    "twenty thousand calls",
    part="random",
    proven_by="tests/integration/test_client_races.py::test_each_answer_is_true_beside_two_services",
)
@pytest.mark.parametrize("kind", STORES)
async def test_twenty_thousand_answers_are_true(
    kind: str, request: pytest.FixtureRequest, chance: random.Random
) -> None:
    calls = await race(kind, request, 11_000, chance)
    print(f"{kind}: {calls.total():,} calls: {dict(calls)}")  # noqa: T201
    assert calls.total() > 20_000


@pytest.mark.soak(
    "twenty thousand calls",
    part="random",
    proven_by="tests/integration/test_client_races.py::test_each_answer_is_true_in_workers_that_are_forked",
)
@pytest.mark.parametrize("kind", STORES)
async def test_twenty_thousand_answers_are_true_in_workers_that_are_forked(
    kind: str, request: pytest.FixtureRequest, chance: random.Random
) -> None:
    calls = await race(kind, request, 11_000, chance, workers=6)  # each has up to 30 connections
    print(f"{kind}: {calls.total():,} calls: {dict(calls)}")  # noqa: T201
    assert calls.total() > 20_000
