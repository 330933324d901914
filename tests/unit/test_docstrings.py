"""Docstrings name the parameters and fields that exist: a rename once left forty names behind."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import postdate

SOURCE = Path(postdate.__file__).parent
_ITEM = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*):(?:\s|$)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(node: Function) -> set[str]:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {each.arg for each in named if each is not None}


def names_of(node: ast.ClassDef | Function) -> set[str] | None:
    """Return the names that the section "Args" may have; ``None``: they cannot be read from this node alone."""
    if not isinstance(node, ast.ClassDef):
        return None if node.args.kwarg is not None else parameters(node)
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    makers = [each for each in node.body if isinstance(each, Function) and each.name in {"__init__", "__new__"}]
    if any(each.args.kwarg is not None for each in makers):
        return None
    names = fields.union(*(parameters(each) for each in makers))
    return names or None


def documented(docstring: str) -> Iterator[str]:
    """Yield the names of the items in the section "Args"."""
    _, _, section = docstring.partition("\nArgs:\n")
    for line in section.splitlines():
        if line and not line.startswith(" "):
            return
        item = _ITEM.match(line.removeprefix("    "))
        if item is not None:
            yield from re.findall(r"\w+", item[1])


def unknown_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef | Function):
            continue
        names, docstring = names_of(node), ast.get_docstring(node)
        if names is None or docstring is None:
            continue
        for name in documented(f"\n{docstring}"):
            if name not in names:
                yield f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}: {name}"


def test_the_section_args_names_what_exists() -> None:
    assert [name for path in sorted(SOURCE.rglob("*.py")) for name in unknown_names(path)] == []


def test_a_name_that_does_not_exist_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docstring = "One.\n\n    Args:\n        ident: it.\n        body: bytes.\n    "
    text = f'class Message:\n    """{docstring}"""\n\n    body: bytes\n'
    (tmp_path / "one.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    assert list(unknown_names(tmp_path / "one.py")) == ["one.py:1 Message: ident"]
