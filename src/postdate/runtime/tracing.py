"""Where traces are told what happens, if anybody traces. Source: ADR 36."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Final

_OFF: Final = nullcontext()


class Tracing:
    """Makes spans; this one makes none. None of its methods may raise."""

    def created(self, message_id: str, destination: str, *, delayed: bool) -> Mapping[str, str]:
        """Note that a message was made, to be sent; return the headers by which its receiver goes on with the trace."""
        return {}

    def dispatching(self, headers: Sequence[Mapping[str, str]]) -> AbstractContextManager[object]:
        """Return the span in which due messages, with these headers, are sent to queues elsewhere."""
        return _OFF

    def handling(
        self, headers: Mapping[str, str], message_id: str, queue: str, due: datetime | None
    ) -> AbstractContextManager[object]:
        """Return the span in which a message is handled; ``due`` if it was delayed."""
        return _OFF


current = Tracing()
"""That of this process."""
