"""The checks of unreadable rows that the suites of stores and queues share (ADR 0043)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from postdate.errors import MessageNotFound
from postdate.ports import UnreadableRow
from postdate.testing.conformance import Damage, Topic, expect, expect_equal, expect_error
from postdate.testing.damaged import GOOD, Rows, damaged_id

S = TypeVar("S")

BODY = b"\0body"
"""Body of each message that ``put`` stores or sends."""

_NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class DamagedSource:
    """A store or a queue with some damaged messages.

    Args:
        rows: its rows.
        queue: its name; empty for a store.
        add: stores or sends messages with these ids, in this order, with the body :data:`BODY`.
        fetch: claims or receives all readable messages, in small batches, and completes them; returns the ids in order.
    """

    rows: Rows
    queue: str
    add: Callable[[Sequence[str]], Awaitable[None]]
    fetch: Callable[[], Awaitable[list[str]]]

    async def add_damaged(self, damage: Damage) -> tuple[bytes, UnreadableRow]:
        """Put one message, damage it, and try to take it; return the damaged bytes and the marked row."""
        await self.add([damaged_id(damage)])
        damaged_bytes = self.rows.damage(damaged_id(damage), damage)
        expect_equal(await self.fetch(), [], "taken of a damaged message")
        return damaged_bytes, await self.rows.find_row(damage)


def unreadable_topic(open_source: Callable[[S], AbstractAsyncContextManager[DamagedSource | None]]) -> Topic[S]:
    """Return the topic ``unreadable`` with the common checks.

    ``open_source`` opens the store or the queue of a subject.

    Every call of ``open_source`` with one subject opens the same storage. ``open_source`` yields ``None`` if the
    storage has no rows that could be damaged.
    """
    unreadable = Topic[S]("unreadable")

    @unreadable
    async def an_unreadable_message_holds_up_nothing(subject: S) -> None:
        """Of fifty good messages and damaged ones before and among them, the fifty are taken in their order."""
        async with open_source(subject) as source:
            if source is None:
                return
            first, *more = map(damaged_id, source.rows.damages)
            await source.add([first, *GOOD[:10], *more, *GOOD[10:]])
            for damage in source.rows.damages:
                source.rows.damage(damaged_id(damage), damage)
            expect_equal(await source.fetch(), GOOD, "taken beside damaged messages")
            expect_equal(await source.fetch(), [], "taken after all that can be read")
            expect_equal(await source.rows.adapter.count_unreadable(), len(source.rows.damages), "unreadable rows")

    @unreadable
    async def an_unreadable_row_keeps_its_bytes(subject: S) -> None:
        """Its bytes, its place and the reason are kept over a restart, and it is logged once, before that."""
        async with open_source(subject) as source:
            if source is None:
                return
            for damage in source.rows.damages:
                with _collect_texts() as texts:
                    damaged_bytes, row = await source.add_damaged(damage)
                    expect_equal(await source.fetch(), [], "taken of an unreadable row")
                expect_equal(len(texts), 1, f"log entries about one damaged message: {texts}")
                _expect_unchanged(row, source.queue, damage, damaged_bytes)
        async with open_source(subject) as source:
            assert source is not None
            with _collect_texts() as texts:
                expect_equal(await source.fetch(), [], "taken after a restart")
            expect_equal(texts, [], "log entries after a restart")
            expect_equal(
                await source.rows.adapter.count_unreadable(), len(source.rows.damages), "rows, after a restart"
            )
            expect_equal(len(await source.rows.adapter.list_unreadable(1)), 1, "rows of a list, up to one")

    @unreadable
    async def an_unreadable_row_is_discarded_once(subject: S) -> None:
        """By its number; a number that no row has is refused, and nothing else is deleted."""
        async with open_source(subject) as source:
            if source is None:
                return
            rows = source.rows.adapter
            for damage in source.rows.damages:
                _, row = await source.add_damaged(damage)
                with expect_error(MessageNotFound, "discarding what is not there"):
                    await rows.discard_unreadable(row.number + 1_000, _NOW)
                expect_equal(await rows.count_unreadable(), 1, "unreadable rows, after another number was refused")
                await rows.discard_unreadable(row.number, _NOW)
                expect_equal(await rows.count_unreadable(), 0, "unreadable rows, after it was discarded")
                with expect_error(MessageNotFound, "discarding a row twice"):
                    await rows.discard_unreadable(row.number, _NOW)
                expect_equal(await source.fetch(), [], "taken of what was discarded")

    return unreadable


def _expect_unchanged(row: UnreadableRow, queue: str, damage: Damage, damaged_bytes: bytes) -> None:
    """Raise `ConformanceFailure` unless a marked row has its place, a reason, a time, and the damaged bytes."""
    expect_equal(row.queue, queue, "queue of an unreadable row")
    expect(bool(row.reason.strip()), "a reason is given")
    expect(row.at.tzinfo is not None, "the time of marking is aware")
    if damage is not Damage.CONTENT:
        expect(BODY in row.raw.values(), f"the body is kept, got {sorted(row.raw)}")
        expect(damaged_bytes in row.raw.values(), f"the damaged bytes are kept, got {dict(row.raw)}")


class _TextHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "cannot be read" in (text := record.getMessage()):
            self.texts.append(text)


@contextmanager
def _collect_texts() -> Generator[list[str]]:
    """Collect the texts of logged errors about unreadable rows."""
    handler, log = _TextHandler(), logging.getLogger("postdate")
    log.addHandler(handler)
    try:
        yield handler.texts
    finally:
        log.removeHandler(handler)
