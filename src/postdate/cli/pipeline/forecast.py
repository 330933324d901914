"""``postdate pipeline forecast``: count messages by due time and destination, and compute the rate that they need."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from postdate.cli.command import Use, command, duration_option, option, usage_error
from postdate.cli.output import escape_control_characters, print_pairs
from postdate.cli.pipeline import common

if TYPE_CHECKING:
    from postdate.pipeline.forecast_result import ForecastResult
    from postdate.pipeline.session import SparkSession


@command(common.app, "forecast")
def forecast(
    use: Use,
    tolerance: Annotated[timedelta, duration_option("--tolerance", "How late a message may be.")] = timedelta(
        seconds=1
    ),
    width: Annotated[Literal["auto", "minute", "hour", "day"], option("--width", "Intervals of the table.")] = "auto",
    herd_factor: Annotated[
        float, option("--herd-factor", "How many times the usual load makes a herd.", metavar="N")
    ] = 10.0,
    herd_least: Annotated[int, option("--herd-least", "Messages in a second that make a herd.", metavar="N")] = 1_000,
    html: Annotated[Path | None, option("--html", "Write a page for the browser.", metavar="FILE")] = None,
    load: Annotated[
        str | None, option("--load", "Write the table of the load to a new folder.", metavar="DIR|URI")
    ] = None,
    load_format: Annotated[Literal["parquet", "csv", "json"], option("--load-format", "Of the table.")] = "parquet",
    partitions: common.Partitions = None,
    engine: common.EngineOption = "auto",
    rate: Annotated[str | None, typer.Option("--rate", hidden=True)] = None,
    *,
    cluster: common.SparkOptions,
) -> None:
    """Forecast when messages fall due, and which rate they need.

    Changes nothing; services may go on.
    """
    if rate is not None:
        raise usage_error(
            "leave out --rate, and compare your rate with the needed rates, one of which is for --tolerance"
        )
    common.check_page(html, "page")
    common.check_tables()
    store = common.store_of(use)
    from postdate.pipeline.forecast_result import ForecastOptions

    options = ForecastOptions(width, tolerance, herd_factor, herd_least)

    def locally() -> ForecastResult:
        from postdate.clock import SystemClock
        from postdate.pipeline.local.folders import check_local_folder
        from postdate.pipeline.local.forecast import forecast as run

        folder = None if load is None else check_local_folder(load, "the table")
        result = run(store, SystemClock().now(), options, most_messages=choice.most_messages)
        if folder is not None:
            result.write_load(folder, load_format)
        return result

    def on_spark(spark: SparkSession) -> ForecastResult:
        from postdate.clock import SystemClock
        from postdate.pipeline.forecast import forecast as run
        from postdate.pipeline.outputs import check_new_folder

        folder = None if load is None else check_new_folder(spark, load, "the table")
        result = run(spark, store, SystemClock().now(), options, partitions=partitions or common.DEFAULT_PARTITIONS)
        if folder is not None:
            result.write_load(folder, load_format)
        return result

    spark_option = cluster.first_spark_option(partitions)
    choice = common.EngineChoice(engine, None if spark_option is None else f"{spark_option} is for Spark")
    result = choice.run(locally, on_spark, cluster)
    if html is not None:
        from postdate.pipeline.forecast_report import write_forecast

        write_forecast(result, html)
    use.report(result.to_json(), lambda: _print_forecast(result, html, load))


def _print_forecast(result: ForecastResult, html: Path | None, load: str | None) -> None:
    from postdate.pipeline.forecast_result import headlines

    print_pairs({"source": result.source, **dict(result.table()), "engine": result.engine})
    print()
    for sentence in headlines(result):
        print(escape_control_characters(sentence))
    for name, path in (("report", html), ("table", load)):
        if path is not None:
            print(f"{name}: {path}")
