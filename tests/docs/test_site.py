"""The site of the documentation is built without a warning, has every page, and no link of it is dead."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import postdate

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
SITE, PAGES = BUILD / "site", BUILD / "site-pages"

_LINK = re.compile(r'<(\w+)\b[^>]*?\s(?:href|src)="?([^"\s>]*)')
_ID = re.compile(r'\sid="?([^"\s>]+)')
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@pytest.fixture(scope="module")
def output() -> str:
    """Build the site as ``make site`` does; return what that printed."""
    command = [sys.executable, str(ROOT / "scripts" / "build_site.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def html(output: str) -> Mapping[Path, str]:
    """Return the pages of the site."""
    return {page: page.read_text("utf-8") for page in sorted(SITE.rglob("*.html"))}


def dead_links(pages: Mapping[Path, str]) -> Iterator[str]:
    """Yield each link within the site that leads nowhere, with its page."""
    anchors = {page: {unescape(each) for each in _ID.findall(text)} for page, text in pages.items()}
    for page, text in pages.items():
        for link in {unquote(unescape(link)) for _, link in _LINK.findall(text)}:
            path, _, anchor = link.partition("#")
            if _ADDRESS.match(link) or page.name == "404.html":  # whose links count from the root of the server
                continue
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and target in pages and anchor not in anchors[target]):
                yield f"{page.name}: {link}"


def pages_of(navigation: Any) -> Iterator[str]:
    match navigation:
        case str():
            yield navigation
        case dict():
            for each in navigation.values():
                yield from pages_of(each)
        case _:
            for each in navigation:
                yield from pages_of(each)


def test_it_is_built_without_a_warning(output: str) -> None:
    """Whatever is printed beside these lines is one, of zensical or of griffe, which reads the docstrings."""
    usual = re.compile(r"Build started|No issues found|Build finished in [\d.]+s|")
    assert [line for line in output.splitlines() if not usual.fullmatch(line.strip())] == []


def test_no_link_and_no_anchor_is_dead(html: Mapping[Path, str]) -> None:
    assert len(html) > 150
    assert list(dead_links(html)) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<h2 id="here">')
    text = '<a href="b.html">, <a class="x" href="b.html#here">, <a href="b.html#gone">, <img alt="" src="c.png">'
    pages = {tmp_path / "a.html": f"{text}, <a href=#no>", tmp_path / "b.html": '<h2 id="here">'}
    assert sorted(dead_links(pages)) == ["a.html: #no", "a.html: b.html#gone", "a.html: c.png"]


def test_nothing_is_loaded_from_elsewhere(html: Mapping[Path, str]) -> None:
    resources = {link for text in html.values() for tag, link in _LINK.findall(text) if tag not in {"a", "base"}}
    assert "../site.css" in resources
    assert [link for link in resources if re.match(r"[a-z]+:|//", link) and not link.startswith("data:")] == []


def test_each_page_is_in_the_navigation_once(output: str) -> None:
    navigation = tomllib.loads((BUILD / "zensical.toml").read_text("utf-8"))["project"]["nav"]
    assert sorted(pages_of(navigation)) == sorted(page.relative_to(PAGES).as_posix() for page in PAGES.rglob("*.md"))


def test_each_public_name_is_in_the_reference(html: Mapping[Path, str]) -> None:
    anchors = {each for page in ("postdate", "adapters") for each in _ID.findall(html[SITE / f"reference/{page}.html"])}
    names = {*postdate.__all__, "Client", "PostgresStore", "RabbitMqTransport"}
    assert [name for name in names if f"postdate.{name}" not in anchors] == []
    assert {"postdate.Endpoint.send", "postdate.connect"} <= anchors


def test_the_jobs_that_the_guide_of_spark_names_are_in_the_reference(html: Mapping[Path, str]) -> None:
    guide = (ROOT / "docs" / "guides" / "spark.md").read_text("utf-8")
    names = set(re.findall(r"`(postdate\.pipeline\.\w+\.\w+)\(", guide))
    anchors = set(_ID.findall(html[SITE / "reference/postdate.pipeline.html"]))
    assert len(names) > 6
    assert names - anchors == set()


def test_no_sign_of_another_markup_is_left_in_the_reference(html: Mapping[Path, str]) -> None:
    reference = [text for page, text in html.items() if page.parent.name == "reference"]
    assert len(reference) > 5
    assert [role for text in reference for role in re.findall(r":(?:class|meth|func|mod|attr|data):", text)] == []


def test_each_command_is_in_the_reference(html: Mapping[Path, str]) -> None:
    """Each of which the pages of the commands have an example."""
    text = html[SITE / "reference" / "commands.html"]
    headings = re.findall(r"<h2 id=[^>]*>postdate ?([\w -]*)", text)
    assert {"", "run", "messages explain", "errors return", "pipeline migrate preview"} <= set(headings)
    commands = {
        words
        for page in (ROOT / "docs" / "cli").glob("*.md")
        for words in re.findall(r"^\$ postdate ([a-z]+)", page.read_text("utf-8"), re.MULTILINE)
    }
    assert commands <= set(headings)


def test_words_that_people_search_for_are_headings(html: Mapping[Path, str]) -> None:
    headings = " ".join(each for text in html.values() for each in re.findall(r"<h[12] id=[^>]*>(.*?)<", text)).lower()
    words = ("dead-letter queue", "quick start", "cron", "retry", "webhook", "celery", "django", "fastapi", "rabbitmq")
    assert [word for word in words if word not in headings] == []
