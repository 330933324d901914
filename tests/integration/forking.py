"""Cases of forks, each a function ``case(place)`` that returns what to show: ``python forking.py CASES URL SETTINGS``.

Prints one line of JSON for each case: its name, and what it returned. Programs with threads of their own are forked
here, which must not happen in the process of the tests.
"""

import asyncio
import ctypes
import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import postdate
from postdate import (
    DelayedMessage,
    Endpoint,
    Envelope,
    HandlerContext,
    LocalTransport,
    PostdateError,
    Postgres,
    Sqlite,
    TransactionMode,
)
from postdate.clock import SystemClock
from postdate.runtime.threads import run_in_thread
from postdate.wiring import open_store

HOUR: Final = timedelta(hours=1)
WAITS_AT_MOST_SECONDS: Final = 240


class Place:
    """Where a ``case`` stores: ``url`` and settings of :func:`postdate.connect`; in a file, its ``path``."""

    def __init__(self, case: str, url: str, more: dict[str, Any]) -> None:
        self.case, self.url, self.more = case, url, more

    @property
    def path(self) -> Path:
        return Path(self.url.removeprefix("sqlite:///"))

    def connect(self) -> Any:
        return postdate.connect(self.url, **self.more).blocking

    def send(self, shop: Any, name: str) -> None:
        shop.send(b"", destination="q", delay=HOUR, message_id=f"{self.case}/{name}")

    def waiting(self) -> list[str]:
        """Return the names of what waits, as a client of its own sees it."""
        with self.connect() as shop:
            ids = sorted(each.message_id for each in shop.list(limit=10_000))
        return [id_.partition("/")[2] for id_ in ids if id_.startswith(f"{self.case}/")]


class Child:
    """A forked process that does ``work``, and ends with a line that says what came of it."""

    def __init__(self, work: Callable[[], object], fork: Callable[[], int] = os.fork) -> None:
        reading, writing = os.pipe()
        self.pid = fork()
        if not self.pid:
            os.close(reading)
            signal.alarm(WAITS_AT_MOST_SECONDS)
            os.write(writing, _came_of(work).encode())
            os._exit(0)
        os.close(writing)
        self._reading = reading

    def came(self) -> str:
        with os.fdopen(self._reading) as told:
            text = told.read()
        os.waitpid(self.pid, 0)
        return text or "died"


def _came_of(work: Callable[[], object]) -> str:
    try:
        found = work()
    except PostdateError as error:
        return type(error).__name__
    except BaseException:  # noqa: BLE001 - told to the test
        return traceback.format_exc()
    return "done" if found is None else str(found)


def until_other_threads_sleep() -> None:
    """Wait until no other thread runs, or waits for the interpreter, which it asks for every few milliseconds."""

    def turns() -> dict[str, list[str]]:
        """Return by thread how often it has begun and stopped to run."""
        own, there = str(threading.get_native_id()), dict[str, list[str]]()
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                if task.name != own:
                    lines = (task / "status").read_text().splitlines()
                    there[task.name] = [line for line in lines if "ctxt" in line]
        return there

    before, waiting = turns(), threading.Event()
    for _ in range(600):
        waiting.wait(0.1)
        if before == (before := turns()):
            return
    raise AssertionError(f"other threads went on for a minute: {before}")


# --- every store ------------------------------------------------------------------------------------------------------


def the_parent_closes(place: Place) -> object:
    shop, go = place.connect(), os.pipe()
    place.send(shop, "before")

    def work() -> None:
        place.send(shop, "child, parent open")
        os.read(go[0], 1)
        for number in range(5):
            place.send(shop, f"child-{number}")

    child = Child(work)
    shop.close()
    os.write(go[1], b"x")
    return child.came(), place.waiting()


def the_parent_is_killed(place: Place) -> object:
    """A parent that the test can kill, and a child of it that goes on."""
    told, go = os.pipe(), os.pipe()

    def parent() -> None:
        shop = place.connect()
        place.send(shop, "before")

        def work() -> None:
            place.send(shop, "child, parent alive")
            os.write(told[1], b"x")
            os.read(go[0], 1)
            place.send(shop, "child, parent killed")
            os.write(told[1], b"x")

        Child(work).came()

    killed = Child(parent)
    os.read(told[0], 1)
    os.kill(killed.pid, signal.SIGKILL)
    os.waitpid(killed.pid, 0)
    os.write(go[1], b"x")
    os.read(told[0], 1)
    return place.waiting()


