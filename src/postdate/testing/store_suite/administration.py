"""Checks of an operator's questions and changes, and of records."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime

import anyio

from postdate import ports
from postdate.clock import EARLIEST
from postdate.errors import InvalidMessage, MessageTooLarge
from postdate.messages import DelayedMessage, Headers, format_timestamp
from postdate.ports.changing import CreateMessage
from postdate.testing.conformance import Topic, expect, expect_equal, expect_error
from postdate.testing.store_suite.subject import (
    MICROSECOND,
    NOW,
    SECOND,
    StoreSubject,
    claim_one,
    close_adapter,
    expect_history,
    fixture_with_role,
    ids,
    message,
    open_administrable,
    open_claiming,
    open_replacing,
    prepare_store,
    store_and_claim_one,
)

administration: Topic[StoreSubject] = Topic("administration")
recording: Topic[StoreSubject] = Topic("recording")


@administration.with_fixtures(open_administrable)
async def a_cancelled_message_is_gone(store: ports.ClaimingStore, operator: ports.AdministrableStore) -> None:
    """Cancel is true once, the message is never claimed, and the record says so (row 119)."""
    await store.store(message(), NOW)
    cancelled = [await operator.cancel(id_, NOW) for id_ in ("m-1", "m-1", "unknown")]
    expect_equal(cancelled, [True, False, False], "results of cancel")
    expect_equal(ids(await store.claim_due(NOW + SECOND, 10)), [], "claims of a cancelled message")
    await expect_history(operator, "m-1", "SCHEDULED", "CANCELLED")


@administration
async def a_look_is_had_before_the_store_is_prepared(subject: StoreSubject) -> None:
    """An observer can be had of a store that is not initialized yet; later it tells of pending messages."""
    store = subject.open()
    try:
        look = store.observer() if isinstance(store, ports.AdministrableStore) else None
        await prepare_store(store)
        await store.store(message(), NOW)
        if look is not None and (standing := await look.pending_state_of("m-1")) is not None:
            expect_equal(standing.message, message(), "what the look tells")
    finally:
        await close_adapter(store)


@administration.with_fixtures(open_administrable)
async def what_is_being_dispatched_is_left_alone(
    store: ports.ClaimingStore, operator: ports.AdministrableStore
) -> None:
    """A claimed message is neither cancelled nor rescheduled; both say false."""
    claim = await store_and_claim_one(store)
    expect(not await operator.cancel("m-1", NOW), "cancelling a claimed message is false")
    expect(not await operator.reschedule("m-1", NOW + SECOND, NOW), "rescheduling a claimed message is false")
    expect_equal(await store.finish([claim], ports.Outcome.DELIVERED, NOW), 1, "finished by the holder")


@administration.with_fixtures(open_replacing)
async def one_message_waits_for_a_key(store: ports.ClaimingStore, keyed: ports.ReplacingStore) -> None:
    """The last one replaces all that the message is, keeps its id, and learns when the first was stored."""
    stored_times = list[datetime | None]()

    def make(number: int) -> CreateMessage:
        def made(message_id: str, stored_at: datetime | None) -> DelayedMessage:
            stored_times.append(stored_at)
            due = NOW + number * SECOND
            return message(message_id, due, destination=f"q-{number}", headers={"n": str(number)}, body=b"%d" % number)

        return made

    ids_of_key = [
        await keyed.replace(key, make(n), NOW + n * SECOND) for n, key in enumerate(("k", "k~", "k", "k", "K"))
    ]
    expect_equal(ids_of_key, ["k~00000001", "k~~00000001", "k~00000001", "k~00000001", "K~00000001"], "ids")
    expect_equal(stored_times, [None, None, NOW, NOW, None], "when the first was stored")
    claims = await store.claim_due(NOW + 60 * SECOND, 10)
    expect_equal([each.message.body for each in claims], [b"1", b"3", b"4"], "what waits")
    (last,) = [each.message for each in claims if each.message.message_id == "k~00000001"]
    expect_equal((last.due, last.destination, last.headers), (NOW + 3 * SECOND, "q-3", {"n": "3"}), "the last one")
    await store.finish(claims, ports.Outcome.DELIVERED, NOW)
    expect_equal(await keyed.replace("k", make(5), NOW), "k~00000002", "id after the delivery")
    expect_equal(stored_times[-1], None, "the first after the delivery")
    await expect_history(store, "k~00000001", "SCHEDULED", "RESCHEDULED", "RESCHEDULED", "DELIVERED")


@administration.with_fixtures(fixture_with_role(ports.ReplacingStore, largest_message_bytes=1_000))
async def what_is_too_large_replaces_nothing(store: ports.ClaimingStore, keyed: ports.ReplacingStore) -> None:
    """The message that waits is as it was."""
    first = await keyed.replace("k", lambda id_, _: message(id_, body=b"1"), NOW)
    with expect_error(MessageTooLarge, "replacing by a body over the limit"):
        await keyed.replace("k", lambda id_, _: message(id_, body=b"x" * 1_001), NOW)
    with expect_error(MessageTooLarge, "replacing by id by a body over the limit"):
        await keyed.replace_pending(message(first, body=b"x" * 1_001), NOW)
    waiting = (await claim_one(store)).message
    expect_equal((waiting.message_id, waiting.body), (first, b"1"), "what waits")


@administration.with_fixtures(open_replacing)
async def a_pending_message_is_replaced_by_its_id(store: ports.ClaimingStore, replacing: ports.ReplacingStore) -> None:
    """The new message replaces all that the old one is, has all its retries, wakes, and a record says so."""
    await store.store_many([message(expires_at=NOW + 90 * SECOND), message("other", NOW + 300 * SECOND)], NOW)
    old = await _fail_attempts(store, 3)
    new = message("m-1", NOW - SECOND, destination="elsewhere", headers={"new": "ä"}, body=b"new")
    woken: list[str] = []
    stop = await store.listen(lambda: woken.append("woken"))
    expect(await replacing.replace_pending(new, NOW), "replacing a pending message is true")
    stop()
    expect(bool(woken), "a message that is replaced by one due before all others wakes")
    claim = await claim_one(store, NOW)
    expect_equal(claim.message, new, "the message that waits")
    expect_equal(await store.finish([old], ports.Outcome.DELIVERED, NOW), 0, "finished by the old claim")
    expect_equal(await store.finish([claim], ports.Outcome.DELIVERED, NOW), 1, "finished by the new claim")
    await expect_history(store, "m-1", "SCHEDULED", "RETRIED", "RETRIED", "RETRIED", "RESCHEDULED", "DELIVERED")


@administration.with_fixtures(open_replacing)
async def only_what_is_pending_is_replaced_by_its_id(
    store: ports.ClaimingStore, replacing: ports.ReplacingStore
) -> None:
    """A message that is claimed, delivered or unknown is not replaced, nothing is stored, and the claim is in force."""
    claim = await store_and_claim_one(store)
    new = message(due=NOW - SECOND, body=b"new")
    expect(not await replacing.replace_pending(new, NOW), "replacing a claimed message is false")
    expect_equal(await store.finish([claim], ports.Outcome.DELIVERED, NOW), 1, "finished by the holder")
    expect(not await replacing.replace_pending(new, NOW), "replacing a delivered message is false")
    expect(not await replacing.replace_pending(message("unknown"), NOW), "replacing an unknown message is false")
    expect_equal(ids(await store.claim_due(NOW + SECOND, 10)), [], "messages that wait")


@administration.with_fixtures(open_replacing)
async def what_is_being_delivered_is_not_replaced(store: ports.ClaimingStore, keyed: ports.ReplacingStore) -> None:
    """The new message waits beside it; the claim is in force, and what is claimed is as it was."""
    first = await keyed.replace("k", lambda id_, _: message(id_, body=b"1"), NOW)
    claim = await claim_one(store, NOW + SECOND)
    second = await keyed.replace("k", lambda id_, _: message(id_, NOW + SECOND, body=b"2"), NOW)
    expect(second != first, "another id")
    expect_equal(await store.finish([claim], ports.Outcome.DELIVERED, NOW), 1, "finished by the holder")
    expect_equal((await claim_one(store, NOW + 2 * SECOND)).message.body, b"2", "what waits")


async def _fail_attempts(store: ports.ClaimingStore, times: int) -> ports.Claim:
    """Let all attempts to deliver the only due message fail; return the last claim."""
    claim = await claim_one(store, NOW + 60 * SECOND)
    await store.retry_later(claim, NOW, NOW, "refused")
    for _ in range(times - 1):
        claim = await claim_one(store, NOW + 60 * SECOND)
        await store.retry_later(claim, NOW, NOW, "refused")
    return claim


@administration.with_fixtures(open_replacing)
async def what_is_replaced_has_all_its_retries(store: ports.ClaimingStore, keyed: ports.ReplacingStore) -> None:
    """Failures of the message before are not those of the new one, and an old claim does not end the new one."""
    id_ = await keyed.replace("k", lambda id_, _: message(id_), NOW)
    old = await _fail_attempts(store, 3)
    expect_equal(await keyed.replace("k", lambda id_, _: message(id_), NOW), id_, "id")
    new = await claim_one(store, NOW + 60 * SECOND)
    expect_equal(new.message.number_of_failures, 0, "failures of the new message")
    expect_equal(await store.finish([old], ports.Outcome.DELIVERED, NOW), 0, "finished by the old claim")
    expect_equal(await store.finish([new], ports.Outcome.DELIVERED, NOW), 1, "finished by the new claim")


@administration.with_fixtures(open_administrable)
async def what_is_rescheduled_has_all_its_retries(
    store: ports.ClaimingStore, operator: ports.AdministrableStore
) -> None:
    """It was never tried at its new due time; an old claim, of the same number of failures, does not end it."""
    await store.store(message(), NOW)
    old = [await _fail_attempts(store, 1), await _fail_attempts(store, 2)]
    expect(await operator.reschedule("m-1", NOW, NOW), "rescheduling a failing message is true")
    pending = await operator.get("m-1")
    expect_equal(pending and pending.number_of_failures, 0, "failures")
    expect_equal((await operator.statistics(NOW)).failing, 0, "failing messages")
    new = await claim_one(store, NOW + 60 * SECOND)
    expect_equal(await store.finish(old, ports.Outcome.DELIVERED, NOW), 0, "finished by old claims")
    expect_equal(await store.finish([new], ports.Outcome.DELIVERED, NOW), 1, "finished by the new claim")


@administration.with_fixtures(open_replacing)
async def an_ordinary_id_is_not_replaced(store: ports.ClaimingStore, keyed: ports.ReplacingStore) -> None:
    """What was stored without a key stays as it is, however much its id is like that of a key; so does what was first.

    The numbers of the key continue, even if other messages use some of them in their ids.
    """
    ordinary = [f"k~{number:08d}" for number in (1, 2, 20261128, 99_999_999)]
    await store.store_many([message(id_, NOW + SECOND, body=b"ordinary") for id_ in ordinary], NOW)
    ids_of_key = list[str]()
    for n in range(3):
        ids_of_key += [await keyed.replace("k", lambda id_, _: message(id_, body=b"keyed"), NOW) for _ in range(2)]
        claim = await claim_one(store, NOW + MICROSECOND)
        expect_equal(
            (claim.message.message_id, claim.message.body), (ids_of_key[-1], b"keyed"), f"what is due, round {n}"
        )
        await store.finish([claim], ports.Outcome.DELIVERED, NOW)
    expect_equal(ids_of_key[::2], ids_of_key[1::2], "the second of each round takes the place of the first")
    expect_equal(len({*ids_of_key, *ordinary}), 3 + len(ordinary), "ids")
    claims = await store.claim_due(NOW + 60 * SECOND, 10)
    expect_equal(sorted(ids(claims)), ordinary, "ordinary messages")
    expect_equal({each.message.body for each in claims}, {b"ordinary"}, "their bodies")


@administration.with_fixtures(open_replacing)
async def the_numbers_of_a_key_end(store: ports.ClaimingStore, keyed: ports.ReplacingStore) -> None:
    """Where they are used up, replacing is an error that tells so, and the store goes on."""
    await store.store(message("k~99999999", NOW), NOW)
    await keyed.store_keys(["k~99999999"])
    expect_equal(await keyed.replace("k", lambda id_, _: message(id_), NOW), "k~99999999", "the last one")
    await store.finish([await claim_one(store, NOW + SECOND)], ports.Outcome.DELIVERED, NOW)
    with expect_error(InvalidMessage, "a number behind the last one"):
        await keyed.replace("k", lambda id_, _: message(id_), NOW)
    expect_equal(await keyed.replace("k2", lambda id_, _: message(id_), NOW), "k2~00000001", "another key")


@administration.with_fixtures(open_replacing)
async def keys_are_kept_by_a_migration(store: ports.ClaimingStore, keyed: ports.ReplacingStore) -> None:
    """A message that was moved into the store under its id, and its key, is replaced under that key."""
    await store.store_many([message("k~00000007", NOW + SECOND), message("other~00000001", NOW)], NOW)
    await keyed.store_keys(["k~00000007", "unknown~00000001"])
    expect_equal(await keyed.replace("k", lambda id_, _: message(id_), NOW), "k~00000007", "id")
    expect_equal(await keyed.replace("other", lambda id_, _: message(id_), NOW), "other~00000002", "another id")


_CALLER: ContextVar[str] = ContextVar("caller")


@administration.with_fixtures(open_replacing)
async def callers_make_their_own_messages(store: ports.ClaimingStore, keyed: ports.ReplacingStore) -> None:
    """Of many who replace at once, each makes its message in its own context: no code of one runs in another's turn."""

    async def replace(name: str) -> None:
        _CALLER.set(name)
        await keyed.replace(name, lambda id_, _: message(id_, headers={"caller": _CALLER.get()}), NOW)

    names = [f"caller {number}" for number in range(20)]
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(replace, name)
    claims = await store.claim_due(NOW + SECOND, 100)
    contexts = sorted((each.message.message_id, each.message.headers["caller"]) for each in claims)
    expect_equal(contexts, sorted((f"{name}~00000001", name) for name in names), "ids, and whose context made them")


