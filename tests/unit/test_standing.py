"""Who keeps the event loop from everybody else is said, with the message: by a clock that the test moves."""

import anyio
import anyio.lowlevel
import pytest
from tests.waiting import until

from postdate import Endpoint, HandlerContext, MemoryTransport, Recoverability
from postdate.testing import VirtualClock


class Seconds:
    """What a handler takes in one step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("postdate.endpoint.handling.steady_seconds", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


async def ended(queues: MemoryTransport, lengths: dict[str, int]) -> bool:
    """Return whether these are the lengths of the queues, and nothing is in hand."""
    return await queues.queue_lengths() == lengths


@pytest.mark.parametrize("fails", [False, True], ids=["that succeeds", "that fails"])
async def test_a_handler_that_keeps_the_event_loop_is_named(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, fails: bool
) -> None:
    seconds, queues = Seconds(monkeypatch), MemoryTransport()
    settings = Recoverability(immediate_retries=0, delayed_retries=0)
    endpoint = Endpoint("sales", transport=queues, clock=clock, recoverability=settings)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        await anyio.lowlevel.checkpoint()
        if message == b"slow":
            seconds.pass_by(15)
        if fails:
            raise ValueError

    async with endpoint:
        for body in (b"slow", b"quick"):
            await endpoint.send(body, destination="sales", message_id=f"the-{body.decode()}-one")
        await until(lambda: ended(queues, {"sales": 0, "error": 2 * fails}))
    said = [record.getMessage() for record in caplog.records if "event loop" in record.getMessage()]
    assert said == ["the event loop stood for 15 s, in the handler of bytes the-slow-one: have a thread do what blocks"]


async def test_a_handler_that_waits_keeps_nobody_from_anything(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds, queues = Seconds(monkeypatch), MemoryTransport()
    endpoint, begun, may_end = Endpoint("sales", transport=queues, clock=clock), anyio.Event(), anyio.Event()
    raised = list[BaseException]()

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        begun.set()
        await may_end.wait()
        with anyio.CancelScope() as scope:
            scope.cancel()
            try:
                await anyio.sleep_forever()
            except BaseException as error:
                raised.append(error)
                raise

    async with endpoint:
        await endpoint.send(b"patient", destination="sales")
        await begun.wait()
        seconds.pass_by(60)
        may_end.set()
        await until(lambda: ended(queues, {"sales": 0, "error": 0}))
    assert [type(error) for error in raised] == [anyio.get_cancelled_exc_class()]
    assert "event loop" not in caplog.text
