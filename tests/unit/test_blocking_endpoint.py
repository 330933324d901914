"""The endpoint for programs without an event loop."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from postdate import (
    BlockingEndpoint,
    DelayedDelivery,
    Endpoint,
    HandlerContext,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    SqliteStore,
)
from postdate.errors import ConfigurationError, NotADatabase


@dataclass
class Pay:
    amount: int = 0


def test_any_thread_may_send_and_messages_arrive_row_1(eventually) -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport(), delayed_delivery=DelayedDelivery(MemoryStore()))
    handled: list[int] = []

    @endpoint.handler(Pay)
    async def handle(message: Pay, context: HandlerContext) -> None:
        handled.append(message.amount)

    with BlockingEndpoint(endpoint) as blocking, ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda n: blocking.send(Pay(n), delay=timedelta(milliseconds=n)), range(20)))
        eventually(lambda: len(handled) == 20, "20 messages handled")
    assert len(set(ids)) == 20
    assert sorted(handled) == list(range(20))


def test_it_runs_in_a_thread_of_its_own_and_ends_it(eventually) -> None:
    before = set(threading.enumerate())
    with BlockingEndpoint(Endpoint("sales", transport=MemoryTransport())) as blocking:
        assert set(threading.enumerate()) - before
    eventually(lambda: set(threading.enumerate()) <= before, "the end of its threads")
    with pytest.raises(ConfigurationError, match="not running"):
        blocking.send(Pay(1))


def test_an_error_at_start_is_raised_and_the_thread_ends(tmp_path: Path, eventually) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("This is no database.\n" * 100)
    store, transport = SqliteStore(path), LocalTransport(path)
    before = set(threading.enumerate())
    with (
        pytest.raises(NotADatabase),
        BlockingEndpoint(Endpoint("sales", transport=transport, delayed_delivery=DelayedDelivery(store))),
    ):
        pytest.fail("it must not start")
    eventually(lambda: set(threading.enumerate()) <= before, "the end of its threads")
    store.file.close()
    transport.file.close()


def test_an_error_in_the_program_ends_it_and_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), BlockingEndpoint(Endpoint("sales", transport=MemoryTransport())):
        raise ZeroDivisionError
