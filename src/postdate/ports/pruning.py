"""Taking records out of a store and putting them back: what an archive needs. All of it blocks. Source: ADR 0011."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from postdate.ports.scanning import ScannableStore, ScanPart

ARCHIVED: Final = "archived"
"""Detail of a *scheduled* record whose message's other records are in an archive."""


class StoredRecord(NamedTuple):
    """A record as it stands in a store.

    Args:
        number: of the record; unique in its database, and never used again.
        kind: number of :class:`postdate.ports.RecordKind`.
        message_id: of the message.
        at: microseconds since 1970 UTC.
        due: likewise.
        destination: queue.
        detail: reason, or ``None``.
    """

    number: int
    kind: int
    message_id: str
    at: int
    due: int | None
    destination: str | None
    detail: str | None


@runtime_checkable
class PrunableStore(ScannableStore, Protocol):
    """A store whose records can be moved elsewhere and back, while others work with it.

    Records are found by their place: ``part`` is a share of a scan of ``records`` in which they were seen. A record
    that is there no longer is not counted. Each call is one short transaction, so callers come in batches.

    Who prunes marks first: at any moment a record that is missing belongs to a message that is marked, and no audit
    takes it for lost.
    """

    @property
    def pruned_at_once(self) -> int:
        """How wide a share is whose records are pruned in one transaction that nobody has to wait for; constant."""
        ...

    def mark_archived(self, part: ScanPart, numbers: Sequence[int]) -> int:
        """Mark *scheduled* records with :data:`ARCHIVED`; their ids stay known, and refused when they come again.

        Args:
            part: where they were seen. Marking may move them to another place.
            numbers: of records in that share; any but those of *scheduled* records are left as they are.

        Returns:
            How many were marked by this call.
        """
        ...

    def prune(self, part: ScanPart, numbers: Sequence[int]) -> int:
        """Remove records for good, whatever their kind.

        A store that takes its numbers from the last record keeps that one.

        Args:
            part: where they were seen.
            numbers: of records in that share.

        Returns:
            How many were removed.
        """
        ...

    def restore(self, records: Sequence[StoredRecord]) -> int:
        """Put records back under their numbers, message by message, and take the marks away: one transaction.

        The *scheduled* record is the claim: a message comes back if its record is marked, or if its id is unknown. The
        records of all others are left out, so a repeated call adds nothing.

        A store that counts its numbers by itself gives none to a new record, from the beginning of the call on, that is
        as high as the highest of ``records`` or lower, whether anything comes back or not; no call ever sets its count
        back. A store that takes its numbers from the last record does so once the message with the highest is back. A
        number that another record has by then is an error, and nothing is changed.

        Args:
            records: of whole messages, each with its *scheduled* record; none of its other records is in the store.
                Without its *scheduled* record, nothing of a message comes back.

        Returns:
            How many messages came back.
        """
        ...
