"""SQL for SQLite is understood by the oldest one that `doctor` accepts, whatever is installed here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import postdate.backends
from postdate.backends.sqlite.observation import OLDEST_SQLITE

BACKENDS = Path(postdate.backends.__file__).parent

NEWER = re.compile(
    r"""
    \b(RIGHT|FULL)\s+(OUTER\s+)?JOIN\b                        # 3.39
    | \bIS\s+(NOT\s+)?DISTINCT\s+FROM\b                       # 3.39
    | \bSELECT\b(?:(?!\bSELECT\b|\bGROUP\s+BY\b).)*\bHAVING\b # 3.39: it needed a GROUP BY
    | ->>? \s* ['":?]                                         # 3.38, of JSON
    | \)\s*STRICT\b                                           # 3.37
    | \b(unixepoch | format | octet_length | timediff | concat | concat_ws | string_agg | jsonb\w* | unhex
        | json_(error_position|pretty|array_insert) | median | percentile\w* | unistr\w*) \(
    | \bWITHIN\s+GROUP\b                                      # 3.47
    """,
    re.VERBOSE | re.DOTALL,
)
"""What came after 3.35: https://www.sqlite.org/changes.html."""


def texts_of(path: Path) -> Iterator[str]:
    """Yield a file of SQL, or the texts of a module; values that are put into them read ``x``."""
    if path.suffix == ".sql":
        yield path.read_text(encoding="utf-8")
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(each.value) if isinstance(each, ast.Constant) else "x" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        yield text


def test_the_oldest_sqlite_understands_every_statement() -> None:
    paths = [
        each for room in ("sqlite", "sql") for each in (BACKENDS / room).rglob("*") if each.suffix in {".py", ".sql"}
    ]
    texts = [(path.name, text) for path in paths for text in texts_of(path)]
    assert OLDEST_SQLITE == (3, 35, 0)
    assert sum("SELECT" in text for _, text in texts) > 50
    assert [(name, text) for name, text in texts if NEWER.search(text)] == []


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT min(queue_id) FROM temp.batch WHERE NOT expired HAVING min(queue_id) = max(queue_id)",
        "SELECT a, (SELECT max(b) FROM c HAVING max(b) > 1) FROM d GROUP BY a",
        "SELECT 1 FROM a FULL JOIN b USING (c)",
        "SELECT 1 WHERE a IS NOT DISTINCT FROM b",
        "SELECT headers ->> '$.id' FROM delayed",
        "SELECT unixepoch('now')",
        "CREATE TABLE a (b TEXT) STRICT",
    ],
)
def test_newer_ones_are_found(statement: str) -> None:
    assert NEWER.search(statement) is not None


def test_older_ones_are_not() -> None:
    statement = "SELECT a, iif(count(*) > 1, 1, NULL) FROM b LEFT JOIN c USING (d) GROUP BY a HAVING count(*) > 1"
    assert NEWER.search(statement) is None
