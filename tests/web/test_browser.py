"""The page in Chromium, as an operator has it: it is clicked through, keeps itself up to date, and keeps nobody out."""

from collections.abc import AsyncGenerator

import pytest
from playwright.async_api import Browser
from tests.web.chromium import PHONE, WIDE, Dashboard, Screen, chromium, screen_of
from tests.web.shop import PAGES, Shop


@pytest.fixture(scope="module")
async def browser() -> AsyncGenerator[Browser]:
    async with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[Shop, Dashboard]]:
    """Serve the page of a shop; tests may add to it, and leave there what is."""
    shop = Shop(tmp_path_factory.mktemp("shop"))
    await shop.fill()
    dashboard = Dashboard(shop.folder)
    dashboard.start()
    yield shop, dashboard
    dashboard.stop()


@pytest.fixture
async def screen(browser: Browser, served: tuple[Shop, Dashboard]) -> AsyncGenerator[Screen]:
    """Open a window; at its end, nothing may have gone wrong there."""
    async with screen_of(browser, served[1].address) as opened:
        yield opened


@pytest.mark.parametrize(("path", "status"), PAGES.items(), ids=PAGES)
async def test_a_page_keeps_nobody_out(screen: Screen, path: str, status: int) -> None:
    """Nothing serious or critical for axe, wide and on a phone, light and dark; and nothing to scroll sideways."""
    await screen.go(path, status)
    for size in (WIDE, PHONE):
        await screen.look(size)
        assert await screen.overflow() <= 0
        assert await screen.barriers() == []
        await screen.look(size, "dark")
        assert await screen.barriers("color-contrast") == []
