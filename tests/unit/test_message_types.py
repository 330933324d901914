"""Messages of the application to bytes and back: dataclasses, structs, models of pydantic, and what names no type."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pydantic
import pytest

from postdate import Endpoint, Envelope, HandlerContext, Headers, MemoryTransport, connect, message
from postdate.client.testing import ClientTest
from postdate.endpoint.message_types import MessageTypes
from postdate.errors import ConfigurationError, InvalidMessage, UnknownMessageType
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


# --- names that stay when a class moves -------------------------------------------------------------------------------


def moved(module: str) -> type[Any]:
    """Return the class of a message as it stands in a module."""

    @message("remind", aliases=["shop.old.Remind"])
    @dataclass(slots=True)
    class Remind:
        text: str

    Remind.__module__ = module
    return Remind


def test_the_name_of_a_type_does_not_depend_on_where_its_class_is() -> None:
    there, here = MessageTypes(), MessageTypes()
    remind = moved("shop.new")
    here.add(remind)
    headers, body = there.encode(moved("__main__")("call"))
    assert headers[Headers.ENCLOSED_MESSAGE_TYPES] == "remind"
    assert here.decode(headers, body) == remind("call")
    assert here.decode({Headers.ENCLOSED_MESSAGE_TYPES: "shop.old.Remind"}, body) == remind("call")


def test_a_type_that_has_a_name_has_it_before_one_whose_earlier_name_it_was() -> None:
    for types_first in (True, False):
        types, remind = MessageTypes(), moved("shop.new")
        types.add(remind) if types_first else types.add(Pay, "shop.old.Remind")
        types.add(Pay, "shop.old.Remind") if types_first else types.add(remind)
        assert types.decode({Headers.ENCLOSED_MESSAGE_TYPES: "shop.old.Remind"}, b'{"number": 1}') == Pay(1)


def test_a_subclass_has_a_name_of_its_own() -> None:
    class Later(moved("shop")):
        pass

    assert MessageTypes().name_of(Later).endswith(".Later")


@pytest.mark.parametrize("name", ["", " ", " a", "a;b", "a, b", "a\nb", 7, None])
def test_what_cannot_be_a_name_is_refused(name: Any) -> None:
    for names in ((name, ()), ("a", (name,))):
        with pytest.raises(ConfigurationError, match="a message type has a name"):
            message(names[0], aliases=names[1])
    with pytest.raises(ConfigurationError, match=r"write @message\('Pay'\)"):
        message(Pay)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="aliases must be a list"):
        message("a", aliases="ab")


def test_an_unknown_name_says_how_to_keep_it() -> None:
    with pytest.raises(UnknownMessageType, match=r"decorate it .*aliases=\['shop.Remind'\]\)"):
        MessageTypes().decode({Headers.ENCLOSED_MESSAGE_TYPES: "shop.Remind"}, b"{}")


def test_a_class_of_somebody_else_is_named_by_a_header(caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be decorated, and no warning says that it should be."""

    @message("remind")
    @dataclass
    class Remind:
        text: str

    @dataclass
    class Foreign:
        text: str

    Foreign.__module__ = "__main__"
    handled = MessageTypes()
    handled.add(Remind)
    client = ClientTest()
    for sent in (Foreign("call"), {"text": "call"}):
        client.blocking.send(sent, destination="mails", headers={Headers.ENCLOSED_MESSAGE_TYPES: "remind"})
    waiting = client.deliveries
    assert [each.headers[Headers.ENCLOSED_MESSAGE_TYPES] for each in waiting] == ["remind"] * 2
    assert handled.decode(waiting[0].headers, b'{"text":"call"}') == Remind("call")
    assert "__main__" not in caplog.text
    client.end()


def test_a_client_warns_once_of_a_class_of_the_main_program(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass
    class Remind:
        text: str

    Remind.__module__ = "__main__"
    caplog.set_level(logging.WARNING)
    with connect("memory:").blocking as client:
        for _ in range(2):
            client.send(Remind("call"), destination="mails")
            client.send(moved("__main__")("call"), destination="mails")
    told = [record.getMessage() for record in caplog.records if "__main__" in record.getMessage()]
    assert len(told) == 1
    assert told[0].endswith("name it with @postdate.message('Remind'), there and here")
