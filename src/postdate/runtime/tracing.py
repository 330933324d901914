"""Where traces are told what happens, if anybody traces. Source: ADR 36."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Protocol


class Tracing(Protocol):
    """Makes spans; none of its methods may raise."""

    def created(self, message_id: str, destination: str, *, delayed: bool) -> Mapping[str, str]:
        """Note that a message was made, to be sent; return the headers by which its receiver goes on with the trace."""
        ...

    def dispatching(self, headers: Sequence[Mapping[str, str]]) -> AbstractContextManager[object]:
        """Return the span in which due messages, with these headers, are sent to queues elsewhere."""
        ...

    def handling(
        self, headers: Mapping[str, str], message_id: str, queue: str, due: datetime | None
    ) -> AbstractContextManager[object]:
        """Return the span in which a message is handled; ``due`` if it was delayed."""
        ...


_OFF = nullcontext()


class _Tracer:
    """What traces in this process."""

    used: Tracing | None = None


def use(tracing: Tracing | None) -> None:
    """Have this process traced; ``None``: no more."""
    _Tracer.used = tracing


def created(message_id: str, destination: str, *, delayed: bool) -> Mapping[str, str]:
    return {} if _Tracer.used is None else _Tracer.used.created(message_id, destination, delayed=delayed)


def dispatching(headers: Sequence[Mapping[str, str]]) -> AbstractContextManager[object]:
    return _OFF if _Tracer.used is None else _Tracer.used.dispatching(headers)


def handling(
    headers: Mapping[str, str], message_id: str, queue: str, due: datetime | None
) -> AbstractContextManager[object]:
    return _OFF if _Tracer.used is None else _Tracer.used.handling(headers, message_id, queue, due)
