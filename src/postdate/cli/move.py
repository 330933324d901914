"""``postdate move``: move pending messages from one store into another."""

from __future__ import annotations

import os
from typing import Annotated

import anyio
import typer

from postdate.cli.command import DryRun, Use, command, create_progress_printer, option, usage_error
from postdate.cli.output import escape_control_characters, print_pairs
from postdate.config import load_settings
from postdate.operations.plain import format_count
from postdate.operations.store_move import StoreMove, StoreMoveResult, move_store

app = typer.Typer(name="move", add_completion=False)


@command(app, "move")
def move(
    use: Use,
    source: Annotated[
        str, option("--from", "Address of the old store; env:NAME and file:PATH are allowed.", metavar="ADDRESS")
    ],
    target: Annotated[
        str | None, option("--to", "Address of the new store; default: the store of the settings.", metavar="ADDRESS")
    ] = None,
    from_schema: Annotated[str | None, option("--from-schema", "Schema of the old store, if not the default.")] = None,
    from_table: Annotated[str | None, option("--from-table", "Table of the old store, if not the endpoint's.")] = None,
    services_stopped: Annotated[
        bool,
        option("--services-stopped", "Confirm that no service delivers from the old store, and skip that check."),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Move pending messages to another store. Services of the target may run.

    Stop the services of the old store first. After an interruption run it again before you start them. Exit code 1 if
    something stays in the old store.
    """
    if target is not None and use.store is not None:
        raise usage_error("--to and --store both name the new store: give one of them")
    settings = use.settings()
    if target is not None:
        addresses = {"store.address": target, "transport.address": use.transport}
        settings = load_settings(use.config, os.environ, addresses, origin="option --to")
    plan = StoreMove(source, settings, from_schema, from_table, services_stopped, dry_run)
    result = anyio.run(move_store, plan, create_progress_printer())
    use.report(result, lambda: _print_result(result), succeeded=result.is_complete)


def _print_result(result: StoreMoveResult) -> None:
    prefix = "would be " if result.dry_run else ""
    print_pairs(
        {
            "from": result.source,
            "to": result.target,
            "waited": result.waiting_before,
            f"{prefix}moved": result.moved,
            "known before": result.known_before or None,
            f"{prefix}refused": result.refused,
            "still waiting": result.waiting,
        }
    )
    for queue, count in result.destinations.items():
        print(f"{format_count(count, 'message')} for {escape_control_characters(queue)}")
    for queue, limits in result.limits.items():
        print(f"limits of {escape_control_characters(queue)}: {limits}")
    for each in result.refusals:
        print(f"refused: {escape_control_characters(each.message_id)}: {escape_control_characters(each.reason)}")
    if len(result.refusals) < result.refused:
        print(f"refused in all: {result.refused:,}")
    for remark in result.remarks:
        print(f"note: {escape_control_characters(remark)}")
    if not result.dry_run:
        rate = result.moved / max(result.took_seconds, 1e-9)
        print(f"took {result.took_seconds:.1f} s, {rate:,.0f} messages/s")