@administration.with_fixtures(open_administrable)
async def a_rescheduled_message_has_its_new_due_time(
    store: ports.ClaimingStore, operator: ports.AdministrableStore
) -> None:
    """Reschedule moves the due time, later or earlier; the message is claimed strictly after it, and recorded.

    The header with the due time changes, too, unless the sender has set it to another time.
    """
    await store.store(message(headers={"own": "1", Headers.DELIVER_AT: format_timestamp(NOW)}), NOW)
    later, earlier = NOW + 60 * SECOND, NOW + 30 * SECOND
    expect(await operator.reschedule("m-1", later, NOW), "rescheduling a pending message is true")
    expect_equal(ids(await store.claim_due(later, 10)), [], "claims before the later due time")
    expect(await operator.reschedule("m-1", earlier, NOW), "rescheduling again is true")
    claimed = (await claim_one(store, earlier + MICROSECOND)).message
    expect_equal(claimed.due, earlier, "due time")
    expect_equal(claimed.headers, {"own": "1", Headers.DELIVER_AT: format_timestamp(earlier)}, "headers")
    await store.store(message("m-2", headers={Headers.DELIVER_AT: "mine"}), NOW)
    await operator.reschedule("m-2", earlier, NOW)
    expect_equal((await claim_one(store, earlier + MICROSECOND)).message.headers[Headers.DELIVER_AT], "mine", "own")
    await expect_history(operator, "m-1", "SCHEDULED", "RESCHEDULED", "RESCHEDULED")
    expect(not await operator.reschedule("unknown", NOW, NOW), "rescheduling an unknown id is false")


