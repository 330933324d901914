"""Tests wait by tests/waiting.py alone: tests/ruff.toml bans the other ways, and what ruff cannot see is found here."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]


def draws(pause: ast.expr) -> bool:
    """Return whether a number is drawn: the moment of a kill is."""
    calls = (ast.unparse(node.func) for node in ast.walk(pause) if isinstance(node, ast.Call))
    return any(call.endswith(".random") for call in calls)


def sleeps_in(source: str) -> Iterator[int]:
    """Yield the lines that wait for time to pass: on an event that nobody sets."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(ast.Call(made), "wait"), args=[pause]):
                if ast.unparse(made).endswith("Event") and not draws(pause):
                    yield node.lineno
            case _:
                pass


def test_no_test_sleeps_on_an_event() -> None:
    sources = {
        path.relative_to(TESTS).as_posix(): source
        for path in TESTS.rglob("test_*.py")
        if ".wait(" in (source := path.read_text("utf-8"))
    }
    assert [f"{name}:{line}" for name, source in sources.items() for line in sleeps_in(source)] == []


def test_what_sleeps_is_found() -> None:
    sleeps = ["Event().wait(n)", "threading.Event().wait(2)"]
    others = ["Event().wait(chance.random() / 2)", "done.wait(60)", "done.wait()"]
    assert list(sleeps_in("\n".join([*sleeps, *others]))) == [1, 2]


def test_what_is_banned_everywhere_is_banned_in_tests() -> None:
    """Ruff does not add the one table to the other."""
    root = tomllib.loads((TESTS.parent / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]
    own = tomllib.loads((TESTS / "ruff.toml").read_text("utf-8"))
    everywhere, in_tests = (each["lint"]["flake8-tidy-imports"]["banned-api"] for each in (root, own))
    assert in_tests.items() >= everywhere.items()
