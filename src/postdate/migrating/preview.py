"""Looking at what waits without changing anything: counts, and what would keep it from being moved.

Rows are looked at in pages, so that a million of them takes seconds and no memory. Source: specification 4.12.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from postdate.errors import InvalidHeaders, InvalidMessage, InvalidTimestamp
from postdate.messages import (
    DESTINATION_LIMIT,
    DelayedMessage,
    Headers,
    check_text,
    encode_headers,
    size_in_bytes,
)
from postdate.persistence.timeouts import decode, normal_id, read_time, row_headers
from postdate.ports.migrating import MigrationPreview

_SHOWN: Final = 10
"""So many ids are shown of each kind of problem."""

_ID: Final = re.compile("[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")

PAGE_ROWS: Final = 5_000


def to_message(row: Sequence[Any], endpoint: str) -> DelayedMessage:
    """Return the message of a row of :data:`postdate.migrating.names.READ`.

    Raises:
        MessageError: it is none.
    """
    timeout_id, destination, state, time, headers = row
    timeout = decode(timeout_id, destination or "", None, state, time, headers, endpoint)
    where = destination_of(destination, timeout.headers)
    check_text(where, f"the destination of timeout {timeout.timeout_id}", DESTINATION_LIMIT)
    return DelayedMessage(timeout.timeout_id, timeout.due, where, timeout.headers, timeout.body)


def destination_of(stored: str | None, headers: Mapping[str, str]) -> str:
    """Return where a timeout goes: without a destination, to whom its sender wants answers sent (specification 4.5)."""
    return stored if stored and stored.strip() else headers.get(Headers.REPLY_TO_ADDRESS, "")


class Looking:
    """Adds up rows, and keeps some ids of those that are no messages: those that :func:`to_message` refuses."""

    def __init__(self) -> None:
        self.destinations: Counter[str] = Counter()
        self.count = 0
        self.earliest: datetime | None = None
        self.latest: datetime | None = None
        self.largest_bytes, self.largest_id = 0, ""
        self._problems: dict[str, list[str]] = {}
        self._how_many: Counter[str] = Counter()

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Look at rows of id, destination, time, headers, and the size of the body in bytes."""
        for timeout_id, destination, time, headers, body_bytes in rows:
            self.count += 1
            self._due(timeout_id, time)
            found = self._headers(timeout_id, headers)
            self._destination(timeout_id, destination, found)
            self._size(timeout_id, headers, found, body_bytes or 0)
            # The pattern is what nearly all ids look like, and ten times as quick.
            if _ID.fullmatch(str(timeout_id)) is None and normal_id(timeout_id) is None:
                self._problem("an id that is no UUID", timeout_id)

    def _due(self, timeout_id: object, time: object) -> None:
        try:
            due = read_time(time)
        except InvalidTimestamp:
            self._problem("a due time that cannot be read", timeout_id)
            return
        if self.earliest is None or due < self.earliest:
            self.earliest = due
        if self.latest is None or due > self.latest:
            self.latest = due

    def _headers(self, timeout_id: object, headers: Any) -> Mapping[str, str]:
        try:
            found = row_headers(str(timeout_id), headers)
        except InvalidHeaders:
            found = None
        if found is None or "" in found:  # beyond that, whatever JSON can say is a header
            self._problem("headers that are no JSON object of texts with names", timeout_id)
            return {}
        return found

    def _destination(self, timeout_id: object, stored: str | None, headers: Mapping[str, str]) -> None:
        destination = destination_of(stored, headers)
        if destination not in self.destinations:
            try:
                check_text(destination, "destination", DESTINATION_LIMIT)
            except InvalidMessage:
                what = f"a destination that is blank, longer than {DESTINATION_LIMIT} characters, or no text"
                self._problem(what, timeout_id)
                return
        self.destinations[destination] += 1

    def _size(self, timeout_id: object, written: object, headers: Mapping[str, str], body_bytes: int) -> None:
        # A store writes headers as short as can be, so nearly all need no second look.
        if size_in_bytes(str(written), b"") + body_bytes <= self.largest_bytes:
            return
        size = size_in_bytes(encode_headers(headers), b"") + body_bytes
        if size > self.largest_bytes:
            self.largest_bytes, self.largest_id = size, str(timeout_id)

    def _problem(self, what: str, timeout_id: object) -> None:
        self._how_many[what] += 1
        ids = self._problems.setdefault(what, [])
        if len(ids) < _SHOWN:
            ids.append(str(timeout_id))

    def problems(self) -> list[str]:
        """Return a text for each kind of problem, with the first ids."""
        return [
            f"{self._how_many[what]:,} with {what}: {', '.join(ids)}{', …' if self._how_many[what] > len(ids) else ''}"
            for what, ids in self._problems.items()
        ]

    def preview(self, endpoint: str, left: int) -> MigrationPreview:
        """Return what was seen."""
        return MigrationPreview(
            endpoint,
            self.count,
            left,
            self.earliest,
            self.latest,
            dict(self.destinations),
            self.problems(),
            self.largest_bytes,
            self.largest_id,
        )
