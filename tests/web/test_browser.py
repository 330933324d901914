"""The page in Chromium, as an operator has it: it is clicked through, keeps itself up to date, and keeps nobody out.

What a new page needs here is a line in `PAGES` of ``shop.py``, what it shows in `Shop.fill`, and a test that clicks.
"""

import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from datetime import timedelta

import pytest
from playwright.async_api import Browser, expect
from tests.web.chromium import OF_THE_STYLE, PHONE, WIDE, Dashboard, Screen, chromium, screen_of
from tests.web.shop import MINUTE, NEXT, OF_WHO_ACTS, PAGES, TOKEN, TRIED, Shop
from tests.web.test_pages import HOSTILE

from postdate.operations.plain import escape_control_characters

SCRIPT = "</td><script>alert('ran')</script><img src=x onerror=alert(1)> \"' \u202e\x1b[31m " + "w" * 3_000


@pytest.fixture(scope="module")
async def browser() -> AsyncGenerator[Browser]:
    async with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[Shop, Dashboard]]:
    """Serve the page of a shop, to which somebody has sent what is hostile."""
    shop = Shop(tmp_path_factory.mktemp("shop"))
    await shop.fill()
    for id_ in HOSTILE:
        waiting = shop.message(id_, "<script>", timedelta(days=40))
        await shop.store(replace(waiting, headers={**waiting.headers, SCRIPT[:200]: SCRIPT}, body=SCRIPT.encode()))
        failed = shop.failed(f"f{id_}", "<script>", ValueError(SCRIPT), MINUTE)
        await shop.send(replace(failed, body=SCRIPT.encode()))
    dashboard = Dashboard(shop.folder, "--allow-actions", "--token-file", "token")
    dashboard.start()
    yield shop, dashboard
    dashboard.end()


@pytest.fixture
async def screen(browser: Browser, served: tuple[Shop, Dashboard]) -> AsyncGenerator[Screen]:
    """Open a window; at its end, nothing may have gone wrong there."""
    async with screen_of(browser, served[1].address) as opened:
        yield opened


async def _keep_nobody_out(screen: Screen, pages: Mapping[str, int]) -> None:
    """Nothing serious or critical for axe, wide and light, and dark on a phone; and nothing to scroll sideways."""
    found = dict[tuple[str, str], list[str]]()
    for path, status in pages.items():
        await screen.go(path, status)
        for size, scheme, rules in ((WIDE, "light", ()), (PHONE, "dark", OF_THE_STYLE)):
            await screen.look(size, scheme)
            faults = [] if await screen.overflow() <= 0 else ["it is wider than its window"]
            found[path, scheme] = faults + await screen.barriers(rules)
    assert {where: faults for where, faults in found.items() if faults} == {}


async def _sign_in(screen: Screen) -> None:
    await screen.go("/")
    await screen.click("Sign in")
    await screen.page.get_by_label("Your name").fill("ada")
    await screen.page.get_by_label("Token").fill(TOKEN)
    await screen.page.get_by_role("button", name="Sign in").click()
    await expect(screen.page.get_by_role("button", name="Sign out")).to_be_visible()


async def test_no_page_keeps_anybody_out(screen: Screen) -> None:
    await _keep_nobody_out(screen, PAGES)


async def test_no_page_of_who_acts_keeps_anybody_out(screen: Screen) -> None:
    await _sign_in(screen)
    await _keep_nobody_out(screen, OF_WHO_ACTS)


async def test_deployments_lead_to_their_pages(browser: Browser, served: tuple[Shop, Dashboard]) -> None:
    several = Dashboard(served[0].folder, "--also", "depot=postdate.toml")
    several.start()
    try:
        async with screen_of(browser, several.address) as screen:
            await _keep_nobody_out(screen, {"/": 200, "/depot/": 200})
            await screen.go("/")
            await screen.click("depot")
            await screen.click("Errors")
            await expect(screen.page.get_by_role("heading", level=1)).to_contain_text("failed messages")
            await screen.click("All")
            await expect(screen.page.get_by_role("heading", level=1)).to_have_text("Deployments")
    finally:
        several.end()


