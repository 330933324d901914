"""What sagas say to others, on every pair of queues and store."""

from dataclasses import dataclass
from datetime import timedelta

import anyio
from tests.integration.endpoints.places import Place, now

from postdate import HandlerContext, Saga, TimeoutManager, handles, handles_timeout, started_by

DAY = timedelta(days=1)


@dataclass
class Begin:
    order_id: str


@dataclass
class Finish:
    order_id: str


@dataclass
class Due:
    """A timeout."""


@dataclass
class State:
    order_id: str


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


async def test_a_timeout_manager_forgets_the_timeouts_of_a_completed_saga_row_108(place: Place) -> None:
    timeouts, start = place.timeouts(), now()

    async def pending(number: int) -> None:
        with anyio.fail_after(30):
            while len((await timeouts.next_chunk(start, start + 9 * DAY, 10)).due) != number:  # noqa: ASYNC110 - a table
                await anyio.sleep(0.005)

    endpoint = place.endpoint(delayed_delivery=None, timeout_manager=TimeoutManager(timeouts), sagas=place.sagas())
    endpoint.saga(Order)
    async with endpoint:
        for order in ("o-1", "o-2"):
            await endpoint.send(Begin(order))
        await pending(4)
        await endpoint.send(Finish("o-1"))
        await pending(2)
        await place.is_empty(place.name, place.error)
