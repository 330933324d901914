"""How replies find the saga instance that asked, and sagas those who began them (ADR 0016)."""

import logging
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.saga_world import ONCE, SECOND, World

from postdate import (
    Endpoint,
    HandlerContext,
    Headers,
    MemorySagaStore,
    MemoryTimeouts,
    MemoryTransport,
    Recoverability,
    Saga,
    TimeoutManager,
    handles,
    handles_reply,
    handles_timeout,
    started_by,
)
from postdate.endpoint.saga_instance import SagaDetails, decode_details
from postdate.errors import InvalidMessage
from postdate.ports import Correlation
from postdate.testing import EndpointTest, VirtualClock


@dataclass
class Buy:
    order_id: str
    then: str = ""


@dataclass
class Leave:
    order_id: str


@dataclass
class Authorize:
    amount: int = 1


@dataclass
class Authorized:
    """A reply: whose it is, it does not say."""

    code: str = "ok"


@dataclass
class Done:
    """A reply to whoever began the saga."""

    text: str = ""


@dataclass
class Wait:
    """A timeout."""


@dataclass
class Basket:
    order_id: str
    answers: list[str] = field(default_factory=list)


unclaimed: list[tuple[str, object]] = []


class Buying(Saga[Basket], correlated_by="order_id", name="Buying"):
    @started_by(Buy)
    async def buy(self, message: Buy, context: HandlerContext) -> None:
        await context.send(Authorize(), destination="payments", headers={"order": message.order_id})
        if message.then == "fail":
            raise LookupError(message.then)

    @handles_reply(Authorized)
    async def authorized(self, message: Authorized, context: HandlerContext) -> None:
        self.state.answers.append(message.code)

    @handles_reply(Done)
    async def done(self, message: Done, context: HandlerContext) -> None:
        self.state.answers.append(message.text)

    @handles(Leave)
    async def leave(self, message: Leave, context: HandlerContext) -> None:
        self.complete()

    @classmethod
    async def not_found(cls, message: object, context: HandlerContext) -> None:
        unclaimed.append((cls.definition.name, message))
        await super().not_found(message, context)


class AlsoBuying(Buying, correlated_by="order_id", name="AlsoBuying"):
    """Takes the same replies, and asks for none."""

    @started_by(Buy)
    async def buy(self, message: Buy, context: HandlerContext) -> None: ...


class Authorizing(Saga[Basket], correlated_by="order_id", name="Authorizing"):
    """Replies later, from a timeout."""

    @started_by(Authorize, correlate=lambda _: "the only one")
    async def authorize(self, message: Authorize, context: HandlerContext) -> None:
        await self.request_timeout(Wait, within=60 * SECOND)

    @handles_timeout(Wait)
    async def waited(self, timeout: Wait, context: HandlerContext) -> None:
        await self.reply_to_originator(Done("at last"), headers={"own": "1"})
        self.complete()


@pytest.fixture(autouse=True)
def nothing_was_not_found() -> None:
    unclaimed.clear()


def replying(world: World, code: str = "ok", **settings: Any) -> Endpoint:
    """Return an endpoint that answers with a reply, and knows nothing of sagas."""
    settings = {"recoverability": ONCE, "clock": world.clock, **settings}
    endpoint = Endpoint("payments", transport=world.transport, **settings)

    @endpoint.handler(Authorize)
    async def authorize(message: Authorize, context: HandlerContext) -> None:
        await context.reply(Authorized(f"{code} for {context.headers['order']}"))

    return endpoint


async def answers(world: World, order_id: str = "o-1", saga: str = "Buying") -> list[str] | None:
    record = await world.sagas.find(saga, Correlation("order_id", order_id))
    return None if record is None else msgspec.json.decode(record.state, type=Basket).answers


async def test_a_reply_finds_the_instance_that_asked_although_it_does_not_say_which(world: World) -> None:
    async with world.endpoint(Buying, AlsoBuying) as endpoint, replying(world):
        await world.send(endpoint, Buy("o-1"), Buy("o-2"))
        await world.clock.run_until_idle()
        assert [await answers(world, order) for order in ("o-1", "o-2")] == [["ok for o-1"], ["ok for o-2"]]
        assert await answers(world, saga="AlsoBuying") == []
    assert unclaimed == []
    assert await world.length("error") == 0


