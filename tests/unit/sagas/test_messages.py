"""How messages find their saga instances (specification 5)."""

import enum
import logging
import math
from dataclasses import dataclass

import msgspec
import pytest
from tests.saga_world import LOG, SECOND, Change, OrderSaga, Place, State, World

from postdate import HandlerContext, Headers, Saga, started_by
from postdate.ports import Correlation


async def test_a_second_starting_message_goes_to_the_instance_that_is_there(world: World) -> None:
    async with world.endpoint() as endpoint:
        await world.send(endpoint, Place("o-1"), Place("o-1"), Place("o-2"))
    assert await world.seen() == ["Place", "Place"]
    record = await world.record()
    assert record is not None
    assert record.version == 2


async def test_a_message_without_an_instance_that_it_could_start_goes_to_the_hook_and_is_consumed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "postdate.sagas"):
        async with world.endpoint() as endpoint:
            await world.send(endpoint, Change("o-1"))
    assert LOG == [("not found", "Change", "")]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert await world.length("orders") == await world.length("error") == 0


async def test_what_fails_leaves_state_timeouts_and_messages_as_they_were(memory: World) -> None:
    async with memory.endpoint() as endpoint:
        await memory.send(endpoint, Place("o-1", ["due 10"]))
        await memory.send(endpoint, Change("o-1", ["cancel", "mail lost", "fail"]))
        assert await memory.seen() == ["Place"]
        assert await memory.waiting() == 1
        assert "mails" not in memory.transport.queues
        await memory.clock.advance(11 * SECOND)
        assert await memory.seen() == ["Place", "Due 10"]


async def test_an_instance_that_completes_with_its_first_message_is_never_kept(world: World) -> None:
    async with world.endpoint() as endpoint:
        await world.send(endpoint, Place("o-1", ["due 10", "mail bye", "complete"]))
        assert await world.record() is None
        assert await world.waiting() == 0
        assert await world.length("mails") == 1


async def test_the_correlation_property_must_stay(memory: World) -> None:
    async with memory.endpoint() as endpoint:
        await memory.send(endpoint, Place("o-1"), Change("o-1", ["rename"]))
    assert await memory.seen() == ["Place"]
    assert await memory.length("error") == 1


@pytest.mark.parametrize("value", [None, 1.5, True, "", "  ", "x" * 201, ["o-1"]])
async def test_a_value_by_which_nothing_can_be_found_fails_its_message(memory: World, value: object) -> None:
    class Odd(Saga[State], correlated_by="order_id"):
        @started_by(Place, correlate=lambda _: value)
        async def place(self, message: Place, context: HandlerContext) -> None:
            raise AssertionError

    async with memory.endpoint(Odd) as endpoint:
        await memory.send(endpoint, Place("o-1"))
    assert await memory.length("error") == 1


class Numbered(msgspec.Struct, rename="camel"):
    order_number: int
    seen: int = 0


async def test_instances_may_be_told_apart_by_numbers_and_the_value_must_fit_the_state(memory: World) -> None:
    class ByNumber(Saga[Numbered], correlated_by="order_number"):
        @started_by(Place, correlate=lambda place: int(place.order_id))
        async def place(self, message: Place, context: HandlerContext) -> None:
            self.state.seen += 1

        @started_by(Change, correlate=lambda change: change.order_id)
        async def change(self, message: Change, context: HandlerContext) -> None:
            self.state.seen += 10

    async with memory.endpoint(ByNumber) as endpoint:
        await memory.send(endpoint, Place("7"), Place("7"), Change("7"), Change("8"))
        record = await memory.sagas.find(ByNumber.definition.name, Correlation("order_number", "7"))
        assert msgspec.json.decode(record.state, type=Numbered) == Numbered(7, 12)
        assert await memory.length("error") == 1  # the text "8" is no number


@dataclass
class Rated:
    order_id: str
    rate: float = 0.0


@pytest.mark.parametrize("rate", [math.nan, math.inf, "high"], ids=str)
async def test_a_state_that_could_not_be_read_again_fails_its_message_and_not_all_later_ones(
    memory: World, rate: object
) -> None:
    class Rating(Saga[Rated], correlated_by="order_id"):
        @started_by(Place)
        async def place(self, message: Place, context: HandlerContext) -> None:
            self.state.rate += 1

        @started_by(Change)
        async def change(self, message: Change, context: HandlerContext) -> None:
            self.state.rate = rate  # pyright: ignore[reportAttributeAccessIssue]

    async with memory.endpoint(Rating) as endpoint:
        await memory.send(endpoint, Place("o-1"), Change("o-1"), Place("o-1"))
        record = await memory.sagas.find(Rating.definition.name, Correlation("order_id", "o-1"))
        ((copy, _),) = memory.transport.queues["error"].messages
    assert msgspec.json.decode(record.state, type=Rated).rate == 2
    assert "could not be read as Rated again: Expected `float`" in copy.headers[Headers.EXCEPTION_MESSAGE]


class Kind(enum.Enum):
    LAMP = "lamp"


@dataclass
class OfKind:
    order_id: Kind


async def test_a_member_of_an_enum_finds_its_saga_by_its_value(memory: World) -> None:
    class ByKind(OrderSaga, correlated_by="order_id"):
        @started_by(OfKind)
        async def of_kind(self, message: OfKind, context: HandlerContext) -> None:
            await self.do([], "OfKind", context)

    async with memory.endpoint(ByKind) as endpoint:
        await memory.send(endpoint, OfKind(Kind.LAMP), OfKind(Kind.LAMP), Place("lamp"))
        assert await memory.length("error") == 0
    assert [before for _, _, before in LOG] == ["", "OfKind", "OfKind,OfKind"]
