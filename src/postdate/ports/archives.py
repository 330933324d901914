"""What audits and archives ask of a store besides its rows. All of it blocks. Source: ADR 0011."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

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


class ArchivableStore(ScannableStore):
    """A store whose records can be audited, and moved elsewhere and back, while others work with it.

    Records are found by their place: ``part`` is a share of a scan of ``records`` in which they were seen. A record
    that is there no longer is not counted. Each call is one short transaction, so callers come in batches.

    Callers mark before they prune: at any moment a record that is missing belongs to a marked message, and no audit
    takes it for lost.
    """

    @property
    @abstractmethod
    def records_in_commit_order(self) -> bool:
        """Whether a record that is not yet committed has a higher number than every one that is; constant.

        Then the records up to a number are all there once one of them was seen. A database that hands out numbers
        before the commit cannot say so.
        """

    @abstractmethod
    def tables_of_stores(self) -> Sequence[str]:
        """Return the names of the tables of all stores that share this one's records, in order; none for a file.

        Each is what ``table=`` takes; the table of an endpoint is called ``{endpoint}.timeouts``.
        """

    @property
    @abstractmethod
    def pruned_at_once(self) -> int:
        """Width of a share whose records can be pruned in one transaction without making others wait; constant."""

    @abstractmethod
    def mark_archived(self, part: ScanPart, numbers: Sequence[int]) -> int:
        """Mark *scheduled* records with :data:`ARCHIVED`; their ids stay known, and refused when they come again.

        Args:
            part: where they were seen. Marking may move them to another place.
            numbers: of records in that share; records of other kinds than *scheduled* are left as they are.

        Returns:
            How many were marked by this call.
        """

    @abstractmethod
    def prune(self, part: ScanPart, numbers: Sequence[int]) -> int:
        """Remove records for good, whatever their kind.

        A store that takes its numbers from the last record keeps that one.

        Args:
            part: where they were seen.
            numbers: of records in that share.

        Returns:
            How many were removed.
        """

    @abstractmethod
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
