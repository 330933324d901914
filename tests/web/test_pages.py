"""Each page shows what is there, in words, and nothing of others' making runs in it."""

import logging
import sqlite3
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import quote, urlsplit

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from tests.integration.postgres_place import now, placed
from tests.web.conftest import MINUTE, Deployment, Page, Visit, app_of, browsing, news_of, settings_of

from postdate import (
    DelayedMessage,
    LocalTransport,
    PostgresStore,
    SqliteStore,
    SystemClock,
    TransactionMode,
    operations,
)
from postdate.clock import steady_seconds
from postdate.core.limits import add_pause, change_limits
from postdate.errors import StoreUnavailable, StoreUnreachable, TransportUnreachable
from postdate.messages import Headers
from postdate.operations.looking import Observation
from postdate.operations.plain import escape_control_characters
from postdate.ports import Outcome
from postdate.runtime.resource import resource_at
from postdate.web.views import SECURITY_HEADERS
from postdate.web.watching import LISTED, Watcher
from postdate.wiring import open_deployment

HOSTILE = (
    "<script>alert('id')</script>",
    "\"quoted\" 'twice' & <b>",
    "a/b//c/../d/",
    "..",
    ".",
    "%2F%00%",
    "?body=shown#x",
    "\x01\x07\x1b[31m\r\n",
    "ü 🕰 \u202e\u2028",
    "x" * 200,
)


async def test_the_overview_says_what_waits_and_what_is_due_when(deployment: Deployment, visit: Visit) -> None:
    await deployment.store(
        *(deployment.waiting(f"m-{n}", 1 + n, ("orders", "bills")[n % 3 == 0]) for n in range(50)),
        *(deployment.waiting(f"h-{n}", 30, "bills") for n in range(1_500)),
        deployment.waiting("late", -5),
        deployment.waiting("far", 60 * 24 * 10),
    )
    await deployment.send(deployment.failed("f", "builtins.ValueError", "no"))
    async with visit() as browser:
        hour, day, month = await browser("/"), await browser("/?due=day"), await browser("/?due=month")
    assert "1 message of 1,552 is overdue" in hour.words
    assert "A herd: 1,50" in hour.words
    assert "Failed 1 in the error queue" in hour.words
    assert "Services 0 besides this process; to start: postdate run" in hour.words
    assert "No other process uses the store." in hour.words
    assert "1,550 in the next hour, usually 1 a minute." in hour.words
    assert "1,550 in the next day" in day.words
    assert "1,551 in the next 30 days" in month.words
    assert "bills 1,517" in hour.words
    for page, name in ((hour, "hour"), (day, "day"), (month, "month")):
        assert [each["href"] for each in page.all("a") if each.get("aria-current") == "true"] == [f"/?due={name}"]


@pytest.mark.parametrize("path", ["/messages?due_from={}", "/messages/{}", "/{}", "/errors?exception={}&queue={}"])
async def test_an_address_that_is_too_long_is_refused_and_not_repeated(visit: Visit, path: str) -> None:
    async with visit() as browser:
        for word in ("a" * 30_000, "%C3%A4" * 1_500, "a" * 8_192):
            page = await browser(path.replace("{}", word))
            assert (page.status, "at most 8,192 characters" in page.words) == (414, True)
            assert len(page.answer.text) < 8_192
        assert (await browser(path.replace("{}", "a" * 4_000))).status < 500


async def test_links_to_the_longest_names_are_short_enough(deployment: Deployment, visit: Visit) -> None:
    id_, queue = "\U0001f570" * 250, "\U0001f570" * 200
    await deployment.store(*(deployment.waiting(f"{n}{id_}"[:250], 10, queue) for n in range(LISTED + 1)))
    async with visit() as browser:
        (further,) = set((await browser(f"/messages?queue={quote(queue)}&search=all")).links("/messages?queue="))
        assert (await browser(further)).status == 200
        assert (await browser(f"/messages/{quote(f'0{id_}'[:250])}")).status == 200


