"""``postdate pipeline sweep``: send due messages to their queues, once or continuously."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from postdate.cli import command as cli
from postdate.cli.output import print_pairs
from postdate.cli.pipeline.common import SparkOptions, app, log, run_on_spark, stop_on_signal

if TYPE_CHECKING:
    from postdate.pipeline.session import SparkSession
    from postdate.pipeline.sweep import SweepResult


@cli.command(app, "sweep")
def sweep(
    use: cli.Use,
    continuous: Annotated[
        bool, cli.option("--continuous", "Continue until SIGTERM or Ctrl-C; needs --checkpoint.")
    ] = False,
    checkpoint: Annotated[
        str | None, cli.option("--checkpoint", "Folder of the query, to continue it later.", metavar="DIR")
    ] = None,
    ledger: Annotated[
        str | None, cli.option("--ledger", "Folder of Parquet files to which outcomes are added.", metavar="DIR")
    ] = None,
    slots: Annotated[
        int | None, cli.option("--slots", "Dispatchers at once; default: as many as Spark has cores.", min=1)
    ] = None,
    residency: Annotated[
        timedelta | None, cli.duration_option("--residency", "With --continuous: how long a task lasts; default: 30s.")
    ] = None,
    discard_lapsed: Annotated[bool, typer.Option("--discard-lapsed", hidden=True)] = False,
    allowance: Annotated[str | None, typer.Option("--allowance", hidden=True)] = None,
    log_level: cli.LogLevel = "INFO",
    *,
    cluster: SparkOptions,
) -> None:
    """Put due messages into their queues on Spark.

    It claims them as services do: both may run at once. Without --continuous, once: everything that is due now. Exit
    code 1 if some of it went to the error queue, or is due still.
    """
    if continuous and checkpoint is None:
        raise cli.usage_error("--continuous needs --checkpoint DIR")
    if not continuous and (checkpoint is not None or residency is not None):
        raise cli.usage_error("--checkpoint and --residency are for --continuous")
    if discard_lapsed or allowance is not None:
        raise cli.usage_error("leave out --discard-lapsed and --allowance: receivers discard by the same rule")
    from postdate.pipeline.dispatching import SweepSpec

    spec = SweepSpec.of(use.settings())
    if continuous:

        def run_query(spark: SparkSession) -> None:
            from postdate.pipeline.sweep import RESIDENCY, sweep_continuously

            assert checkpoint is not None
            with sweep_continuously(
                spark, spec, checkpoint=checkpoint, slots=slots, ledger=ledger, residency=residency or RESIDENCY
            ) as query:
                log.info("delivering from %s; checkpoint %s", spec.store.redacted_address, checkpoint)
                while not stop.is_set() and not query.wait(0.2):
                    pass
                log.info("stopping: finishing what is in hand")
            log.info("stopped")

        with cli.log_to_stderr(log_level), stop_on_signal() as stop:
            run_on_spark(run_query, cluster, long=True)
        return

    def run_once(spark: SparkSession) -> SweepResult:
        from postdate.pipeline.sweep import sweep as run

        return run(spark, spec, slots=slots, ledger=ledger)

    result = run_on_spark(run_once, cluster)
    use.report(
        result.to_json(),
        lambda: print_pairs(
            {
                "store": spec.store.redacted_address,
                "delivered": result.delivered,
                "expired": result.expired,
                "retried": result.retried,
                "moved to the error queue": result.failed,
                "due still": result.left,
                "ledger": result.ledger,
                "took": f"{result.seconds:.1f} s, {result.per_second:,.1f} messages/s",
            }
        ),
        succeeded=result.is_complete,
    )
