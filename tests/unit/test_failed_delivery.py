"""Where delayed messages go that cannot be delivered, and whereto their copies are returned (rows 84, 86)."""

from dataclasses import replace
from typing import Any

import pytest

from postdate import DelayedDelivery, Endpoint, Envelope, Headers, MemoryStore, MemoryTransport
from postdate.core.due.dispatcher import Dispatcher
from postdate.endpoint.outgoing import timeouts_queue_envelope
from postdate.errors import ConfigurationError, ErrorQueueNotConfigured, MessageTooLarge
from postdate.testing import Fault


@pytest.fixture
async def bench(make_bench):
    """One whose error copies are returned to their destination."""
    bench = make_bench()
    await bench.create_queues()
    bench.settings = settings = replace(bench.settings, errors_return_to_destination=True)
    bench.dispatcher = Dispatcher(
        bench.store, bench.transport, settings, bench.clock, bench.breaker, bench.failure_rate
    )
    bench.intake = bench.intake_of(bench.store)
    return bench


def check_copy(copy: Envelope) -> None:
    assert copy.headers[Headers.FAILED_QUEUE] == "nowhere"
    assert copy.headers[Headers.ERROR_CODE] == "queue_not_found"
    assert (copy.message_id, copy.headers["own"], copy.body) == ("m-1", "1", b"body")
    assert not [name for name in copy.headers if name.startswith(Headers.TIMEOUT_PROPERTIES_PREFIX)]


async def test_the_copy_of_a_due_message_names_its_destination_row_84(bench) -> None:
    await bench.keep(bench.message(due_in=-1, destination="nowhere", headers={"own": "1"}, body=b"body"))
    await bench.look()
    (copy,) = bench.arrived("error")
    check_copy(copy)


async def test_the_copy_of_a_message_that_came_due_names_its_destination_row_84(bench) -> None:
    late = bench.message(due_in=-1, destination="nowhere", headers={"own": "1"}, body=b"body")
    await bench.pump.handle(await bench.put_in_timeouts_queue(timeouts_queue_envelope(late, "sales.timeouts")))
    (copy,) = bench.arrived("error")
    check_copy(copy)


async def test_the_copy_of_a_message_that_is_not_due_names_the_timeouts_queue(bench) -> None:
    """Returned to its destination, it would be there too early."""
    bench.store.faults.add(Fault("store", MessageTooLarge("too large")))
    early = timeouts_queue_envelope(bench.message(due_in=60), "sales.timeouts")
    await bench.pump.handle(await bench.put_in_timeouts_queue(early))
    (copy,) = bench.arrived("error")
    assert copy.headers[Headers.FAILED_QUEUE] == "sales.timeouts"
    assert early.headers.items() <= copy.headers.items()


async def test_a_copy_that_fails_again_names_its_destination_once_more(bench) -> None:
    stale = {Headers.FAILED_QUEUE: "elsewhere", "own": "1"}
    await bench.keep(bench.message(due_in=-1, destination="nowhere", headers=stale, body=b"body"))
    await bench.look()
    check_copy(bench.arrived("error")[0])


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"poison_queue": " "}, "poison_queue must be the name of a queue: it is blank"),
        ({"poison_queue": "p" * 201}, "at most 200"),
        ({"errors_return_to": "sender"}, "must be one of timeouts_queue, destination, not 'sender'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        DelayedDelivery(MemoryStore(), **settings)


def test_who_only_sends_needs_a_poison_queue_or_an_error_queue_row_86() -> None:
    transport = MemoryTransport()
    with pytest.raises(ErrorQueueNotConfigured, match="poison_queue="):
        Endpoint(
            "s", transport=transport, send_only=True, error_queue=None, delayed_delivery=DelayedDelivery(MemoryStore())
        )
    Endpoint(
        "s",
        transport=transport,
        send_only=True,
        error_queue=None,
        delayed_delivery=DelayedDelivery(MemoryStore(), poison_queue="poison"),
    )


async def test_the_poison_queue_and_those_to_be_drained_are_created_with_the_others_row_86() -> None:
    transport = MemoryTransport()
    settings = DelayedDelivery(MemoryStore(), poison_queue="poison", drain_timeout_manager=True)
    async with Endpoint("sales", transport=transport, delayed_delivery=settings):
        assert set(transport.queues) == {"sales", "sales.timeouts", "sales.timeoutsdispatcher", "poison", "error"}
