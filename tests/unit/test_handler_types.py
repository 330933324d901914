"""A handler that takes other messages than those it is registered for is an error of the types, before it runs.

The checker fails if one of the errors that are ignored here is none any more.
"""

from dataclasses import dataclass

from postdate import BlockingHandlerContext, Endpoint, HandlerContext, MemoryTransport, Saga, handles, started_by


@dataclass
class Pay:
    number: int


@dataclass
class Paid:
    number: int


@dataclass
class State:
    number: int = 0


async def takes_pay(message: Pay, context: HandlerContext) -> None: ...


async def takes_both(message: Pay | Paid, context: HandlerContext) -> None: ...


async def takes_anything(message: object, context: object) -> None: ...


def is_plain(message: Pay, context: BlockingHandlerContext) -> None: ...


def test_a_handler_takes_the_messages_that_it_is_registered_for() -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    for handle in (takes_pay, takes_both, takes_anything):
        assert endpoint.handler(Pay)(handle) is handle
    assert endpoint.handler(Pay)(is_plain) is is_plain
    endpoint.handler(Paid)(endpoint.handler(Pay)(takes_both))
    endpoint.handler(Paid)(takes_pay)  # pyright: ignore[reportArgumentType]


def test_a_method_of_a_saga_takes_the_messages_that_it_is_named_for() -> None:
    class Order(Saga[State], correlated_by="number"):
        @started_by(Pay)
        @handles(Paid)
        async def both(self, message: Pay | Paid, context: HandlerContext) -> None: ...

    class Wrong(Saga[State], correlated_by="number"):
        @started_by(Pay)  # pyright: ignore[reportArgumentType]
        async def start(self, message: Paid, context: HandlerContext) -> None: ...

    assert {*Order.definition.messages} == {Pay, Paid}
    assert {*Wrong.definition.messages} == {Pay}
