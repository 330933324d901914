"""`EndpointTest`: delayed messages are cancelled and rescheduled as a client does it."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from postdate import Answer, Endpoint, HandlerContext
from postdate.testing import EndpointTest

HOUR = timedelta(hours=1)


@dataclass
class Remind:
    of: str


async def test_what_keeps_a_zone_is_not_among_what_waits() -> None:
    def configure(endpoint: Endpoint) -> None:
        @endpoint.handler(Remind)
        async def remind(message: Remind, context: HandlerContext) -> None:
            pass

    async with EndpointTest(configure) as shop:
        await shop.send(Remind("a"), deliver_at="2999-07-01 09:00", zone="Europe/Paris")
        assert [each.due for each in await shop.waiting()] == [datetime(2999, 7, 1, 7, tzinfo=UTC)]


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
