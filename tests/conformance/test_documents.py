"""What is written about tests is true: the tests that contracts and documents name exist."""

import inspect
import re
from pathlib import Path

from postdate import ports
from postdate.testing import store_checks, transport_checks

ROOT = Path(__file__).parents[2]
CHECKS = [*store_checks(), *transport_checks()]


def guaranteed_by(docstring: str) -> list[str]:
    """Return ``topic.name`` of every check that a ``Guarantees`` section names; a topic is said once for its checks."""
    section = docstring.partition("Guarantees:")[2]
    names: list[str] = []
    for sentence in re.split(r"[;.]\s", " ".join(section.split()) + " "):
        topic, _, first = sentence.partition(".")
        names += [f"{topic.strip()}.{name.strip()}" for name in first.split(",") if name.strip()]
    return names


def test_every_guarantee_of_a_port_names_a_check() -> None:
    known = {str(check) for check in CHECKS}
    named = {
        name
        for _, port in inspect.getmembers(ports, inspect.isclass)
        for _, method in inspect.getmembers(port, inspect.isfunction)
        for name in guaranteed_by(inspect.getdoc(method) or "")
    }
    assert named <= known, sorted(named - known)
    assert len(named) > 50


def test_the_tests_of_the_specification_exist_and_every_row_of_the_core_has_one() -> None:
    """docs/specification-rows.md names tests that are there, and tests for rows 1 to 14, 32 to 41 and 53 to 58."""
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    tests = set(re.findall(r"def (test_\w+)", sources)) | {str(check) for check in CHECKS}
    table = (ROOT / "docs" / "specification-rows.md").read_text(encoding="utf-8")
    rows: dict[int, list[str]] = {}
    for row, names in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE):
        rows[int(row)] = re.findall(r"`(?:\w+/\w+\.py::)?([\w.]+)`", names)
    named = {name for names in rows.values() for name in names}
    assert named <= tests, sorted(named - tests)
    wanted = {*range(1, 15), *range(32, 42), *range(53, 59)}
    assert wanted <= {row for row, names in rows.items() if names}