async def test_what_a_saga_sends_says_who_sent_it_and_the_reply_who_is_to_get_it(memory: World) -> None:
    async with memory.endpoint(Buying) as endpoint:
        await memory.transport.create_queues(["payments"])
        await memory.send(endpoint, Buy("o-1"))
        record = await memory.sagas.find("Buying", Correlation("order_id", "o-1"))
        ((request, _),) = memory.transport.queues["payments"].messages
    assert request.headers["NServiceBus.OriginatingSagaId"] == record.saga_id
    assert request.headers["NServiceBus.OriginatingSagaType"] == "Buying"
    assert not {Headers.SAGA_ID, Headers.SAGA_TYPE} & request.headers.keys()
    async with replying(memory):
        await memory.clock.run_until_idle()
        ((reply, _),) = memory.transport.queues["orders"].messages
    assert {key: value for key, value in reply.headers.items() if "Saga" in key} == {
        "NServiceBus.SagaId": record.saga_id,
        "NServiceBus.SagaType": "Buying",
    }
    assert reply.headers[Headers.CORRELATION_ID] == request.headers[Headers.CORRELATION_ID]
    assert reply.headers[Headers.MESSAGE_INTENT] == "Reply"


async def test_a_reply_to_an_instance_that_has_ended_is_not_for_the_next_of_its_name(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "postdate.sagas")
    async with world.endpoint(Buying) as endpoint:
        await world.transport.create_queues(["payments"])
        await world.send(endpoint, Buy("o-1"), Leave("o-1"), Buy("o-1"))
        async with replying(world):
            await world.clock.run_until_idle()
            await world.clock.run_until_idle()
        assert await answers(world) == ["ok for o-1"]  # of the second
    assert unclaimed == [("Buying", Authorized("ok for o-1"))]
    assert "belongs to no Buying: ignored" in caplog.text
    assert await world.length("error") == 0


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {Headers.SAGA_TYPE: "Buying", Headers.SAGA_ID: "01a20181-db3c-7326-905e-bd495b091ef1"},
        {Headers.SAGA_TYPE: "Gone", Headers.SAGA_ID: "01a20181-db3c-7326-905e-bd495b091ef1"},
    ],
    ids=["no reply", "unknown instance", "unknown saga"],
)
async def test_a_reply_that_nobody_waits_for_goes_to_the_hook(memory: World, headers: dict[str, str]) -> None:
    async with memory.endpoint(Buying) as endpoint:
        await endpoint.send(Authorized(), headers=headers)
        await memory.clock.run_until_idle()
        assert await memory.length("error") == 0
    assert unclaimed == [("Buying", Authorized())]


async def test_a_reply_to_something_that_is_no_id_goes_to_the_error_queue(memory: World) -> None:
    async with memory.endpoint(Buying) as endpoint:
        await endpoint.send(Authorized(), headers={Headers.SAGA_TYPE: "Buying, Shop", Headers.SAGA_ID: "seven"})
        await memory.clock.run_until_idle()
        ((copy, _),) = memory.transport.queues["error"].messages
    assert "NServiceBus.SagaId names no saga instance: 'seven' is not a UUID" in copy.headers[Headers.EXCEPTION_MESSAGE]


async def test_a_saga_replies_later_to_the_saga_that_began_it(world: World) -> None:
    """By id, so that the one who asked need not be the one who has its name by then."""
    payments = Endpoint(
        "payments",
        transport=world.transport,
        delayed_delivery=world.endpoint(Buying).delayed_delivery,
        clock=world.clock,
        sagas=world.sagas,
        recoverability=ONCE,
    )
    payments.saga(Authorizing)
    async with payments, world.endpoint(Buying) as endpoint:
        await world.send(endpoint, Buy("o-1"))
        await world.clock.advance(59 * SECOND)
        assert await answers(world) == []
        await world.clock.advance(2 * SECOND)
        assert await answers(world) == ["at last"]
        assert await answers(world, "the only one", "Authorizing") is None
    assert unclaimed == []


async def test_whoever_began_a_saga_gets_its_reply_under_the_id_it_knows(memory: World) -> None:
    async with memory.endpoint(Authorizing) as endpoint:
        await memory.transport.create_queues(["shop"])
        await endpoint.send(Authorize(), message_id="m-1", headers={Headers.REPLY_TO_ADDRESS: "shop"})
        await memory.clock.advance(61 * SECOND)
        ((reply, _),) = memory.transport.queues["shop"].messages
    assert (reply.headers[Headers.CORRELATION_ID], reply.headers["own"]) == ("m-1", "1")
    assert reply.headers[Headers.ORIGINATING_SAGA_TYPE] == "Authorizing"  # so that it may be answered in turn
    assert Headers.SAGA_ID not in reply.headers


