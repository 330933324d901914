"""``python -m examples.flights``: schedule, deliver and audit on real input."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from postdate.cli.entry import run
from postdate.errors import ConfigurationError

if TYPE_CHECKING:
    from examples.flights.show import DemoResult


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def demo(
    year: Annotated[
        bool, typer.Option("--year", help="Every message of 2013, about a million, delivered at full speed.")
    ] = False,
    day: Annotated[
        datetime, typer.Option("--day", formats=["%Y-%m-%d"], help="A day of 2013, by New York's clocks.")
    ] = datetime(2013, 7, 11),  # noqa: DTZ001 - only the date counts
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, max=1440, help="How long the day takes.")] = 1.0,
    consumers: Annotated[int, typer.Option("--consumers", min=1, help="Consumer processes, with --year.")] = 1,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Keep database and report here; must not hold an earlier demo.")
    ] = None,
    report: Annotated[Path, typer.Option("--report", help="Where to write the report.")] = Path(
        "postdate-demo-report.html"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Deliver reminders for real flights on time, and prove it.

    All 336,776 flights that left New York in 2013: Spark schedules a check-in reminder, a boarding call and a follow-up
    for each; a service process delivers them when due; a consumer process handles them; a Spark audit proves that
    nothing was lost, doubled or early. Exit status 0 only then.
    """
    # Imported here: it brings Spark, which the help need not wait for.
    from examples.flights.show import Demo

    if not year and day.year != 2013:
        raise ConfigurationError(f"the flights are those of 2013; {day:%Y-%m-%d} is another year")
    console = Console(quiet=as_json)
    with _folder(folder) as place:
        show = Demo(place, console)
        outcome = show.year(consumers) if year else show.day(day.date(), minutes)
        if folder is None:
            shutil.copyfile(outcome.report, report)
    if as_json:
        typer.echo(json.dumps(_json(outcome, str(report if folder is None else outcome.report))))
    else:
        _print(outcome, console, report if folder is None else outcome.report)
    if not outcome.audit.is_clean:
        raise typer.Exit(1)


@contextmanager
def _folder(folder: Path | None) -> Generator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("postdate-demo*")):
            raise ConfigurationError(
                f"{folder} holds an earlier demo; name another folder or remove its postdate-demo*"
            )
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="postdate-demo-") as temporary:
        yield Path(temporary)


def _print(outcome: DemoResult, console: Console, report: Path) -> None:
    table = Table(title="What the audit found", title_justify="left", show_header=False)
    for name, value in outcome.audit.table():
        table.add_row(name, value)
    console.print(table)
    if outcome.speed != 1:
        real = (outcome.audit.lateness.p99_seconds or 0) / outcome.speed * 1000
        console.print(
            f"Lateness is in seconds of that day's clock; its 99th percentile was {real:.1f} ms of real time."
        )
    for finding in outcome.audit.findings:
        console.print(f"{finding.name}: {finding.count:,}, for example {', '.join(finding.sample[:3])}")
    kept = "Nothing was lost, doubled or early." if outcome.audit.is_clean else "The promise was NOT kept."
    console.print(f"[bold]{kept}[/] Report: {report}")


def _json(outcome: DemoResult, report: str) -> dict[str, Any]:
    audit = outcome.audit
    return {
        "scheduled_by_spark": outcome.scheduled.accepted,
        "schedule_seconds": round(outcome.scheduled.seconds, 1),
        "clock_speed": outcome.speed,
        "clean": audit.is_clean,
        **asdict(audit.counts),
        **asdict(audit.lateness),
        "audit_seconds": round(audit.took_seconds, 1),
        "findings": [asdict(finding) for finding in audit.findings],
        "report": report,
    }


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], app, "python -m examples.flights"))
