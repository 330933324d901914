"""What became of due messages, told as it happens, for callers that keep a ledger of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, Protocol

from postdate.messages import DelayedMessage
from postdate.ports import Moved, RecordKind


class Journal(Protocol):
    """Hears of records that the store has committed. Methods return at once and do not raise.

    The same events, with the same ``at``, are in the records of the store. When the process ends between a commit and
    the call, an event is there only.
    """

    def ended(self, kind: RecordKind, messages: Sequence[DelayedMessage], at: datetime, detail: str = "") -> None:
        """Note messages that were delivered, expired, failed or retried, as they were claimed."""
        ...

    def moved(self, moved: Moved, at: datetime) -> None:
        """Note messages that were moved inside the database, or had expired there."""
        ...


class _NoJournal:
    def ended(self, kind: RecordKind, messages: Sequence[DelayedMessage], at: datetime, detail: str = "") -> None: ...

    def moved(self, moved: Moved, at: datetime) -> None: ...


NO_JOURNAL: Final[Journal] = _NoJournal()
