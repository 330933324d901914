"""The page in a real browser: Chromium, driven by Playwright, and ``postdate dashboard``, which it reads."""

import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from playwright.async_api import Browser, ConsoleMessage, Locator, Page, Request, ViewportSize, async_playwright, expect
from tests.azure_server import Azurite
from tests.servers import Chromium, install_missing
from tests.waiting import PATIENCE_SECONDS, Eventually

WIDE, PHONE = ViewportSize(width=1280, height=900), ViewportSize(width=390, height=844)
_FLAGS: Final = (
    *("--disable-gpu", "--disable-quic", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # it looks up its maker's hosts at each start
)
_GRAVE: Final = """
async (rules) => (await axe.run({resultTypes: ["violations"], ...(rules ? {runOnly: rules} : {})})).violations
  .filter((each) => ["serious", "critical"].includes(each.impact))
  .map((each) => `${each.id}: ${each.help}: ${each.nodes.map((node) => node.html).join(" ")}`)
"""

OF_THE_STYLE: Final = ("color-contrast", "link-in-text-block", "scrollable-region-focusable", "target-size")
"""The rules of axe that depend on the colours and the size of the window."""

expect.set_options(timeout=PATIENCE_SECONDS * 1_000)


@asynccontextmanager
async def chromium() -> AsyncGenerator[Browser]:
    """Open the browser, with an empty profile; it fetches nothing but from this machine."""
    install_missing([Chromium, Azurite])  # which is as good as nothing after `make services-up`
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=Chromium.program(), args=_FLAGS)
        yield browser
        await browser.close()


class Dashboard:
    """``postdate dashboard``, in the folder that has its settings."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options, self._log, self.address = folder, options, folder / "dashboard.log", ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8")

    def start(self) -> None:
        """Serve it, at the address of last time if there was one."""
        listen = self.address.removeprefix("http://") or "127.0.0.1:0"
        command = [sys.executable, "-W", "error", "-m", "postdate.cli", "dashboard", "--listen", listen, *self._options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("POSTDATE_")}
        with self._log.open("wb") as log:
            process = subprocess.Popen(command, cwd=self._folder, env=environment, stdout=log, stderr=log)
        Eventually()(lambda: "the page is at" in self.log or process.poll() is not None, "it listens")
        assert process.poll() is None, self.log
        self._process = process
        self.address = re.findall(r"the page is at (http://127\.0\.0\.1:\d+)/", self.log)[0]

    def end(self) -> None:
        """End it as a power cut would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Screen:
    """A page in a window of its own, and what has gone wrong there."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self._address, self.faults = page, address, list[str]()
        page.set_default_timeout(PATIENCE_SECONDS * 1_000)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        page.on("request", self._look_at)

    def _hear(self, said: ConsoleMessage) -> None:
        if said.type in {"error", "warning"}:
            self.faults.append(said.text)

    def _look_at(self, request: Request) -> None:
        if not request.url.startswith(f"{self._address}/"):
            self.faults.append(f"asked another origin: {request.url}")

    async def go(self, path: str, status: int = 200) -> None:
        """Ask for a page, and expect this status of the answer; of another than 200 the console complains."""
        answer = await self.page.goto(f"{self._address}{path}")
        assert answer is not None
        assert answer.status == status, f"{path}: {answer.status}"
        if status != 200:
            assert f"status of {status}" in self.faults.pop()

    async def look(self, size: ViewportSize, scheme: Any = "light") -> None:
        """Have it as wide as a window, or a phone; light or dark."""
        await self.page.set_viewport_size(size)
        await self.page.emulate_media(color_scheme=scheme)

    async def click(self, name: str) -> None:
        """Follow the first link that is called so."""
        await self.page.get_by_role("link", name=name).first.click()

    def tile(self, name: str) -> Locator:
        """Return the value of a tile of the overview."""
        return self.page.locator(".tiles > div").filter(has=self.page.get_by_text(name, exact=True)).locator("dd").first

    async def focused(self) -> str:
        """Return what the focus is on, in words."""
        return await self.page.evaluate("document.activeElement.innerText || document.activeElement.placeholder")

    async def barriers(self, rules: tuple[str, ...] = ()) -> list[str]:
        """Return what axe finds serious or critical by these rules; by all of them if none are named."""
        if not await self.page.evaluate("typeof axe === 'object'"):
            await self.page.evaluate((Azurite.modules() / "axe-core" / "axe.min.js").read_text("utf-8"))
        return await self.page.evaluate(_GRAVE, list(rules) or None)

    async def overflow(self) -> int:
        """Return by how many pixels it is wider than its window, once its style is there."""
        await self.page.wait_for_load_state()
        return await self.page.evaluate("document.scrollingElement.scrollWidth - innerWidth")


@asynccontextmanager
async def screen_of(browser: Browser, address: str) -> AsyncGenerator[Screen]:
    """Open a window, which shares nothing with others; close it, and assert that nothing went wrong there."""
    async with await browser.new_context(viewport=WIDE, reduced_motion="reduce", timezone_id="UTC") as context:
        screen = Screen(await context.new_page(), address)
        yield screen
        assert not screen.faults, screen.faults
