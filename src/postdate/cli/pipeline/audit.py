"""``postdate pipeline audit``: compare scheduled messages with their outcomes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from postdate.cli.command import Use, command, duration_option, option
from postdate.cli.output import escape_control_characters, print_pairs
from postdate.cli.pipeline import common

if TYPE_CHECKING:
    from postdate.pipeline.audit import AuditResult
    from postdate.pipeline.session import SparkSession


@command(common.app, "audit")
def audit(
    use: Use,
    html: Annotated[Path | None, option("--html", "Write a report for the browser.", metavar="FILE")] = None,
    late_after: Annotated[
        timedelta, duration_option("--late-after", "From which lateness on a message counts as late.")
    ] = timedelta(seconds=1),
    records: Annotated[
        list[str] | None,
        option("--records", "Lake of history, or ledger of a sweep, to read as well; repeatable.", metavar="DIR"),
    ] = None,
    findings: Annotated[
        str | None,
        option("--findings", "New folder for every finding; …json: JSON lines, else Parquet.", metavar="DIR|URI"),
    ] = None,
    destinations: Annotated[
        str | None,
        option(
            "--destinations", "New folder for every destination; …json: JSON lines, else Parquet.", metavar="DIR|URI"
        ),
    ] = None,
    state: Annotated[
        str | None,
        option("--state", "Read only what is new since the last audit with this folder.", metavar="LOCATION"),
    ] = None,
    all_endpoints: Annotated[
        bool, option("--all-endpoints", "Every endpoint of the database, not only that of the settings.")
    ] = False,
    partitions: common.Partitions = None,
    engine: common.EngineOption = "auto",
    *,
    cluster: common.SparkOptions,
) -> None:
    """Compare what was scheduled with what was delivered.

    Exit code 1 if any message was lost, duplicated, early or orphaned; with --state, since the last audit. Changes
    nothing in the store; services may go on.
    """
    common.check_page(html, "report")
    common.check_tables()
    store = common.store_of(use)

    def write_page(result: AuditResult) -> None:
        if html is not None:
            from postdate.pipeline.report import write_html

            write_html(result, html)

    def locally() -> AuditResult:
        from postdate.clock import SystemClock
        from postdate.pipeline import audit as auditing
        from postdate.pipeline.engines import NeedsSpark
        from postdate.pipeline.local.audit import audit as run

        stores = auditing.endpoints_of(store) if all_endpoints else (store,)
        only = stores[0]
        if len(stores) > 1:
            raise NeedsSpark("several endpoints are audited together by Spark")
        result = run(
            only,
            SystemClock().now(),
            late_after=late_after,
            findings_to=findings,
            destinations_to=destinations,
            most_records=choice.most_messages,
        )
        write_page(result)
        return result

    def on_spark(spark: SparkSession) -> AuditResult:
        from postdate.clock import SystemClock
        from postdate.pipeline import audit as auditing

        stores = auditing.endpoints_of(store) if all_endpoints else (store,)
        return auditing.audit(
            spark,
            stores,
            SystemClock().now(),
            late_after=late_after,
            records=records or (),
            findings_to=findings,
            partitions=partitions or common.DEFAULT_PARTITIONS,
            destinations_to=destinations,
            state=state,
            publish=write_page,  # before the state is committed: the next audit finds what the page would have lost
        )

    only_spark = {"--state": state, "--records": records}
    spark_option = next((name for name, value in only_spark.items() if value), cluster.first_spark_option(partitions))
    choice = common.EngineChoice(engine, None if spark_option is None else f"{spark_option} is for Spark")
    result = choice.run(locally, on_spark, cluster)
    use.report(result.to_json(), lambda: _print_audit(result, html), succeeded=result.is_clean)


def _print_audit(result: AuditResult, html: Path | None) -> None:
    print_pairs({"store": result.store, **dict(result.table()), "engine": result.engine})
    if len(result.by_endpoint) > 1:
        for row in result.by_endpoint:
            counts = row.counts
            print(
                f"endpoint {escape_control_characters(row.key)}: {counts.scheduled:,} scheduled, {counts.delivered:,} "
                f"delivered, "
                f"{counts.pending:,} pending, {counts.lost:,} lost"
            )
    if result.counts.undelayed:
        print(f"{result.counts.undelayed:,} of the discarded were never delayed: they are in no other line")
    for finding in result.findings:
        ids = ", ".join(escape_control_characters(each) for each in finding.sample[:5])
        print(f"{finding.name}: {finding.count:,}, such as {ids}")
    if result.since is not None:
        print(f"findings are of messages with news since {result.since.isoformat()}, or that had not ended then")
    print("clean: nothing lost, duplicated, early or orphaned" if result.is_clean else "NOT CLEAN")
    for name, path in (("findings", result.findings_to), ("destinations", result.destinations_to)):
        if path is not None:
            print(f"{name}: {path}")
    if html is not None:
        print(f"report: {html}")
