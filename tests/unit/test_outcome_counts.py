"""Each outcome of a received message has its count, told once it is carried out. Source: ADR 26, "one outcome"."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Never, get_args

import pytest

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    DelayedRetry,
    Discard,
    Endpoint,
    Envelope,
    Headers,
    ImmediateRetry,
    MemoryStore,
    MemoryTransport,
    MoveToError,
    Recoverability,
)
from postdate.core.receive.outcomes import COUNTED_AS
from postdate.core.recoverability import Decision, Resolution
from postdate.errors import MessageTooLarge, SagaConflict, TransportUnreachable
from postdate.messages import delay_headers
from postdate.ports import RecordKind
from postdate.runtime.reporting import Counted
from postdate.telemetry.metrics import prometheus
from postdate.telemetry.vitals import Vitals
from postdate.testing import Fault, FaultyTransport, Plan, RecordedMetrics, VirtualClock

SECOND = timedelta(seconds=1)


def fail(attempts: int = 99, error: Exception | None = None) -> Callable[[int], None]:
    """Let so many attempts fail."""

    def attempt(number: int) -> None:
        if number <= attempts:
            raise error or ValueError("no")

    return attempt


def decide(*decisions: Decision) -> Callable[[], Recoverability]:
    """Return what makes a policy that decides so one time after the other, and then for the error queue."""

    def make() -> Recoverability:
        remaining = list(decisions)
        return Recoverability(policy=lambda *_: remaining.pop(0) if remaining else MoveToError())

    return make


def fail_to_decide(*_: object) -> Never:
    raise ValueError("no policy")


def refuse(*commits: int, error: Exception | None = None) -> list[Plan]:
    """Let the queues refuse these commits."""
    return [Fault("commit", error or MessageTooLarge("too large"), commits)]


@dataclass(frozen=True)
class Case:
    """How a message fares, and what is counted.

    Args:
        shows: the ways and decisions that it is an example of.
        counts: what is counted in the end, but for ``delivered`` and ``stored`` of a delayed retry.
    """

    shows: Sequence[object]
    counts: Mapping[Counted, int]
    attempt: Callable[[int], None] = lambda _: None
    policy: Callable[[], Recoverability] = lambda: Recoverability(immediate_retries=0, delayed_retries=0)
    faults: Sequence[Plan] = ()
    expires: bool = False


TWICE = [ImmediateRetry(), ImmediateRetry()]
CASES = {
    "it is handled": Case([], {"handled": 1}),
    "it is past its time to be received": Case([], {"discarded": 1}, expires=True),
    "it is retried at once": Case(
        [ImmediateRetry, Resolution.POLICY],
        {"failed": 2, "retried": 2, "handled": 1},
        fail(2),
        decide(*TWICE),
    ),
    "it is retried later": Case(
        [DelayedRetry], {"failed": 1, "retried": 1, "handled": 1}, fail(1), decide(DelayedRetry(SECOND))
    ),
    "it goes to the error queue": Case([MoveToError], {"failed": 1, "moved_to_error": 1}, fail(), decide()),
    "it goes to another error queue": Case(
        [MoveToError], {"failed": 1, "moved_to_error": 1}, fail(), decide(MoveToError("other"))
    ),
    "its policy discards it": Case([Discard], {"failed": 1, "discarded": 1}, fail(), decide(Discard("known"))),
    "its policy fails": Case(
        [], {"failed": 11, "retried": 10, "moved_to_error": 1}, fail(), partial(Recoverability, policy=fail_to_decide)
    ),
    "another process is faster": Case([Resolution.RETRY_NOW], {"handled": 1}, fail(1, SagaConflict("faster"))),
    "its queue is away when it ends": Case(
        [Resolution.REQUEUE], {"handled": 1}, faults=refuse(1, error=TransportUnreachable("away"))
    ),
    "its end is refused for good": Case([Resolution.POLICY], {"failed": 1, "moved_to_error": 1}, faults=refuse(1)),
    "its error copy is refused": Case(
        [Resolution.ERROR_COPY], {"failed": 1, "moved_to_error": 1}, fail(), decide(), refuse(1)
    ),
    "its second error copy is refused": Case(
        [Resolution.BRIEF_ERROR_COPY], {"failed": 1, "moved_to_error": 1}, fail(), decide(), refuse(1, 2)
    ),
    "no error queue takes it at first": Case(
        [Resolution.STUCK], {"failed": 2, "retried": 1, "moved_to_error": 1}, fail(), decide(), refuse(1, 2, 3)
    ),
}


async def count(case: Case, clock: VirtualClock) -> Mapping[str, int]:
    metrics, queues, attempts = RecordedMetrics(), MemoryTransport(), [0]
    await queues.create_queues(["other"])
    endpoint = Endpoint(
        "sales",
        transport=FaultyTransport(queues, *case.faults),
        delayed_delivery=DelayedDelivery(MemoryStore()) if DelayedRetry in case.shows else None,
        recoverability=case.policy(),
        clock=clock,
        metrics=metrics,
    )

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: object) -> None:
        attempts[0] += 1
        case.attempt(attempts[0])

    headers = {Headers.TIME_TO_BE_RECEIVED: "00:00:01", Headers.TIME_SENT: "2000-01-01 00:00:00:000000 Z"}
    async with endpoint:
        await endpoint.send(b"", destination="sales", headers=headers if case.expires else {})
        await clock.advance(300 * SECOND)
        await clock.run_until_idle()
    assert sum(metrics.handler_runs.values()) == attempts[0]
    return {name: messages for name, messages in metrics.counts.items() if name not in {"delivered", "stored"}}


@pytest.mark.parametrize("name", CASES)
async def test_each_outcome_has_its_count(name: str, clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    assert await count(CASES[name], clock) == CASES[name].counts


async def test_what_the_intake_cannot_store_is_counted(clock: VirtualClock) -> None:
    metrics, queues = RecordedMetrics(), MemoryTransport()
    endpoint = Endpoint(
        "sales", transport=queues, delayed_delivery=DelayedDelivery(MemoryStore()), clock=clock, metrics=metrics
    )
    async with endpoint:
        await queues.send([Envelope("sales.timeouts", "m-1", {}, b"for nobody")], clock.now())
        await clock.run_until_idle()
    assert metrics.counts == {"failed": 1, "moved_to_error": 1}


async def test_what_the_intake_sends_on_is_counted_as_delivered(clock: VirtualClock) -> None:
    metrics, queues = RecordedMetrics(), MemoryTransport()
    endpoint = Endpoint(
        "sales", transport=queues, delayed_delivery=DelayedDelivery(MemoryStore()), clock=clock, metrics=metrics
    )
    message = DelayedMessage("m-1", clock.now() - SECOND, "billing", {}, b"")
    async with endpoint:
        await queues.create_queues(["billing"])
        await queues.send([Envelope("sales.timeouts", "m-1", delay_headers(message), b"")], clock.now())
        await clock.run_until_idle()
    assert metrics.counts == {"delivered": 1}
    assert metrics.delivered_to == {"billing": 1}


def test_the_table_has_every_way_and_decision() -> None:
    """What is not in the table is shown by the tests of the intake, which alone keeps messages in hand."""
    shown = {each for case in CASES.values() for each in case.shows}
    assert shown == {*Resolution, *get_args(Decision)} - {Resolution.WAIT_FOR_STORE, Resolution.WAIT_ALONE}
    assert {*COUNTED_AS.values()} <= {*get_args(Counted)}
    ends = {RecordKind.HANDLED, RecordKind.RETRIED, RecordKind.FAILED, RecordKind.DISCARDED}
    assert COUNTED_AS.keys() == ends


async def test_the_line_a_minute_and_prometheus_tell_of_failed_handlers(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The alert for messages in the error queue asks for the increase of ``moved_to_error``."""
    from prometheus_client import generate_latest

    metrics, registry = prometheus()
    endpoint = Endpoint("sales", transport=MemoryTransport(), recoverability=decide()(), clock=clock, metrics=metrics)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: object) -> None:
        raise ValueError("no")

    async with endpoint:
        for _ in range(5):
            await endpoint.send(b"", destination="sales")
        await clock.run_until_idle()
    text = generate_latest(registry).decode()
    assert 'postdate_messages_total{postdate_outcome="moved_to_error"} 5.0' in text
    assert 'postdate_messages_total{postdate_outcome="failed"} 5.0' in text
    assert 'postdate_handler_runs_total{postdate_message_type="builtins.bytes"} 5.0' in text
    assert 'postdate_handler_duration_seconds_count{postdate_message_type="builtins.bytes"}' in text
    with caplog.at_level(logging.INFO, "postdate.service"):
        Vitals(metrics, list)._log_summary()
    assert "in the last minute: 5 failed, 5 moved to error" in caplog.text
