"""What becomes of messages that fail, on every pair of queues and store, in real time: rows 12, 109 to 114."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tests.integration.endpoints.places import MILLISECOND, Pay, Place, now
from tests.waiting import patience, until

from postdate import (
    DelayedDelivery,
    DelayedRetry,
    Envelope,
    HandlerContext,
    Headers,
    ImmediateRetry,
    Outbox,
    SendOptions,
)
from postdate.core.recoverability import Recoverability
from postdate.errors import StoreUnavailable, TransportUnreachable
from postdate.messages import format_timestamp, parse_timestamp
from postdate.testing import Fault, FaultyStore, FaultyTransport

STEP = 20 * MILLISECOND
MAY_LAG = timedelta(seconds=1)
"""The clock of a store is followed by as much as a round trip behind it; what is noted here is the machine's time."""


class Refused(Exception):
    """An error with everything that an error copy tells of one."""

    def __init__(self) -> None:
        super().__init__("ü" * 20_000)
        self.data, self.help_link = {"order": 7}, "https://example.org/refused"


def failing(
    place: Place, error: Callable[[], Exception] = lambda: RuntimeError("no")
) -> Callable[..., Awaitable[None]]:
    async def fail(message: object, context: HandlerContext) -> None:
        await place.note(message, context)
        raise error()

    return fail


async def test_24_attempts_at_exact_times_with_exact_headers_row_109(place: Place) -> None:
    """Only the increase is shortened. Due times are computed from the time of the failure, which the header says."""
    assert Recoverability().time_increase == timedelta(seconds=10)
    async with place.endpoint(failing(place), recoverability=Recoverability(time_increase=STEP)) as endpoint:
        await endpoint.send(Pay(1), message_id="m-1", headers={"own": "1"})
        copy = await place.take(place.error)
        await place.is_empty(place.name, f"{place.name}.timeouts", place.error)
        await place.nothing_waits()
    assert len(place.handled) == 24
    first = dict(place.handled[0].context.headers)
    for number in range(4):
        attempts = place.handled[6 * number : 6 * number + 6]
        headers = [dict(each.context.headers) for each in attempts]
        assert headers == 6 * [headers[0]]
        if number == 0:
            continue
        scheduled = headers[0][Headers.DELAYED_RETRIES_TIMESTAMP]
        retried = {Headers.DELAYED_RETRIES: str(number), Headers.DELAYED_RETRIES_TIMESTAMP: scheduled}
        assert headers[0] == first | retried
        due = attempts[0].context.due
        assert due is not None
        assert due == parse_timestamp(scheduled) + number * STEP
        assert place.handled[6 * number - 1].at <= parse_timestamp(scheduled) + MAY_LAG
        assert due < attempts[0].at
    assert (copy.headers[Headers.MESSAGE_ID], copy.headers[Headers.FAILED_QUEUE]) == ("m-1", place.name)
    assert parse_timestamp(copy.headers[Headers.TIME_OF_FAILURE]) + MAY_LAG >= place.handled[-1].at


async def test_delayed_retries_end_after_24_hours_row_109(place: Place) -> None:
    long_ago = format_timestamp(now() - timedelta(hours=24, minutes=1))
    headers = {Headers.DELAYED_RETRIES: "1", Headers.DELAYED_RETRIES_TIMESTAMP: long_ago}
    async with place.endpoint(failing(place), recoverability=Recoverability(time_increase=STEP)) as endpoint:
        await endpoint.send(Pay(1), headers=headers)
        copy = await place.take(place.error)
    assert len(place.handled) == 6
    assert Headers.DELAYED_RETRIES not in copy.headers


async def test_a_message_without_headers_survives_a_delayed_retry_row_110(place: Place) -> None:
    recoverability = Recoverability(immediate_retries=1, delayed_retries=1, time_increase=STEP)
    async with place.endpoint(failing(place), recoverability=recoverability):
        await place.put_raw(place.name, b"\0raw")
        copy = await place.take(place.error)
    assert [each.message for each in place.handled] == 4 * [b"\0raw"]
    assert [each.context.headers.get(Headers.DELAYED_RETRIES) for each in place.handled] == [None, None, "1", "1"]
    ids = [each.context.message_id for each in place.handled]
    assert len(set(ids[1:])) == 1  # from the first delayed retry on it has one, also where the queue gave it none
    assert (copy.body, copy.headers[Headers.MESSAGE_ID]) == (b"\0raw", ids[1])


@pytest.mark.parametrize(
    ("wanted", "settings"),
    [
        (ImmediateRetry(), {"transaction_mode": "none"}),
        (DelayedRetry(STEP), {"transaction_mode": "none"}),
        (DelayedRetry(STEP), {"delayed_delivery": None}),
    ],
)
async def test_an_action_that_is_not_there_leads_to_the_error_queue_with_a_warning_row_111(
    place: Place, caplog: pytest.LogCaptureFixture, wanted: Any, settings: Mapping[str, Any]
) -> None:
    policy = Recoverability(policy=lambda *_: wanted)
    async with place.endpoint(failing(place), recoverability=policy, **settings) as endpoint:
        await endpoint.send(Pay(1))
        await place.take(place.error)
        await place.is_empty(place.name, place.error)
    assert len(place.handled) == 1
    (line,) = [each for each in caplog.records if "goes to the error queue" in each.getMessage()]
    assert line.levelname == "WARNING"


