"""Messages of the application to bytes and back: dataclasses, structs, models of pydantic, and what names no type."""

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import pydantic
import pytest

from postdate import Endpoint, Envelope, HandlerContext, Headers, MemoryTransport
from postdate.endpoint.message_types import MessageTypes
from postdate.errors import InvalidMessage, UnknownMessageType
from postdate.testing import VirtualClock


class Order(pydantic.BaseModel):
    number: int
    at: datetime
    lines: list[str] = []


class Item(msgspec.Struct):
    number: int


@dataclass
class Pay:
    number: int


MESSAGES = [Order(number=1, at=datetime(2026, 1, 31, 12, tzinfo=UTC), lines=["ü"]), Item(1), Pay(1)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_as_they_were(message: object) -> None:
    types = MessageTypes()
    types.add(type(message), "Name")
    headers, body = types.encode(message)
    assert headers[Headers.ENCLOSED_MESSAGE_TYPES] == "Name"
    assert types.decode(headers, body) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("body", [b"", b'{"number": "many"}', b"\xff", b"[]"])
def test_a_body_that_does_not_fit_is_refused(message: object, body: bytes) -> None:
    types = MessageTypes()
    types.add(type(message), "Name")
    with pytest.raises(InvalidMessage, match="the body is not a Name"):
        types.decode({Headers.ENCLOSED_MESSAGE_TYPES: "Name"}, body)


def test_a_model_checks_what_it_reads() -> None:
    types = MessageTypes()
    types.add(Order)
    headers, body = types.encode(Order(number=1, at=datetime(2026, 1, 31, tzinfo=UTC)))
    with pytest.raises(InvalidMessage, match="at"):
        types.decode(headers, body.replace(b'"at"', b'"never"'))


def test_a_model_that_cannot_be_written_is_refused() -> None:
    class Odd(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        what: object

    with pytest.raises(InvalidMessage, match="cannot be written"):
        MessageTypes().encode(Odd(what=object()))


async def test_a_message_that_names_no_type_goes_to_the_handlers_of_bytes(clock: VirtualClock) -> None:
    queues = MemoryTransport()
    endpoint, handled = Endpoint("sales", transport=queues, clock=clock), list[object]()

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        handled.append(message)

    @endpoint.handler(Order, name="Order")
    async def order(message: Order, context: HandlerContext) -> None:
        handled.append(message)

    async with endpoint:
        await endpoint.send(b"\0raw", destination="sales")
        await endpoint.send(MESSAGES[0])
        named = {Headers.ENCLOSED_MESSAGE_TYPES: "Else"}
        await queues.send([Envelope("sales", "m-1", named, b"")], clock.now())
        await clock.run_until_idle()
    assert handled == [b"\0raw", MESSAGES[0]]
    ((copy, _),) = queues.queues["error"].messages
    assert copy.headers[Headers.ERROR_CODE] == UnknownMessageType.code
