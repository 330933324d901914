"""``docs/faults.md``: one row for every case, made from the figures that are kept beside the cases.

``python -m tests.faults.table FOLDER`` takes in what a run has left in FOLDER (``build/faults``), and writes the table
anew; ``--before`` takes it in as what was measured before ADR 19. The text around the table is written by hand.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults.cases import CASES
from tests.faults.lab import Case

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
FIGURES = Path(__file__).with_name("figures.json")

Kept = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""What came of each case, by its name: ``before`` and ``now``."""

_BEGIN, _END = "<!-- made by tests/faults/table.py: begin -->", "<!-- end -->"
_COLUMNS = (
    "fault",
    "where",
    "run by",
    "promise",
    "what is tested",
    "messages",
    "lost",
    "twice",
    "early",
    "error queue",
    "recovery, s",
    "retried",
    "CPU, s",
    "before",
)


def page(kept: Kept, text: str) -> str:
    """Return the text of the page with the table made anew."""
    lines = [_BEGIN, _row(_COLUMNS), "|" + "---|" * len(_COLUMNS)]
    lines += [_row(_cells(case, kept.get(case.name, {}))) for case in CASES]
    above, _, rest = text.partition(_BEGIN)
    return above + "\n".join([*lines, _END]) + rest.partition(_END)[2]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _cells(case: Case, kept: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    figures = kept.get("now", {})
    return (
        case.title,
        case.deployment,
        "`make soak`" + (", in short `make test`" if case.in_gate else ""),
        promised(case),
        case.tests,
        *(_number(figures, name) for name in ("messages", "lost", "doubled", "early", "error_queue")),
        recovery(figures) + (" from the beginning" if figures and case.promise.while_it_lasts else ""),
        _number(figures, "retried"),
        _number(figures, "cpu_seconds"),
        before(kept.get("before", {})),
    )


def promised(case: Case) -> str:
    """Return the promise of a case in words."""
    return "none twice" if case.promise.doubled == 0 else f"≤ {case.promise.doubled:,} twice"


def _number(figures: Mapping[str, Any], name: str) -> str:
    return "-" if figures.get(name) is None else f"{figures[name]:,}"


def recovery(figures: Mapping[str, Any]) -> str:
    """Return how long it took, in words."""
    if not figures:
        return "-"
    seconds = figures["recovery_seconds"]
    return "never" if seconds is None else f"{seconds:.1f}"


def before(figures: Mapping[str, Any]) -> str:
    """Return what was bad before, or that nothing was."""
    if not figures:
        return "-"
    said = [f"{figures[name]:,} {words}" for name, words in _BAD if figures[name]]
    if figures["copies"] > figures["doubled"]:
        said.append(f"{figures['copies']:,} copies")
    if figures["retried"]:
        said.append(f"{figures['retried']:,} retried")
    if figures["stopped_seconds"] is None:
        said.append("ended, or does not stop")
    if said or figures["recovery_seconds"] is None:
        return ", ".join(said)
    return f"recovery {recovery(figures)} s"


_BAD = (("lost", "not delivered"), ("doubled", "twice"), ("early", "early"), ("error_queue", "in the error queue"))


def load() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what is kept; see ``Kept``."""
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def with_figures_of(kept: Kept, folder: Path, when: str) -> Kept:
    """Return what is kept with the figures of a run, in the order of the cases."""
    new = {name: dict(figures) for name, figures in kept.items()}
    for file in folder.glob("*.json"):
        figures = json.loads(file.read_text(encoding="utf-8"))
        new.setdefault(figures.pop("case"), {})[when] = figures
    return {case.name: new[case.name] for case in CASES if case.name in new}


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    when = "before" if "--before" in arguments else "now"
    kept: Kept = load()
    for folder in (each for each in arguments if not each.startswith("--")):
        kept = with_figures_of(kept, Path(folder), when)
    FIGURES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
