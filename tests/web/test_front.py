"""Several deployments on one page: each has a row and pages of its own, and one that is away is told in words."""

import logging
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from tests.web.conftest import Deployment, browsing, news_of, settings_of

from postdate.clock import steady_seconds
from postdate.errors import ConfigurationError, StoreUnreachable
from postdate.operations import Overview
from postdate.runtime.resource import resource_of
from postdate.web import dashboard
from postdate.wiring import open_deployment


@pytest.fixture
async def shops(deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starlette:
    """A deployment with a message that is late and one that failed, one with nothing, and two that are away."""
    monkeypatch.setattr("postdate.web.views._FIRST_LOOK_SECONDS", 60.0)
    await deployment.store(deployment.waiting("late", -5), deployment.waiting("m-1", 5))
    await deployment.send(deployment.failed("f", "E", "no"))
    other = Deployment(tmp_path / "other.db")
    await other.create()
    addresses = {"shop": deployment.address, "depot": other.address, "gone": f"sqlite:///{tmp_path}/gone.db"}
    addresses["away"] = "postgresql://ada:enigma@127.0.0.1:1/shop"
    return dashboard({name: settings_of(address) for name, address in addresses.items()})


async def test_each_deployment_has_a_row_or_its_error(shops: Starlette) -> None:
    async with browsing(shops) as browser:
        page = await browser("/")
        assert "shop overdue 1 message of 2 is overdue 2 1 1 0 " in page.words
        assert "depot Nothing waits 0 0 0 0 " in page.words
        assert "gone not seen " in page.words
        assert "there is no file" in page.words
        assert "away not seen " in page.words
        assert "enigma" not in page.answer.text
        assert [each["href"] for each in page.all("a")] == ["#content", "/", "/shop/", "/depot/", "/gone/", "/away/"]
        assert not page.all("form")
        assert (await browser("/messages")).status == 404
        assert (await browser("/", Host="evil.example")).status == 400


async def test_nobody_is_waited_for(shops: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.web.views._FIRST_LOOK_SECONDS", 0.0)
    async with browsing(shops) as browser:
        page = await browser("/")
    assert (page.status, page.words.count("not seen It has not answered yet,")) == (200, 4)


async def test_a_fault_in_one_keeps_no_other_from_being_shown(
    shops: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(state: Overview) -> str:
        return "Nothing waits" if not state.overdue else f"{1 // 0}"

    monkeypatch.setattr("postdate.web.views.headline_of", faulty)
    async with browsing(shops) as browser:
        page = await browser("/")
    assert "shop not seen It has not answered yet, or not well: see the log." in page.words
    assert "depot Nothing waits 0 0 0 0 " in page.words


async def test_each_deployment_has_its_pages_and_a_way_back(shops: Starlette) -> None:
    async with browsing(Starlette(routes=[Mount("/ops", shops)])) as browser, shops.router.lifespan_context(shops):
        page = await browser("/ops/shop/messages")
        assert page.links("/ops/shop/messages/") == ["/ops/shop/messages/late", "/ops/shop/messages/m-1"]
        links = [each["href"] or "" for each in page.all("a")]
        assert {each for each in links if not each.startswith("/ops/shop/")} == {"#content", "/ops/"}
        assert (await browser("/ops/shop/static/page.css")).status == 200
        assert "No message waits." in (await browser("/ops/depot/messages")).words
        for name in ("gone", "away"):
            assert (await browser(f"/ops/{name}/")).status == 503
        assert (await browser("/ops/")).links("/ops/shop/") == ["/ops/shop/"]


async def test_the_pages_of_a_deployment_name_its_own_outages_only(shops: Starlette, deployment: Deployment) -> None:
    async with browsing(shops) as browser, open_deployment(settings_of(deployment.address)) as opening:
        await browser("/shop/")  # opens it
        calls = resource_of(opening.store).calls("cannot claim due messages", logging.getLogger("postdate.test"))
        calls.report_failure(StoreUnreachable("disk is gone"), steady_seconds())
        pages = {path: (await browser(path)).words for path in ("/", "/shop/", "/shop/queues", "/depot/", "/gone/")}
        told = [path for path, words in pages.items() if "disk is gone" in words]
        assert told == ["/", "/shop/", "/shop/queues"]
        calls.report_success(steady_seconds())


async def test_news_of_any_are_told(shops: Starlette) -> None:
    assert await news_of(shops, 1) == [b"event: newer\ndata: any\n\n"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "static", "events", "-a", "ü", "a b", "a\n"])
def test_a_name_that_cannot_be_in_an_address_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a deployment"):
        dashboard({"shop": settings_of("sqlite:///a.db"), name: settings_of("sqlite:///b.db")})


def test_none_at_all_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is no deployment to show"):
        dashboard({})