async def test_an_error_copy_has_exactly_these_headers_row_112(place: Place) -> None:
    def fail() -> Exception:
        error = Refused()
        error.__cause__ = KeyError("inner")
        return error

    def customize(headers: Mapping[str, str]) -> Mapping[str, str]:
        return {**headers, "team": "payments"}

    sent = {"own": "1", Headers.DELAYED_RETRIES: "3", Headers.IMMEDIATE_RETRIES: "5"}
    recoverability = Recoverability(immediate_retries=0, delayed_retries=0, customize_headers=customize)
    async with place.endpoint(failing(place, fail), recoverability=recoverability) as endpoint:
        before = now()
        await place.put(place.name, Envelope(place.name, "m-1", sent, b"body"))
        copy = await place.take(place.error)
    headers = dict(copy.headers)
    trace, failed_at = headers.pop(Headers.EXCEPTION_STACK_TRACE), headers.pop(Headers.TIME_OF_FAILURE)
    assert "KeyError: 'inner'" in trace
    assert before - MAY_LAG <= parse_timestamp(failed_at) <= now()
    assert (copy.message_id, copy.body) == ("m-1", b"body")
    assert headers == {
        "own": "1",
        "team": "payments",
        "NServiceBus.FailedQ": place.name,
        "NServiceBus.ProcessingMachine": endpoint.host.machine,
        "NServiceBus.ProcessingEndpoint": place.name,
        "$.diagnostics.hostid": endpoint.host.host_id,
        "$.diagnostics.hostdisplayname": endpoint.host.display_name,
        "NServiceBus.ExceptionInfo.ExceptionType": f"{Refused.__module__}.Refused",
        "NServiceBus.ExceptionInfo.InnerExceptionType": "builtins.KeyError",
        "NServiceBus.ExceptionInfo.Message": "ü" * 16_384,
        "NServiceBus.ExceptionInfo.Source": Refused.__module__,
        "NServiceBus.ExceptionInfo.HelpLink": "https://example.org/refused",
        "NServiceBus.ExceptionInfo.Data.order": "7",
    }


@pytest.mark.parametrize("told", ["an action of the application", "the log"])
async def test_a_store_out_of_reach_for_too_long_is_a_critical_error_row_113(
    place: Place, caplog: pytest.LogCaptureFixture, told: str
) -> None:
    outage, happened, errors = StoreUnavailable("gone away"), anyio.Event(), list[tuple[str, BaseException]]()
    store = FaultyStore(place.store, Fault("claim_due", outage))

    def act(text: str, error: BaseException) -> None:
        errors.append((text, error))
        happened.set()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.CRITICAL:
                happened.set()

    listening, logger = Listening(), logging.getLogger("postdate.endpoint")
    logger.addHandler(listening)
    settings: dict[str, Any] = {} if told == "the log" else {"critical_error": act}
    delays = DelayedDelivery(store, time_to_trigger_fetch_circuit_breaker=STEP)
    try:
        async with place.endpoint(delayed_delivery=delays, **settings) as endpoint:
            with patience():
                await happened.wait()
            await endpoint.send(Pay(1))
            assert len(await place.handles(1)) == 1  # the endpoint lives on
    finally:
        logger.removeHandler(listening)
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.CRITICAL]
    if told == "the log":
        assert lines == ["Failed to fetch due delayed messages from the store: gone away"]
    else:
        assert errors == [("Failed to fetch due delayed messages from the store", outage)]
        assert lines == []


async def awaited(value: Any) -> Any:
    """Return what a driver returns, awaited where that is its way."""
    return await value if isinstance(value, Awaitable) else value


async def test_a_delayed_message_dispatched_twice_keeps_its_id_and_has_its_effects_once_rows_12_114(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer to its sending is lost: it is sent again, and known by its id; what is known to be sent is not."""
    caplog.set_level(logging.INFO, "postdate.outbox")
    store = FaultyStore(place.store)  # which shares no transaction with the queues, also where the one inside does
    transport = FaultyTransport(
        place.transport, Fault("send", TransportUnreachable("no answer"), calls=[1], after=True)
    )
    outbox, billing = place.outbox(), place.queue("billing")
    await place.transport.create_queues([billing])

    async def handle(message: Pay, context: HandlerContext) -> None:
        connection = await context.transaction()
        await awaited(connection.execute(f"CREATE TABLE IF NOT EXISTS {place.table} (message TEXT)"))
        await awaited(connection.execute(f"INSERT INTO {place.table} VALUES ('{context.message_id}')"))
        await context.send(Pay(2), destination=billing)
        await place.note(message, context)

    settings: dict[str, Any] = {"outbox": Outbox(outbox), "transaction_mode": "receive_only", "transport": transport}
    known = "message m-1 was handled before; nothing is left"
    async with place.endpoint(handle, delayed_delivery=DelayedDelivery(store), **settings) as endpoint:
        delayed = endpoint.outgoing.create(Pay(1), SendOptions(delay=STEP, message_id="m-1"))
        await place.store.store(delayed, now())  # in the queue before the store it may be found to be due already
        await until(lambda: known in caplog.text)
        await place.take(billing)
        await place.is_empty(place.name, place.error, billing)
    transaction = outbox.transaction(place.name, "another")
    try:
        cursor = await awaited((await transaction.begin()).execute(f"SELECT message FROM {place.table}"))
        assert await awaited(cursor.fetchall()) == [("m-1",)]
    finally:
        await transaction.roll_back()
    assert len(place.handled) == 1
