"""Prints the most that each statement reads in each state of the statistics: one table for each kind of database.

eval "$(scripts/services env)"
.venv/bin/python -m tests.plans
"""

import os
import sys
import tempfile
from pathlib import Path

import anyio
from tests.plans.meters import Meter
from tests.plans.sites import BESIDE, PLANS, MariaDbSite, PostgresSite, Site, SqliteSite, Statistics, measure
from tests.plans.work import BATCH

_SHOWN = 120
"""Characters of a statement."""

Rows = dict[tuple[str, str], dict[Statistics, int]]


def note(rows: Rows, statistics: Statistics, meter: Meter) -> None:
    """Add what was measured in one state."""
    for each in meter.worst():
        row = rows.setdefault((each.step, each.statement), {})
        row[statistics] = max(row.get(statistics, 0), each.rows)


def table(rows: Rows) -> str:
    """Return the rows as a table of Markdown."""
    lines = [
        f"| step | statement | {' | '.join(each.value for each in Statistics)} |",
        f"|---|---|{'---:|' * len(Statistics)}",
    ]
    for (step, statement), row in sorted(rows.items()):
        shown = statement[:_SHOWN].replace("|", "\\|").replace("`", "")
        lines.append(f"| {step} | `{shown}` | {' | '.join(str(row.get(each, '')) for each in Statistics)} |")
    return "\n".join(lines)


def sites(kind: str, folder: Path) -> list[Site]:
    """Return the sites of a kind of database; PostgreSQL has one for each kind of plan."""
    if kind == "PostgreSQL":
        return [PostgresSite(os.environ["POSTDATE_POSTGRES_URL"], plans) for plans in PLANS]
    return [MariaDbSite(os.environ["POSTDATE_MARIADB_URL"]) if kind == "MariaDB" else SqliteSite(folder)]


async def main() -> None:
    """Measure everything."""
    for kind, unit in (("PostgreSQL", "rows"), ("MariaDB", "rows"), ("SQLite", "steps of the virtual machine")):
        rows: Rows = {}
        for statistics in Statistics:
            with tempfile.TemporaryDirectory() as folder:
                for site in sites(kind, Path(folder)):
                    note(rows, statistics, await measure(site, statistics))
        title = f"## {kind}: {unit}, for batches of {BATCH}, with {BESIDE:,} rows beside them"
        sys.stdout.write(f"{title}\n\n{table(rows)}\n\n")


if __name__ == "__main__":
    anyio.run(main)
