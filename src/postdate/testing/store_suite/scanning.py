"""Checks of scans: all rows are read, in shares that cover every row once."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

from anyio import to_thread

from postdate import ports
from postdate.clock import to_microseconds
from postdate.errors import PipelineError
from postdate.ports.scanning import SCANNED_COLUMNS
from postdate.testing.conformance import Topic, expect, expect_equal, expect_error
from postdate.testing.store_suite.subject import (
    MICROSECOND,
    NOW,
    SECOND,
    StoreSubject,
    message,
    open_columnar,
    open_scannable,
    open_streamable,
)

scanning: Topic[StoreSubject] = Topic("scanning")

_PAGE = 7


def _read_rows(store: ports.ScannableStore, table: str, parts: int, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    return _scan_rows(store, ports.Scan(table, tuple(columns)), store.scan_parts(table, parts))


def _scan_rows(store: ports.ScannableStore, scan: ports.Scan, parts: Sequence[ports.ScanPart]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for part in parts:
        for page in store.scan(scan, part, _PAGE):
            expect(0 < len(page) <= _PAGE, f"a page has 1 to {_PAGE} rows, not {len(page)}")
            rows.extend(tuple(row) for row in page)
    return rows


@asynccontextmanager
async def _open_snapshot(store: ports.ScannableStore) -> AsyncGenerator[str | None]:
    """Hold a snapshot during the block; the calls that open and close it block, so they run in a thread."""
    snapshot = store.snapshot()
    name = await to_thread.run_sync(snapshot.__enter__)
    try:
        yield name
    finally:
        await to_thread.run_sync(snapshot.__exit__, None, None, None)


@scanning.with_fixtures(open_scannable)
async def parts_cover_every_row_once(store: ports.ClaimingStore, scanned: ports.ScannableStore) -> None:
    """Whatever the number of parts, together they hold every pending message exactly once, gaps or not."""
    await store.store_many([message(f"m-{n}", NOW + (n % 5) * SECOND) for n in range(100)], NOW)
    finished = await store.claim_due(NOW + 2 * SECOND, 30)
    await store.finish(finished, ports.Outcome.DELIVERED, NOW)
    expected = Counter({f"m-{n}" for n in range(100)} - {claim.message.message_id for claim in finished})
    for parts in (1, 2, 3, 7, 200):
        rows = await to_thread.run_sync(_read_rows, scanned, "pending", parts, ["message_id"])
        expect_equal(Counter(row[0] for row in rows), expected, f"rows in {parts} parts")


@scanning.with_fixtures(open_scannable)
async def columns_come_as_asked_for(store: ports.ClaimingStore, scanned: ports.ScannableStore) -> None:
    """Rows hold the columns asked for, in that order; times are microseconds since 1970."""
    await store.store(message(expires_at=NOW + SECOND, body=b"\0body"), NOW)
    columns = ["body", "due", "message_id", "expires_at", "number_of_failures", "destination", "headers"]
    (row,) = await to_thread.run_sync(_read_rows, scanned, "pending", 1, columns)
    stored = message()
    expected = (
        b"\0body", to_microseconds(NOW), "m-1", to_microseconds(NOW + SECOND), 0,
        stored.destination, '{"kind":"check"}',
    )  # fmt: skip
    expect_equal(tuple(row), expected, "row")
    columns = ["kind", "message_id", "at", "due", "destination", "detail"]
    (record,) = await to_thread.run_sync(_read_rows, scanned, "records", 1, columns)
    at = to_microseconds(NOW)
    expect_equal(tuple(record), (int(ports.RecordKind.SCHEDULED), "m-1", at, at, stored.destination, None), "record")


@scanning.with_fixtures(open_scannable)
async def an_empty_store_has_no_rows(store: ports.ClaimingStore, scanned: ports.ScannableStore) -> None:
    """Nothing pending, no records, nothing queued: no rows."""
    for what in ("pending", "records", "queued"):
        expect_equal(await to_thread.run_sync(_read_rows, scanned, what, 4, ["message_id"]), [], f"rows of {what}")


@scanning.with_fixtures(open_scannable)
async def what_does_not_exist_is_refused(store: ports.ClaimingStore, scanned: ports.ScannableStore) -> None:
    """An unknown relation or column raises PipelineError."""
    with expect_error(PipelineError, "an unknown relation"):
        scanned.scan_parts("saga", 1)
    with expect_error(PipelineError, "an unknown column"):
        list(scanned.scan(ports.Scan("pending", ("colour",)), ports.ScanPart(0, 1), _PAGE))


async def _store_various(store: ports.ClaimingStore) -> None:
    """Store messages that differ in every condition of a filter, and in values that are difficult for columns."""
    await store.store_many(
        [
            message("a", NOW, destination="x"),
            message("A", NOW + MICROSECOND, destination="X", expires_at=NOW + 3 * MICROSECOND),
            message("a ", NOW + 2 * MICROSECOND, destination="x ", headers={"ключ": 'a"\\\n\0🕰'}),
            message("é", NOW + 3 * MICROSECOND, destination="x", body=b""),
            message("e\u0301", NOW.replace(year=1900), destination="очередь", body=bytes(range(256))),
            message("'\\;%$1", NOW.replace(year=9998), destination="it's\\", expires_at=NOW.replace(year=9999)),
        ],
        NOW,
    )
    (oldest,) = await store.claim_due(NOW, 1)
    await store.finish([oldest], ports.Outcome.DELIVERED, NOW + SECOND)


_FILTERS: dict[str, ports.ScanFilter] = {
    "everything": ports.ScanFilter(),
    "some ids": ports.ScanFilter(message_ids=("a", "é", "e\u0301", "'\\;%$1", "not there", "a\0")),
    "no ids": ports.ScanFilter(message_ids=()),
    "some destinations": ports.ScanFilter(destinations=("x", "it's\\", "not there")),
    "no destinations": ports.ScanFilter(destinations=()),
    "due from": ports.ScanFilter(due_from=NOW + MICROSECOND),
    "due to": ports.ScanFilter(due_to=NOW + MICROSECOND),
    "all at once": ports.ScanFilter(
        message_ids=("a", "A", "a ", "é"), destinations=("x", "X"), due_from=NOW, due_to=NOW + 3 * MICROSECOND
    ),
}


def _is_match(row: dict[str, Any], scan_filter: ports.ScanFilter) -> bool:
    due_from, due_to = scan_filter.due_from, scan_filter.due_to
    return (
        (scan_filter.message_ids is None or row["message_id"] in scan_filter.message_ids)
        and (scan_filter.destinations is None or row["destination"] in scan_filter.destinations)
        and (due_from is None or row["due"] >= to_microseconds(due_from))
        and (due_to is None or row["due"] < to_microseconds(due_to))
    )


@scanning.with_fixtures(open_scannable)
async def only_what_is_asked_for_is_read(store: ports.ClaimingStore, scanned: ports.ScannableStore) -> None:
    """A filter leaves exactly the rows that fulfil all its conditions; texts are compared character by character."""
    await _store_various(store)
    for what in ("pending", "records"):
        columns = SCANNED_COLUMNS[what]
        every = await to_thread.run_sync(_read_rows, scanned, what, 1, columns)
        expect_equal(len(every), 5 if what == "pending" else 7, f"rows of {what}")
        for name, where in _FILTERS.items():
            scan, parts = ports.Scan(what, columns, where), scanned.scan_parts(what, 2)
            rows = await to_thread.run_sync(_scan_rows, scanned, scan, parts)
            expected = [row for row in every if _is_match(dict(zip(columns, row, strict=True)), where)]
            expect_equal(Counter(rows), Counter(expected), f"{what}: {name}")
            nothing = await to_thread.run_sync(_scan_rows, scanned, ports.Scan(what, (), where), parts)
            expect_equal(len(nothing), len(expected), f"{what}: {name}, no columns")


@scanning.with_fixtures(open_scannable)
async def a_snapshot_is_one_instant(store: ports.ClaimingStore, scanned: ports.ScannableStore) -> None:
    """Changes made while a snapshot is held are not seen with it; a store may have no snapshots."""
    await store.store_many([message(f"m-{n}") for n in range(20)], NOW)
    async with _open_snapshot(scanned) as snapshot:
        parts = {what: scanned.scan_parts(what, 3) for what in ("pending", "records")}
        await store.store_many([message(f"later-{n}") for n in range(5)], NOW)
        await store.finish(await store.claim_due(NOW + SECOND, 10), ports.Outcome.DELIVERED, NOW)
        if snapshot is None:
            return
        for what in ("pending", "records"):
            scan = ports.Scan(what, ("message_id",), snapshot=snapshot)
            rows = await to_thread.run_sync(_scan_rows, scanned, scan, parts[what])
            expect_equal(Counter(rows), Counter((f"m-{n}",) for n in range(20)), f"{what} of the snapshot")
    expect_equal(len(await to_thread.run_sync(_read_rows, scanned, "records", 3, ["kind"])), 35, "records by now")
    with expect_error(PipelineError, "a snapshot that is not held any more"):
        await to_thread.run_sync(_scan_rows, scanned, scan, parts["records"])


@scanning.with_fixtures(open_columnar)
async def columns_hold_what_rows_hold(store: ports.ClaimingStore, columns: ports.ScannableStore) -> None:
    """A scan of columns has the values, order and filters of one of rows; no columns at all may be asked for."""
    from postdate.testing.store_suite.columns import rows_of_columns

    await _store_various(store)
    async with _open_snapshot(columns) as snapshot:
        for what, all_columns in SCANNED_COLUMNS.items():
            shares, whole = columns.scan_parts(what, 2), columns.scan_parts(what, 1)
            for name, where in _FILTERS.items():
                rows = await to_thread.run_sync(
                    _scan_rows, columns, ports.Scan(what, all_columns, where, snapshot), shares
                )
                for chosen in (all_columns, all_columns[::-1], all_columns[:1], ()):
                    parts = shares if chosen == all_columns else whole  # for a store, each part may cost a connection
                    scan = ports.Scan(what, chosen, where, snapshot)
                    columns_read = await to_thread.run_sync(rows_of_columns, columns, scan, parts)
                    expected = Counter(tuple(row[all_columns.index(column)] for column in chosen) for row in rows)
                    expect_equal(Counter(columns_read), expected, f"{what}: {name}, columns {chosen}")
    with expect_error(PipelineError, "an unknown column"):
        list(columns.scan_columns(ports.Scan("pending", ("colour",)), ports.ScanPart(0, 1)))
    if snapshot is not None:
        with expect_error(PipelineError, "a snapshot that is not held any more"):
            list(columns.scan_columns(ports.Scan("pending", (), snapshot=snapshot), ports.ScanPart(0, 1)))


@scanning.with_fixtures(open_streamable)
async def positions_last_until_they_are_removed(store: ports.ClaimingStore, streamable: ports.StreamableStore) -> None:
    """A position has the name, number and time that were set last, until it is removed; others do not change."""
    names = ("it's a / lake#1 \\ %s", "лед")

    async def set_position(name: str, number: int, now: datetime) -> None:
        await to_thread.run_sync(streamable.set_stream_position, name, number, now)

    expect_equal(await to_thread.run_sync(streamable.stream_positions), [], "positions of a new store")
    await set_position(names[1], 2**40, NOW)
    await set_position(names[0], 7, NOW)
    await set_position(names[0], 3, NOW + SECOND)
    expected = [ports.StreamPosition(names[0], 3, NOW + SECOND), ports.StreamPosition(names[1], 2**40, NOW)]
    positions = await to_thread.run_sync(streamable.stream_positions)
    expect_equal(list(positions), expected, "positions")
    expect(all(each.at.utcoffset() == timedelta(0) for each in positions), "times of positions are in UTC")
    expect(await to_thread.run_sync(streamable.remove_stream_position, names[0]), "an existing position is removed")
    expect(not await to_thread.run_sync(streamable.remove_stream_position, names[0]), "it is removed once")
    expect_equal(await to_thread.run_sync(streamable.stream_positions), expected[1:], "positions that remain")


@scanning.with_fixtures(open_streamable)
async def nothing_is_pruned_that_a_stream_has_not_passed(
    store: ports.ClaimingStore, streamable: ports.StreamableStore
) -> None:
    """Retention removes no record from the smallest position on; without positions it removes all that is old."""

    def prune() -> None:
        for part in streamable.scan_parts("records", 1):
            streamable.prune_before(part, NOW + 2 * SECOND, NOW + 2 * SECOND)

    async def read_numbers() -> set[int]:
        rows = await to_thread.run_sync(_read_rows, streamable, "records", 1, ["number", "kind"])
        return {number for number, kind in rows if kind != ports.RecordKind.PRUNED}

    await store.store_many([message(f"m-{n}") for n in range(4)], NOW)
    await store.finish(await store.claim_due(NOW + SECOND, 10), ports.Outcome.DELIVERED, NOW)
    await store.store(message("waits", NOW + 3600 * SECOND), NOW)
    numbers = sorted(await read_numbers())
    for name, position in {"slow": numbers[3], "fast": numbers[6]}.items():
        await to_thread.run_sync(streamable.set_stream_position, name, position, NOW)
    await to_thread.run_sync(prune)
    expect_equal(await read_numbers(), set(numbers[3:]), "records after two streams")
    await to_thread.run_sync(streamable.remove_stream_position, "slow")
    await to_thread.run_sync(prune)
    expect_equal(await read_numbers(), set(numbers[6:]), "records after one stream")
    await to_thread.run_sync(streamable.remove_stream_position, "fast")
    await to_thread.run_sync(prune)
    expect_equal(await read_numbers(), set(numbers[8:]), "records without streams")