@administration.with_fixtures(open_administrable)
async def rescheduling_earlier_wakes(store: ports.ClaimingStore, operator: ports.AdministrableStore) -> None:
    """A message rescheduled before all others wakes listeners."""
    await store.store_many([message("a", NOW + 100 * SECOND), message("b", NOW + 200 * SECOND)], NOW)
    woken: list[str] = []
    stop = await store.listen(lambda: woken.append("woken"))
    await operator.reschedule("b", NOW + SECOND, NOW)
    stop()
    expect(bool(woken), "a message moved to the front wakes")


@administration.with_fixtures(open_administrable)
async def nothing_is_rescheduled_past_its_expiry(
    store: ports.ClaimingStore, operator: ports.AdministrableStore
) -> None:
    """A due time after the expiry raises InvalidMessage and changes nothing."""
    await store.store(message(expires_at=NOW + 10 * SECOND), NOW)
    with expect_error(InvalidMessage, "rescheduling past the expiry"):
        await operator.reschedule("m-1", NOW + 11 * SECOND, NOW)
    expect_equal((await claim_one(store)).message.due, NOW, "due time")


@administration.with_fixtures(open_administrable)
async def what_is_rescheduled_follows_the_clocks_that_are_given(
    store: ports.ClaimingStore, operator: ports.AdministrableStore
) -> None:
    """Reschedule sets the header of a wall time, or takes it off; all other headers stay as they are."""
    name, wall, other = Headers.WALL_TIME, "2027-07-01T09:00:00 Europe/Paris", "2027-08-01T09:00:00;fold=1 Asia/Tokyo"
    like_it = {f'x"{name}': wall, "x": f'{{"{name}":"{wall}"}}', f"{name}.": "ä", "€": '\\","'}
    for number, before in enumerate(({}, {"a": "1"}, {"a": "1", "z": "2"}, like_it)):
        id_ = f"m-{number}"
        for headers in ({name: wall, **before}, {**before, name: wall}, before):
            await store.store(replace(message(id_), headers=headers), NOW)
            for wall_time in (None, other, wall, None):
                await operator.reschedule(id_, NOW + SECOND, NOW, wall_time)
                expected = {**before, name: wall_time} if wall_time is not None else before
                changed = await operator.get(id_)
                expect_equal(
                    None if changed is None else dict(changed.headers), expected, f"headers after {wall_time!r}"
                )
            await operator.cancel(id_, NOW)
            id_ += "~"


