"""Arguments that several commands take, and how their texts are read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, Any, TypeVar

import typer

from postdate.errors import PostdateError

T = TypeVar("T")


def _reading(read: Callable[[str], T]) -> Callable[[Any], T]:
    """Return ``read`` with errors that typer can place at the option they belong to."""

    def reading(text: Any) -> T:
        if not isinstance(text, str):  # a default is read, too
            return text
        try:
            return read(text)
        except PostdateError as error:
            raise typer.BadParameter(str(error)) from error

    return reading


def _duration(text: str) -> timedelta:
    from postdate.config import parse_duration

    return parse_duration(text)


def _instant(text: str) -> datetime:
    from postdate.config import parse_instant

    return parse_instant(text)


def _name(text: str) -> str:
    """Refuse a blank name, which a script's unset variable leaves: it would count as not given, or as another name."""
    from postdate.errors import InvalidMessage

    if not text.strip():
        raise InvalidMessage("it is blank; name one, or leave the option out")
    return text


DURATION = _reading(_duration)
INSTANT = _reading(_instant)
NAME = _reading(_name)

MessageId = Annotated[str, typer.Argument(parser=NAME, metavar="ID", help="Id of the message.")]
MessageIds = Annotated[list[str], typer.Argument(parser=NAME, metavar="ID…", help="Ids of messages.")]
Delay = Annotated[
    timedelta | None,
    typer.Option("--delay", parser=DURATION, metavar="DURATION", help="Due this long from now: 30s, 10m, 1h30m, 2d."),
]
At = Annotated[
    datetime | None,
    typer.Option(
        "--at", parser=INSTANT, metavar="TIME", help="Due then: ISO 8601 with offset, 2026-01-31T12:00+01:00."
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1_000_000, help="At most so many.")]