def other_threads_send(place: Place) -> object:
    shop, stop = place.connect(), threading.Event()
    place.send(shop, "before")
    sent = list[str]()

    def busy(name: str) -> None:
        while not stop.is_set():
            place.send(shop, f"{name}-{len(sent)}")
            sent.append(name)

    threads = [threading.Thread(target=busy, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    children = list[Child]()
    for number in range(4):
        so_far = len(sent)
        while len(sent) == so_far:
            stop.wait(0.001)
        children.append(Child(lambda name=f"child-{number}": place.send(shop, name)))
    came = [child.came() for child in children]
    stop.set()
    for thread in threads:
        thread.join()
    waiting = place.waiting()
    shop.close()
    return came, len(waiting) - len(sent), [each for each in waiting if each.startswith("child")]


def another_thread_opens_it(place: Place) -> object:
    """The fork comes at any moment of that."""
    came = list[str]()
    for number in range(6):
        shop, begun = place.connect(), threading.Event()

        def work(shop: Any = shop, number: int = number, begun: threading.Event = begun) -> None:
            begun.set()
            place.send(shop, f"parent-{number}")

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        threading.Event().wait(number * 0.003)
        came.append(Child(lambda shop=shop, number=number: place.send(shop, f"child-{number}")).came())
        thread.join()
        shop.close()
    return came, len(place.waiting())


def a_grandchild(place: Place) -> object:
    shop = place.connect()
    place.send(shop, "before")

    def child() -> str:
        place.send(shop, "child")
        came = Child(lambda: place.send(shop, "grandchild")).came()
        place.send(shop, "child again")
        return came

    came = Child(child).came()
    place.send(shop, "parent")
    shop.close()
    return came, place.waiting()


def inside_an_event_loop_and_a_thread(place: Place) -> object:
    client, came = postdate.connect(place.url, **place.more), list[str]()

    async def fork() -> None:
        await client.send(b"", destination="q", delay=HOUR, message_id=f"{place.case}/loop")
        child = Child(lambda: asyncio.run(again()))
        await client.send(b"", destination="q", delay=HOUR, message_id=f"{place.case}/loop, after")
        came.append(child.came())

    async def again() -> None:
        await client.send(b"", destination="q", delay=HOUR, message_id=f"{place.case}/child of the loop")

    asyncio.run(fork())
    thread = threading.Thread(
        target=lambda: came.append(Child(lambda: place.send(client.blocking, "of a thread")).came())
    )
    thread.start()
    thread.join()
    client.blocking.close()
    return came, place.waiting()


def multiprocessing_forks(place: Place) -> object:
    shop = place.connect()
    place.send(shop, "before")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=place.send, args=(shop, f"worker-{number}")) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    shop.close()
    return [worker.exitcode for worker in workers], place.waiting()


def a_subprocess_with_a_function_before_it(place: Place) -> object:
    """Python calls the hooks of forks for ``preexec_fn``, too."""
    shop = place.connect()
    place.send(shop, "before")
    ran = subprocess.run(["true"], preexec_fn=lambda: None, check=False)
    place.send(shop, "after")
    shop.close()
    return ran.returncode, place.waiting()


def an_adapter_of_the_parent(place: Place) -> object:
    """The store itself, which the parent has open in its event loop, is used by the child in another one."""
    came = list[str]()

    async def parent() -> None:
        store, now = open_store(place.url, **place.more), SystemClock().now()

        async def keep(name: str) -> None:
            await store.store(DelayedMessage(f"{place.case}/{name}", now + HOUR, "q", {}, b""), now)

        async def child() -> str:
            await keep("child")
            seen = [claim.message.message_id for claim in await store.claim_due(now + 2 * HOUR, 10_000)]
            await store.close()
            return " ".join(sorted(id_ for id_ in seen if id_.startswith(place.case)))

        await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
        await store.setup()
        await keep("before")
        await keep("held")
        (held,) = [
            each for each in await store.claim_due(now + 2 * HOUR, 10_000) if each.message.message_id.endswith("held")
        ]
        came.append(Child(lambda: asyncio.run(child())).came())
        came.append(str(store.is_in_force(held)))
        await store.close()

    asyncio.run(parent())
    return came, place.waiting()


@dataclass
class Ping:
    """Handled by an endpoint."""

    name: str


def a_handler_forks(place: Place) -> object:
    """The parent is at work; its child sends with the same endpoint, and starts it for itself. Each is handled once."""
    handled, came, names = os.pipe(), list[str](), list[str]()
    databases: dict[str, Callable[[], Any]] = {"sqlite": lambda: Sqlite(place.path)}
    make = databases.get(place.url.partition(":")[0], lambda: Postgres(place.url, **place.more))

    async def parent() -> None:
        async with make() as database:
            endpoint = Endpoint("sales", database)

            @endpoint.handler(Ping)
            async def handle(message: Ping, _context: HandlerContext) -> None:
                os.write(handled[1], f"{message.name}\n".encode())
                if message.name == "fork":
                    came.append(Child(lambda: asyncio.run(child(endpoint))).came())

            async with endpoint:
                await endpoint.send(Ping("fork"))
                while len(names) < 4:
                    names.extend((await run_in_thread(os.read, handled[0], 1000)).decode().split())

    async def child(endpoint: Endpoint) -> None:
        await endpoint.send(Ping("sent"))
        await endpoint.send(Ping("delayed"), delay=timedelta(seconds=0.1))
        async with endpoint:
            await endpoint.send(Ping("run"))

    asyncio.run(parent())
    os.write(handled[1], b"end\n")
    names.extend(os.read(handled[0], 1000).decode().split())
    return came, sorted(names)


def a_fork_in_c(place: Place) -> object:
    """As uWSGI does it, which tells Python nothing: so in the child its lock must not be what others waited for."""
    shop = place.connect()
    place.send(shop, "before")
    until_other_threads_sleep()
    came = Child(lambda: place.send(shop, "child"), ctypes.PyDLL(None).fork).came()
    place.send(shop, "after")
    shop.close()
    return came, place.waiting()


# --- a file -----------------------------------------------------------------------------------------------------------


def the_application_has_the_file_open(place: Place) -> object:
    """What is acknowledged is there; else the child is told."""
    shop = place.connect()
    place.send(shop, "before")
    own = sqlite3.connect(place.path)
    own.execute("SELECT count(*) FROM delayed_message").fetchone()
    refused = Child(lambda: place.send(shop, "child")).came()
    own.close()
    return refused, Child(lambda: place.send(shop, "child, closed")).came(), place.waiting()


def a_handler_with_a_transaction_forks(place: Place) -> object:
    """While it has the outbox's connection, a child cannot use the file; afterwards it can, with the same objects."""
    came = list[str]()

    async def parent() -> None:
        async with Sqlite(place.path) as database:
            endpoint, done = Endpoint("sales", database, outbox=True, transaction_mode="receive_only"), asyncio.Event()

            @endpoint.handler(Ping)
            async def handle(message: Ping, context: HandlerContext) -> None:
                connection = await context.transaction()
                connection.execute("CREATE TABLE paid (name TEXT)")
                connection.execute("INSERT INTO paid VALUES (?)", [message.name])
                came.append(Child(lambda: place.send(place.connect(), "in a transaction")).came())
                done.set()

            async with endpoint:
                await endpoint.send(Ping("lamp"))
                await done.wait()
            came.append(Child(lambda: asyncio.run(child(database))).came())
            await database.sagas.setup()

    async def child(database: Sqlite) -> str:
        await database.sagas.setup()
        await database.outbox.mark_dispatched("sales", "none", SystemClock().now())
        return f"{await database.outbox.find('sales', 'none')}"

    asyncio.run(parent())
    with closing(sqlite3.connect(place.path)) as own:
        return came, own.execute("SELECT name FROM paid").fetchall(), place.waiting()


def the_child_outlives_a_killed_receiver(place: Place) -> object:
    """What a killed process held is free at once, though a child of it lives."""
    told, go = os.pipe(), os.pipe()

    async def receive(wait: bool) -> list[str]:
        queues = LocalTransport(place.path)
        await queues.create_queues(["q"])
        receiver = queues.receiver("q")
        try:
            async with asyncio.timeout(WAITS_AT_MOST_SECONDS / 4):
                return [each.envelope.message_id for each in await receiver.receive(10, wait=wait)]
        finally:
            if wait:
                await queues.close()

    async def fill() -> None:
        queues = LocalTransport(place.path)
        await queues.create_queues(["q"])
        await queues.send([Envelope("q", "m", {}, b"")], SystemClock().now())
        await queues.close()

    def parent() -> None:
        asyncio.run(receive(wait=False))
        if not os.fork():
            os.read(go[0], 1)
            os._exit(0)
        os.write(told[1], b"x")
        signal.pause()

    asyncio.run(fill())
    killed = Child(parent)
    os.read(told[0], 1)
    os.kill(killed.pid, signal.SIGKILL)
    os.waitpid(killed.pid, 0)
    found = asyncio.run(receive(wait=True))
    os.write(go[1], b"x")
    return found


if __name__ == "__main__":
    cases, url, settings = sys.argv[1].split(","), sys.argv[2], json.loads(sys.argv[3])
    for case in cases:
        print(json.dumps([case, globals()[case](Place(case, url, settings))]), flush=True)  # noqa: T201 - it is its answer
