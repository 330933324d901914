"""The store in Azure tables: its layout, what others put there, what is interrupted, and what Azure refuses.

Source: specification 3.1 to 3.6, rows 76 to 78, 82, 83, 85.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from tests.azure_store_subjects import TablePlace, drop_table
from tests.integration.azure.gateway import Gateway, Rule, Selection, slow_way
from tests.waiting import until

from postdate import DelayedMessage, SystemClock, errors
from postdate.backends.azure.groups import Operation
from postdate.backends.azure.layout import LARGEST_BODY, LARGEST_TEXT, attempt_of, read_entity, row_key, second_key
from postdate.backends.azure.lease import deletion_of
from postdate.backends.azure.pages import BackOff, Entity, Polling
from postdate.backends.azure.records import keys_of
from postdate.backends.azure.store import NEAR, AzureTableStore
from postdate.backends.azure.table_names import default_table, normalize_table, records_table
from postdate.ports import ClaimingStore, MessageFilter, Outcome, RecordKind, TransactionMode

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LATER = NOW + SECOND
GUID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
async def place(azurite_connection: str) -> AsyncGenerator[TablePlace]:
    place = TablePlace(azurite_connection)
    yield place
    await place.close()


@pytest.fixture
async def store(place: TablePlace) -> AzureTableStore:
    store = await place.open()
    await store.setup()
    return store


def deletion_in(row: str) -> Selection:
    """Select the transactions with deletions of rows that begin so."""
    return lambda path, body: "$batch" in path and b"DELETE" in body and row.encode() in body


def message(name: str = "m-1", due: datetime = NOW, body: bytes = b"body", **headers: str) -> DelayedMessage:
    return DelayedMessage(name, due, "orders", headers or {"kind": "test"}, body)


def upstream(row: str, **columns: object) -> dict[str, object]:
    """Return an entity as upstream writes it."""
    return {
        "PartitionKey": row[:10],
        "RowKey": row,
        "Destination": "orders",
        "Body": b"theirs",
        "MessageId": "u-1",
        "Headers": '{"NServiceBus.MessageId":"u-1"}',
        **columns,
    }


async def ids_of(store: AzureTableStore, now: datetime = LATER) -> list[str]:
    return [claim.message.message_id for claim in await store.claim_due(now, 1_000)]


# --- names and layout -------------------------------------------------------------------------------------------------


def test_row_76_the_default_name_is_the_sha1_of_the_endpoint() -> None:
    name = default_table("The quick brown fox jumps over the lazy dog")
    assert name == "delays2fd4e1c67a2d28fced849ee1bb76e7391b93eb12"
    assert records_table(name) == f"{name}records"


def test_row_77_a_name_of_ones_own_is_lower_cased() -> None:
    assert normalize_table("Delays2Go") == "delays2go"
    assert normalize_table("a" * 63) == "a" * 63
    assert len(records_table("a" * 63)) <= 63


@pytest.mark.parametrize("name", ["1abc", "ab", "a" * 64, "a-b", "", "délai", "abc\n"])
def test_row_77_a_name_that_cannot_be_is_refused_with_the_pattern(name: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"\^\[A-Za-z\]\[A-Za-z0-9\]\{2,62\}\$"):
        AzureTableStore("azure-table://UseDevelopmentStorage", table=name)


async def test_row_78_the_plain_sdk_finds_upstreams_keys_and_columns(place: TablePlace, store: AzureTableStore) -> None:
    await store.store(message(body=b"\0body", ключ='"🕰'), NOW)
    (entity,) = place.entities()
    assert entity["PartitionKey"] == "2026013112"
    second, _, guid = entity["RowKey"].partition("_")
    assert second == "20260131120005"
    assert len(guid) == 32
    assert int(guid, 16) >= 0
    assert (entity["Destination"], entity["MessageId"], entity["Body"]) == ("orders", "m-1", b"\0body")
    assert json.loads(entity["Headers"]) == {"ключ": '"🕰'}


async def test_row_78_a_message_of_upstream_is_claimed_from_the_next_whole_second_as_there(
    place: TablePlace, store: AzureTableStore
) -> None:
    place.add(upstream(f"20260131120005_{GUID}"))
    end = NOW.replace(second=6, microsecond=0)
    assert await ids_of(store, end - timedelta(microseconds=1)) == []
    (claim,) = await store.claim_due(end, 10)
    found = claim.message
    assert (found.message_id, found.destination, found.body) == ("u-1", "orders", b"theirs")
    assert dict(found.headers) == {"NServiceBus.MessageId": "u-1"}
    assert await store.finish([claim], Outcome.DELIVERED, LATER) == 1
    assert place.entities() == []
    assert [record.kind for record in await store.history("u-1")] == [RecordKind.DELIVERED]


async def test_row_78_a_bare_row_key_is_claimed_in_its_own_second(place: TablePlace, store: AzureTableStore) -> None:
    place.add(upstream("20260131120005"))
    second = NOW.replace(microsecond=0)
    assert await ids_of(store, second) == []
    assert await ids_of(store, second + timedelta(microseconds=1)) == ["u-1"]


async def test_a_message_under_a_bare_row_key_is_found_by_its_second_and_read_whoever_wrote_it(
    place: TablePlace, store: AzureTableStore
) -> None:
    second = NOW.replace(microsecond=0)
    place.add(upstream("20260131120005"))
    place.add(upstream("20260131120006", MessageId="u-2", Due=(second + SECOND).isoformat()))
    found = await store.list_pending(MessageFilter(due_from=second), 10)
    assert [(each.message_id, each.due) for each in found] == [("u-1", second), ("u-2", second + SECOND)]
    assert sorted(await ids_of(store, second + 2 * SECOND)) == ["u-1", "u-2"]
    assert await store.count_unreadable() == 0


async def test_what_others_have_due_in_the_last_second_of_the_calendar_waits_for_ever(
    place: TablePlace, store: AzureTableStore
) -> None:
    """It ended the service at every start."""
    end = datetime.max.replace(tzinfo=UTC)
    place.add({**upstream(f"99991231235959_{GUID}"), "PartitionKey": "9999123123"})
    await store.store(message("never", end), NOW)
    assert await store.next_attempt() == end
    assert await ids_of(store, NOW) == []
    assert await ids_of(store, end) == []
    assert [each.due for each in await store.list_pending(MessageFilter(), 10)] == [end, end]


async def test_two_messages_of_upstream_with_one_id_are_dispatched_one_after_the_other(
    place: TablePlace, store: AzureTableStore
) -> None:
    """They have keys of their own there, and a retried message keeps its id."""
    for number in range(2):
        place.add(upstream(f"20260131120000_{number}{GUID[1:]}", Body=b"%d" % number))
    bodies = []
    for _ in range(2):
        (claim,) = await store.claim_due(LATER, 10)
        bodies.append(claim.message.body)
        assert await store.claim_due(LATER, 10) == []
        assert await store.finish([claim], Outcome.DELIVERED, LATER) == 1
    assert bodies == [b"0", b"1"]


def test_keys_sort_as_times_do() -> None:
    times = [NOW.replace(year=year, microsecond=at) for year in (1, 1900, 2026, 9999) for at in (0, 1, 16, 999_999)]
    keys = [row_key("m-1", at) for at in times]
    assert keys == sorted(keys)
    assert [attempt_of(key, is_own=True) for key in keys] == times
    assert second_key(times[0]) == "00010131120005"


@pytest.mark.parametrize("row", ["", "abc", "20261331000000_x", "2026013112000", "\uff12026013112000"])
def test_a_row_key_that_is_no_time_is_no_message(row: str) -> None:
    with pytest.raises(errors.InvalidMessage):
        attempt_of(row, is_own=False)


# --- polling ----------------------------------------------------------------------------------------------------------


def test_row_82_with_a_second_of_peek_interval_there_are_at_most_seven_looks_in_fifteen_seconds() -> None:
    back_off = BackOff(Polling(peek_interval=SECOND))
    looks, at = 1, timedelta(0)
    while (at := at + back_off.lengthen_pause()) <= 15 * SECOND:
        looks += 1
    assert 5 <= looks <= 7
    back_off.reset()
    assert back_off.lengthen_pause() == SECOND
    assert [back_off.lengthen_pause() for _ in range(50)][-1] == Polling().longest_wait_when_idle


@pytest.mark.parametrize(
    "wrong",
    [
        {"peek_interval": timedelta(0)},
        {"longest_wait_when_idle": timedelta(milliseconds=99)},
        {"longest_wait_when_idle": timedelta(seconds=61)},
        {"page_size": 0},
        {"page_size": 1_001},
    ],
    ids=str,
)
def test_row_82_pauses_that_cannot_be_are_refused(wrong: dict) -> None:
    with pytest.raises(errors.ConfigurationError, match=next(iter(wrong))):
        Polling(**wrong)


async def test_row_83_a_hundred_and_twenty_due_messages_are_claimed_in_pages_of_fifty_by_their_keys(
    store: AzureTableStore,
) -> None:
    batch = [message(f"m-{n:03}", NOW + n * timedelta(milliseconds=1)) for n in range(120)]
    await store.store_many(batch[::-1], NOW)
    pages = [await ids_of(store) for _ in range(4)]
    assert [len(page) for page in pages] == [50, 50, 20, 0]
    assert [id_ for page in pages for id_ in page] == [each.message_id for each in batch]


async def test_more_than_azure_gives_in_one_answer_is_claimed_once_each_and_nothing_is_passed_over(
    place: TablePlace,
) -> None:
    store = await place.open(polling=Polling(page_size=1_000))
    await store.setup()
    await store.store_many([message(f"m-{n}", NOW - n * SECOND) for n in range(1_100)], NOW)
    first = await store.claim_due(LATER, 1_000)
    assert await store.retry_later(first[0], NOW - 5_000 * SECOND, NOW, "goes before all others")
    rest = await store.claim_due(LATER, 1_000)
    assert len(first) == 1_000
    assert len({claim.message.message_id for claim in rest}) == len(rest) == 101
    assert rest[0].message == first[0].message.__class__.from_store(
        first[0].message.message_id, first[0].message.due, "orders", {"kind": "test"}, b"body", None, 1
    )
    assert await store.claim_due(LATER, 1_000) == []


# --- retries and interruptions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [timedelta(seconds=1), timedelta(hours=2)], ids=["same hour", "another hour"])
async def test_a_failed_message_moves_to_the_key_of_its_next_attempt(
    place: TablePlace, store: AzureTableStore, wait: timedelta
) -> None:
    """So that it holds up nothing, and upstream's poller waits for it, too."""
    await store.store(message(), NOW)
    (claim,) = await store.claim_due(LATER, 10)
    assert await store.retry_later(claim, NOW + wait, NOW, "why")
    (entity,) = place.entities()
    assert entity["RowKey"].startswith(second_key(NOW + wait))
    assert entity["Failures"] == 1
    assert await store.get("m-1") == DelayedMessage("m-1", NOW, "orders", {"kind": "test"}, b"body", None, 1)
    with pytest.raises(errors.DuplicateMessage):
        await store.store(message(), NOW)
    (again,) = await store.claim_due(NOW + wait + SECOND, 10)
    assert again.message.due == NOW
    assert await store.finish([again], Outcome.DELIVERED, NOW) == 1