@administration.with_fixtures(open_administrable)
async def pending_messages_are_listed(store: ports.ClaimingStore, operator: ports.AdministrableStore) -> None:
    """Listed by due time, filtered by destination and due range (from inclusive, to exclusive), up to the limit."""
    await store.store_many([message(f"{n}", NOW + n * SECOND, destination="ab"[n % 2]) for n in (3, 0, 2, 1)], NOW)

    async def list_ids(limit: int = 10, **conditions: object) -> list[str]:
        return ids(await operator.list_pending(ports.MessageFilter(**conditions), limit))  # type: ignore[arg-type]

    expect_equal(await list_ids(), ["0", "1", "2", "3"], "all")
    expect_equal(await list_ids(limit=2), ["0", "1"], "the first two")
    expect_equal(await list_ids(destination="b"), ["1", "3"], "one destination")
    expect_equal(await list_ids(due_from=NOW + SECOND, due_to=NOW + 3 * SECOND), ["1", "2"], "a range")
    expect_equal(await list_ids(destination="c"), [], "an unknown destination")
    expect_equal((await list_ids(destination="b", search_limit=2))[:1], ["1"], "one destination among the first two")


async def _read_pages(
    operator: ports.AdministrableStore, message_filter: ports.MessageFilter, limit: int
) -> list[list[str]]:
    """Return the ids of each page of a list, up to its end."""
    pages, after = list[list[str]](), message_filter.after
    while True:
        page = await operator.read_pending(replace(message_filter, after=after), limit)
        pages.append(ids(page.messages))
        expect(len(page.messages) <= limit, f"a page has at most {limit} messages")
        if page.after is None:
            return pages
        after = page.after


