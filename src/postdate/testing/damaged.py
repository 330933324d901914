"""Rows that cannot be read, for the suites of stores and of queues alike (ADR 0043)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from postdate.ports import UnreadableRow, UnreadableRows
from postdate.testing.conformance import Damage, expect

GOOD = [f"good-{number:02d}" for number in range(50)]

Damages = Mapping[Damage, Callable[[str], bytes]]
"""For each way in which a message can be damaged, a function that does it by hand, past the adapter.

It takes the id of a message and returns the damaged bytes, empty for removed content. With :attr:`Damage.DUE` the
message stays due: its due time lies before the calendar begins.
"""


def bad(damage: Damage) -> str:
    """Return the id of the message that is damaged in this way."""
    return f"bad-{damage.value}"


def damages_by(damage: Callable[[str, Damage], bytes], ways: Iterable[Damage] = Damage) -> Damages:
    """Return the ways to damage a message, from one function that takes its id and the way."""
    return {way: lambda message_id, way=way: damage(message_id, way) for way in ways}


class DamagingSubject:
    """What subjects of stores and of transports have for rows that cannot be read."""

    def damages(self) -> Damages:
        """Return the ways to damage a row; none: there are no rows."""
        return {}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of an adapter that marks unreadable ones.

    Args:
        place: where rows are marked.
        damages: the ways in which a row can be damaged.
    """

    place: UnreadableRows
    damages: Damages

    def damage(self, message_id: str, damage: Damage) -> bytes:
        """Damage the row of a message; return the damaged bytes."""
        return self.damages[damage](message_id)

    async def row(self, damage: Damage) -> UnreadableRow:
        """Return the marked row that was damaged in this way."""
        (row,) = [each for each in await self.place.list_unreadable(10) if each.message_id == bad(damage)]
        return row


def rows_of(adapter: object, damages: Damages) -> Rows | None:
    """Return the rows of an adapter if it is a :class:`postdate.ports.UnreadableRows`.

    An adapter whose rows can be damaged must be one, and the subject of one must damage rows, or nothing is shown.
    """
    if not isinstance(adapter, UnreadableRows):
        expect(not damages, f"{type(adapter).__name__} has rows that can be damaged, and so needs UnreadableRows")
        return None
    expect(bool(damages), f"the subject of {type(adapter).__name__}, which marks rows, says how to damage its rows")
    return Rows(adapter, damages)