async def test_a_bar_leads_to_its_messages(deployment: Deployment, visit: Visit) -> None:
    await deployment.store(deployment.waiting("this", 10), deployment.waiting("other", 20))
    async with visit() as browser:
        linked = dict.fromkeys((await browser("/")).links("/messages?due_from="))
        pages = [await browser(href) for href in linked]
    assert sorted(sum(("this" in page.words, "other" in page.words)) for page in pages) == [0] * 58 + [1, 1]


async def test_what_limits_hold_is_not_late(deployment: Deployment, visit: Visit) -> None:
    await deployment.store(deployment.waiting("one", -5), deployment.waiting("two", 5))
    store = SqliteStore(deployment.path)
    await change_limits(store, "orders", add_pause, deployment.now)
    async with visit() as browser:
        assert "1 message of 2 held by limits, all others on time" in (await browser("/")).words
    late = deployment.waiting("late", -3, "bills")
    await deployment.store(late)
    state = await overview_of(deployment)
    assert (state.overdue_since, state.statistics.overdue) == (late.due, 2)
    await store.close()


async def overview_of(deployment: Deployment) -> operations.Overview:
    async with open_deployment(settings_of(deployment.address)) as found:
        return await operations.overview(found, SystemClock().now())


async def test_it_answers_by_the_names_of_this_machine(visit: Visit) -> None:
    async with visit() as browser:
        for name, status in (("localhost", 200), ("127.0.0.1:8080", 200), ("[::1]:8080", 200), ("evil.example", 400)):
            assert (await browser("/messages", Host=name)).status == status


async def test_an_empty_store_says_so(visit: Visit) -> None:
    async with visit() as browser:
        page = await browser("/")
        assert "Nothing waits" in page.words
        assert "Nothing is due in the next hour." in page.words
        assert "No message waits." in (await browser("/messages")).words
        assert "Nothing has failed" in (await browser("/errors")).words


