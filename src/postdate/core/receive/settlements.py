"""What a step decides about a message; the pump does it. Source: ADR 0026."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from postdate.errors import PostdateError
from postdate.ports import End, Received

Afterwards: TypeAlias = Callable[[], Awaitable[None]]
"""What is to be done when a message has ended well; raises nothing."""


class Settlement(NamedTuple):
    """How a received message is to end.

    Args:
        end: with which it leaves its queue; ``None``: it goes back, as one that failed.
        refused: asked what becomes of the message when its queue refuses ``end``; it raises the error if that is not
            the fault of ``end``, and the pump gives the message back after a pause. ``None``: every error is raised.
        afterwards: done when the message has left its queue.
    """

    end: End | None
    refused: Refused | None = None
    afterwards: Sequence[Afterwards] = ()


Refused: TypeAlias = Callable[[Received, PostdateError], Awaitable[Settlement | None]]

Step: TypeAlias = Callable[[Received], Awaitable[Settlement | None]]
"""Handles one message; ``None``: it has dealt with its end, too. What it raises is a failure of the queues or of
itself, not of a handler: the message goes back after a pause."""

BACK = Settlement(None)
