"""Traces: what is handled soon goes on with its sender's, what was delayed begins a new one with a link (row 118)."""

from collections.abc import Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as conventions
from opentelemetry.trace import SpanKind, StatusCode

from postdate import DelayedDelivery, Endpoint, HandlerContext, Headers, MemoryStore, MemoryTransport, Recoverability
from postdate.clock import from_microseconds
from postdate.telemetry.tracing import instrument, uninstrument
from postdate.testing import VirtualClock

SECOND = timedelta(seconds=1)


@dataclass
class Order:
    """A message of an application."""


@dataclass
class Paid:
    """Another one."""


class Traced:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("application")

    def spans(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.exporter.get_finished_spans() if each.name == name]

    def span(self, name: str) -> ReadableSpan:
        (found,) = self.spans(name)
        return found


@pytest.fixture
def traced() -> Generator[Traced]:
    found = Traced()
    instrument(found.provider)
    yield found
    uninstrument()


def own(span: ReadableSpan) -> tuple[int, int]:
    """Return the trace and the number of a span."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(each.context.trace_id, each.context.span_id) for each in span.links]


def shop(clock: VirtualClock, **more: Any) -> Endpoint:
    queues = MemoryTransport()
    return Endpoint("shop", transport=queues, delayed_delivery=DelayedDelivery(MemoryStore()), clock=clock, **more)


async def test_a_message_that_is_handled_soon_goes_on_with_the_trace_of_its_sender(
    clock: VirtualClock, traced: Traced
) -> None:
    endpoint, heads = shop(clock), list[Any]()

    @endpoint.handler(Order)
    async def take(_: Order, context: HandlerContext) -> None:
        heads.append(dict(context.headers))
        with traced.tracer.start_as_current_span("work"):
            pass
        await context.send(Paid(), headers={"traceparent": context.headers["traceparent"]})

    @endpoint.handler(Paid)
    async def note(_: Paid, context: HandlerContext) -> None:
        heads.append(dict(context.headers))

    async with endpoint:
        with traced.tracer.start_as_current_span("request"):
            await endpoint.send(Order())
        await clock.run_until_idle()
    created, paid = traced.spans("create shop")
    handled, noted = traced.spans("process shop")
    assert parent(created) == own(traced.span("request"))
    assert parent(handled) == own(created)
    assert parent(traced.span("work")) == own(handled)
    assert parent(paid) == own(handled)
    assert parent(noted) == own(paid)  # not that of the order, whose header was copied
    assert [created.kind, handled.kind] == [SpanKind.PRODUCER, SpanKind.CONSUMER]
    assert all("NServiceBus.OpenTelemetry.StartNewTrace" not in each for each in heads)
    assert dict(handled.attributes or {}) == {
        conventions.MESSAGING_SYSTEM: "postdate",
        conventions.MESSAGING_OPERATION_NAME: "process",
        conventions.MESSAGING_OPERATION_TYPE: "process",
        conventions.MESSAGING_DESTINATION_NAME: "shop",
        conventions.MESSAGING_MESSAGE_ID: heads[0][Headers.MESSAGE_ID],
    }


async def test_what_was_delayed_begins_a_new_trace_linked_to_its_sender_row_118(
    clock: VirtualClock, traced: Traced
) -> None:
    endpoint, heads = shop(clock), list[Any]()

    @endpoint.handler(Order)
    async def take(_: Order, context: HandlerContext) -> None:
        heads.append(dict(context.headers))

    async with endpoint:
        started = clock.now()
        with traced.tracer.start_as_current_span("request"):
            await endpoint.send(Order(), delay=60 * SECOND)
        await clock.advance(61 * SECOND)
    assert heads[0]["NServiceBus.OpenTelemetry.StartNewTrace"] == "True"
    created, handled, waited = traced.span("create shop"), traced.span("process shop"), traced.span("wait shop")
    assert parent(created) == own(traced.span("request"))
    assert (parent(handled), linked(handled)) == (None, [own(created)])
    assert own(handled)[0] != own(created)[0]
    assert parent(waited) == own(created)
    lasted = [from_microseconds((at or 0) // 1_000) - started for at in (waited.start_time, waited.end_time)]
    assert lasted == [timedelta(0), 60 * SECOND]
    # The memory's queues are elsewhere: the batch was sent, by nobody's trace, with links to whose messages they were.
    sent = traced.spans("send")
    assert [(parent(each), linked(each)) for each in sent] == [(None, [own(created)])]
    assert (sent[0].attributes or {})[conventions.MESSAGING_BATCH_MESSAGE_COUNT] == 1


async def test_a_failure_and_its_delayed_retry_are_traces_of_their_own(clock: VirtualClock, traced: Traced) -> None:
    endpoint = shop(clock, recoverability=Recoverability(immediate_retries=0, delayed_retries=1))

    @endpoint.handler(Order)
    async def fail(_: Order, context: HandlerContext) -> None:
        raise ValueError("no stock")

    async with endpoint:
        with traced.tracer.start_as_current_span("request"):
            await endpoint.send(Order())
        await clock.advance(60 * SECOND)
    first, retried = traced.spans("process shop")
    created = traced.span("create shop")
    assert [each.status.status_code for each in (first, retried)] == [StatusCode.ERROR] * 2
    assert [event.name for event in first.events] == ["exception"]
    assert parent(first) == own(created)
    assert (parent(retried), linked(retried)) == (None, [own(created)])


async def test_headers_that_are_no_trace_are_nobodys(clock: VirtualClock, traced: Traced) -> None:
    endpoint = shop(clock)

    @endpoint.handler(Order)
    async def take(_: Order, context: HandlerContext) -> None:
        assert trace.get_current_span().get_span_context().is_valid

    uninstrument()
    async with endpoint:
        for wrong in ("", "00-zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\0", "é" * 9_000):
            new = {"traceparent": wrong, Headers.TIME_SENT: "never", "NServiceBus.OpenTelemetry.StartNewTrace": "true"}
            await endpoint.send(Order(), headers=new)
        instrument(traced.provider)
        await clock.run_until_idle()
    assert [each.parent for each in traced.spans("process shop")] == [None] * 5
    assert not traced.spans("wait shop")


async def test_by_default_nothing_is_traced(clock: VirtualClock) -> None:
    endpoint, heads = shop(clock), list[Any]()

    @endpoint.handler(Order)
    async def take(_: Order, context: HandlerContext) -> None:
        heads.append(dict(context.headers))

    async with endpoint:
        await endpoint.send(Order(), delay=SECOND)
        await clock.advance(2 * SECOND)
    assert not {"traceparent", "NServiceBus.OpenTelemetry.StartNewTrace"} & set(heads[0])