async def test_what_is_stored_while_the_answer_to_a_look_is_under_way_is_in_the_answer(
    place: TablePlace, store: AzureTableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is due after what was the earliest until then, so that nobody is woken for it."""
    await store.store(message("before"), NOW)
    await store.finish(await store.claim_due(LATER, 10), Outcome.DELIVERED, NOW)
    pages, meanwhile = store._open_parts.pages, [message("meanwhile", LATER)]
    first = pages.find_first_attempt

    async def first_and_store(is_wanted: Callable[[Entity], bool]) -> datetime | None:
        found = await first(is_wanted)
        while meanwhile:
            await store.store(meanwhile.pop(), NOW)
        return found

    monkeypatch.setattr(pages, "find_first_attempt", first_and_store)
    assert await store.next_attempt() == LATER


async def test_an_id_without_its_message_is_stored_by_the_next_attempt(
    place: TablePlace, store: AzureTableStore
) -> None:
    """As a process leaves it that died between the two."""
    await store.store(message(body=b"first"), NOW)
    await store._open_parts.table.apply_each([_deletion(place)])
    await store.store(message(body=b"again"), NOW)
    (claim,) = await store.claim_due(LATER, 10)
    assert claim.message.body == b"again"
    report = await store.store_many([message()], NOW)
    assert (report.stored, report.duplicate_ids) == (0, ("m-1",))


def _deletion(place: TablePlace):
    (entity,) = place.entities()
    return Operation("delete", {"PartitionKey": entity["PartitionKey"], "RowKey": entity["RowKey"]})


@pytest.mark.parametrize(
    ("mode", "again"), [(TransactionMode.NONE, []), (TransactionMode.RECEIVE_ONLY, ["m-1"])], ids=str
)
async def test_row_85_whoever_dies_between_claim_and_send_loses_the_message_in_mode_none_only(
    place: TablePlace, mode: TransactionMode, again: list[str]
) -> None:
    first = await place.open(mode)
    await first.setup()
    await first.store(message(), NOW)
    assert await ids_of(first) == ["m-1"]
    await first.close()  # without having finished or given back anything
    assert await ids_of(await place.open(mode)) == again


async def test_row_85_in_mode_none_a_send_that_fails_is_tried_again(place: TablePlace) -> None:
    store = await place.open(TransactionMode.NONE)
    await store.setup()
    await store.store(message(), NOW)
    (claim,) = await store.claim_due(LATER, 10)
    assert place.entities() == []
    assert await store.retry_later(claim, LATER, NOW, "why")
    (claim,) = await store.claim_due(LATER + SECOND, 10)
    assert claim.message.number_of_failures == 1
    assert await store.finish([claim], Outcome.DELIVERED, NOW) == 1
    assert [record.kind.name for record in await store.history("m-1")] == ["SCHEDULED", "RETRIED", "DELIVERED"]


async def test_row_85_in_mode_none_an_hour_whose_deletion_fails_takes_no_other_with_it(place: TablePlace) -> None:
    async with slow_way(place, TransactionMode.NONE) as (gateway, store):
        for hours in (2, 1):
            await store.store_many([message(f"{hours}-{n}", NOW - timedelta(hours=hours)) for n in range(5)], NOW)
        gateway.refuse(deletion_in("2026013110"))
        assert sorted(await ids_of(store)) == [f"1-{n}" for n in range(5)]
        assert await store.next_attempt() == NOW - timedelta(hours=2)
        assert not await store.cancel("2-0", NOW)
        assert sorted(await ids_of(store)) == [f"2-{n}" for n in range(5)]
        assert await ids_of(store) == place.entities() == []


@pytest.mark.parametrize("is_claimed_again", [True, False])
@pytest.mark.parametrize("is_lost", [True, False], ids=["lost answer", "cancelled"])
async def test_row_85_in_mode_none_a_claim_that_ends_without_an_answer_loses_nothing(
    place: TablePlace, *, is_lost: bool, is_claimed_again: bool
) -> None:
    async with slow_way(place, TransactionMode.NONE) as (gateway, store):
        await store.store_many([message(f"m-{n}") for n in range(5)], NOW)
        if is_lost:
            gateway.lose(deletion_in("2026013112"), 9)
            with pytest.raises(errors.StoreUnreachable):
                await store.claim_due(LATER, 10)
        else:
            stop = gateway.stop(deletion_in("2026013112"), after=True)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(store.claim_due, LATER, 10)
                await stop.reached.wait()
                tasks.cancel_scope.cancel()
            stop.opened.set()
        gateway.rules.clear()
        assert place.entities() == []
        if is_claimed_again:
            assert len(await ids_of(store)) == 5
            assert await ids_of(store) == []
        else:
            await store.close()
            assert len(place.entities()) == 5


@pytest.mark.parametrize("mode", [TransactionMode.TRANSACTION_SCOPE, TransactionMode.SENDS_ATOMIC_WITH_RECEIVE])
async def test_modes_that_azure_cannot_keep_are_refused(place: TablePlace, mode: TransactionMode) -> None:
    with pytest.raises(errors.UnsupportedTransactionMode, match="receive_only"):
        await place.open(mode)
    await place.open()
    await (await place.open()).setup()


BAD = {
    "headers": {"Headers": "not json"},
    "body": {"Body": "a text"},
    "destination": {"Destination": " "},
    "failures": {"Failures": "many"},
    "due": {"Due": "soon"},
}


async def test_entities_that_are_no_messages_are_marked_and_hold_up_nothing(
    place: TablePlace, store: AzureTableStore, caplog: pytest.LogCaptureFixture
) -> None:
    for number, columns in enumerate(BAD.values()):
        place.add(upstream(f"20260131110000_{number}{GUID[1:]}", **columns))
    place.add({"PartitionKey": "2026013111", "RowKey": "20260131110001_x"})
    place.add({"PartitionKey": "2026013111", "RowKey": "2026013111 is no time"})
    place.add({"PartitionKey": "notes", "RowKey": "kept by somebody else"})
    await store.store(message(), NOW)
    assert await ids_of(store) == ["m-1"]
    rows = await store.list_unreadable(100)
    assert len(rows) == len(BAD) + 2 == len({each.number for each in rows})
    assert all(each.reason for each in rows)
    kept = [each for each in place.entities() if each["PartitionKey"] == "unreadable"]
    assert {"not json", "a text"} <= {value for each in kept for value in (each.get("Headers"), each.get("Body"))}
    said = [each for each in caplog.messages if "cannot be read" in each]
    assert len(set(said)) == len(BAD) + 2
    assert await ids_of(store) == []
    assert [each for each in caplog.messages if "cannot be read" in each] == said, "once for all"
    assert {each["PartitionKey"] for each in place.entities()} == {"notes", "2026013112", "unreadable"}


@pytest.mark.parametrize(
    "columns",
    [
        {"Destination": b"\0" * 60_000},
        {"Due": "\N{MANTELPIECE CLOCK}" * 16_380},
    ],
    ids=["bytes", "characters beyond the basic plane"],
)
async def test_an_entity_whose_mark_is_too_large_does_not_stop_dispatching(
    place: TablePlace, store: AzureTableStore, columns: dict[str, object]
) -> None:
    place.add(upstream(f"20260131110000_{GUID}", **columns))
    await store.store(message(), NOW)
    assert await ids_of(store) == ["m-1"]


async def test_an_entity_whose_mark_is_refused_stays_and_does_not_stop_dispatching(
    place: TablePlace, caplog: pytest.LogCaptureFixture
) -> None:
    async with slow_way(place) as (gateway, store):
        place.add(upstream(f"20260131110000_{GUID}", Body="a text"))
        await store.store(message(), NOW)
        refusal = {"x-ms-error-code": "EntityTooLarge"}
        gateway.rules.append(Rule("", 413, 9, refusal, is_meant=lambda _path, body: b"unreadable" in body))
        assert await ids_of(store) == ["m-1"]
        assert "cannot be marked so" in caplog.text


async def test_long_reasons_are_cut_as_azure_counts_them(store: AzureTableStore) -> None:
    await store.store_many([message(f"m-{number}") for number in range(3)], NOW)
    first, second, third = await store.claim_due(LATER, 10)
    reason = "why" + "\N{MANTELPIECE CLOCK}" * 20_000
    assert await store.retry_later(first, LATER, NOW, reason)
    assert await store.finish([second], Outcome.FAILED, NOW, reason) == 1
    assert await store.mark_unreadable(third, reason, NOW)
    (row,) = await store.list_unreadable(10)
    details = [(await store.history(each.message.message_id))[-1].detail for each in (first, second)]
    assert all(reason.startswith(each) and len(each) > 14_000 for each in [*details, row.reason])


async def test_no_message_is_passed_over_when_a_mark_fails(place: TablePlace) -> None:
    async with slow_way(place) as (gateway, store):
        await store.store_many([message(f"m-{n:04}", NOW + n * timedelta(microseconds=1)) for n in range(1_100)], NOW)
        place.add(upstream(f"20260131115959_{GUID}", Body="a text"))
        gateway.refuse(lambda _path, body: b"unreadable" in body)
        with pytest.raises(errors.StoreUnreachable):
            await store.claim_due(LATER, 10)
        assert (await ids_of(store))[0] == "m-0000"


# --- time -------------------------------------------------------------------------------------------------------------


async def test_the_clock_of_the_account_is_told_to_less_than_a_second_and_processes_see_each_others(
    place: TablePlace, store: AzureTableStore
) -> None:
    assert isinstance(store, ClaimingStore)
    clock = SystemClock()
    before, told, after = clock.now(), await store.server_now(), clock.now()
    assert before - SECOND / 2 < told < after + SECOND / 2  # one machine, one clock
    assert await store.reported_clocks() == {}
    await store.report_clock(timedelta(seconds=-3, microseconds=7))
    other = await place.open()
    assert list((await other.reported_clocks()).values()) == [timedelta(seconds=-3, microseconds=7)]
    assert await store.server_now() > told
    assert len(await other.reported_clocks()) == 1  # a look at the clock leaves what was noted
    assert await store.record_counts() == {}


# --- what an operator changes -----------------------------------------------------------------------------------------


async def test_another_process_cancels_what_is_not_due_for_a_while_and_nothing_that_may_be_on_its_way(
    place: TablePlace, store: AzureTableStore
) -> None:
    await store.store_many([message("soon", NOW + SECOND), message("late", NOW + NEAR + SECOND)], NOW)
    assert await ids_of(store, NOW) == []  # it has the lease
    other = await place.open()
    assert [await other.cancel(name, NOW) for name in ("soon", "late")] == [False, True]
    assert [await other.reschedule(name, NOW + NEAR * 9, NOW) for name in ("soon", "late")] == [False, False]
    assert await ids_of(store, NOW + 100 * SECOND) == ["soon"]


async def test_what_is_changed_while_it_is_read_ahead_is_not_claimed_as_it_was(store: AzureTableStore) -> None:
    await store.store_many([message(f"m-{n:03}", NOW + n * timedelta(milliseconds=1)) for n in range(120)], NOW)
    assert len(await store.claim_due(LATER, 50)) == 50
    assert await store.cancel("m-100", LATER)
    assert await store.remove("m-101", LATER)
    assert await store.increment_failure_count("m-102", LATER)
    claims = [*await store.claim_due(LATER, 50), *await store.claim_due(LATER, 50)]
    failures = {claim.message.message_id: claim.message.number_of_failures for claim in claims}
    assert len(failures) == 68
    assert not {"m-100", "m-101"} & failures.keys()
    assert failures["m-102"] == 1


@pytest.mark.parametrize("change", ["cancel", "reschedule"])
async def test_a_change_that_takes_too_long_leaves_the_message_to_the_process_that_dispatches(
    place: TablePlace, store: AzureTableStore, change: str
) -> None:
    await store.store(message(due=NOW + NEAR + SECOND / 2), NOW)
    assert await ids_of(store, NOW) == []  # it has the lease
    before = place.entities()
    answers: list[bool] = []
    async with slow_way(place) as (gateway, operator):

        async def alter() -> None:
            if change == "cancel":
                answers.append(await operator.cancel("m-1", NOW))
            else:
                answers.append(await operator.reschedule("m-1", NOW + timedelta(days=1), NOW))

        def is_record(path: str, body: bytes) -> bool:
            return f"{records_table(place.table)}(" in path + body.decode() and b"RowKey" in body

        stop, began = gateway.stop(is_record, after=True), anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(alter)
            await stop.reached.wait()
            await until(lambda: anyio.current_time() > began + 0.6)
            stop.opened.set()
    assert answers == [False]
    assert place.entities() == before
    assert [each.kind for each in await store.history("m-1")] == [RecordKind.SCHEDULED]
    assert await store.cancel("m-1", NOW)


@pytest.mark.parametrize("change", ["cancel", "reschedule", "remove"])
async def test_a_change_ends_both_copies_that_an_interrupted_move_left(
    place: TablePlace, store: AzureTableStore, change: str
) -> None:
    await store.store(message(), NOW)
    (claim,) = await store.claim_due(LATER, 10)
    (old,) = place.entities()
    assert await store.retry_later(claim, NOW + timedelta(hours=2), NOW, "why")
    place.add(old)  # as a process leaves it that died before its deletion
    later = NOW + timedelta(days=1)
    if change == "reschedule":
        assert await store.reschedule("m-1", later, LATER)
    else:
        assert await (store.cancel if change == "cancel" else store.remove)("m-1", LATER)
    assert len(place.entities()) == (change == "reschedule")
    assert await ids_of(store, later) == []


async def test_a_message_that_is_rescheduled_where_it_stands_has_no_other_copy(
    place: TablePlace, store: AzureTableStore
) -> None:
    await store.store(message(), NOW)
    for _ in range(2):
        assert await store.reschedule("m-1", NOW, NOW)
        assert len(place.entities()) == 1
    assert await store.increment_failure_count("m-1", NOW)
    assert await store.cancel("m-1", NOW)
    assert place.entities() == []


async def test_a_message_stays_known_when_a_retry_and_then_a_rescheduling_are_interrupted(
    place: TablePlace, store: AzureTableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both end before they write the message under its new key."""
    await store.store(message(), NOW + timedelta(hours=1))
    old = read_entity(place.entities()[0])
    await store._open_parts.records.record_retry(old, old.copy_for_retry(NOW + timedelta(hours=2), 1), NOW, "why")

    async def interrupted(*_: object) -> bool:
        raise errors.StoreUnreachable("as by a death")

    monkeypatch.setattr(store, "_move", interrupted)
    with pytest.raises(errors.StoreUnreachable):
        await store.reschedule("m-1", NOW + timedelta(days=1), NOW)
    assert await store.get("m-1") is not None
    with pytest.raises(errors.DuplicateMessage):
        await store.store(message(), NOW)


@pytest.mark.parametrize("is_early", [True, False], ids=["before its row", "after its row"])
async def test_a_message_is_found_and_is_no_new_one_while_it_moves(place: TablePlace, *, is_early: bool) -> None:
    """Its reader looks at its old place when it has left that already."""
    async with slow_way(place) as (gateway, reader):
        store = await place.open()
        await store.store(message(), NOW)
        (claim,) = await store.claim_due(LATER, 10)
        found: list[DelayedMessage | None] = []

        async def look() -> None:
            found.append(await reader.get("m-1"))

        def is_look(path: str, _body: bytes) -> bool:
            return f"{place.table}(" in path and "20260131120005" in path

        async def move() -> None:
            assert await store.retry_later(claim, NOW + timedelta(hours=2), NOW, "why")

        async with anyio.create_task_group() as tasks:
            if is_early:
                stop = gateway.stop(is_look)
                tasks.start_soon(look)
                await stop.reached.wait()
                await move()
            else:
                table, stop = store._open_parts.table, gateway.stop(is_look)
                atomically = table.apply_atomically

                async def look_first(operations: Sequence[Operation]) -> bool:
                    if operations[0].kind == "upsert":
                        tasks.start_soon(look)
                        await stop.reached.wait()
                    return await atomically(operations)

                table.apply_atomically = look_first
                await move()
            stop.opened.set()
        assert found
        assert found[0] is not None
        with pytest.raises(errors.DuplicateMessage):
            await reader.store(message(), NOW)


# --- what azure refuses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("too_large", "said"),
    [
        (message(body=b"x" * (LARGEST_BODY + 1)), "this store takes 65,536"),
        (message(body=b"", h="x" * LARGEST_TEXT), "characters in its headers"),
        (message(body=b"", h="🕰" * (LARGEST_TEXT // 2)), "this store takes 65,536"),
    ],
    ids=["body", "headers", "headers beyond the basic plane"],
)
async def test_what_a_column_does_not_hold_is_refused_before_anything_is_stored(
    place: TablePlace, store: AzureTableStore, too_large: DelayedMessage, said: str
) -> None:
    """The emulator would take more than Azure does."""
    for refused in ([too_large], [message("m-0"), too_large]):
        with pytest.raises(errors.MessageTooLarge, match=said):
            await store.store_many(refused, NOW)
    with pytest.raises(errors.MessageTooLarge, match=said):
        await store.store(too_large, NOW)
    assert place.entities() == place.entities(records_table(place.table)) == []


async def test_a_hundred_of_the_largest_messages_are_more_than_one_transaction(store: AzureTableStore) -> None:
    room = LARGEST_BODY - 100
    report = await store.store_many([message(f"m-{n}", body=b"\xff" * room) for n in range(100)], NOW)
    assert report.stored == 100


async def test_a_limit_above_what_azure_takes_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="65,536"):
        AzureTableStore("azure-table://UseDevelopmentStorage", largest_message_bytes=LARGEST_BODY + 1)


async def test_a_deleted_table_is_said_to_be_missing_and_comes_back_by_setting_up(
    place: TablePlace, store: AzureTableStore
) -> None:
    place.delete_table()
    with pytest.raises(errors.StoreNotSetUp, match=place.table):
        await store.store(message(), NOW)
    with pytest.raises(errors.StoreNotSetUp, match=place.table):
        await store.claim_due(LATER, 10)
    await store.setup()
    await store.store(message(), NOW)
    assert await ids_of(store) == ["m-1"]


async def test_a_wrong_key_is_said_to_be_one_and_not_shown(place: TablePlace, store: AzureTableStore) -> None:
    await store.store(message(), NOW)
    wrong = "d3Jvbmcga2V5IQ=="
    key = dict(part.split("=", 1) for part in place.connection.split(";") if part)["AccountKey"]
    intruder = await place.open(connection=place.connection.replace(key, wrong))
    for call in (intruder.store(message("m-2"), NOW), intruder.claim_due(LATER, 10), intruder.setup()):
        with pytest.raises(errors.StoreUnreachable, match="check the name of the account, its key") as raised:
            await call
        assert wrong not in str(raised.value)
    assert await ids_of(store) == ["m-1"]


async def test_throttling_is_an_outage_and_nothing_is_lost(place: TablePlace, store: AzureTableStore) -> None:
    settings = dict(part.split("=", 1) for part in place.connection.strip(";").split(";"))
    endpoint = settings["TableEndpoint"]
    async with Gateway(endpoint).listening() as gateway:
        slow = await place.open(connection=place.connection.replace(endpoint, gateway.url))
        gateway.answer("POST", 503, times=1, Retry_After="7")
        with pytest.raises(errors.StoreUnreachable, match="asks for a pause of 7 s"):
            await slow.store(message(), NOW)
        assert place.entities() == []
        await slow.store(message(), NOW)
        await store.close()
        (claim,) = await slow.claim_due(LATER, 10)
        gateway.answer("POST", 503, times=2)
        with pytest.raises(errors.StoreUnreachable):
            await slow.finish([claim], Outcome.DELIVERED, NOW)
        with pytest.raises(errors.StoreUnreachable):
            await slow.retry_later(claim, LATER, NOW, "the store does not answer")
        assert [entity["MessageId"] for entity in place.entities()] == ["m-1"]
        assert await slow.finish([claim], Outcome.DELIVERED, NOW) == 1
        assert place.entities() == []
        await slow.close()


async def test_an_answer_that_is_lost_leaves_nothing_double(place: TablePlace, store: AzureTableStore) -> None:
    """The message was stored, and nobody heard of it: storing it again says so."""
    settings = dict(part.split("=", 1) for part in place.connection.strip(";").split(";"))
    endpoint = settings["TableEndpoint"]
    async with Gateway(endpoint).listening() as gateway:
        deaf = await place.open(connection=place.connection.replace(endpoint, gateway.url))
        gateway.answer("POST", 500, times=2, after=True)
        with pytest.raises(errors.StoreUnreachable):
            await deaf.store(message(), NOW)
        with pytest.raises(errors.StoreUnreachable):
            await deaf.store(message(), NOW)
        await deaf.store_many([message()], NOW)
        await deaf.close()
    assert len(place.entities()) == 1
    assert (await store.history("m-1"))[0].kind is RecordKind.SCHEDULED
    assert [each["RowKey"] for each in place.entities(records_table(place.table))] == [keys_of("m-1")["RowKey"]]


# --- answers that are lost: the request is made again, and refused, as it has been done ------------------------------


@pytest.mark.parametrize("wait", [SECOND, timedelta(hours=2)], ids=["same hour", "another hour"])
@pytest.mark.parametrize("losses", [1, 9], ids=["repeated by the connection", "repeated by the caller"])
async def test_a_retry_whose_answer_is_lost_moves_the_message_and_loses_none(
    place: TablePlace, wait: timedelta, losses: int
) -> None:
    async with slow_way(place) as (gateway, store):
        await store.store(message(), NOW)
        (claim,) = await store.claim_due(LATER, 10)
        gateway.lose(deletion_in("2026013112"), losses)
        if losses > 1:
            with pytest.raises(errors.StoreUnreachable):
                await store.retry_later(claim, NOW + wait, NOW, "why")
            gateway.rules.clear()
        assert await store.retry_later(claim, NOW + wait, NOW, "why")
        (entity,) = place.entities()
        assert entity["RowKey"].startswith(second_key(NOW + wait))
        assert await ids_of(store, NOW + wait + SECOND) == ["m-1"]


async def test_a_rescheduling_whose_answer_is_lost_moves_the_message_and_loses_none(place: TablePlace) -> None:
    async with slow_way(place) as (gateway, store):
        await store.store(message(), NOW - timedelta(hours=1))
        gateway.lose(deletion_in("2026013112"))
        assert await store.reschedule("m-1", NOW + timedelta(days=2), NOW - timedelta(hours=1))
        found = await store.get("m-1")
        assert found is not None
        assert found.due == NOW + timedelta(days=2)
        assert len(place.entities()) == 1


async def test_a_retry_of_a_message_that_another_process_has_ended_brings_nothing_back(place: TablePlace) -> None:
    async with slow_way(place) as (gateway, store):
        await store.store(message(), NOW)
        (claim,) = await store.claim_due(LATER, 10)
        stop = gateway.stop(deletion_in("2026013112"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.retry_later, claim, NOW + timedelta(hours=2), NOW, "why")
            await stop.reached.wait()
            old, _new = place.entities()
            other = await place.open()
            await other._open_parts.records.record_ends([read_entity(old)], RecordKind.DELIVERED, NOW)
            place.remove(old)
            stop.opened.set()
        assert place.entities() == []


@pytest.mark.parametrize("losses", [1, 9], ids=["repeated by the connection", "repeated by the caller"])
async def test_an_end_whose_answer_is_lost_counts(place: TablePlace, losses: int) -> None:
    async with slow_way(place) as (gateway, store):
        await store.store(message(), NOW)
        claims = await store.claim_due(LATER, 10)
        gateway.lose(deletion_in("2026013112"), losses)
        if losses > 1:
            with pytest.raises(errors.StoreUnreachable):
                await store.finish(claims, Outcome.DELIVERED, NOW)
            gateway.rules.clear()
        assert await store.finish(claims, Outcome.DELIVERED, NOW) == 1
        assert place.entities() == []


async def test_a_repeated_deletion_does_not_make_another_one_done(place: TablePlace, store: AzureTableStore) -> None:
    """Both go in one transaction, and only the first may have been done by an earlier request."""
    await store.store_many([message("m-1"), message("m-2")], NOW)
    first, second = map(read_entity, place.entities())
    for entity in place.entities():
        place.remove(entity)
    deletions = [deletion_of(first, is_repeated=True), deletion_of(second)]
    assert await store._open_parts.table.apply_each(deletions) == [True, False]


async def test_a_cancellation_whose_answer_is_lost_is_one(place: TablePlace) -> None:
    async with slow_way(place) as (gateway, store):
        await store.store(message(), NOW + timedelta(hours=1))
        gateway.lose(deletion_in("2026013112"))
        assert await store.cancel("m-1", NOW)
        assert place.entities() == []
        assert [each.kind for each in await store.history("m-1")] == [RecordKind.SCHEDULED, RecordKind.CANCELLED]


async def test_a_new_message_whose_answer_is_lost_is_no_duplicate(place: TablePlace) -> None:
    async with slow_way(place) as (gateway, store):

        def is_message(path: str, _body: bytes) -> bool:
            return path.partition("?")[0].endswith(f"/{place.table}")

        gateway.lose(is_message)
        await store.store(message("m-1"), NOW)
        gateway.lose(is_message)
        assert (await store.store_many([message("m-2")], NOW)).stored == 1
        with pytest.raises(errors.DuplicateMessage):
            await store.store(message("m-2"), NOW)
        assert len(place.entities()) == 2


def test_the_endpoint_of_the_guide_runs(azurite_connection: str) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "azure.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```py\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet],
        env={**os.environ, "AZURE_STORAGE_CONNECTION_STRING": azurite_connection},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert default_table("billing") in ran.stdout
    drop_table(azurite_connection, default_table("billing"))
