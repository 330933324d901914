"""What is written about tests is true: the tests that contracts and documents name exist."""

import inspect
import re
from pathlib import Path

import pytest

from postdate import ports
from postdate.testing import saga_checks, store_checks, timeout_checks, transport_checks

ROOT = Path(__file__).parents[2]
CHECKS = [*store_checks(), *transport_checks(), *timeout_checks(), *saga_checks()]


def guaranteed_by(docstring: str) -> list[str]:
    """Return what a ``Guarantees`` section names: checks as ``topic.name``, tests of our own as ``place.py::name``.

    A topic is said once for its checks.
    """
    section = docstring.partition("Guarantees:")[2]
    names: list[str] = []
    for sentence in re.split(r"[;.]\s", " ".join(section.split()) + " "):
        topic, _, first = sentence.partition(".")
        names += [f"{topic.strip()}.{name.strip()}" for name in first.split(",") if name.strip()]
    return names


def test_every_guarantee_of_a_port_names_a_check_or_a_test() -> None:
    known = existing()
    named = {
        name
        for _, port in inspect.getmembers(ports, inspect.isclass)
        for _, method in inspect.getmembers(port, inspect.isfunction)
        for name in guaranteed_by(inspect.getdoc(method) or "")
    }
    assert named <= known, sorted(named - known)
    assert len(named) > 50


def existing() -> set[str]:
    """Return the names of all tests, by file and alone, and of all checks."""
    names = {str(check) for check in CHECKS}
    for file in (ROOT / "tests").rglob("test_*.py"):
        place = file.relative_to(ROOT / "tests").as_posix()
        for test in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8")):
            names |= {test, f"{place}::{test}"}
    return names


@pytest.mark.parametrize("document", ["upstream-faults.md", "specification-rows.md"])
def test_every_test_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py::\w+|[a-z]+\.[a-z_0-9]+)`", text)) - {"topic.name", "postdate.testing"}
    assert len(named) > 30
    assert named <= existing(), sorted(named - existing())


def test_every_fault_of_the_specification_is_in_the_list_with_a_test() -> None:
    text = (ROOT / "docs" / "upstream-faults.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith(("|---", "| fault"))]
    assert all("::" in row.split("|")[3] or "." in row.split("|")[3] for row in rows)
    assert {f"D{number}" for number in (2, 3, 4, 5, 7, 8, 9, 10, 11, 16, 17, 18)} <= set(re.findall(r"D\d+", text))


def test_the_tests_of_the_specification_exist_and_every_row_of_the_core_has_one() -> None:
    """docs/specification-rows.md names tests that are there, and tests for all rows that are built."""
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    tests = set(re.findall(r"def (test_\w+)", sources)) | {str(check) for check in CHECKS}
    table = (ROOT / "docs" / "specification-rows.md").read_text(encoding="utf-8")
    rows: dict[int, list[str]] = {}
    for row, names in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE):
        rows[int(row)] = re.findall(r"`(?:[\w/]+\.py::)?([\w.]+)`", names)
    named = {name for names in rows.values() for name in names}
    assert named <= tests, sorted(named - tests)
    built = set(range(1, 117))
    assert built <= {row for row, names in rows.items() if names}, sorted(built - rows.keys())
