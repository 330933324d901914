"""An administrator's questions about a table, answered from the keys and columns of all entities. Source: ADR 0013."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from datetime import datetime

from postdate.backends.azure.claims import AzureClaims
from postdate.backends.azure.layout import KEY_COLUMNS, attempt_of, instant_of, read_entity, second_key
from postdate.backends.azure.pages import Entity, Pages
from postdate.errors import InvalidMessage, MessageError
from postdate.messages import DelayedMessage
from postdate.ports import MessageFilter, StoreStatistics


async def next_due(pages: Pages) -> datetime | None:
    """Return the earliest due time; reads every message that has failed before."""
    dues: list[datetime] = []
    async with aclosing(pages.entities(select=KEY_COLUMNS, at_once=1)) as entities:
        async for entity in entities:
            due = _due_of(entity)
            if due is not None:
                dues.append(due)
                break
    failing = pages.entities(select=KEY_COLUMNS, also="Failures gt 0")
    found = [*dues, *[_due_of(entity) async for entity in failing]]
    return min((due for due in found if due is not None), default=None)


async def statistics(pages: Pages, holding: AzureClaims, now: datetime) -> StoreStatistics:
    """Count the messages; those in ``holding`` are claimed."""
    pending = overdue = claimed = failing = 0
    earliest: datetime | None = None
    async for entity in pages.entities(select=(*KEY_COLUMNS, "Failures")):
        due, is_held = _due_of(entity), entity.get("MessageId") in holding
        pending, claimed = pending + 1, claimed + is_held
        failing += bool(entity.get("Failures"))
        if due is not None:
            overdue += due < now and not is_held
            earliest = due if earliest is None else min(earliest, due)
    return StoreStatistics(pending, overdue, claimed, failing, earliest)


async def pending(pages: Pages, where: MessageFilter, limit: int) -> Sequence[DelayedMessage]:
    """List messages; one that has failed stands at its next attempt."""
    found: list[DelayedMessage] = []
    # Sorts before all keys of that second, even the one without a GUID.
    since = "" if where.due_from is None else second_key(where.due_from)[:-1]
    async with aclosing(pages.entities(since)) as entities:
        async for entity in entities:
            try:
                message = read_entity(entity).message
            except MessageError:  # quarantined when it is due
                continue
            if where.matches(message):
                found.append(message)
                if len(found) == limit:
                    break
    return sorted(found, key=lambda message: message.due)


def _due_of(entity: Entity) -> datetime | None:
    """Return the due time of an entity; ``None`` when it cannot be read: it is quarantined when it is due."""
    due = entity.get("Due")
    try:
        return attempt_of(entity["RowKey"], is_ours=False) if due is None else instant_of(due)
    except (InvalidMessage, ValueError, TypeError, OverflowError):
        return None