@administration.with_fixtures(open_administrable)
async def a_herd_is_listed_page_by_page(store: ports.ClaimingStore, operator: ports.AdministrableStore) -> None:
    """Of many that are due at one instant every page has its own, also of those that are claimed or failing."""
    herd = [message(f"h-{n:02d}", NOW + SECOND, destination="ab"[n % 2]) for n in range(20)]
    await store.store_many([message("before", NOW - SECOND), *herd, message("behind", NOW + 2 * SECOND)], NOW)
    (first,) = await store.claim_due(NOW, 10)
    expect_equal(first.message.message_id, "before", "the oldest message")
    claimed, failing, *more = await store.claim_due(NOW + SECOND + MICROSECOND, 5)
    await store.release(more, None)
    await store.retry_later(failing, NOW + SECOND + MICROSECOND, NOW, "why")
    everything = ids(await operator.list_pending(ports.MessageFilter(), 100))
    expect_equal(sorted(everything), sorted(["before", *ids(herd), "behind"]), "all")
    for limit in (1, 3, 7, 22, 30):
        pages = await _read_pages(operator, ports.MessageFilter(), limit)
        expect_equal([each for page in pages for each in page], everything, f"in pages of {limit}")
    since = ports.MessageFilter(destination="b", due_from=NOW + SECOND, due_to=NOW + 2 * SECOND)
    listed = [each for page in await _read_pages(operator, since, 3) for each in page]
    expect_equal(
        listed, [each for each in everything if each.startswith("h") and int(each[2:]) % 2], "a filter, in pages"
    )
    await store.finish([claimed], ports.Outcome.DELIVERED, NOW)


