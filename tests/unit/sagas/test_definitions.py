"""What is refused before any message moves."""

import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec import Raw
from tests.saga_world import SECOND, Change, Due, OrderSaga, Place, State, World

from postdate import (
    Endpoint,
    HandlerContext,
    Headers,
    LocalTransport,
    MemorySagaStore,
    PostgresStore,
    Saga,
    SqliteStore,
    TransactionMode,
    handles,
    handles_reply,
    handles_timeout,
    started_by,
)
from postdate.config import load_settings
from postdate.endpoint.saga_instance import PendingTimeout, SagaDetails, decode_details, encode_details
from postdate.errors import ConfigurationError, InvalidMessage, MessageError, UnsupportedTransactionMode
from postdate.testing import VirtualClock
from postdate.wiring import open_outbox, open_saga_store


def test_transaction_scope_needs_sagas_in_the_database_of_the_queues(clock: VirtualClock, tmp_path: Path) -> None:
    file = tmp_path / "all.db"
    world = World(clock, LocalTransport(file), SqliteStore(file), MemorySagaStore())
    with pytest.raises(UnsupportedTransactionMode, match=r"MemorySagaStore and LocalTransport must be on the same"):
        world.endpoint(transaction_mode="transaction_scope")
    assert world.endpoint().mode is TransactionMode.SENDS_ATOMIC_WITH_RECEIVE
    world.transport.file.close()
    world.store.file.close()


def test_an_endpoint_without_a_saga_store_or_delays_or_a_queue_takes_no_saga(memory: World) -> None:
    with pytest.raises(ConfigurationError, match="no saga store"):
        memory.endpoint(sagas=None)
    with pytest.raises(ConfigurationError, match="no delayed message store"):
        Endpoint("orders", transport=memory.transport, sagas=memory.sagas).saga(OrderSaga)
    with pytest.raises(ConfigurationError, match="send-only"):
        memory.endpoint(send_only=True)
    with pytest.raises(ConfigurationError, match="already"):
        memory.endpoint(OrderSaga, OrderSaga)
    with pytest.raises(ConfigurationError, match="is not a saga"):
        memory.endpoint(State)  # pyright: ignore[reportArgumentType]


@dataclass
class Demanding:
    order_id: str
    more: str


class Positional(msgspec.Struct, array_like=True):
    order_id: str


def _define(state: Any, correlated_by: str, name: str | None = None, **methods: Any) -> None:
    base = Saga if state is None else Saga[state]
    types.new_class(
        "Made", (base,), {"correlated_by": correlated_by, "name": name}, lambda names: names.update(methods)
    )


@started_by(Place)
async def _start(self: Any, message: Place, context: HandlerContext) -> None: ...


@handles(Place)
async def _handle(self: Any, message: Place, context: HandlerContext) -> None: ...


@started_by(Due)
async def _start_by_due(self: Any, message: Due, context: HandlerContext) -> None: ...


@handles_timeout(bytes)
async def _time_out_raw(self: Any, message: bytes, context: HandlerContext) -> None: ...


@handles(Due)
async def _handle_due(self: Any, message: Due, context: HandlerContext) -> None: ...


@handles_reply(Place)
async def _take_reply(self: Any, message: Place, context: HandlerContext) -> None: ...


