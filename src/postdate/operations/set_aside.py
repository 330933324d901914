"""Unreadable messages that were set aside: listed, mended and put back, or deleted. Source: ADR 0019."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from postdate.errors import MessageNotFound, MessageTooLarge, NotSupported, PostdateError
from postdate.messages import encode_headers, size_in_bytes
from postdate.operations.plain import Body, body_of
from postdate.ports import Mending, Quarantine, Quarantined
from postdate.wiring import OpenDeployment

_STORE: Final = "s"
_QUEUES: Final = "q"
_NAME: Final = re.compile(rf"(?P<where>[{_STORE}{_QUEUES}])(?P<number>[0-9]{{1,18}})", re.ASCII)
_LOOKED_THROUGH: Final = 10_000
"""How many are searched for a name or an id; more of them means that something is badly wrong."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """One message that was set aside, in a list.

    ``name`` is ``s`` (store) or ``q`` (queues) with its number there; ``queue`` is ``None`` for one that waited in the
    store; ``message_id`` is empty where it cannot be read.
    """

    name: str
    queue: str | None
    message_id: str
    reason: str
    at: datetime
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SetAsideList:
    """Messages that were set aside, those of the store first, the oldest first; ``total`` counts all."""

    total: int = 0
    messages: Sequence[SetAside] = ()


@dataclass(frozen=True, slots=True)
class SetAsideDetails:
    """One message that was set aside, with its content by column."""

    message: SetAside
    raw: Mapping[str, Body]


@dataclass(frozen=True, slots=True)
class Mended:
    """Result of putting back or deleting one message; ``remark`` says why it was not done."""

    name: str
    done: bool
    remark: str = ""


def quarantines(deployment: OpenDeployment) -> dict[str, Quarantine]:
    """Return the store and the transport, if they set messages aside, by the letter that their names begin with."""
    parts = {_STORE: deployment.store, _QUEUES: deployment.transport}
    return {letter: part for letter, part in parts.items() if isinstance(part, Quarantine)}


async def count_set_aside(deployment: OpenDeployment) -> int:
    return sum([await each.quarantined_count() for each in quarantines(deployment).values()])


async def list_set_aside(deployment: OpenDeployment, limit: int) -> SetAsideList:
    found = await _found(deployment, limit)
    return SetAsideList(await count_set_aside(deployment), [_line(name, each) for name, each in found[:limit]])


async def _found(deployment: OpenDeployment, limit: int) -> list[tuple[str, Quarantined]]:
    return [
        (f"{letter}{each.number}", each)
        for letter, part in quarantines(deployment).items()
        for each in await part.quarantined(limit)
    ]


def _line(name: str, each: Quarantined) -> SetAside:
    return SetAside(name, each.place or None, each.message_id, each.reason, each.at, sum(map(len, each.raw.values())))


async def set_aside_of(deployment: OpenDeployment, message_id: str) -> SetAside | None:
    """Return the message as it was set aside last, or ``None`` if it never was."""
    lines = [
        _line(name, each) for name, each in await _found(deployment, _LOOKED_THROUGH) if each.message_id == message_id
    ]
    return max(lines, key=lambda line: line.at, default=None)


async def show_set_aside(deployment: OpenDeployment, name: str) -> SetAsideDetails:
    """Return one message with its content; raise MessageNotFound if there is none of that name."""
    _part(deployment, name)
    for known, each in await _found(deployment, _LOOKED_THROUGH):
        if known == name:
            return SetAsideDetails(_line(name, each), {column: body_of(held) for column, held in each.raw.items()})
    raise _no_such(name)


async def put_back(deployment: OpenDeployment, names: Sequence[str], mending: Mending, now: datetime) -> list[Mended]:
    """Put messages back where they were, with ``mending`` in place of unreadable parts, each in one transaction.

    Messages that still cannot be read stay.
    """
    return [await _tried(name, _put_back(deployment, name, mending, now)) for name in names]


async def _put_back(deployment: OpenDeployment, name: str, mending: Mending, now: datetime) -> None:
    part, number = _part(deployment, name)
    if name.startswith(_QUEUES) and (mending.due is not None or mending.destination is not None):
        raise NotSupported("it was in a queue already: only its headers and its body can be mended")
    kept_in = deployment.transport if name.startswith(_QUEUES) else deployment.store
    assert kept_in is not None  # it has something set aside
    limit = kept_in.capabilities.largest_message_bytes
    size = size_in_bytes(encode_headers(mending.headers or {}), mending.body or b"")  # the rest was stored once
    if size > limit:
        raise MessageTooLarge(f"what is to take its place has {size:,} bytes, at most {limit:,} are taken")
    await part.put_back(number, mending, now)


async def delete_set_aside(deployment: OpenDeployment, names: Sequence[str], now: datetime) -> list[Mended]:
    """Delete messages that were set aside; recorded as discarded where the id can be read."""
    return [await _tried(name, _delete(deployment, name, now)) for name in names]


async def _delete(deployment: OpenDeployment, name: str, now: datetime) -> None:
    part, number = _part(deployment, name)
    await part.discard_quarantined(number, now)


async def _tried(name: str, doing: Awaitable[None]) -> Mended:
    try:
        await doing
    except PostdateError as error:
        if error.transient:
            raise
        return Mended(name, done=False, remark=str(error))
    return Mended(name, done=True)


def _part(deployment: OpenDeployment, name: str) -> tuple[Quarantine, int]:
    """Return the store or transport, and the number there; raise MessageNotFound for anything but such a name."""
    match = _NAME.fullmatch(name)
    part = None if match is None else quarantines(deployment).get(match["where"])
    if match is None or part is None:
        raise _no_such(name)
    return part, int(match["number"])


def _no_such(name: str) -> MessageNotFound:
    return MessageNotFound(
        f"nothing of the name {name!r} is set aside; names are like {_STORE}12 or {_QUEUES}3: see "
        f"`postdate errors list --set-aside`"
    )
