"""``postdate pipeline loads``: what waits under the names of loads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from postdate.cli.command import NAME, DryRun, Use, command, create_group, option
from postdate.cli.output import escape_control_characters, print_pairs, print_table
from postdate.cli.pipeline.common import SparkOptions, app, run_on_spark, store_of
from postdate.cli.pipeline.schedule import InputOptions, Sources, TasksOfInput, report_scheduled

if TYPE_CHECKING:
    from postdate.pipeline.loads import LoadDetails, LoadList, UndoResult
    from postdate.pipeline.session import SparkSession

loads = create_group("loads", "What waits under the names that schedule --load has given.")
app.add_typer(loads)

_Tasks = Annotated[
    int | None,
    option("--partitions", "Tasks that read at once; default: as many as Spark runs.", min=1, metavar="N"),
]

LoadName = Annotated[str, typer.Argument(parser=NAME, metavar="NAME", help="Name of the load.")]


@command(loads, "list")
def list_all(use: Use, partitions: _Tasks = None, *, cluster: SparkOptions) -> None:
    """List the loads that have pending messages."""
    store = store_of(use)

    def job(spark: SparkSession) -> LoadList:
        from postdate.pipeline.loads import list_loads

        return list_loads(spark, store, partitions=partitions)

    result = run_on_spark(job, cluster)
    use.report(result.to_json(), lambda: _print_list(result))


def _print_list(result: LoadList) -> None:
    if not result.loads:
        print("no message waits under a load")
        return
    rows = [(each.load, each.messages, each.first_due, each.last_due, each.destinations) for each in result.loads]
    print_table(["load", "messages", "first due", "last due", "queues"], rows)


@command(loads, "show")
def show(use: Use, name: LoadName, partitions: _Tasks = None, *, cluster: SparkOptions) -> None:
    """Show what waits under a load.

    It is counted by queue and day, and the messages that are due first are listed.
    """
    store = store_of(use)

    def job(spark: SparkSession) -> LoadDetails:
        from postdate.pipeline.loads import show_load

        return show_load(spark, store, name, partitions=partitions)

    result = run_on_spark(job, cluster)
    use.report(result.to_json(), lambda: _print_details(result))


def _print_details(result: LoadDetails) -> None:
    load = result.load
    print_pairs(
        {
            "store": result.store,
            "load": load.load,
            "messages": load.messages,
            "first due": load.first_due,
            "last due": load.last_due,
            "queues": load.destinations,
        }
    )
    print()
    print_table(["queue", "day", "messages"], [(each.destination, each.day, each.messages) for each in result.groups])
    if result.more_groups:
        print(f"… and {result.more_groups:,} more")
    print()
    print_table(["id", "due", "queue"], [tuple(each.values()) for each in result.sample])


@command(loads, "diff")
def diff(
    use: Use,
    name: LoadName,
    sources: Sources,
    table: InputOptions,
    partitions: TasksOfInput = None,
    *,
    cluster: SparkOptions,
) -> None:
    """Compare a load with a table.

    Changes nothing: it is schedule --sync --dry-run. Exit code 1 if rows are no message or conflict with the store.
    """
    store = store_of(use)
    result = table.run(sources, store, partitions, cluster, load=name, sync=True, dry_run=True)
    report_scheduled(use, result, store)


@command(loads, "undo")
def undo(
    use: Use, name: LoadName, partitions: _Tasks = None, dry_run: DryRun = False, *, cluster: SparkOptions
) -> None:
    """Cancel everything that waits under a load.

    What is delivered already stays delivered, and messages of other loads are left alone.
    """
    store = store_of(use)

    def job(spark: SparkSession) -> UndoResult:
        from postdate.clock import SystemClock
        from postdate.pipeline.loads import undo_load

        return undo_load(spark, store, name, SystemClock().now(), partitions=partitions, dry_run=dry_run)

    result = run_on_spark(job, cluster)
    use.report(result.to_json(), lambda: _print_undone(result))


def _print_undone(result: UndoResult) -> None:
    print_pairs(
        {
            "store": result.store,
            "load": result.load,
            "messages": result.waiting,
            "would be cancelled" if result.is_dry_run else "cancelled": result.cancelled,
            **({"delivered meanwhile": result.delivered} if result.delivered else {}),
        }
    )
    if result.sample:
        print("\nwould be cancelled, for example:")
        for row in result.sample:
            print("  " + escape_control_characters(json.dumps(row, ensure_ascii=False)))