async def test_messages_are_listed_by_queue_and_time_and_page_by_page(deployment: Deployment, visit: Visit) -> None:
    await deployment.store(*(deployment.waiting(f"m-{n:03}", 1 + n, ("orders", "bills")[n % 2]) for n in range(120)))
    first = (deployment.now + 11 * MINUTE - timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%S")
    async with visit() as browser:
        page, seen = await browser("/messages"), list[str]()
        while True:
            seen += page.links("/messages/m-")
            if not (further := page.links("/messages?after=")):
                break
            page = await browser(further[0])
        assert seen == [f"/messages/m-{n:03}" for n in range(120)]
        bills = await browser("/messages?queue=bills&due_from=&due_to=")
        assert bills.links("/messages/m-") == [f"/messages/m-{n:03}" for n in range(1, 101, 2)]
        late = await browser(f"/messages?queue=bills&due_from={first}&due_to=")
        assert late.links("/messages/m-")[:2] == ["/messages/m-011", "/messages/m-013"]
        assert "No message is like that." in (await browser("/messages?queue=nowhere")).words
        wrong = await browser("/messages?due_from=tomorrow")
    assert (wrong.status, "tomorrow" in wrong.words) == (400, True)


async def test_what_waits_to_be_tried_again_is_marked_and_listed_when_it_is_asked_for(
    deployment: Deployment, visit: Visit
) -> None:
    mine, again = deployment.waiting("m-mine", 1, "bills"), deployment.waiting("m-again", 2, "bills")
    await deployment.store(mine, replace(again, headers={**again.headers, Headers.DELAYED_RETRIES: "1"}))
    async with visit() as browser:
        every = await browser("/messages")
        assert every.links("/messages/m-") == ["/messages/m-mine", "/messages/m-again"]
        assert "retry" in every.words
        for origin, links in (("", ["m-mine"]), ("retry", ["m-again"]), ("any", ["m-mine", "m-again"])):
            page = await browser(f"/messages?queue=bills&origin={origin}")
            assert page.links("/messages/m-") == [f"/messages/{each}" for each in links], origin


async def test_a_list_goes_on_though_the_last_message_of_a_page_has_gone(deployment: Deployment, visit: Visit) -> None:
    """All others are due at its instant, as in a herd."""
    await deployment.store(*(deployment.waiting(f"m-{n:02}", 5) for n in range(60)))
    async with visit() as browser:
        page = await browser("/messages?queue=orders")
        async with open_deployment(settings_of(deployment.address)) as found:
            await operations.cancel(found, "m-49", deployment.now)
        seen = {*page.links("/messages/m-")}
        while further := page.links("/messages?queue="):
            page = await browser(further[0])
            seen |= {*page.links("/messages/m-")}
    assert seen == {f"/messages/m-{n:02}" for n in range(60)}


async def test_a_message_has_its_story(deployment: Deployment, visit: Visit) -> None:
    await deployment.store(deployment.waiting("m-1", -5), deployment.waiting("m-2", 5))
    store = SqliteStore(deployment.path)
    await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
    await store.move_due(deployment.now, 10)
    await store.close()
    async with visit() as browser:
        delivered, waiting = await browser("/messages/m-1"), await browser("/messages/?id=m-2")
        unknown = await browser("/messages/m-3")
    assert "Scheduled for orders" in delivered.words
    assert "Delivered to orders" in delivered.words
    assert "5m after it was due" in delivered.words
    assert "it is in queue 'orders', waiting for a consumer" in delivered.words
    assert "What to do: start the endpoint that receives from 'orders'" in delivered.words
    assert "it waits until it is due at" in waiting.words
    assert "Now waits for orders" in waiting.words
    assert "own header" in waiting.words
    assert (unknown.status, "it was never scheduled" in unknown.words) == (404, True)


async def test_a_delivery_before_its_due_time_is_not_shown_as_late(deployment: Deployment, visit: Visit) -> None:
    await deployment.store(deployment.waiting("m-1", -5))
    store = SqliteStore(deployment.path)
    claims = await store.claim_due(deployment.now, 10)
    await store.finish(claims, Outcome.DELIVERED, deployment.now - 8 * MINUTE)
    await store.close()
    async with visit() as browser:
        page = await browser("/messages/m-1")
    assert "3m before it was due, because clocks differ" in page.words
    assert "after it was due" not in page.words


async def test_with_many_messages_what_is_gone_is_looked_for_when_asked(
    deployment: Deployment, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for a retry reads all that waits."""
    monkeypatch.setattr("postdate.web.views._SEARCH_LIMIT", 1)
    await deployment.store(deployment.waiting("m-1", 5), deployment.waiting("m-2", 5))
    await deployment.send(deployment.failed("f-1", "E", "no"))
    async with visit() as browser:
        assert "it is in the error queue 'error'" in (await browser("/errors/f-1")).words  # queues have few
        assert "it waits until it is due" in (await browser("/messages/m-1")).words
        brief = await browser("/messages/gone")
        assert "nothing was recorded of it" in brief.words
        assert "it was never scheduled" in (await browser(f"/messages/gone{brief.links('?')[0]}")).words


async def test_with_many_messages_an_unreadable_one_is_not_said_to_have_gone(
    deployment: Deployment, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.web.views._SEARCH_LIMIT", 1)
    await deployment.store(deployment.waiting("broken", -5))
    with sqlite3.connect(deployment.path) as file:
        file.execute("UPDATE content SET headers = '{not json'")
        file.execute("DELETE FROM record")  # as retention does
    file.close()
    store = SqliteStore(deployment.path)
    assert await store.claim_due(deployment.now, 10) == []
    await store.close()
    await deployment.store(deployment.waiting("m-1", 5), deployment.waiting("m-2", 5))
    async with visit() as browser:
        brief = await browser("/messages/broken")
        explained = await browser(f"/messages/broken{brief.links('?')[0]}")
    assert (brief.status, "It cannot be read: headers must be a JSON object" in brief.words) == (200, True)
    assert "It does not wait" not in brief.words
    assert "see its content: postdate messages show --unreadable" in explained.words


async def test_with_many_messages_those_for_a_queue_are_looked_for_among_the_next_ones(
    deployment: Deployment, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.web.views._SEARCH_LIMIT", 2)
    messages = [deployment.waiting(f"m-{n}", 1 + n, queue) for n, queue in enumerate(("bills", "orders", "bills"))]
    await deployment.store(*messages)
    async with visit() as browser:
        page = await browser("/messages?queue=bills")
        everything = await browser(page.links("/messages?queue=bills&search=all")[0])
        assert "Looked for among" not in (await browser("/messages?due_from=2026-01-01")).words
    assert (page.links("/messages/m-"), "among the next 2 messages" in page.words) == (["/messages/m-0"], True)
    assert everything.links("/messages/m-") == ["/messages/m-0", "/messages/m-2"]
    assert "Looked for among" not in everything.words


async def test_errors_are_grouped_and_listed(deployment: Deployment, visit: Visit) -> None:
    await deployment.send(
        *(deployment.failed(f"v-{n}", "builtins.ValueError", f"no {n}") for n in range(3)),
        deployment.failed("k-1", "builtins.KeyError", "'id'", "bills"),
    )
    async with visit() as browser:
        page = await browser("/errors")
        grouped = await browser(page.links("/errors?exception=builtins.KeyError")[0])
        error, unknown = await browser("/errors/v-1"), await browser("/errors/nope")
    assert "4 failed messages" in page.words
    assert "3 builtins.ValueError orders - no 2" in page.words
    assert page.links("/errors/") == ["/errors/v-0", "/errors/v-1", "/errors/v-2", "/errors/k-1"]
    assert grouped.links("/errors/") == ["/errors/k-1"]
    assert "Traceback of v-1" in error.words
    assert "it is in the error queue 'error' because of: no 1" in error.words
    assert (unknown.status, "it was never scheduled" in unknown.words) == (404, True)


async def test_queues_and_doctor_say_what_they_found(deployment: Deployment, visit: Visit) -> None:
    await deployment.send(deployment.failed("f", "builtins.ValueError", "no"))
    async with visit() as browser:
        queues, doctor = await browser("/queues"), await browser("/doctor")
    assert "bills 0 error 1 orders 0" in queues.words
    assert "warn error queue 1 message in 'error'" in doctor.words


@pytest.mark.parametrize("id_", HOSTILE, ids=range(len(HOSTILE)))
async def test_whatever_an_id_is_the_list_leads_to_its_message(deployment: Deployment, visit: Visit, id_: str) -> None:
    await deployment.store(deployment.waiting(id_, 5))
    await deployment.send(deployment.failed(f"f{id_}", "E", f"<i>{id_}"))
    async with visit() as browser:
        listed, errors = await browser("/messages"), await browser("/errors")
        for page, prefix, name in ((listed, "/messages/", id_), (errors, "/errors/", f"f{id_}")):
            (href,) = page.links(prefix)
            assert urlsplit(href).path.split("/")[2:] in ([href.removeprefix(prefix)], [""])  # no dots that lead up
            found = await browser(href)
            assert found.status == 200
            assert " ".join(escape_control_characters(name).split()) in found.words
            harmless(found)
        searched = await browser.client.get("/messages/", params={"id": id_})
    assert searched.status_code == 200


async def test_content_that_is_hostile_is_text(deployment: Deployment, visit: Visit) -> None:
    body = b"<script>alert(1)</script>" * 40_000
    hostile = {"<b>name</b>": "</td><img src=x onerror=alert(1)>\x1b[2J", "quote": "\"'`"}
    await deployment.store(
        DelayedMessage("text", deployment.now + MINUTE, '"><script>q</script>', hostile, body),
        DelayedMessage("bytes", deployment.now + MINUTE, "orders", {}, b"\xff\x00"),
    )
    async with visit() as browser:
        text, raw = await browser("/messages/text?body=shown"), await browser("/messages/bytes?body=shown")
        overview = await browser("/")
    for page in (text, raw, overview):
        harmless(page)
    assert text.words.count("<script>alert(1)</script>") == 40_000
    assert "</td><img src=x onerror=alert(1)>\\x1b[2J" in text.words
    assert "in base64. That you looked is logged. /wA=" in raw.words
    assert '"><script>q</script>' in overview.words


def harmless(page: Page) -> None:
    """Assert that nothing runs, is drawn or fetched but what the page itself has."""
    assert [each.get("src") for each in page.all("script")] == ["/static/page.js"]
    assert [each.get("href") for each in page.all("link")] == [
        "/static/mark.svg",
        "/static/look.css",
        "/static/page.css",
    ]
    assert {tag for tag, _ in page.elements}.isdisjoint({"img", "style", "b", "i", "iframe", "object"})
    assert not [name for _, given in page.elements for name in given if name == "style" or name.startswith("on")]


async def test_a_body_is_shown_when_asked_for_and_that_is_logged(
    deployment: Deployment, visit: Visit, caplog: pytest.LogCaptureFixture
) -> None:
    await deployment.store(deployment.waiting("m-1", 5))
    await deployment.send(deployment.failed("f-1", "E", "no"))
    caplog.set_level(logging.INFO, "postdate.dashboard")
    async with visit() as browser:
        for path in ("/messages/m-1", "/errors/f-1"):
            hidden = await browser(path)
            assert "6 bytes, which may hold personal data." in hidden.words
            assert "secret" not in hidden.answer.text
            (link,) = hidden.links("?")
            assert not caplog.messages
            assert "secret" in (await browser(path + link, **{"X-Forwarded-User": "ada\n"})).words
            id_ = path.rpartition("/")[2]
            assert caplog.messages == [f"the body of message {id_!r} is shown to 192.0.2.7, user 'ada\\n'"]
            caplog.clear()


async def test_pages_are_for_everybody(deployment: Deployment, visit: Visit) -> None:
    """Landmarks, one heading of the first rank, names for what is entered, and where one is; for screen readers."""
    await deployment.store(deployment.waiting("m-1", 5))
    await deployment.send(deployment.failed("f-1", "E", "no"))
    lists, single = ("/", "/messages", "/errors", "/queues", "/sagas", "/doctor"), ("/messages/m-1", "/errors/f-1")
    async with visit() as browser:
        for path in (*lists, *single, "/sagas/a/b", "/nowhere"):
            page = await browser(path)
            assert [len(page.all(tag)) for tag in ("h1", "main", "header", "footer")] == [1] * 4, path
            assert page.all("html") == [{"lang": "en"}]
            assert (page.all("a")[0]["href"], page.all("main")[0]["id"]) == ("#content", "content")
            here = [each["href"] for each in page.all("a") if each.get("aria-current") == "page"]
            assert here == ([] if path == "/nowhere" else [f"/{path.split('/')[1]}"])
            assert len(page.all("label")) == len(page.all("input")) + len(page.all("select")) > 0
            assert all(each.get("aria-hidden") == "true" for each in page.all("svg"))
            assert all(each.get("scope") for each in page.all("th"))
            ids = [given["id"] for _, given in page.elements if given.get("id")]
            assert len(ids) == len(set(ids))


async def test_nothing_but_the_page_is_asked_for_and_every_answer_says_so(deployment: Deployment, visit: Visit) -> None:
    async with visit() as browser:
        client = browser.client
        answers = [
            await client.get("/"),
            await client.head("/"),
            await client.get("/nowhere"),
            await client.get("/messages/unknown"),
            await client.get("/static/page.css"),
            await client.get("/static/page.js"),
            await client.get("/static/../views.py"),
            await client.post("/", data={"id": "1"}),
            await client.delete("/messages/m-1"),
            await client.get("/", headers={"Host": "evil.example"}),
        ]
    assert [each.status_code for each in answers] == [200, 200, 404, 404, 200, 200, 404, 405, 405, 400]
    for answer in answers:
        assert {name: answer.headers.get(name) for name in SECURITY_HEADERS} == SECURITY_HEADERS
    assert "unsafe" not in SECURITY_HEADERS["Content-Security-Policy"]


async def test_a_fault_of_ours_is_told_without_its_details(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("enigma")

    monkeypatch.setattr("postdate.web.views.headline_of", broken)
    async with visit() as browser:
        page = await browser("/")
    assert (page.status, "This is a fault in Postdate" in page.words) == (500, True)
    assert "enigma" not in page.answer.text


async def test_records_that_cannot_be_counted_keep_nothing_else_from_being_shown(
    deployment: Deployment, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: object) -> None:
        raise StoreUnavailable("no answer within 2 minutes")

    watcher = Watcher(settings_of(deployment.address), SystemClock())
    monkeypatch.setattr("postdate.web.app.Watcher", lambda *_: watcher)
    monkeypatch.setattr(operations, "record_counts", slow)
    async with visit() as browser:
        await browser("/queues")
        await watcher.records.get_latest()
        page = await browser("/")
    assert (page.status, "Delivered - could not be counted" in page.words) == (200, True)


@pytest.mark.parametrize(
    ("ages", "text"),
    [
        ((0, 10), "Delivered 30 1.0 a second lately, just now"),
        ((90, 100), "Delivered 30 1.0 a second lately, 1m30s ago"),
        ((0, 3_600), "Delivered 30 in all, by the records, just now"),  # nobody watched between these looks
        ((3_600, 3_610), "Delivered 30 in all, by the records, 1h ago"),
    ],
)
async def test_deliveries_are_shown_with_the_age_of_their_count(
    deployment: Deployment, visit: Visit, monkeypatch: pytest.MonkeyPatch, ages: tuple[int, int], text: str
) -> None:
    watcher = Watcher(settings_of(deployment.address), SystemClock())
    monkeypatch.setattr("postdate.web.app.Watcher", lambda *_: watcher)
    counts = zip(ages, (30, 20), strict=True)

    def looks() -> list[Observation[dict[str, int]]]:
        seconds = watcher.clock.monotonic()
        return [Observation(1, deployment.now, seconds - age, {"delivered": count}) for age, count in counts]

    monkeypatch.setattr(watcher.records, "remember_request", looks)
    async with visit() as browser:
        assert text in (await browser("/")).words


async def test_the_overview_is_shown_while_the_queues_are_out_of_reach(
    deployment: Deployment, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues in a database of their own raise errors of a store."""
    away = AsyncMock(side_effect=StoreUnreachable("connection refused"))
    monkeypatch.setattr("postdate.backends.sqlite.observation.FileObserver.queue_lengths", away)
    monkeypatch.setattr(LocalTransport, "count_unreadable", away)
    await deployment.store(deployment.waiting("m-1", 5))
    async with visit() as browser:
        page = await browser("/")
    assert (page.status, "1 message waits, all on time" in page.words) == (200, True)
    assert "Failed - cannot be counted Unreadable - cannot be counted" in page.words


@pytest.mark.parametrize(
    "path", ["/", "/messages", "/messages/m-1", "/errors", "/doctor", "/queues", "/sagas", "/events"]
)
async def test_a_store_out_of_reach_is_told_in_words(path: str, tmp_path: Any) -> None:
    async with browsing(app_of("postgresql://ada:enigma@127.0.0.1:1/shop")) as browser:
        page = await browser(path)
    assert page.status == 503
    assert "127.0.0.1" in page.words
    assert "is the server running there? start it, or correct host and port" in page.words
    assert "enigma" not in page.answer.text


async def test_every_page_names_resources_that_are_out_of_reach(visit: Visit) -> None:
    """One state, whoever shows it: `/readyz`, metrics and the page read the same resources."""
    broker = resource_at(object(), "RabbitMQ shop")
    calls = broker.calls("cannot send due messages", logging.getLogger("postdate.test"))
    async with visit() as browser:
        assert "RabbitMQ shop" not in (await browser("/")).words
        calls.report_failure(TransportUnreachable("connection refused"), steady_seconds())
        for path in ("/", "/queues", "/doctor"):
            assert "RabbitMQ shop is out of reach for" in (await browser(path)).words
        calls.report_success(steady_seconds())
        assert "RabbitMQ shop" not in (await browser("/")).words


async def test_it_comes_back_with_the_store(deployment: Deployment) -> None:
    """What is missing at the first request is opened by a later one."""
    moved = deployment.path.rename(deployment.path.with_suffix(".elsewhere"))
    async with browsing(app_of(deployment.address)) as browser:
        missing = await browser("/")
        assert (missing.status, "There is no file" in missing.words) == (503, True)
        moved.rename(deployment.path)
        assert (await browser("/")).status == 200


async def test_it_can_be_mounted_in_another_application(deployment: Deployment) -> None:
    await deployment.store(deployment.waiting("m-1", 5))
    inner = app_of(deployment.address)
    async with inner.router.lifespan_context(inner), browsing(Starlette(routes=[Mount("/ops", inner)])) as browser:
        page = await browser("/ops/")
        assert page.status == 200
        links = [each["href"] or "" for each in page.all("a")]
        assert all(each.startswith(("/ops/", "#")) for each in links)
        assert (await browser("/ops/static/page.css")).status == 200
        assert (await browser("/ops/messages")).links("/ops/messages/") == ["/ops/messages/m-1"]


async def test_news_are_told_as_they_come(deployment: Deployment) -> None:
    told = await news_of(app_of(deployment.address), 2)
    assert told == [b"id: 1\n\n", b"id: 2\nevent: newer\ndata: 2\n\n"]


async def test_it_shows_a_store_on_postgresql(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"elsewhere:4711": timedelta(seconds=-2)}
    monkeypatch.setattr(PostgresStore, "reported_clocks", AsyncMock(return_value=clocks))
    async with placed(postgres_url, "orders", "postdate.timeouts") as place:
        at = now()
        await place.store.store_many([place.work(n, at + (1 + n) * MINUTE, "orders") for n in range(3)], at)
        place.run(
            "INSERT INTO holder (holder, pid, machine, started_at, delivers) "
            "VALUES (4711, 4711, 'elsewhere', now(), true)"
        )
        options = {"store.schema": place.schema, "transport.schema": place.schema, "endpoint.name": "service"}
        async with browsing(app_of(postgres_url, **options)) as browser:
            overview = await browser("/")
            assert "3 messages wait, all on time" in overview.words
            assert "orders 3" in overview.words
            assert [(await browser(f"/messages/{each}")).status for each in ("%00", "?id=a%00b", "gone")] == [404] * 3
            assert (await browser("/messages?queue=a%00b")).status == 200
            assert "4711 on elsewhere died delivers; clock 2s behind" in overview.words
            listed = await browser("/messages")
            assert listed.links("/messages/") == ["/messages/m-0", "/messages/m-1", "/messages/m-2"]
            assert "it waits until it is due" in (await browser("/messages/m-1")).words
            assert "Nothing has failed" in (await browser("/errors")).words
            assert "ok store server" in (await browser("/doctor")).words
            assert "orders 0" in (await browser("/queues")).words


async def test_the_overview_says_how_late_deliveries_were(deployment: Deployment, visit: Visit) -> None:
    late = (0.0004, 0.004, 0.5, 1, 3_600)
    seconds = [timedelta(seconds=each) for each in late]
    store = SqliteStore(deployment.path)
    await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
    messages = [DelayedMessage(f"m-{n}", deployment.now - each, "orders", {}, b"") for n, each in enumerate(seconds)]
    async with visit() as browser:
        assert "Nothing was delivered lately." in (await browser("/")).words
    await store.store_many(messages, deployment.now)
    await store.move_due(deployment.now, 10)
    async with visit() as browser:
        page = await browser("/")
    assert f"Lateness 500ms 99 of 100 up to 1h, since {deployment.now:%d %b %H:%M} " in page.words
    assert "Of the latest 5 deliveries," in page.words
    assert "half up to 500ms, 99 of 100 up to 1h. " in page.words
    spread = "up to 1 ms 1 up to 10 ms 1 up to 100 ms 0 up to 1 s 2 up to 10 s 0 up to 1 min 0 longer 1"
    assert spread in page.words
    await store.close()


async def test_what_is_overdue_is_told_by_its_age(deployment: Deployment, visit: Visit) -> None:
    ages = {"now": 0.1, "hour": 30, "edge": 59, "day": 61, "days": 60 * 24 * 3, "month": 60 * 24 * 40}
    async with visit() as browser:
        assert "Overdue:" not in (await browser("/")).words
    await deployment.store(*(deployment.waiting(name, -minutes) for name, minutes in ages.items()))
    state = await overview_of(deployment)
    assert [each.count for each in state.overdue] == [1, 2, 1, 2]
    async with visit() as browser:
        page = await browser("/")
        assert "Overdue: 1 for less than a minute; 2 for less than an hour; 1 for less than a day;" in page.words
        assert " 2 for a day or longer; the longest for 40d." in page.words
        lists = [(await browser(link)).links("/messages/") for link in page.links("/messages?due_from=")[:4]]
    names = [["now"], ["edge", "hour"], ["day"], ["month", "days"]]
    assert lists == [[f"/messages/{name}" for name in each] for each in names]
