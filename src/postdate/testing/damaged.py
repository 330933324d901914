"""Unreadable rows, for the suites of stores and of queues (ADR 0043)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from postdate.ports import UnreadableRow, UnreadableRows
from postdate.testing.conformance import Damage, expect

GOOD = [f"good-{number:02d}" for number in range(50)]

Damages = Mapping[Damage, Callable[[str], bytes]]
"""For each kind of damage, a function that damages a message directly in the storage, without the adapter.

The function takes the id of a message and returns the damaged bytes; they are empty for removed content. With
:attr:`Damage.DUE` the message stays due: its due time lies before the calendar begins.
"""


def damaged_id(damage: Damage) -> str:
    """Return the id of the message with this damage."""
    return f"bad-{damage.value}"


def damages_of(damage: Callable[[str, Damage], bytes], kinds: Iterable[Damage] = Damage) -> Damages:
    """Return the functions that damage a message, from one function that takes the id and the kind of damage."""
    return {kind: lambda message_id, way=kind: damage(message_id, way) for kind in kinds}


class DamagingSubject:
    """The part of a subject, of a store or a transport, that damages rows."""

    def damages(self) -> Damages:
        """Return the functions that damage a row; empty if there are no rows."""
        return {}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of an adapter that marks unreadable ones.

    Args:
        adapter: the adapter, which marks rows.
        damages: the functions that damage a row.
    """

    adapter: UnreadableRows
    damages: Damages

    def damage(self, message_id: str, damage: Damage) -> bytes:
        """Damage the row of a message; return the damaged bytes."""
        return self.damages[damage](message_id)

    async def find_row(self, damage: Damage) -> UnreadableRow:
        """Return the marked row with this damage."""
        (row,) = [each for each in await self.adapter.list_unreadable(10) if each.message_id == damaged_id(damage)]
        return row


def rows_of(adapter: object, damages: Damages) -> Rows | None:
    """Return the rows of an adapter if it is a :class:`postdate.ports.UnreadableRows`.

    An adapter whose rows can be damaged must be one. The subject of such an adapter must damage rows, because otherwise
    the suite proves nothing.
    """
    if not isinstance(adapter, UnreadableRows):
        expect(not damages, f"{type(adapter).__name__} has rows that can be damaged, and so needs UnreadableRows")
        return None
    expect(bool(damages), f"the subject of {type(adapter).__name__}, which marks rows, says how to damage its rows")
    return Rows(adapter, damages)
