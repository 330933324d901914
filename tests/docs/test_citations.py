"""Docstrings cite pages that users have, and no page that only the authors had."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src").rglob("*.py"))
ROWS = re.compile(r"docs/specification-rows\.md, rows? ((?:\d+(?:-|, | to | and )?)+)")


@cache
def docstrings(module):
    """Return all string statements: docstrings, and those below constants and fields."""
    statements = ast.walk(ast.parse(module.read_text("utf-8")))
    return [
        each.value.value
        for each in statements
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
    ]


def test_no_docstring_cites_what_users_do_not_have():
    private = re.compile(r"(?<!docs/)\bspecification\b|house.style|design\.md", re.IGNORECASE)
    cited = [(module.name, text) for module in MODULES for text in docstrings(module) if private.search(text)]
    assert cited == []


def test_each_page_that_a_docstring_cites_is_there():
    texts = [text for module in MODULES for text in docstrings(module)]
    pages = {page for text in texts for page in re.findall(r"\b(?:docs/[\w/-]+|ARCHITECTURE)\.md", text)}
    assert len(pages) > 10
    assert [page for page in pages if not (ROOT / page).is_file()] == []


def test_each_decision_that_a_docstring_cites_is_there():
    texts = [text for module in MODULES for text in docstrings(module)]
    numbers = {int(number) for text in texts for number in re.findall(r"\bADR (\d+)", text)}
    pages = {int(page.name[:4]) for page in (ROOT / "docs" / "adr").glob("0*.md")}
    assert len(numbers) > 20
    assert numbers - pages == set()


def test_each_row_that_a_docstring_cites_is_on_the_page():
    table = (ROOT / "docs" / "specification-rows.md").read_text("utf-8")
    on_page = set(re.findall(r"^\| (\d+) \|", table, re.MULTILINE))
    cited = {
        (module.name, row)
        for module in MODULES
        for text in docstrings(module)
        for rows in ROWS.findall(text)
        for row in re.findall(r"\d+", rows)
    }
    assert len(cited) > 20
    assert [(name, row) for name, row in cited if row not in on_page] == []
