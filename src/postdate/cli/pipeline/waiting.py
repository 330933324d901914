"""``postdate pipeline waiting``: show the rows that wait in the checkpoint of ``pipeline delay``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from postdate.cli.command import Use, command, option
from postdate.cli.output import print_pairs, print_table
from postdate.cli.pipeline.common import SparkOptions, app, run_on_spark

if TYPE_CHECKING:
    from postdate.pipeline.delay import WaitingSummary
    from postdate.pipeline.session import SparkSession


@command(app, "waiting")
def waiting(
    use: Use,
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder in which the rows wait.")],
    by: Annotated[
        str | None, option("--by", "Count the rows by a column, such as the destination.", metavar="COLUMN")
    ] = None,
    first: Annotated[int, option("--first", "Show this many rows that are due first.", min=0, metavar="N")] = 0,
    *,
    cluster: SparkOptions,
) -> None:
    """Show the rows that wait in a checkpoint of pipeline delay.

    Changes nothing; the query may go on.
    """
    from postdate.pipeline.delay import delay_conf

    def job(spark: SparkSession) -> WaitingSummary:
        from postdate.clock import SystemClock
        from postdate.pipeline.delay import read_waiting, summarize_waiting

        return summarize_waiting(read_waiting(spark, checkpoint), SystemClock().now(), by, first)

    summary = run_on_spark(job, cluster, delay_conf())
    result = {**summary.total, "by": summary.groups, "first": summary.rows}
    use.report(result, lambda: _print_summary(summary, by))


def _print_summary(summary: WaitingSummary, by: str | None) -> None:
    total = summary.total
    print_pairs(
        {
            "rows waiting": total["rows"],
            "overdue": total["overdue"],
            "earliest due": total["earliest"],
            "latest due": total["latest"],
        }
    )
    if summary.groups:
        print()
        lines = [
            [_cell(group["value"]), group["rows"], group["overdue"], group["earliest"]] for group in summary.groups
        ]
        print_table([by or "", "rows", "overdue", "earliest due"], lines)
    if summary.rows:
        print()
        print_table(list(summary.rows[0]), [list(map(_cell, row.values())) for row in summary.rows])


def _cell(value: str | None) -> str:
    return "" if value is None else value
