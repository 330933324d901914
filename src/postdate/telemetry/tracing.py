"""Traces through OpenTelemetry, by its conventions for messaging. Source: ADR 36.

A message carries the ``traceparent`` of its sender. A message that is handled soon continues that trace. A delayed
message begins a new trace with a link to the sender's trace. In the sender's trace, a span *wait* ends when the message
was due. This needs ``opentelemetry-api``.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, SpanKind, TracerProvider
from typing_extensions import override

from postdate.clock import to_microseconds
from postdate.errors import InvalidTimestamp
from postdate.messages import Headers, parse_timestamp
from postdate.runtime import tracing

_LINKS_AT_MOST: Final = 128
"""Number of links that exporters keep of one span."""


def instrument(provider: TracerProvider | None = None) -> None:
    """Trace the messages that this process sends, delivers and handles.

    ``provider``: the provider of tracers; by default the provider of the process.
    """
    tracing.current = _OpenTelemetryTracing(provider)


def instrument_if_exported() -> None:
    """Call :func:`instrument` if the process has its own provider. Without one, the spans would not be exported."""
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        instrument()


def uninstrument() -> None:
    """Stop tracing."""
    tracing.current = tracing.Tracing()


class _OpenTelemetryTracing(tracing.Tracing):
    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = trace.get_tracer("postdate", tracer_provider=provider)

    @override
    def trace_message(self, message_id: str, destination: str, *, delayed: bool) -> Mapping[str, str]:
        headers = {Headers.START_NEW_TRACE: "True"} if delayed else dict[str, str]()
        attributes = _attributes("create", destination) | {"messaging.message.id": message_id}
        with self._tracer.start_as_current_span(f"create {destination}", kind=SpanKind.PRODUCER, attributes=attributes):
            propagate.inject(headers)
        return headers

    @override
    @contextmanager
    def dispatch_span(self, headers: Sequence[Mapping[str, str]]) -> Generator[None]:
        attributes = {"messaging.batch.message_count": len(headers), **_attributes("send")}
        with self._tracer.start_as_current_span("send", Context(), kind=SpanKind.CLIENT, attributes=attributes) as span:
            for each in headers[:_LINKS_AT_MOST] if span.is_recording() else ():
                if (sender := _sender(each)[1]) is not None:
                    span.add_link(sender)
            yield

    @override
    @contextmanager
    def handling_span(
        self, headers: Mapping[str, str], message_id: str, queue: str, due: datetime | None
    ) -> Generator[None]:
        (context, sender), links = _sender(headers), list[Link]()
        if headers.get(Headers.START_NEW_TRACE, "").lower() == "true" and sender is not None:
            self._add_wait_span(headers, context, queue, due)
            context, links = Context(), [Link(sender)]
        attributes = _attributes("process", queue) | {"messaging.message.id": message_id}
        with self._tracer.start_as_current_span(
            f"process {queue}", context, kind=SpanKind.CONSUMER, attributes=attributes, links=links
        ):
            yield

    def _add_wait_span(self, headers: Mapping[str, str], sender: Context, queue: str, due: datetime | None) -> None:
        """Add a span to the sender's trace that shows how long the message had to wait."""
        with suppress(InvalidTimestamp):
            sent = parse_timestamp(headers.get(Headers.TIME_SENT, ""))
            until = due or parse_timestamp(headers.get(Headers.DELIVER_AT, ""))
            begin, end = (to_microseconds(each) * 1_000 for each in (sent, max(sent, until)))
            attributes = _attributes("wait", queue)
            self._tracer.start_span(f"wait {queue}", sender, attributes=attributes, start_time=begin).end(end)


def _attributes(operation: str, destination: str | None = None) -> dict[str, Any]:
    destination_attributes = {} if destination is None else {"messaging.destination.name": destination}
    kind = {} if operation == "wait" else {"messaging.operation.type": operation}
    return {"messaging.system": "postdate", "messaging.operation.name": operation, **kind, **destination_attributes}


def _sender(headers: Mapping[str, str]) -> tuple[Context, SpanContext | None]:
    """Return the context that a message carries, without any context of this process, and the span in it."""
    context = propagate.extract(headers, Context())
    span_context = trace.get_current_span(context).get_span_context()
    return context, span_context if span_context.is_valid else None