@administration.with_fixtures(open_administrable)
async def a_cursor_is_exact_when_its_message_has_gone(
    store: ports.ClaimingStore, operator: ports.AdministrableStore
) -> None:
    """A list goes on behind the cursor of a message that was cancelled, delivered or moved; others have no cursor."""
    await store.store_many([message(f"{n}", NOW + SECOND) for n in range(8)], NOW)
    every = await operator.list_pending(ports.MessageFilter(), 100)
    cancelled, moved, delivered = every[1], every[3], every[5]
    await operator.cancel(cancelled.message_id, NOW)
    expect(await operator.reschedule(moved.message_id, NOW + 9 * SECOND, NOW), "moved")
    await store.remove(delivered.message_id, NOW)
    waiting = [each for each in ids(every) if await operator.get(each) is not None and each != moved.message_id]
    for removed in (cancelled, moved, delivered):
        behind = [each for each in waiting if ids(every).index(each) > every.index(removed)]
        listed = await operator.list_pending(ports.MessageFilter(after=removed.cursor), 100)
        expect_equal(ids(listed), [*behind, moved.message_id], f"behind {removed.message_id}")
    expect_equal(
        listed[-1].cursor, (await operator.list_pending(ports.MessageFilter(), 100))[-1].cursor, "the same cursor"
    )
    late = ports.MessageFilter(due_from=NOW + 2 * SECOND, after=cancelled.cursor)
    expect_equal(ids(await operator.list_pending(late, 100)), [moved.message_id], "behind both bounds")
    for wrong in (
        "",
        " ",
        "0",
        "-",
        " 0",
        "0 ",
        "\0",
        "a_b",
        f"{cancelled.cursor}\n",
        "9" * 5_000,
        "9" * 5_000 + " 1",
        5,
    ):
        with expect_error(InvalidMessage, f"the cursor {wrong!r:.20}"):
            await operator.read_pending(ports.MessageFilter(after=wrong), 10)  # type: ignore[arg-type]


@administration.with_fixtures(open_administrable)
async def a_pending_message_is_found_by_id(store: ports.ClaimingStore, operator: ports.AdministrableStore) -> None:
    """Get returns a pending message, also while it is claimed, and none for one that is gone or unknown."""
    stored = message()
    await store.store(stored, NOW)
    expect_equal(await operator.get("m-1"), stored, "a pending message")
    claim = await claim_one(store)
    expect_equal(await operator.get("m-1"), stored, "a claimed message")
    await store.finish([claim], ports.Outcome.DELIVERED, NOW)
    expect_equal(await operator.get("m-1"), None, "a delivered message")
    expect_equal(await operator.get("unknown"), None, "an unknown id")


@administration.with_fixtures(open_administrable)
async def statistics_agree_with_the_messages(store: ports.ClaimingStore, operator: ports.AdministrableStore) -> None:
    """Pending, overdue, claimed and failing are counted, and the earliest due time is theirs.

    A message that waits for its destination is as late as it is: whoever watches the store must see the outage grow.
    """
    empty = await operator.statistics(NOW)
    expect_equal((empty.pending, empty.overdue, empty.claimed, empty.failing, empty.next_due), (0, 0, 0, 0, None), "0")
    offsets = {"released": -5, "claimed": -4, "failing": -3, "overdue": -2, "now": 0, "later": 1}
    await store.store_many([message(name, NOW + offset * SECOND) for name, offset in offsets.items()], NOW)
    released, claimed, failing = await store.claim_due(NOW - 2 * SECOND, 10)
    expect_equal(ids([released, claimed, failing]), ["released", "claimed", "failing"], "the oldest messages")
    await store.release([released], NOW + 60 * SECOND)
    await store.retry_later(failing, NOW + 60 * SECOND, NOW, "why")
    statistics = await operator.statistics(NOW)
    counts = (statistics.pending, statistics.overdue, statistics.claimed, statistics.failing)
    expect_equal(counts, (6, 3, 1, 1), "pending, overdue, claimed, failing")
    expect_equal(statistics.next_due, NOW - 5 * SECOND, "next due")


