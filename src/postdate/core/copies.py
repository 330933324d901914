"""Checks whether a store has its copy of a message: unchanged, or as the store itself has changed it since.

Pure: callers read the copy and its records. Source: ADR 15, ADR 44.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from postdate.messages import DelayedMessage
from postdate.ports import Record, RecordKind
from postdate.ports.migrating import MOVED_AWAY
from postdate.ports.scanning import ARCHIVED

MISSING: Final = "missing"

IN_ANOTHER_STORE: Final = "moved away"
"""The store has moved the message to another store, and will not deliver it itself."""

_NOT_COPIED: Final = frozenset({"message_id", "number_of_failures"})
_FIELDS: Final = [each.name for each in fields(DelayedMessage) if each.compare and each.name not in _NOT_COPIED]
_OUTCOME_KINDS: Final = frozenset(RecordKind) - {RecordKind.SCHEDULED, RecordKind.RETRIED, RecordKind.RESCHEDULED}


def different_fields(message: DelayedMessage, copy: DelayedMessage) -> list[str]:
    """Return the names of the fields in which a pending copy differs from its message. Failures do not count."""
    return [name for name in _FIELDS if getattr(message, name) != getattr(copy, name)]


def difference(message: DelayedMessage, copy: DelayedMessage | None, records: Sequence[Record]) -> str:
    """Return the reason why the store's message with this id is no copy of ``message``; empty if it is one.

    A copy may have been delivered, rescheduled or replaced since, or have ended otherwise. Then its content cannot be
    compared. Instead the record of its scheduling must have the same due time and destination.

    Args:
        message: as it was passed to the store.
        copy: the message that is pending in the store under this id; ``None``: there is none.
        records: all records of the id in the store, in the order of writing.
    """
    fields = [] if copy is None else different_fields(message, copy)
    if copy is not None and not fields:
        return ""
    scheduled = next((record for record in records if record.kind is RecordKind.SCHEDULED), None)
    if scheduled is None:
        return ", ".join(fields) or MISSING
    is_equal = {"due": scheduled.due == message.due, "destination": scheduled.destination == message.destination}
    if not all(is_equal.values()):
        return ", ".join(name for name, same in is_equal.items() if not same)
    if copy is not None:
        was_changed = any(record.kind is RecordKind.RESCHEDULED for record in records)
        return "" if was_changed else ", ".join(fields)
    if records[-1].detail.startswith(MOVED_AWAY):
        return IN_ANOTHER_STORE
    # An archived message has no other record in the store.
    has_ended = scheduled.detail == ARCHIVED or any(record.kind in _OUTCOME_KINDS for record in records)
    return "" if has_ended else MISSING
