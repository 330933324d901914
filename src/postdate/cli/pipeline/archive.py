"""``postdate pipeline archive`` and ``restore``: move records from the store into Parquet, and back."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from postdate.cli.command import Use, command, duration_option, instant_option, option, usage_error
from postdate.cli.output import print_pairs
from postdate.cli.pipeline.common import DEFAULT_PARTITIONS, Partitions, SparkOptions, app, run_on_spark, store_of

if TYPE_CHECKING:
    from postdate.pipeline.archive import ArchiveResult, RestoreResult
    from postdate.pipeline.session import SparkSession

Folder = Annotated[str, typer.Argument(metavar="DIR", help="The archive: a folder that all of Spark can reach.")]


@command(app, "archive")
def archive(
    use: Use,
    folder: Folder,
    before: Annotated[datetime | None, instant_option("--before", "Messages that ended before; ISO 8601.")] = None,
    older_than: Annotated[
        timedelta | None, duration_option("--older-than", "Messages that ended so long ago: 30d.")
    ] = None,
    forget_ids: Annotated[bool, option("--forget-ids", "Remove the ids as well: they may be used again then.")] = False,
    partitions: Partitions = None,
    *,
    cluster: SparkOptions,
) -> None:
    """Move records of messages that have ended to Parquet, by day.

    What was written is read back and compared before anything is taken out. Run it again after a failure of any kind.
    """
    if (before is None) == (older_than is None):
        raise usage_error("give either --before TIME or --older-than DURATION")
    store = store_of(use)

    def job(spark: SparkSession) -> ArchiveResult:
        from postdate.clock import SystemClock
        from postdate.pipeline.archive import archive as run

        now = SystemClock().now()
        limit = now - older_than if older_than is not None else before
        assert limit is not None
        return run(
            spark,
            store,
            folder,
            limit,
            now,
            keep_ids=not forget_ids,
            partitions=partitions or DEFAULT_PARTITIONS,
        )

    result = run_on_spark(job, cluster)
    use.report(result.to_json(), lambda: _print_archived(result))


def _print_archived(result: ArchiveResult) -> None:
    print_pairs(
        {
            "store": result.store,
            "archive": result.archive,
            "messages": f"{result.messages:,}",
            "records": f"{result.records:,}",
            "already there": f"{result.already_there:,}",
            "taken out": f"{result.pruned:,}",
            "ids kept": f"{result.ids_kept:,}",
            "ids forgotten": f"{result.ids_forgotten:,}",
            "took": f"{result.took_seconds:.1f} s",
        }
    )
    for day in result.days:
        print(f"{day.day}: {day.messages:,} messages, {day.records:,} records")


@command(app, "restore")
def restore(
    use: Use,
    folder: Folder,
    ids: Annotated[list[str] | None, option("--id", "This message; repeatable. Default: all.", metavar="ID")] = None,
    ended_from: Annotated[datetime | None, instant_option("--ended-from", "Messages that ended then or later.")] = None,
    ended_to: Annotated[datetime | None, instant_option("--ended-to", "Messages that ended before then.")] = None,
    partitions: Partitions = None,
    *,
    cluster: SparkOptions,
) -> None:
    """Restore the records of an archive to the store. Existing records stay unchanged."""
    store = store_of(use)

    def job(spark: SparkSession) -> RestoreResult:
        from postdate.pipeline.archive import restore as run

        return run(
            spark,
            store,
            folder,
            ids=ids,
            ended_from=ended_from,
            ended_to=ended_to,
            partitions=partitions or DEFAULT_PARTITIONS,
        )

    result = run_on_spark(job, cluster)
    use.report(
        result.to_json(),
        lambda: print_pairs(
            {
                "store": result.store,
                "archive": result.archive,
                "messages": f"{result.messages:,}",
                "left out": f"{result.left_out:,}",
                "took": f"{result.took_seconds:.1f} s",
            }
        ),
    )
