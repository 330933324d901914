"""What sagas say to others, on every pair of queues and store."""

import json
from dataclasses import dataclass
from datetime import timedelta

from tests.integration.endpoints.places import Place, now
from tests.waiting import until

from postdate import HandlerContext, Headers, Saga, TimeoutManager, handles, handles_reply, handles_timeout, started_by

DAY = timedelta(days=1)


@dataclass
class Begin:
    order_id: str


@dataclass
class Finish:
    order_id: str


@dataclass
class Ask:
    question: str


@dataclass
class Answer:
    """A reply, which does not say whose it is."""

    text: str


@dataclass
class Due:
    """A timeout."""


@dataclass
class State:
    order_id: str
    answer: str = ""


class Order(Saga[State], correlated_by="order_id"):
    @started_by(Begin)
    async def begin(self, message: Begin, context: HandlerContext) -> None:
        await self.request_timeout(Due, within=DAY)
        await self.request_timeout(Due, within=2 * DAY)

    @handles(Finish)
    async def finish(self, message: Finish, context: HandlerContext) -> None:
        self.complete()

    @handles_timeout(Due)
    async def due(self, timeout: Due, context: HandlerContext) -> None: ...


class Asking(Saga[State], correlated_by="order_id"):
    @started_by(Begin)
    async def begin(self, message: Begin, context: HandlerContext) -> None:
        await context.send(Ask(message.order_id))

    @handles_reply(Answer)
    async def answered(self, message: Answer, context: HandlerContext) -> None:
        self.state.answer = message.text
        await self.reply_to_originator(Answer(f"{self.state.order_id}: {message.text}"))
        self.complete()


async def test_a_timeout_manager_forgets_the_timeouts_of_a_completed_saga_row_108(place: Place) -> None:
    timeouts, start = place.timeouts(), now()

    async def pending(number: int) -> None:
        async def there_are() -> bool:
            return len((await timeouts.next_chunk(start, start + 9 * DAY, 10)).due) == number

        await until(there_are)

    endpoint = place.endpoint(delayed_delivery=None, timeout_manager=TimeoutManager(timeouts), sagas=place.sagas())
    endpoint.saga(Order)
    async with endpoint:
        for order in ("o-1", "o-2"):
            await endpoint.send(Begin(order))
        await pending(4)
        await endpoint.send(Finish("o-1"))
        await pending(2)
        await place.is_empty(place.name, place.error)


async def test_replies_find_the_instances_that_asked(place: Place) -> None:
    """And what they reply in turn, whoever began them."""
    shop, answers = place.queue("shop"), place.queue("answers")
    await place.transport.create_queues([shop])

    async def answer(message: Ask, context: HandlerContext) -> None:
        await context.reply(Answer(f"yes, {message.question}"))

    answering = place.endpoint(name=answers)
    answering.handler(Ask)(answer)
    asking = place.endpoint(sagas=place.sagas())
    asking.saga(Asking)
    asking.route(Ask, answers)
    async with answering, asking:
        for number in range(5):
            await asking.send(Begin(f"o-{number}"), message_id=f"m-{number}", headers={Headers.REPLY_TO_ADDRESS: shop})
        replies = [await place.take(shop) for _ in range(5)]
        await place.is_empty(place.name, answers, place.error)
    found = {each.headers[Headers.CORRELATION_ID]: json.loads(each.body)["text"] for each in replies}
    assert found == {f"m-{number}": f"o-{number}: yes, o-{number}" for number in range(5)}
