"""Rows that cannot be read, for the suites of stores and of queues alike (ADR 0019)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime

from postdate.errors import InvalidHeaders, InvalidMessage, MessageNotFound
from postdate.ports import Mending, Quarantine, Quarantined
from postdate.testing.conformance import ConformanceFailure, Damage, expect, expect_equal, expect_error

GOOD = [f"good-{number:02d}" for number in range(50)]

_NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
MENDED = {
    Damage.HEADERS: Mending(headers={"mended": "é"}),
    Damage.DUE: Mending(due=_NOW),
    Damage.CONTENT: Mending(headers={"mended": "é"}, body=b"mended"),
    Damage.DESTINATION: Mending(destination="conformance"),
}


def bad(damage: Damage) -> str:
    """Return the id of the message that is damaged in this way."""
    return f"bad-{damage.value}"


class DamagingSubject:
    """What subjects of stores and of transports have for rows that cannot be read."""

    def damages(self) -> frozenset[Damage]:
        """Return in which ways :meth:`damage` can damage what is there; none: there are no rows."""
        return frozenset()

    def damage(self, message_id: str, damage: Damage) -> bytes:
        """Damage one message by hand, past the adapter; return the damaged bytes, empty for removed content.

        With :attr:`Damage.DUE` the message stays due: its due time lies before the calendar begins.
        """
        raise NotImplementedError(f"{type(self).__name__} must define damage(): it says that it can damage rows")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of an adapter that sets unreadable ones aside.

    Args:
        place: where rows are set aside.
        damages: the ways in which a row can be damaged.
        damage: damages the row of a message, by its id; returns the damaged bytes.
    """

    place: Quarantine
    damages: list[Damage]
    damage: Callable[[str, Damage], bytes]

    async def aside(self, damage: Damage) -> Quarantined:
        """Return the row that was damaged in this way, as it is set aside."""
        (found,) = [each for each in await self.place.quarantined(10) if each.message_id == bad(damage)]
        return found

    async def expect_refused(self, aside: Quarantined) -> None:
        """Fail unless the only row aside is refused when it is put back unmended, and can be discarded, once."""
        place = self.place
        try:
            await place.put_back(aside.number, Mending(), _NOW)
        except (InvalidMessage, InvalidHeaders):
            pass
        else:
            raise ConformanceFailure("put back unmended: expected InvalidMessage or InvalidHeaders")
        expect_equal(await place.quarantined_count(), 1, "set aside, after it was refused")
        await place.discard_quarantined(aside.number, _NOW)
        expect_equal(await place.quarantined_count(), 0, "set aside, after it was discarded")
        for call in (place.put_back(aside.number, Mending(), _NOW), place.discard_quarantined(aside.number, _NOW)):
            with expect_error(MessageNotFound, "naming what is not set aside any more"):
                await call

    async def expect_all_aside(self) -> None:
        """Fail unless a message damaged in each way is set aside, and is listed up to a limit, after a restart."""
        expect_equal(await self.place.quarantined_count(), len(self.damages), "set aside, after a restart")
        expect_equal(len(await self.place.quarantined(1)), 1, "set aside, up to one")


def rows_of(adapter: object, damages: Collection[Damage], damage: Callable[[str, Damage], bytes]) -> Rows | None:
    """Return the rows of an adapter if it is a :class:`Quarantine`.

    An adapter whose rows can be damaged must be one, and the subject of one must damage rows, or nothing is shown.
    """
    if not isinstance(adapter, Quarantine):
        expect(not damages, f"{type(adapter).__name__} has rows that can be damaged, and so the methods of Quarantine")
        return None
    expect(bool(damages), f"the subject of {type(adapter).__name__}, which sets aside, says how to damage its rows")
    return Rows(adapter, sorted(damages, key=lambda damage: damage.value), damage)


def expect_kept(aside: Quarantined, place: str, damage: Damage, there: bytes) -> None:
    """Fail unless a row aside has its place, a reason, a time, and the bytes that it had when it was read."""
    expect_equal(aside.place, place, "place")
    expect(bool(aside.reason.strip()), "a reason is given")
    expect(aside.at.tzinfo is not None, "the time of setting aside is aware")
    if damage is not Damage.CONTENT:
        expect(b"\0body" in aside.raw.values(), f"the body is kept, got {sorted(aside.raw)}")
        expect(there in aside.raw.values(), f"what stood there is kept, got {dict(aside.raw)}")
