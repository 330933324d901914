"""Unreadable rows of the store and the queues: count, list, show and discard them. Source: ADR 0043."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from postdate.errors import MessageNotFound, PostdateError
from postdate.ports import UnreadableRow, UnreadableRows
from postdate.wiring import OpenDeployment

_STORE: Final = "s"
_QUEUES: Final = "q"
_NAME: Final = re.compile(rf"(?P<where>[{_STORE}{_QUEUES}])(?P<number>[0-9]{{1,18}})", re.ASCII)
_SEARCHED: Final = 10_000
"""Number of rows to search for a name or an id. A larger number of unreadable rows means a serious fault."""


@dataclass(frozen=True, slots=True)
class UnreadableLine:
    """One unreadable row, in a list.

    ``name`` is ``s`` (store) or ``q`` (queues) with the number of the row there. ``queue`` is ``None`` for a row of the
    store. ``message_id`` is empty if it cannot be read. ``at`` is when the row was first met.
    """

    name: str
    queue: str | None
    message_id: str
    reason: str
    at: datetime
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UnreadableList:
    """Unreadable rows, with those of the store first. ``total`` counts all."""

    total: int = 0
    messages: Sequence[UnreadableLine] = ()


@dataclass(frozen=True, slots=True)
class UnreadableDetails:
    """One unreadable row. ``raw`` has the content of the row by column, in hexadecimal digits."""

    message: UnreadableLine
    raw: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DiscardResult:
    """Result of discarding one row. ``remark`` says why the row was not discarded."""

    name: str
    done: bool
    remark: str = ""


def _sources(deployment: OpenDeployment) -> dict[str, UnreadableRows]:
    """Return the store and the transport that mark unreadable rows, by the first letter of the names of their rows."""
    parts = {_STORE: deployment.store, _QUEUES: deployment.transport}
    return {letter: part for letter, part in parts.items() if isinstance(part, UnreadableRows)}


async def count_unreadable(deployment: OpenDeployment) -> int:
    return await count_unreadable_in(deployment.store) + await count_unreadable_in(deployment.transport)


async def count_unreadable_in(part: object) -> int:
    """Return the number of unreadable rows of a store or a transport; 0 if it marks none."""
    return await part.count_unreadable() if isinstance(part, UnreadableRows) else 0


async def list_unreadable(deployment: OpenDeployment, limit: int) -> UnreadableList:
    rows = await _list_rows(deployment, limit)
    return UnreadableList(await count_unreadable(deployment), [_line(name, row) for name, row in rows[:limit]])


async def _list_rows(deployment: OpenDeployment, limit: int) -> list[tuple[str, UnreadableRow]]:
    return [
        (f"{letter}{row.number}", row)
        for letter, source in _sources(deployment).items()
        for row in await source.list_unreadable(limit)
    ]


def _line(name: str, row: UnreadableRow) -> UnreadableLine:
    return UnreadableLine(name, row.queue or None, row.message_id, row.reason, row.at, sum(map(len, row.raw.values())))


def _details(name: str, row: UnreadableRow) -> UnreadableDetails:
    return UnreadableDetails(_line(name, row), {column: value.hex() for column, value in row.raw.items()})


async def find_unreadable(deployment: OpenDeployment, message_id: str) -> list[UnreadableDetails]:
    """Return the unreadable rows of a message, with the row that was met last at the end."""
    rows = [(name, row) for name, row in await _list_rows(deployment, _SEARCHED) if row.message_id == message_id]
    return [_details(name, row) for name, row in sorted(rows, key=lambda each: each[1].at)]


async def show_unreadable(deployment: OpenDeployment, name: str) -> UnreadableDetails:
    """Return one row with its content. Raise MessageNotFound if no row has that name."""
    _find_source(deployment, name)
    for row_name, row in await _list_rows(deployment, _SEARCHED):
        if row_name == name:
            return _details(name, row)
    raise _not_found_error(name)


async def discard_unreadable(deployment: OpenDeployment, names: Sequence[str], now: datetime) -> list[DiscardResult]:
    """Delete rows permanently, each in a transaction. The deletion is recorded as discarded if the id can be read."""
    results = list[DiscardResult]()
    for name in names:
        try:
            source, number = _find_source(deployment, name)
            await source.discard_unreadable(number, now)
        except PostdateError as error:
            if error.transient:
                raise
            results.append(DiscardResult(name, done=False, remark=str(error)))
        else:
            results.append(DiscardResult(name, done=True))
    return results


def _find_source(deployment: OpenDeployment, name: str) -> tuple[UnreadableRows, int]:
    """Return the store or transport of a name, and the number of the row.

    Raise MessageNotFound if the name is malformed.
    """
    match = _NAME.fullmatch(name)
    source = None if match is None else _sources(deployment).get(match["where"])
    if match is None or source is None:
        raise _not_found_error(name)
    return source, int(match["number"])


def _not_found_error(name: str) -> MessageNotFound:
    return MessageNotFound(
        f"no unreadable row has the name {name!r}; names are like {_STORE}12 or {_QUEUES}3: see "
        f"`postdate messages list --unreadable`"
    )
