"""The pages of audits and forecasts in a real browser: what people look for is in sight, wide and narrow."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.web.chromium import chromium

from postdate.pipeline import audit
from postdate.pipeline.report import render_html

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
LATENESS = audit.Lateness(0.041, 0.12, 0.41, 7_265.0)
LONG_NAME = "reply-3f2b9c1e-77aa-4d0e-9a55-0123456789ab-shipping-service-eu-west-1"
ALL_COUNTS = audit.AuditCounts(
    scheduled=12_345_678, delivered=1_234_567, handled=1_234_500, queued=56, pending=1_234_567, overdue=12, expired=123,
    discarded=9, undelayed=2, cancelled=812, failed=4, retried=321, archived=1, lost=120, duplicated=1, early=2,
    orphaned=3, late=4_321,
)  # fmt: skip

_CELLS_OUT_OF_SIGHT = """
() => [...document.querySelectorAll("section[aria-labelledby=destinations] tbody tr:first-child > *")].slice(0, 5)
  .filter((cell) => cell.getBoundingClientRect().right > innerWidth).map((cell) => cell.textContent)
"""
_NAME_AFTER_SCROLLING = """
() => { const table = document.querySelector("section[aria-labelledby=destinations] .wide"); table.scrollLeft = 400;
  return table.querySelector("tbody th").getBoundingClientRect().left - table.getBoundingClientRect().left; }
"""
_TEXTS_WIDER_THAN_THEIR_TILE = """
() => [...document.querySelectorAll(".tiles dd:first-of-type")].filter((each) => each.scrollWidth > each.clientWidth)
  .map((each) => each.textContent)
"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a made-up audit of a week with a herd, in which every line has a number."""
    rows = tuple(audit.AuditRow(name, ALL_COUNTS, LATENESS) for name in ("orders", LONG_NAME))
    hours = [NOW + timedelta(hours=hour) for hour in range(168)]
    result = audit.AuditResult(
        "postgresql://postdate@db/postdate",
        NOW,
        1.0,
        ALL_COUNTS,
        LATENESS,
        by_destination=rows,
        number_of_destinations=20_000,
        other_destinations=audit.AuditRow("all others", ALL_COUNTS, audit.Lateness()),
        findings=(audit.Finding("lost", 120, tuple(f"order-{number:05}" for number in range(100))),),
        curve=tuple(audit.CurvePoint(at, 400_000 if at == hours[90] else 4_000, 4_000) for at in hours),
        curve_seconds=3_600,
        lateness_bins=(audit.LatenessBin(0.03, 0.05, 1_000_000), audit.LatenessBin(7_000.0, 9_000.0, 1)),
    )
    path = tmp_path_factory.mktemp("page") / "audit.html"
    path.write_text(render_html(result), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1280, 400])
async def test_names_faults_and_percentiles_are_in_sight(page_file: Path, width: int) -> None:
    async with chromium() as browser:
        page = await browser.new_page(viewport={"width": width, "height": 900})
        await page.goto(page_file.as_uri())
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        assert await page.evaluate(_CELLS_OUT_OF_SIGHT) == []
        assert await page.evaluate(_TEXTS_WIDER_THAN_THEIR_TILE) == []
        assert await page.evaluate(_NAME_AFTER_SCROLLING) == 0
        assert await page.locator(f"th[title='{LONG_NAME}']").inner_text() == "reply-3f2b9c1e-…ce-eu-west-1"
        assert await page.get_by_text("the same, without the peaks").count() == 1
        # The ids of one finding do not push everything else away.
        assert (await page.locator(".listed").first.bounding_box() or {})["height"] < 200
