"""What can be done on the page is asked once, done as the command line does it, and logged; by those who may alone."""

import logging
import re
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import urlencode

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from tests.web.conftest import MINUTE, Browser, Deployment, Page, Visit, browsing, settings_of
from tests.web.test_pages import HOSTILE, harmless

from postdate import Envelope, Headers, SqliteStore, operations
from postdate.config import Settings
from postdate.core.changes import Pending, list_matching
from postdate.core.limits import load_limits_in_force
from postdate.errors import ConfigurationError, StoreUnavailable, TransportUnreachable
from postdate.operations.needs import require_queue_view
from postdate.web import Actions, dashboard
from postdate.wiring import OpenDeployment, open_deployment

TOKEN = "a token of some length"


def acting_on(
    deployment: Deployment, actions: Actions, base: str = "http://localhost"
) -> AbstractAsyncContextManager[Any]:
    return browsing(dashboard(settings_of(deployment.address), actions=actions), base)


@pytest.fixture
async def ada(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> AsyncGenerator[Browser]:
    """The browser of somebody whom a server in front names."""
    caplog.set_level(logging.INFO, "postdate.dashboard")
    async with acting_on(deployment, Actions(user_header="X-User")) as browser:
        browser.client.headers["X-User"] = "ada"
        yield browser


def form_of(page: Page) -> tuple[str, str, str]:
    """Return where the question of a page is sent, what its button says, and the CSRF token."""
    assert page.status == 200, page.words
    assert [len(page.all(tag)) for tag in ("h1", "main")] == [1, 1]
    assert len(page.all("label")) == len(page.all("input")) + len(page.all("textarea"))
    (action,) = [form["action"] for form in page.all("form") if str(form["action"]).split("?")[0].endswith("/change")]
    said = re.findall(r'name="csrf_token" value="(\w+)">([^<]+)</button>', page.answer.text)[-1]
    return action or "", said[1], said[0]


async def done(browser: Browser, what: str, fields: dict[str, str] | None = None, **given: str) -> Page:
    """Ask for something, agree, and return the page that says what became of it."""
    action, _, token = form_of(await browser("/change?" + urlencode({"what": what, **given})))
    return Page(await browser.client.post(action, data={**(fields or {}), "csrf_token": token}))


async def waiting(deployment: Deployment) -> dict[str, datetime]:
    store = SqliteStore(deployment.path)
    found = {each.message_id: each.due for each in await list_matching(store, Pending(), None)}
    await store.close()
    return found


async def queued(deployment: Deployment, queue: str) -> list[Envelope]:
    async with open_deployment(settings_of(deployment.address)) as found:
        return [each.envelope for each in await require_queue_view(found, "look into queues").browse(queue, 100)]


async def ids_in(deployment: Deployment, queue: str) -> list[str]:
    return sorted(each.message_id for each in await queued(deployment, queue))


# --- what can be done -------------------------------------------------------------------------------------------------


async def test_a_waiting_message_is_cancelled_delivered_and_rescheduled(
    deployment: Deployment, ada: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    await deployment.store(*(deployment.waiting(id_, 60) for id_ in ("gone", "now", "then", "stays")))
    hrefs = (await ada("/messages/gone")).links("/change?")
    assert hrefs == [f"/change?id=gone&what={what}" for what in ("deliver", "reschedule", "cancel")]
    question = await ada(hrefs[2])
    assert "Cancel the message? Message gone It is removed for good, and never delivered." in question.words
    assert form_of(question)[1] == "Cancel the message"
    assert len(await waiting(deployment)) == 4
    assert "1 message cancelled" in (await done(ada, "cancel", id="gone")).words
    assert "user 'ada' at 192.0.2.7: cancel {'id': 'gone'}: Change(message_id='gone', done=True" in caplog.text
    assert "Rescheduled: now, due" in (await done(ada, "deliver", id="now")).words
    moved = await done(ada, "reschedule", {"due": "2126-01-31T11:00:05"}, id="then")
    assert "1 message rescheduled" in moved.words
    assert "due 2126-01-31 11:00:05" in moved.words
    found = await waiting(deployment)
    assert found.keys() == {"now", "then", "stays"}
    assert deployment.now <= found["now"] < deployment.now + 60 * MINUTE == found["stays"]
    assert found["then"].isoformat() == "2126-01-31T11:00:05+00:00"
    again = await done(ada, "cancel", id="gone")
    assert "0 messages cancelled" in again.words
    assert "Not cancelled: gone: it was cancelled at" in again.words
    wrong = await done(ada, "reschedule", {"due": "soon"}, id="then")
    assert (wrong.status, "'soonZ' is not a date and time" in wrong.words) == (400, True)
    assert "reschedule {'id': 'then'}: ended, with 0 done, by InvalidTimestamp" in caplog.text


async def test_a_failed_message_is_returned_or_discarded(deployment: Deployment, ada: Browser) -> None:
    late = deployment.failed("late", "E", "no")
    over = Envelope("error", "over", {**late.headers, Headers.EXPIRES_AT: "2020-01-31 11:00:00:000000 Z"}, b"")
    await deployment.send(*(deployment.failed(id_, "E", "no") for id_ in ("back", "elsewhere", "gone")), over)
    hrefs = (await ada("/errors/back")).links("/change?")
    assert hrefs == [f"/change?id=back&what={what}" for what in ("return", "edit", "discard")]
    assert "Returned: back, to orders" in (await done(ada, "return", id="back")).words
    assert "Returned: elsewhere, to bills" in (await done(ada, "return", {"to": " bills "}, id="elsewhere")).words
    assert "1 message discarded" in (await done(ada, "discard", id="gone")).words
    stays = await done(ada, "return", id="over")
    assert "0 messages returned" in stays.words
    assert "Not returned: over: it expired" in stays.words
    assert await ids_in(deployment, "error") == ["over"]
    assert "1 message returned" in (await done(ada, "return", {"without_expiry": "on"}, id="over")).words
    assert await ids_in(deployment, "orders") == ["back", "over"]
    assert await ids_in(deployment, "bills") == ["elsewhere"]
    missing = await done(ada, "return", {"to": "nowhere"}, id="back")
    assert (missing.status, "no message 'back' is in queue 'error'" in missing.words) == (200, True)


async def test_of_two_messages_with_one_id_the_first_is_discarded_and_the_page_says_so(
    deployment: Deployment, ada: Browser
) -> None:
    headers = deployment.failed("twin", "E", "no").headers
    await deployment.send(*(Envelope("error", "twin", headers, body) for body in (b"first", b"second")))
    for what, text in (("discard", "is thrown away for good"), ("return", "goes back to where it failed")):
        assert f"The first message with this id {text}" in (await ada(f"/change?what={what}&id=twin")).words
        group = await ada(f"/change?exception=E&queue=orders&what={what}-group")
        assert f"Each message with this cause {text}" in group.words
    assert "1 message discarded" in (await done(ada, "discard", id="twin")).words
    assert [each.body for each in await queued(deployment, "error")] == [b"second"]


async def test_a_failed_message_is_edited_and_that_its_body_is_seen_is_logged(
    deployment: Deployment, ada: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    failed = deployment.failed("text", "E", "no")
    text = "\n<b>Grüße</b> &amp;\n\ttab\x01\n"
    await deployment.send(
        Envelope("error", "text", failed.headers, text.encode()),
        *(Envelope("error", f"raw-{n}", failed.headers, body) for n, body in enumerate((b"\xff", b"a\r\nb", b"\0"))),
    )
    question = await ada("/change?what=edit&id=text")
    assert "the body of message 'text' is shown to 192.0.2.7, user 'ada'" in caplog.messages
    # The first line end is none of the text, for a browser.
    assert 'name="body" rows="12" spellcheck="false">\n\n&lt;b&gt;Grüße&lt;/b&gt; &amp;amp;' in question.answer.text
    fields = {"body": text.replace("\n", "\r\n"), "headers": "fixed=by=ada\r\n\r\nalso=this", "to": ""}
    sent = await done(ada, "edit", fields, id="text")
    (edited,) = await queued(deployment, "orders")
    assert f"Sent: {edited.message_id}, to orders" in sent.words
    assert edited.body.decode() == text
    assert {"fixed": "by=ada", "also": "this", Headers.EDIT_OF: "text"}.items() <= edited.headers.items()
    assert "text" in await ids_in(deployment, "error")
    caplog.clear()
    for n in range(3):
        assert "Its body is no text of ordinary lines" in (await ada(f"/change?what=edit&id=raw-{n}")).words
    assert not caplog.messages
    assert "1 message sent" in (await done(ada, "edit", {"headers": "a=b", "to": "bills"}, id="raw-0")).words
    assert [each.body for each in await queued(deployment, "bills")] == [b"\xff"]
    nothing, wrong = await done(ada, "edit", id="raw-0"), await done(ada, "edit", {"headers": "a"}, id="raw-0")
    assert (nothing.status, "What is to be changed?" in nothing.words) == (400, True)
    assert (wrong.status, "'a' is no header" in wrong.words) == (400, True)
    assert (await ada("/change?what=edit&id=nowhere")).status == 404


async def test_the_largest_body_that_is_offered_can_be_sent(deployment: Deployment, ada: Browser) -> None:
    """A browser sends each of its line feeds in six characters."""
    body = "\n" * 2**20
    await deployment.send(replace(deployment.failed("large", "E", "no"), body=body.encode()))
    fields = {"body": body.replace("\n", "\r\n"), "headers": f"own={'x' * 10_000}"}
    assert "1 message sent" in (await done(ada, "edit", fields, id="large")).words
    assert [each.body.decode() == body for each in await queued(deployment, "orders")] == [True]


async def test_the_body_of_the_message_that_is_edited_is_shown_and_not_that_of_its_retry(
    deployment: Deployment, ada: Browser
) -> None:
    headers = deployment.failed("a", "E", "no").headers
    await deployment.send(Envelope("error", "r1", headers, b"retry"), Envelope("error", "a", headers, b"original"))
    question = await ada("/change?what=edit&id=a")
    assert ("original" in question.words, "retry" in question.words) == (True, False)


async def test_a_button_that_is_pressed_twice_sends_one_message(deployment: Deployment, ada: Browser) -> None:
    await deployment.send(deployment.failed("text", "E", "no"))
    for count in (1, 2):
        action, _, token = form_of(await ada("/change?what=edit&id=text"))
        form = {"body": "other", "csrf_token": token}
        wrong = await ada.client.post(action, data={**form, "headers": "no header"})
        assert wrong.status_code == 400  # and can be corrected
        missing = await ada.client.post(action, data={**form, "to": "nowhere"})
        assert missing.status_code == 404  # and so can this
        assert "1 message sent" in Page(await ada.client.post(action, data=form)).words
        again = Page(await ada.client.post(action, data=form))
        assert (again.status, "This was sent before" in again.words) == (403, True)
        assert len(await queued(deployment, "orders")) == count


async def test_an_edit_that_may_have_been_sent_is_not_sent_again(
    deployment: Deployment, ada: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deployment.send(deployment.failed("text", "E", "no"))
    action, _, token = form_of(await ada("/change?what=edit&id=text"))
    form = {"body": "other", "csrf_token": token}
    with monkeypatch.context() as patch:
        patch.setattr(operations, "edit", AsyncMock(side_effect=TransportUnreachable("the connection was lost")))
        assert (await ada.client.post(action, data=form)).status_code == 503
    again = Page(await ada.client.post(action, data=form))
    assert (again.status, "This was sent before" in again.words) == (403, True)


async def test_a_group_is_returned_or_discarded_and_no_other(
    deployment: Deployment, ada: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    bare = deployment.failed("bare", "", "")
    own = {name: value for name, value in bare.headers.items() if name == Headers.MESSAGE_ID}
    await deployment.send(
        *(deployment.failed(f"v-{n}", "builtins.ValueError", "no") for n in range(60)),
        deployment.failed("other", "builtins.ValueError", "no", "bills"),
        deployment.failed("key", "builtins.KeyError", "no"),
        Envelope("error", "bare", own, b""),
    )
    page = await ada("/errors")
    hrefs = page.links("/change?")
    assert len(hrefs) == 8
    assert "/change?exception=builtins.ValueError&queue=orders&what=return-group" in hrefs
    assert "/change?exception=&queue=&what=discard-group" in hrefs
    only = await ada("/errors?exception=&queue=")
    assert ("No exception 1 of 1" in only.words, only.links("/errors/")) == (True, ["/errors/bare"])
    assert "/errors?exception=&queue=" in page.links("/errors?")
    question = await ada("/change?exception=builtins.ValueError&queue=orders&what=return-group")
    assert form_of(question)[1] == "Return 60 messages"
    said = await done(ada, "return-group", exception="builtins.ValueError", queue="orders")
    assert "60 messages returned" in said.words
    assert "… and 10 more" in said.words
    assert sum("ReturnResult(message_id='v-" in each for each in caplog.messages) == 60
    assert len(await queued(deployment, "orders")) == 60
    assert await ids_in(deployment, "error") == ["bare", "key", "other"]
    stuck = await ada("/change?exception=&queue=&what=return-group")
    assert "Would stay: bare: it has no header NServiceBus.FailedQ" in stuck.words
    assert "1 message discarded" in (await done(ada, "discard-group", exception="", queue="")).words
    assert await ids_in(deployment, "error") == ["key", "other"]
    assert "0 messages discarded" in (await done(ada, "discard-group", exception="", queue="")).words
    assert "{'exception': '', 'queue': ''}: 'there is none'" in caplog.messages[-1]


async def test_a_group_has_no_types_of_another_module(deployment: Deployment, ada: Browser) -> None:
    await deployment.send(*(deployment.failed(kind, kind, "no") for kind in ("ValueError", "a.ValueError", "a.")))
    assert "1 message returned" in (await done(ada, "return-group", exception="ValueError", queue="orders")).words
    assert "0 messages discarded" in (await done(ada, "discard-group", exception="", queue="orders")).words
    assert await ids_in(deployment, "error") == ["a.", "a.ValueError"]


async def test_whether_it_was_done_is_not_known_when_the_store_does_not_answer(
    deployment: Deployment, ada: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page that says so stays: going back to the question by itself would ask to do it again."""

    async def lost(*_: object) -> None:
        raise StoreUnavailable("the connection was lost")

    await deployment.store(deployment.waiting("m-1", 5))
    action, _, token = form_of(await ada(CANCEL))
    monkeypatch.setattr(operations, "cancel", lost)
    page = Page(await ada.client.post(action, data={"csrf_token": token}))
    assert page.status == 503
    assert "It may have been done all the same: look before you repeat it." in page.words
    assert "http-equiv" not in page.answer.text
    assert "tries again" not in page.words


async def test_an_unreadable_row_is_discarded(deployment: Deployment, ada: Browser) -> None:
    await deployment.store(*(deployment.waiting(id_, -5) for id_ in ("broken", "gone")))
    with sqlite3.connect(deployment.path) as file:
        file.execute("UPDATE content SET headers = '{not json'")
        store = SqliteStore(deployment.path)
        file.commit()
        assert await store.claim_due(deployment.now, 10) == []
        await store.close()
    file.close()
    async with open_deployment(settings_of(deployment.address)) as found:
        names = {each.message_id: each.name for each in (await operations.list_unreadable(found, 10)).messages}
    href = f"/change?id={names['gone']}&what=discard-unreadable"
    assert (await ada("/errors")).links("/change?") == [f"/change?id={names['broken']}&what=discard-unreadable", href]
    page = await ada("/messages/gone")
    assert href in page.links("/change?")
    assert f"Unreadable row {names['gone']}, in the store headers must be a JSON object" in page.words
    assert f"Discarded: {names['gone']}" in (await done(ada, "discard-unreadable", id=names["gone"])).words
    again = (await done(ada, "discard-unreadable", id=names["gone"])).words
    assert f"Not discarded: {names['gone']}: no unreadable row of" in again
    assert len((await ada("/errors")).links("/change?")) == 1


async def test_unreadable_rows_are_shown_also_where_queues_cannot_be_browsed(
    deployment: Deployment, ada: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deployment.store(deployment.waiting("broken", -5))
    with sqlite3.connect(deployment.path) as file:
        file.execute("UPDATE content SET headers = '{not json'")
    file.close()
    store = SqliteStore(deployment.path)
    assert await store.claim_due(deployment.now, 10) == []
    await store.close()

    @asynccontextmanager
    async def open_unbrowsable(settings: Settings) -> AsyncGenerator[OpenDeployment]:
        async with open_deployment(settings) as opening:
            yield replace(opening, queue_view=None)

    monkeypatch.setattr("postdate.web.watching.open_deployment", open_unbrowsable)
    page = await ada("/errors")
    assert (page.status, "headers must be a JSON object" in page.words) == (200, True)
    assert "the page does not show failed messages. To see them: postdate queues peek error" in page.words
    assert len(page.links("/change?")) == 1


async def test_queues_are_paused_resumed_and_limited(deployment: Deployment, ada: Browser, visit: Visit) -> None:
    async def limits() -> dict[str, str]:
        store = SqliteStore(deployment.path)
        found = {queue: str(each) for queue, each in (await load_limits_in_force(store)).items()}
        await store.close()
        return found

    assert "Pause" in (await ada("/queues")).words
    assert "Queue orders: paused" in (await done(ada, "pause", queue="orders")).words
    fields = {"per_second": "0.5", "windows": "mon-fri 09:00-17:00 UTC\r\nsun 09:00-10:00 UTC\r\n"}
    await done(ada, "limit", fields, queue="orders")
    said = "at most 0.5 a second, within mon-fri 09:00-17:00 UTC, within sun 09:00-10:00 UTC"
    assert await limits() == {"orders": f"paused, {said}"}
    held = await ada("/change?what=limit&queue=orders")
    assert f"Now paused, {said}" in held.words
    assert [each.get("value") for each in held.all("input")][-1] == "0.5"
    assert "mon-fri 09:00-17:00 UTC\nsun 09:00-10:00 UTC</textarea>" in held.answer.text
    async with visit() as looking:
        page = await looking("/queues")
        assert f"orders paused, {said}" in page.words
        assert (page.links("/change"), page.all("form")[1:]) == ([], [])
    assert "/change?queue=orders&what=resume" in (await ada("/queues")).links("/change")
    await done(ada, "resume", queue="orders")
    assert await limits() == {"orders": said}
    for field, wrong, told in (
        ("per_second", "much", "'much' messages a second is not a valid rate"),
        ("per_second", "-1", "-1.0 messages a second is not a valid rate"),
        ("windows", "noon", "'noon' is not a window of time"),
    ):
        page = await done(ada, "limit", {field: wrong}, queue="orders")
        assert (page.status, told in page.words) == (400, True)
    assert (await done(ada, "pause", queue=" ")).status == 400
    await done(ada, "limit", queue="orders")
    assert await limits() == {}


async def test_limits_that_cannot_be_read_are_replaced_and_never_resumed(deployment: Deployment, ada: Browser) -> None:
    store = SqliteStore(deployment.path)
    await store.store_limits("orders", '{"per_minute": 5}', deployment.now)  # as of a newer version
    page = await ada("/queues")
    assert "orders cannot be read: they hold everything until new limits are set" in page.words
    assert page.links("/change?queue=orders") == ["/change?queue=orders&what=limit"]
    question = await ada("/change?what=limit&queue=orders")
    assert "What the unreadable ones held is then sent as the new ones allow." in question.words
    assert "it stays so" not in question.words
    assert "Queue orders: at most 5 a second" in (await done(ada, "limit", {"per_second": "5"}, queue="orders")).words
    await store.close()


async def test_what_a_store_cannot_do_is_told(ada: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        """What no store is."""

    monkeypatch.setattr("postdate.core.limits.LimitingStore", Other)
    monkeypatch.setattr("postdate.web.views.LimitingStore", Other)
    assert "Limits" not in (await ada("/queues")).words
    page = await ada("/change?what=pause&queue=orders")
    assert (page.status, "This cannot be done here SqliteStore does not support limits" in page.words) == (501, True)


@pytest.mark.parametrize("id_", HOSTILE, ids=range(len(HOSTILE)))
async def test_whatever_an_id_is_its_message_is_the_one(deployment: Deployment, ada: Browser, id_: str) -> None:
    await deployment.store(deployment.waiting(id_, 5), deployment.waiting("other", 5))
    await deployment.send(deployment.failed(f"f{id_}", f"E{id_}", "no", f"q{id_}"), deployment.failed("f", "E", "no"))
    (listed,) = [href for href in (await ada("/messages")).links("/messages/") if "other" not in href]
    (cancel,) = [href for href in (await ada(listed)).links("/change?") if href.endswith("what=cancel")]
    question = await ada(cancel)
    harmless(question)
    action, _, token = form_of(question)
    assert "1 message cancelled" in Page(await ada.client.post(action, data={"csrf_token": token})).words
    assert (await waiting(deployment)).keys() == {"other"}
    for href in (await ada("/errors")).links("/change?"):
        if href.endswith("discard-group") and "exception=E&" not in href:
            action, said, token = form_of(await ada(href))
            assert said == "Discard 1 message"
            harmless(Page(await ada.client.post(action, data={"csrf_token": token})))
    assert await ids_in(deployment, "error") == ["f"]


# --- who may do it ----------------------------------------------------------------------------------------------------


async def test_without_actions_nothing_can_be_done(deployment: Deployment, visit: Visit) -> None:
    await deployment.store(deployment.waiting("m-1", 5))
    async with visit() as browser:
        for path in ("/messages/m-1", "/errors", "/queues"):
            page = await browser(path)
            assert (page.links("/change"), "Sign in" in page.words) == ([], False)
        for path in ("/change?what=cancel&id=m-1", "/sign-in", "/sign-out"):
            assert [(await browser(path)).status, (await browser.client.post(path)).status_code] == [404, 404]
    assert (await waiting(deployment)).keys() == {"m-1"}


CANCEL = "/change?what=cancel&id=m-1"


async def signed_in(browser: Browser, name: str = "ada") -> httpx.Response:
    return await browser.client.post("/sign-in", data={"name": name, "token": TOKEN})


async def test_one_signs_in_acts_and_signs_out(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    await deployment.store(deployment.waiting("m-1", 5))
    async with acting_on(deployment, Actions(token=TOKEN)) as browser:
        page = await browser("/messages/m-1")
        assert (page.links("/change"), page.links("/sign-in")) == ([], ["/sign-in"])
        assert [each.get("name") for each in (await browser("/sign-in")).all("input")] == ["id", "name", "token"]
        wrong = Page(await browser.client.post("/sign-in", data={"name": "eve", "token": TOKEN + "!"}))
        assert (wrong.status, "The token is wrong, or no name given. Nothing was done." in wrong.words) == (403, True)
        assert not browser.client.cookies
        assert "at 192.0.2.7: 'eve' has a wrong token" in caplog.messages[-1]
        assert TOKEN not in caplog.text
        assert (await browser.client.post("/sign-in", data={"name": " ", "token": TOKEN})).status_code == 403
        answer = await signed_in(browser, "Ada, ü\n;.")
        assert (answer.status_code, answer.headers["Location"]) == (303, "/")
        parts = set(answer.headers["Set-Cookie"].split("; ")[1:])
        assert parts == {"HttpOnly", "Max-Age=43200", "Path=/", "SameSite=strict"}
        assert caplog.messages[-1] == "user 'Ada, ü\\n;.' at 192.0.2.7 signs in"
        page = await browser("/messages/m-1")
        assert ("Ada, ü ;." in page.words, len(page.links("/change"))) == (True, 3)
        await browser("/messages/m-1?body=shown")
        assert caplog.messages[-1].endswith("is shown to 192.0.2.7, user 'Ada, ü\\n;.'")
        token = form_of(await browser(CANCEL))[2]
        assert (await browser.client.post("/sign-out")).status_code == 403
        assert (await browser.client.post("/sign-out", data={"csrf_token": token})).status_code == 303
        assert (await browser(CANCEL)).status == 403
    assert (await waiting(deployment)).keys() == {"m-1"}


async def test_the_cookie_is_for_the_page_alone_and_for_https_if_it_came_so(deployment: Deployment) -> None:
    inner = dashboard(settings_of(deployment.address), actions=Actions(token=TOKEN))
    app = Starlette(routes=[Mount("/ops", inner)])
    async with inner.router.lifespan_context(inner), browsing(app, "https://localhost") as browser:
        answer = await browser.client.post("/ops/sign-in", data={"name": "ada", "token": TOKEN})
        assert answer.headers["Location"] == "/ops/"
        assert {"Path=/ops", "Secure"} <= set(answer.headers["Set-Cookie"].split("; "))
        assert "Queue orders: paused" in (await paused_at(browser, "/ops")).words
        assert (await browser("/ops/queues")).links("/ops/change?")


async def paused_at(browser: Browser, base: str) -> Page:
    action, _, token = form_of(await browser(f"{base}/change?what=pause&queue=orders"))
    assert action.startswith(f"{base}/change?")
    return Page(await browser.client.post(action, data={"csrf_token": token}))


async def test_only_forms_of_the_page_itself_are_taken(
    deployment: Deployment, ada: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    await deployment.store(deployment.waiting("m-1", 5))
    token = form_of(await ada(CANCEL))[2]
    for headers in (
        {"Origin": "http://localhost:8080"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost.evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"},
    ):
        page = Page(await ada.client.post(CANCEL, data={"csrf_token": token}, headers=headers))
        assert page.status == 403, headers
        assert "This was sent by a page elsewhere. Nothing was done." in page.words
        assert "refused: 'POST /change?what=cancel&id=m-1' by user 'ada' at 192.0.2.7: sent by" in caplog.messages[-1]
    assert (await waiting(deployment)).keys() == {"m-1"}
    for headers in ({"Origin": "http://localhost"}, {"Origin": "null", "Sec-Fetch-Site": "same-origin"}):
        answer = await ada.client.post(CANCEL, data={"csrf_token": token}, headers=headers)
        assert answer.status_code == 200
    assert not await waiting(deployment)


async def test_a_form_is_for_who_asked_for_it(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    """A CSRF token is of one session, or one user; sent with GET it does nothing, either."""
    await deployment.store(deployment.waiting("m-1", 5))
    async with acting_on(deployment, Actions(token=TOKEN)) as browser:
        await signed_in(browser, "eve")
        token = form_of(await browser(CANCEL))[2]
        await browser(f"{CANCEL}&csrf_token={token}")
        await signed_in(browser, "ada")
        for given in ({"csrf_token": token}, {"csrf_token": ""}, {"csrf_token": "ü"}, {}):
            page = Page(await browser.client.post(CANCEL, data=given))
            assert (page.status, "of another session" in page.words) == (403, True)
            assert "by user 'ada' at 192.0.2.7: its CSRF token is missing or wrong" in caplog.messages[-1]
        assert (await browser.client.post(f"{CANCEL}&csrf_token={token}")).status_code == 400
    async with acting_on(deployment, Actions(user_header="X-User")) as browser:
        token = form_of(Page(await browser.client.get(CANCEL, headers={"X-User": "eve"})))[2]
        answer = await browser.client.post(CANCEL, data={"csrf_token": token}, headers={"X-User": "ada"})
        assert answer.status_code == 403
    assert (await waiting(deployment)).keys() == {"m-1"}


async def test_who_looks_is_named_by_the_one_header_that_can_be_trusted(
    deployment: Deployment, ada: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    await deployment.store(deployment.waiting("m-1", 5))
    del ada.client.headers["X-User"]
    await ada("/messages/m-1?body=shown", **{"X-Forwarded-User": "bob"})
    assert caplog.messages == ["the body of message 'm-1' is shown to 192.0.2.7, user None"]


async def test_who_is_not_named_may_look(
    deployment: Deployment, ada: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    await deployment.store(deployment.waiting("m-1", 5))
    token = form_of(await ada(CANCEL))[2]
    for name in ("", " "):
        ada.client.headers["X-User"] = name
        page = await ada("/messages/m-1")
        assert (page.status, page.links("/change"), "Sign in" in page.words) == (200, [], False)
        for answer in (await ada.client.get(CANCEL), await ada.client.post(CANCEL, data={"csrf_token": token})):
            assert (answer.status_code, "does not say who you are" in answer.text) == (403, True)
            assert "by user None at 192.0.2.7: nobody is known to ask" in caplog.messages[-1]
    assert (await ada("/sign-in")).status == 404
    assert (await waiting(deployment)).keys() == {"m-1"}


async def test_a_session_ends_and_none_can_be_made_up(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    await deployment.store(deployment.waiting("m-1", 5))
    async with acting_on(deployment, Actions(token=TOKEN)) as browser:
        await signed_in(browser)
        ((cookie, ours),) = browser.client.cookies.items()
        token = form_of(await browser(CANCEL))[2]
        until, name, signature = ours.split(".")
        made_up = [
            f"{int(until) + 1}.{name}.{signature}",
            f"{until}.eve.{signature}",
            f"{until}.{name}.{signature[:-1]}",
            f"{until}.{name}.{token}",  # signed, as something else
            f".{signature}",
            "x",
            '"\\351"',
        ]
        monkeypatch.setattr("postdate.web.acting._SESSION_DURATION", timedelta(0))
        browser.client.cookies.clear()
        made_up.append((await signed_in(browser)).headers["Set-Cookie"].split("=")[1].split(";")[0])
        browser.client.cookies.clear()
        for value in made_up:
            headers = {"Cookie": f"{cookie}={value}"}
            page = Page(await browser.client.get("/queues", headers=headers))
            assert (page.status, page.links("/sign-in")) == (200, ["/sign-in"]), value
            answer = await browser.client.post(CANCEL, headers=headers, data={"csrf_token": token})
            assert answer.status_code == 403, value
        page = Page(await browser.client.get("/queues", headers={"Cookie": f"{cookie}={ours}"}))
        assert page.links("/sign-in") == []
    async with acting_on(deployment, Actions(token=TOKEN)) as restarted:
        page = Page(await restarted.client.get("/queues", headers={"Cookie": f"{cookie}={ours}"}))
        assert page.links("/sign-in") == ["/sign-in"]
    assert (await waiting(deployment)).keys() == {"m-1"}


async def test_who_signs_in_to_one_of_two_pages_of_a_host_stays_signed_in_to_the_other(deployment: Deployment) -> None:
    async with acting_on(deployment, Actions(token=TOKEN)) as one, acting_on(deployment, Actions(token=TOKEN)) as two:
        for browser in (one, two):
            await signed_in(browser)
        for browser, other in ((one, two), (two, one)):
            browser.client.cookies.update(other.client.cookies)
            assert (await browser("/queues")).links("/sign-in") == []


async def test_what_is_no_form_is_refused(
    deployment: Deployment, ada: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    await deployment.store(deployment.waiting("m-1", 5))
    token = form_of(await ada(CANCEL))[2]
    for content, status in (
        (f"csrf_token={token}&x=".encode().ljust(7 * 2**20 + 1, b"x"), 413),
        (f"csrf_token={token}{'&x=1' * 10}".encode(), 400),
        (b"\xff", 400),
        (b"", 403),
    ):
        assert (await ada.client.post(CANCEL, content=content)).status_code == status
        assert "refused: " in caplog.messages[-1]
    for path in ("what=fly&id=m-1", "what=cancel", "id=m-1", "what=return-group&queue=orders", "what=pause&id=m-1"):
        assert [(await ada(f"/change?{path}")).status] == [400]
        assert (await ada.client.post(f"/change?{path}", data={"csrf_token": token})).status_code == 400
    assert (await ada.client.put(CANCEL)).status_code == 405
    assert (await waiting(deployment)).keys() == {"m-1"}


def test_who_may_act_is_said_once_and_well() -> None:
    for given, told in (
        ({}, "who may act?"),
        ({"token": TOKEN, "user_header": "X-User"}, "who may act?"),
        ({"token": "x" * 15}, "the token needs 16 characters of ASCII at least"),
        ({"token": "x" * 16 + "\ufffd"}, "the token needs 16 characters of ASCII at least"),
        ({"user_header": "X-User:"}, "'X-User:' is no name of a header"),
        ({"user_header": ""}, "'' is no name of a header"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(told)):
            Actions(**given)
    assert repr(Actions(token=TOKEN)) == "Actions(user_header=None)"  # neither the token nor the key of signatures
    assert Actions(token="x" * 16).token == "x" * 16


async def test_who_signs_in_to_one_of_several_deployments_acts_on_all(deployment: Deployment) -> None:
    await deployment.store(deployment.waiting("m-1", 60))
    settings = settings_of(deployment.address)
    app = dashboard({"shop": settings, "depot": settings}, actions=Actions(token=TOKEN))
    async with browsing(Starlette(routes=[Mount("/ops", app)])) as browser, app.router.lifespan_context(app):
        assert "Sign in" in (await browser("/ops/depot/")).words
        signed = await browser.client.post("/ops/shop/sign-in", data={"name": "ada", "token": TOKEN})
        assert "Path=/ops;" in signed.headers["set-cookie"]
        action, _, token = form_of(await browser("/ops/depot/change?what=cancel&id=m-1"))
        assert (await browser.client.post(action, data={"csrf_token": token})).status_code == 200
    assert await waiting(deployment) == {}
