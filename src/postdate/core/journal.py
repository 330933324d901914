"""What became of due messages, told as it happens: for whoever wants to keep a ledger of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, Protocol

from postdate.messages import DelayedMessage
from postdate.ports import Moved, RecordKind


class Journal(Protocol):
    """Hears of what the store has recorded, after the commit. Methods return at once and do not raise.

    The same events are in the records of the store, with the same ``at``: a journal is a copy of them. What happens
    between a commit and the call, when the process ends just there, is in the store's records only.
    """

    def ended(self, kind: RecordKind, messages: Sequence[DelayedMessage], at: datetime, detail: str = "") -> None:
        """Note messages that were claimed, and left the store or were given back.

        Args:
            kind: delivered, expired, failed or retried.
            messages: as they were claimed.
            at: of the record; UTC.
            detail: of the record.
        """
        ...

    def moved(self, moved: Moved, at: datetime) -> None:
        """Note messages that were moved inside the database, or had expired there."""
        ...


class _NoJournal:
    def ended(self, kind: RecordKind, messages: Sequence[DelayedMessage], at: datetime, detail: str = "") -> None:
        """Do nothing."""

    def moved(self, moved: Moved, at: datetime) -> None:
        """Do nothing."""


NO_JOURNAL: Final[Journal] = _NoJournal()
