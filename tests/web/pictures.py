"""Takes the pictures of ``docs/pictures`` anew, or, into a FOLDER, of each page in each look.

``.venv/bin/python -m tests.web.pictures [FOLDER]``
"""

import argparse
import re
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import anyio
from PIL import Image
from playwright.async_api import ViewportSize, expect
from tests.web.chromium import PHONE, WIDE, Dashboard, chromium, screen_of
from tests.web.shop import FAILED, PAGES, TRIED, Shop

_DOCS: Final = Path(__file__).resolve().parents[2] / "docs" / "pictures"
_OF_DOCS: Final = {
    "overview": ("/", WIDE, "light"),
    "overview-dark": ("/?due=month", WIDE, "dark"),
    "overview-phone": ("/?due=day", PHONE, "light"),
    "message-phone": (f"/messages/{TRIED}", PHONE, "dark"),
    "errors": ("/errors", WIDE, "light"),
    "error-dark": (f"/errors/{FAILED}", WIDE, "dark"),
}
_LOOKS: Final = {
    "wide": (WIDE, "light"),
    "dark": (WIDE, "dark"),
    "phone": (PHONE, "light"),
    "phone-dark": (PHONE, "dark"),
}

Pictures = dict[str, tuple[str, ViewportSize, Any]]


def of_all() -> Pictures:
    """Return each page in each look."""
    return {
        f"{re.sub(r'[^a-z0-9]+', '-', path).strip('-') or 'overview'}-{name}": (path, *look)
        for path in PAGES
        for name, look in _LOOKS.items()
    }


async def take(folder: Path, pictures: Pictures, *, whole: bool) -> None:
    """Write PNG files of pages of a shop that is at work: as much as a window shows, or the whole of them."""
    with TemporaryDirectory() as place:
        shop = Shop(Path(place))
        await shop.fill()
        dashboard = Dashboard(shop.folder)
        dashboard.start()
        service = await anyio.open_process(
            [sys.executable, "-m", "postdate.cli", "run"], stdout=None, stderr=None, cwd=place
        )
        async with service, chromium() as browser:
            async with screen_of(browser, dashboard.address) as screen:
                await screen.go("/")
                await expect(screen.tile("Services")).to_have_text("1")
                await expect(screen.tile("Delivered")).not_to_have_text("…")
            for name, (path, size, scheme) in pictures.items():
                async with screen_of(browser, dashboard.address) as screen:
                    await screen.look(size, scheme)
                    await screen.go(path, PAGES.get(path, 200))
                    taken = Image.open(BytesIO(await screen.page.screenshot(full_page=whole)))
                taken.convert("RGB").quantize(128).save(folder / f"{name}.png", optimize=True)
            service.terminate()
        dashboard.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    chosen: Path | None = parser.parse_args().folder
    (chosen or _DOCS).mkdir(parents=True, exist_ok=True)
    anyio.run(lambda: take(chosen or _DOCS, of_all() if chosen else _OF_DOCS, whole=chosen is not None))
