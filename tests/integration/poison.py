"""A message whose handler kills its process each time, amid others: only that one ends in the error queue."""

import json
from collections.abc import Callable

from tests.integration.conftest import Process
from tests.waiting import until

from postdate import Envelope, Headers, SystemClock, Transport

CONTENT = {Headers.ENCLOSED_MESSAGE_TYPES: "Work", Headers.CONTENT_TYPE: "application/json"}
MESSAGES = 200
DEATHS = 6


async def let_a_message_kill_its_processes(start: Callable[..., Process], place: str, queues: Transport) -> None:
    """Start one process after the other until the message is in the error queue; check what has become of the others.

    Args:
        start: the fixture.
        place: as ``processes.py`` takes it; its queues are there.
        queues: those of the place.
    """
    numbers = [*range(MESSAGES // 2), -1, *range(MESSAGES // 2, MESSAGES)]
    works = [Envelope("consumer", f"m-{n}", CONTENT, json.dumps({"number": n}).encode()) for n in numbers]
    await queues.send(works, SystemClock().now())
    process, deaths = start("fragile_consumer", place), 0

    async def is_in(queue: str, count: int) -> bool:
        return await queues.lengths_of([queue]) == {queue: count}

    async def has_ended_or_failed_it() -> bool:
        return not process.is_running or await is_in("error", 1)

    await until(has_ended_or_failed_it)
    while not process.is_running:
        process, deaths = start("fragile_consumer", place), deaths + 1
        await until(has_ended_or_failed_it)
    await until(lambda: is_in("done", MESSAGES))
    process.stop()
    assert deaths == DEATHS
    assert await is_in("error", 1)
    assert await is_in("consumer", 0)
    receiver = queues.receiver("error")
    (copy,) = await receiver.receive(10)
    assert copy.envelope.message_id == "m--1"
    await receiver.close()