async def test_a_saga_that_nobody_waits_for_cannot_reply_and_says_why(memory: World) -> None:
    async with memory.endpoint(Authorizing) as endpoint:
        await endpoint.send(Authorize(), headers={Headers.REPLY_TO_ADDRESS: ""})
        await memory.clock.advance(61 * SECOND)
        ((copy, _),) = memory.transport.queues["error"].messages
    assert (
        "the message that started it has no header 'NServiceBus.ReplyToAddress'"
        in copy.headers[Headers.EXCEPTION_MESSAGE]
    )


async def test_a_request_leaves_with_the_state_or_not_at_all(memory: World) -> None:
    async with memory.endpoint(Buying) as endpoint, replying(memory):
        await memory.send(endpoint, Buy("o-1", "fail"))
    assert (await memory.length("payments"), unclaimed) == (0, [])


async def test_after_delayed_retries_a_reply_still_knows_its_saga(memory: World) -> None:
    tries: list[str] = []

    class Failing(Buying, correlated_by="order_id", name="Buying"):
        @handles_reply(Authorized)
        async def authorized(self, message: Authorized, context: HandlerContext) -> None:
            tries.append(message.code)
            if len(tries) == 1:
                raise LookupError("once")
            self.state.answers.append(message.code)

    retrying = Recoverability(immediate_retries=0, delayed_retries=1)
    async with memory.endpoint(Failing, recoverability=retrying) as endpoint, replying(memory):
        await memory.send(endpoint, Buy("o-1"))
        await memory.clock.advance(timedelta(minutes=1))
        assert await answers(memory) == ["ok for o-1"]
    assert len(tries) == 2


async def test_a_retry_of_a_reply_is_no_timeout_of_its_saga_that_a_timeout_manager_would_forget(
    clock: VirtualClock,
) -> None:
    world = World(clock, MemoryTransport(), None, MemorySagaStore())
    handled: list[object] = []
    endpoint = Endpoint(
        "orders",
        transport=world.transport,
        timeout_manager=TimeoutManager(MemoryTimeouts()),
        sagas=world.sagas,
        recoverability=Recoverability(immediate_retries=0, delayed_retries=1),
        clock=clock,
    )
    endpoint.saga(Buying)

    @endpoint.handler(Authorized)
    async def note(message: Authorized, context: HandlerContext) -> None:
        handled.append(message)
        if len(handled) == 1:
            raise LookupError("once")

    async with endpoint, replying(world):
        await world.send(endpoint, Buy("o-1"))
        await world.send(endpoint, Leave("o-1"))
        await clock.advance(timedelta(minutes=1))
    assert handled == 2 * [Authorized("ok for o-1")]
    assert unclaimed == [("Buying", Authorized("ok for o-1"))]


# --- under test, and where they are defined ---------------------------------------------------------------------------


async def test_replies_can_be_tested_without_whoever_gives_them() -> None:
    async with EndpointTest(lambda endpoint: endpoint.saga(Buying)) as test:
        await test.send(Buy("o-1"))
        await test.send(Buy("o-2"))
        first, second = test.deliveries
        await test.reply(Authorized("two"), to=second)
        await test.reply(Authorized("one"), to=first, headers={"own": "1"})
        assert await test.state_of(Buying, "o-1") == Basket("o-1", ["one"])
        assert await test.state_of(Buying, "o-2") == Basket("o-2", ["two"])


async def test_a_reply_under_test_goes_where_a_reply_would_go() -> None:
    def configure(endpoint: Endpoint) -> None:
        @endpoint.handler(Buy)
        async def buy(message: Buy, context: HandlerContext) -> None:
            await context.send(Authorize(), destination="payments", headers={Headers.REPLY_TO_ADDRESS: "elsewhere"})

    async with EndpointTest(configure) as test:
        await test.send(Buy("o-1"))
        with pytest.raises(InvalidMessage, match="replies to it go to 'elsewhere', not to 'tested'"):
            await test.reply(Authorized(), to=test.deliveries[0])


def test_details_of_earlier_versions_name_nobody_who_began_it() -> None:
    assert decode_details('{"timeouts": {}, "fired": [], "completed_by": null}', "a saga") == SagaDetails()
