"""`EndpointTest`: delayed messages are cancelled and rescheduled as a client does it."""

from dataclasses import dataclass
from datetime import timedelta

from postdate import Answer, Endpoint, HandlerContext
from postdate.testing import EndpointTest

HOUR = timedelta(hours=1)


@dataclass
class Remind:
    of: str


async def test_what_waits_is_cancelled_and_rescheduled() -> None:
    handled = list[str]()

    def configure(endpoint: Endpoint) -> None:
        @endpoint.handler(Remind)
        async def remind(message: Remind, context: HandlerContext) -> None:
            handled.append(message.of)

    async with EndpointTest(configure) as shop:
        first, second = [await shop.send(Remind(each), delay=HOUR) for each in ("a", "b")]
        assert await shop.cancel(first) is Answer.DONE
        assert await shop.cancel(first) is Answer.CANCELLED
        assert await shop.reschedule(second, delay=3 * HOUR)
        await shop.advance(hours=2)
        assert handled == []
        await shop.advance(hours=1)
        assert handled == ["b"]
        assert await shop.cancel(second) is Answer.DELIVERED
