"""The interface through which traces get their spans, if tracing is on. Source: ADR 36."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Final

_OFF: Final = nullcontext()


class Tracing:
    """Makes spans. This base class makes none. None of the methods may raise."""

    def trace_message(self, message_id: str, destination: str, *, delayed: bool) -> Mapping[str, str]:
        """Record that a message to send was made; return the headers with which its receiver continues the trace."""
        return {}

    def dispatch_span(self, headers: Sequence[Mapping[str, str]]) -> AbstractContextManager[object]:
        """Return the span for sending due messages, with these headers, to queues elsewhere."""
        return _OFF

    def handling_span(
        self, headers: Mapping[str, str], message_id: str, queue: str, due: datetime | None
    ) -> AbstractContextManager[object]:
        """Return the span for handling a message; ``due`` is the due time of a message that was delayed, in UTC."""
        return _OFF


current = Tracing()
"""The tracing of this process."""
