"""Reading everything, in shares that add up."""

from __future__ import annotations

from collections import Counter

from anyio import to_thread

from postdate.clock import to_microseconds
from postdate.errors import PipelineError
from postdate.ports import Outcome, RecordKind, ScannableStore, ScanPart
from postdate.testing.conformance import Topic, expect, expect_equal, expect_error
from postdate.testing.store_suite.subject import NOW, SECOND, StoreSubject, claiming, message, scannable

scanning: Topic[StoreSubject] = Topic("scanning")

_PAGE = 7


def _read(store: ScannableStore, what: str, parts: int, columns: list[str]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for part in store.scan_parts(what, parts):
        for page in store.scan(what, part, columns, _PAGE):
            expect(0 < len(page) <= _PAGE, f"a page has 1 to {_PAGE} rows, not {len(page)}")
            rows.extend(page)
    return rows


@scanning
async def parts_cover_every_row_once(subject: StoreSubject) -> None:
    """Whatever the number of parts, together they hold every pending message exactly once, gaps or not."""
    async with claiming(subject) as store:
        scanned = scannable(store)
        if scanned is None:
            return
        await store.store_many([message(f"m-{n}", NOW + (n % 5) * SECOND) for n in range(100)], NOW)
        gone = await store.claim_due(NOW + 2 * SECOND, 30)
        await store.finish(gone, Outcome.DELIVERED, NOW)
        expected = Counter({f"m-{n}" for n in range(100)} - {claim.message.message_id for claim in gone})
        for parts in (1, 2, 3, 7, 200):
            rows = await to_thread.run_sync(_read, scanned, "pending", parts, ["message_id"])
            expect_equal(Counter(row[0] for row in rows), expected, f"rows in {parts} parts")


@scanning
async def columns_come_as_asked_for(subject: StoreSubject) -> None:
    """Rows hold the columns asked for, in that order; times are microseconds since 1970."""
    async with claiming(subject) as store:
        scanned = scannable(store)
        if scanned is None:
            return
        await store.store(message(expires_at=NOW + SECOND, body=b"\0body"), NOW)
        columns = ["body", "due", "message_id", "expires_at", "number_of_failures", "destination", "headers"]
        (row,) = await to_thread.run_sync(_read, scanned, "pending", 1, columns)
        stored = message()
        expected = (
            b"\0body", to_microseconds(NOW), "m-1", to_microseconds(NOW + SECOND), 0,
            stored.destination, '{"kind":"check"}',
        )  # fmt: skip
        expect_equal(tuple(row), expected, "row")
        columns = ["kind", "message_id", "at", "due", "destination", "detail"]
        (record,) = await to_thread.run_sync(_read, scanned, "records", 1, columns)
        at = to_microseconds(NOW)
        expected_record = (int(RecordKind.SCHEDULED), "m-1", at, at, stored.destination, None)
        expect_equal(tuple(record), expected_record, "record")


@scanning
async def an_empty_store_has_no_rows(subject: StoreSubject) -> None:
    """Nothing pending, no records, nothing queued: no rows."""
    async with claiming(subject) as store:
        scanned = scannable(store)
        if scanned is not None:
            for what in ("pending", "records", "queued"):
                rows = await to_thread.run_sync(_read, scanned, what, 4, ["message_id"])
                expect_equal(rows, [], f"rows of {what}")


@scanning
async def what_does_not_exist_is_refused(subject: StoreSubject) -> None:
    """An unknown relation or column raises PipelineError."""
    async with claiming(subject) as store:
        scanned = scannable(store)
        if scanned is None:
            return
        with expect_error(PipelineError, "an unknown relation"):
            scanned.scan_parts("saga", 1)
        with expect_error(PipelineError, "an unknown column"):
            list(scanned.scan("pending", ScanPart(0, 1), ["colour"], _PAGE))
