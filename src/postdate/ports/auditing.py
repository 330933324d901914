"""What an audit asks of a store besides its rows. All of it blocks. Source: ADR 0011."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from postdate.ports.scanning import ScannableStore


@runtime_checkable
class AuditableStore(ScannableStore, Protocol):
    """A store that says how a consistent picture of it is had while others work with it."""

    @property
    def records_in_commit_order(self) -> bool:
        """Whether a record that is not yet committed has a higher number than every one that is; constant.

        Then the records up to a number are all there once one of them was seen. A database that hands out numbers
        before the commit cannot say so.
        """
        ...

    def tables_of_stores(self) -> Sequence[str]:
        """Return the names of the tables of all stores that share this one's records, in order; of a file: none.

        Each is what ``table=`` takes; the table of an endpoint is called ``{endpoint}.timeouts``.
        """
        ...