@administration.with_fixtures(open_administrable)
async def what_is_due_is_counted_by_interval(store: ports.ClaimingStore, operator: ports.AdministrableStore) -> None:
    """Each message counts once, where it is due (from inclusive, to exclusive): waiting, claimed or after a failure."""
    start = NOW.replace(microsecond=0)
    edges = [start + n * SECOND for n in (0, 10, 20, 60)]
    expect_equal(list(await operator.due_counts(edges)), [0, 0, 0], "of an empty store")
    dues = {"claimed": 1, "failing": 2, "waiting": 3, "edge": 10, "late": 20, "end": 60, "before": -1}
    await store.store_many([message(name, start + n * SECOND) for name, n in dues.items()], NOW)
    await store.store(message("last", edges[1] - MICROSECOND), NOW)
    expect_equal(list(await operator.due_counts(edges)), [4, 1, 1], "waiting")
    before, claimed, failing = await store.claim_due(start + 3 * SECOND, 10)
    expect_equal(ids([before, claimed, failing]), ["before", "claimed", "failing"], "the oldest messages")
    await store.retry_later(failing, edges[2] + SECOND, NOW, "why")
    await store.finish([before], ports.Outcome.DELIVERED, NOW)
    expect_equal(list(await operator.due_counts(edges)), [4, 1, 1], "one claimed, one after a failure")
    await operator.reschedule("waiting", edges[1] + SECOND, NOW)
    await operator.cancel("late", NOW)
    expect_equal(list(await operator.due_counts(edges)), [3, 2, 0], "one later, one cancelled")
    expect_equal(list(await operator.due_counts([edges[0], edges[3]])), [5], "in one interval")
    expect_equal(list(await operator.due_counts([EARLIEST, edges[3]])), [5], "all before a time")


async def _expect_records_of_each_outcome(subject: StoreSubject, level: ports.Recording) -> None:
    """Store a message for each outcome and one for a retry; compare their records with this recording level."""
    async with open_claiming(subject, recording=level) as store:
        if not isinstance(store, ports.AdministrableStore):
            return
        outcomes = [ports.Outcome.DELIVERED, ports.Outcome.EXPIRED, ports.Outcome.FAILED]
        names = [outcome.value for outcome in outcomes]
        await store.store_many([message(name) for name in (*names, "cancelled", "failing")], NOW)
        await store.cancel("cancelled", NOW)
        claims = {claim.message.message_id: claim for claim in await store.claim_due(NOW + SECOND, 10)}
        for outcome in outcomes:
            await store.finish([claims[outcome.value]], outcome, NOW + SECOND, "detail")
        await store.retry_later(claims["failing"], NOW, NOW + SECOND, "reason")
        for name in (*names, "cancelled"):
            await expect_history(store, name, "SCHEDULED", name.upper())
        await expect_history(store, "failing", "SCHEDULED", *(["RETRIED"] if level is ports.Recording.ALL else []))


@recording
async def all_keeps_everything(subject: StoreSubject) -> None:
    """Every message has a record of its scheduling and of its end, and one for each retry."""
    await _expect_records_of_each_outcome(subject, ports.Recording.ALL)


@recording
async def outcomes_leaves_out_retries(subject: StoreSubject) -> None:
    """The same without retries."""
    await _expect_records_of_each_outcome(subject, ports.Recording.OUTCOMES)


@recording.with_fixtures(open_administrable)
async def a_record_says_what_when_and_why(store: ports.ClaimingStore, operator: ports.AdministrableStore) -> None:
    """A record has its kind, id, time, due time, destination and detail; the counts of the kinds agree with them."""
    await store.store(message(), NOW - SECOND)
    await store.retry_later(await claim_one(store), NOW, NOW + SECOND, "the reason 🕰")
    await store.finish([await claim_one(store)], ports.Outcome.FAILED, NOW + 2 * SECOND, "the detail")
    lines = [
        (record.kind, record.message_id, record.at, record.due, record.destination, record.detail)
        for record in await operator.history("m-1")
    ]
    destination = message().destination
    expected = [
        (ports.RecordKind.SCHEDULED, "m-1", NOW - SECOND, NOW, destination, ""),
        (ports.RecordKind.RETRIED, "m-1", NOW + SECOND, NOW, destination, "the reason 🕰"),
        (ports.RecordKind.FAILED, "m-1", NOW + 2 * SECOND, NOW, destination, "the detail"),
    ]
    expect_equal(lines, expected, "history")
    counts = {kind: number for kind, number in (await operator.record_counts()).items() if number}
    expect_equal(counts, dict.fromkeys((line[0] for line in expected), 1), "counts")