async def test_what_is_done_is_asked_once_and_logged(screen: Screen, served: tuple[Shop, Dashboard]) -> None:
    heading, button = screen.page.get_by_role("heading", level=1), screen.page.get_by_role("button")
    await _sign_in(screen)
    await screen.go("/errors?exception=builtins.ValueError&queue=shipping")
    await screen.click("Return all builtins.ValueError in shipping")
    await expect(heading).to_have_text("Return 1 message?")
    await button.filter(has_text="Return").click()
    await expect(screen.page.locator("main li")).to_have_text(re.compile("Returned: parcel-7740"))
    await screen.go("/queues")
    await screen.page.get_by_label("Queue", exact=True).fill("reminders")
    await button.filter(has_text="Pause").click()
    await button.filter(has_text="Pause queue reminders").click()
    await screen.click("Back")
    await screen.click("Resume reminders")
    await button.filter(has_text="Resume queue reminders").click()
    await expect(heading).to_have_text(re.compile("Queue reminders: "))
    await screen.go(f"/messages/{NEXT}")
    await screen.click("Cancel")
    await button.filter(has_text="Cancel the message").click()
    await expect(heading).to_have_text("1 message cancelled")
    await screen.go(f"/messages/{NEXT}")
    await expect(screen.page.locator(".timeline strong").last).to_have_text("Cancelled")
    await button.filter(has_text="Sign out").click()
    await expect(screen.page.get_by_role("link", name="Sign in")).to_be_visible()
    for done in ("return-group", "pause", "resume", "cancel"):
        assert served[1].log.count(f"user 'ada' at 127.0.0.1: {done} ") == 1


async def test_a_saga_leads_to_its_timeouts(screen: Screen) -> None:
    await screen.go("/")
    await screen.click("Sagas")
    await screen.click("order=10420")
    await screen.click("Show the state")
    await expect(screen.page.locator("pre")).to_have_text('{"total": 59.9, "paid": false}')
    await screen.click("Shop.PaymentIsLate")
    await expect(screen.page.get_by_role("heading", level=1)).to_have_text("PaymentIsLate-10420")


async def test_the_pages_lead_to_each_other(screen: Screen) -> None:
    await screen.go("/")
    headings = {"Messages": "that wait", "Errors": "failed", "Doctor": "is broken", "Queues": "Queues"}
    for name, heading in headings.items():
        await screen.click(name)
        await expect(screen.page.get_by_role("heading", level=1)).to_contain_text(heading)
        await expect(screen.page.locator("[aria-current]")).to_have_text(name)
    await expect(screen.page.get_by_role("row", name="newsletter")).to_have_text(re.compile(r"newsletter\s*0"))
    await screen.click("Doctor")
    await expect(screen.page.get_by_role("row", name="error queue").locator("code").first).to_have_text(
        "postdate errors list"
    )


async def test_the_overview_leads_to_the_messages_of_a_bar(screen: Screen) -> None:
    await screen.go("/")
    for name in ("Next day", "Next 30 days", "Next hour"):
        await screen.click(name)
        await expect(screen.page.locator(".tabs [aria-current]")).to_have_text(name)
    await screen.page.locator(".broad a:has(rect.herd)").click()
    await expect(screen.page.get_by_label("Due from")).to_have_value(re.compile(r".+:.+"))
    await expect(screen.page.locator("tbody tr")).to_have_count(50)
    await screen.click("The next 50")
    await expect(screen.page.locator("tbody tr").last).to_contain_text("campaign-")


async def test_an_id_leads_to_the_story_of_its_message(screen: Screen) -> None:
    await screen.go("/queues")
    await screen.page.get_by_placeholder("Id of a message").fill(TRIED)
    await screen.page.keyboard.press("Enter")
    await expect(screen.page.get_by_role("heading", level=1)).to_have_text(TRIED)
    await expect(screen.page.locator(".timeline strong")).to_have_text(
        ["Scheduled", "Retried", "Retried", "Delivered", "Now"]
    )


async def test_a_cause_of_errors_leads_to_a_message_and_its_body(
    screen: Screen, served: tuple[Shop, Dashboard]
) -> None:
    await screen.go("/")
    await screen.click("Failed")
    await screen.click("builtins.KeyError")
    await expect(screen.page.get_by_role("heading", name="builtins.KeyError in invoices")).to_be_visible()
    await screen.click("invoice-7741")
    await expect(screen.page.locator("pre")).to_contain_text("KeyError: 'vat_id'")
    said = "the body of message 'invoice-7741' is shown to 127.0.0.1"
    assert said not in served[1].log
    await screen.click("Show the body")
    await expect(screen.page.locator("pre").last).to_have_text('{"order": 10399, "total": 120.5}')
    assert served[1].log.count(said) == 1