@pytest.mark.parametrize(
    ("define", "why"),
    [
        (lambda: _define(State, "order_id", handle=_handle), "nothing starts it"),
        (lambda: _define(State, "order", start=_start), "has no 'order'"),
        (lambda: _define(Demanding, "order_id", start=_start), "needs defaults for more"),
        (lambda: _define(dict, "order_id", start=_start), "neither a dataclass nor"),
        (lambda: _define(State, "order_id", start=_start, handle=_handle), "two methods handle Place"),
        (lambda: _define(State, "order_id", start=_start_by_due), "Due has no 'order_id'.*=lambda message: …\\)$"),
        (lambda: _define(State, "order_id", start=_start, handle=_handle_due), "or @handles_reply\\(Due\\) if it only"),
        (lambda: _define(State, "order_id", start=_start, reply=_take_reply), "two methods handle Place: reply and"),
        (lambda: _define(State, "order_id", start=_start, raw=_time_out_raw), "not bytes"),
        (lambda: _define(Positional, "order_id", start=_start), "Positional must not be array_like"),
        (lambda: _define(State, "order_id", reply=_take_reply), "nothing starts it; mark a method"),
        (lambda: _define(None, "order_id", start=_start), "its state has no type"),
        (lambda: started_by(Place)(cast("Any", print)), "async methods"),
        (lambda: _define(State, "order_id", "Orders, abroad", start=_start), "name 'Orders, abroad' has a comma"),
        (lambda: _define(State, "order_id", "Orders ", start=_start), "name 'Orders ' has .* a blank at one end"),
        (lambda: _define(State, "order_id", "s" * 201, start=_start), "name has 201 characters"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_saga_that_cannot_work_is_refused_where_it_is_defined(define: Callable[[], None], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        define()


def test_saga_stores_are_where_the_delayed_messages_are(tmp_path: Path) -> None:
    file = {"POSTDATE_STORE__ADDRESS": f"sqlite:///{tmp_path / 'all.db'}", "POSTDATE_STORE__SYNCHRONOUS": "normal"}
    in_file = open_saga_store(load_settings(None, file))
    store = SqliteStore(tmp_path / "all.db", synchronous="normal")
    assert in_file.capabilities.database == store.capabilities.database
    for each in (in_file, store):
        each.file.close()  # pyright: ignore[reportAttributeAccessIssue]
    url = "postgresql://someone@nowhere/shop"
    servers = {"POSTDATE_STORE__ADDRESS": url, "POSTDATE_STORE__SCHEMA": "orders", "POSTDATE_TRANSPORT__ADDRESS": url}
    store = PostgresStore(url, schema="orders")
    assert open_saga_store(load_settings(None, servers)).capabilities.database == store.capabilities.database
    mariadb = {"POSTDATE_STORE__ADDRESS": "mariadb://someone@nowhere/shop", "POSTDATE_TRANSPORT__ADDRESS": url}
    settings = load_settings(None, mariadb)
    assert open_saga_store(settings).capabilities.database == open_outbox(settings).database
    with pytest.raises(ConfigurationError, match="sagas are kept in SQLite or PostgreSQL"):
        open_saga_store(load_settings(None, {"POSTDATE_STORE__ADDRESS": "redis://nowhere/0"}))


def test_the_last_timeouts_that_came_are_remembered_and_no_more() -> None:
    details = SagaDetails()
    for number in range(100):
        details.timeouts[f"t-{number}"] = PendingTimeout(
            f"m-{number}", datetime(2030, 1, 1, tzinfo=UTC), "T", Raw(b"{}")
        )
        assert details.has_timeout(f"m-{number}")
        details.remember_handled(f"m-{number}", remember=True)
    assert [number for number in range(100) if details.has_timeout(f"m-{number}")] == list(range(68, 100))
    details.remember_handled("m-99", remember=True)  # a second time
    assert len(details.fired) == 32
    assert decode_details(encode_details(details), "a saga") == details


@pytest.mark.parametrize(
    "details",
    [
        '{"timeouts": 7}',
        '{"timeouts": {"t-1": {"message_id": "m-1", "due": "2026-01-31T12:00:05", "type": "Due", "body": {}}}}',
    ],
    ids=["no mapping", "no time zone"],
)
def test_details_that_cannot_be_read_are_told(details: str) -> None:
    with pytest.raises(InvalidMessage, match="the stored state of Order order_id='o-1' cannot be read"):
        decode_details(details, "Order order_id='o-1'")


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_requested_after_its_handler_has_ended_is_refused(memory: World, *, fails: bool) -> None:
    kept: list[Saga[State]] = []

    class Late(OrderSaga, correlated_by="order_id"):
        @started_by(Place)
        async def take(self, message: Place | Change, context: HandlerContext) -> None:
            kept.append(self)
            if fails:
                raise RuntimeError("no")

    async with memory.endpoint(Late) as endpoint:
        await memory.send(endpoint, Place("o-1"))
        with pytest.raises(MessageError, match="has ended"):
            await kept[0].request_timeout(Due(), within=SECOND)
        for change in (lambda: kept[0].cancel_timeout("t-1"), kept[0].complete):
            with pytest.raises(MessageError, match="has ended"):
                change()


@pytest.mark.parametrize(
    "headers",
    [
        {Headers.SAGA_TYPE: "NoSuchSaga", Headers.SAGA_ID: str(uuid.uuid4())},
        {Headers.SAGA_TYPE: "OrderSaga", Headers.SAGA_ID: "7"},
        {Headers.SAGA_TYPE: "OrderSaga"},
    ],
)
async def test_a_timeout_for_nobody_here_goes_to_the_error_queue(memory: World, headers: dict[str, str]) -> None:
    async with memory.endpoint() as endpoint:
        headers = {Headers.IS_SAGA_TIMEOUT_MESSAGE: "True", **headers}
        await endpoint.send(Due(), destination="orders", headers=headers)
        await memory.clock.run_until_idle()
        assert await memory.length("error") == 1


def test_in_transaction_mode_none_sagas_are_refused(memory: World) -> None:
    with pytest.raises(UnsupportedTransactionMode, match=r"handled again.*use 'receive_only'"):
        memory.endpoint(transaction_mode="none")
