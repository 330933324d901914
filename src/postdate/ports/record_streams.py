"""Reading the records of a store as they are written. Everything here blocks. Source: ADR 0011, point 5."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any


class RecordStreamStore(ABC):
    """Gives the records of one store by their numbers: each once, none left out, while others write.

    Numbers grow, with gaps. They need not be in the order of commits; :meth:`safe_end` says up to where no gap will be
    filled any more.
    """

    @property
    @abstractmethod
    def identity(self) -> str:
        """What tells this store from others, the same in every process; without secrets."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Where the store is, for people; without secrets."""

    @abstractmethod
    def next_number(self) -> int:
        """Return a number above every number in use; transactions that run may still write lower ones."""

    @abstractmethod
    def safe_end(self) -> int:
        """Return a number below which nothing will be written any more, at once and without waiting for writers.

        Each call checks whether the transactions that were writing at an earlier call have ended, so the answer grows
        from call to call only. It never shrinks. The first answer may be 0.

        Raises:
            StoreUnavailable: transient; the next call goes on from the last answer.

        Guarantees:
            integration/test_record_streams.py::test_nothing_below_the_safe_end_is_written_later;
            integration/test_record_streams.py::test_the_safe_end_gets_past_writers_that_come_and_go.
        """

    @abstractmethod
    def records(self, first: int, end: int, columns: Sequence[str], page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield the records with numbers from ``first`` on and below ``end``, in no order, from one snapshot.

        Args:
            first: lowest number.
            end: at most :meth:`safe_end`; above that, records may still be missing.
            columns: of ``records``, see :class:`postdate.ports.ScannableStore`; rows are plain as there.
            page: rows at a time, at most.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections; a second time without effect."""