async def test_all_is_reached_by_the_keyboard(screen: Screen) -> None:
    """What is there first is the way past the pages; bars are passed over, as they are in the table, too."""
    await screen.go("/")
    press, found = screen.page.keyboard.press, list[str]()
    while "Sign in" not in found:
        await press("Tab")
        found.append(await screen.focused())
        assert len(found) < 20, found
    assert found[:3] == ["Skip to the content", "Postdate", "Overview"]
    assert found[-4:] == ["Doctor", "Id of a message", "Explain", "Sign in"]
    await screen.go("/")
    await press("Tab")
    await expect(screen.page.get_by_role("link", name="Skip to the content")).to_be_in_viewport()
    await press("Enter")
    await expect(screen.page.locator("main")).to_be_focused()
    within = list[str]()
    while "As a table" not in within:
        await press("Tab")
        within.append(await screen.focused())
        assert len(within) < 20, within
    first = within.index("Failed")
    assert within[first : first + 3] == ["Failed", "Unreadable", "Next hour"]
    assert re.fullmatch(r"1,8\d\d messages", within[-2])
    await press("Enter")
    await press("Tab")
    await press("Enter")
    await expect(screen.page).to_have_url(re.compile(r"/messages\?due_from="))


async def _shows_what_comes(screen: Screen, shop: Shop, id_: str) -> None:
    """Store a message, and assert that the overview counts it, without being asked for again."""
    await screen.page.evaluate("document.same = true")
    await shop.store(shop.message(id_, "orders", 3 * MINUTE))
    await expect(screen.tile("Waiting")).to_have_text(f"{shop.waiting:,}")
    assert await screen.page.evaluate("document.same")


async def test_it_shows_by_itself_what_comes(screen: Screen, served: tuple[Shop, Dashboard]) -> None:
    await screen.go("/")
    await screen.page.get_by_text("As a table").click()
    await screen.page.evaluate("document.activeElement.blur()")  # what has the focus stays as it is
    table = await screen.page.locator("#due details").inner_text()
    await _shows_what_comes(screen, served[0], "news")
    await expect(screen.page.locator("#due details")).not_to_have_text(table, use_inner_text=True)
    await expect(screen.page.locator("#due details")).to_have_attribute("open", "")


async def test_it_goes_on_when_the_server_is_back(screen: Screen, served: tuple[Shop, Dashboard]) -> None:
    shop, dashboard = served
    await screen.go("/")
    dashboard.end()
    await expect(screen.page.locator("body.stale")).to_be_attached()
    dashboard.start()
    await expect(screen.page.locator("body:not(.stale)")).to_be_attached()
    await _shows_what_comes(screen, shop, "after-the-restart")
    assert screen.faults
    assert all("net::ERR_" in each for each in screen.faults)
    screen.faults.clear()


async def test_it_goes_on_after_a_stream_was_refused(screen: Screen, served: tuple[Shop, Dashboard]) -> None:
    """As by a server in front of it that has nobody to ask; which a browser takes for the end."""
    await screen.page.clock.install()
    await screen.page.route("**/events", lambda route: route.fulfill(status=502))
    await screen.go("/")
    await expect(screen.page.locator("body.stale")).to_be_attached()
    await screen.page.unroute("**/events")
    await screen.page.clock.fast_forward(10_000)
    await expect(screen.page.locator("body:not(.stale)")).to_be_attached()
    await _shows_what_comes(screen, served[0], "after-the-refusal")
    assert screen.faults
    assert all("status of 502" in each for each in screen.faults)
    screen.faults.clear()


async def test_what_is_hostile_is_text_and_the_page_holds(screen: Screen) -> None:
    await screen.look(PHONE)
    for path, names in (("/messages", HOSTILE), ("/errors", [f"f{id_}" for id_ in HOSTILE[:3]])):
        for place, name in enumerate(names):
            await screen.go(f"{path}?queue=%3Cscript%3E")
            assert await screen.overflow() <= 0
            await screen.page.locator("a.id").nth(place).click()
            await expect(screen.page.get_by_role("heading", level=1)).to_have_text(escape_control_characters(name))
            assert await screen.overflow() <= 0
        await screen.click("Show the body")
        await expect(screen.page.locator("pre").last).to_contain_text("<script>alert('ran')</script>")
        assert await screen.overflow() <= 0


async def test_a_browser_keeps_the_policy(screen: Screen) -> None:
    """What should ever get into a page does not run there; and these tests hear of it."""
    await screen.go("/")
    await screen.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 1'}))"
    )
    assert await screen.page.evaluate("typeof ran") == "undefined"
    assert "Content Security Policy" in screen.faults.pop()
