"""``postdate errors``: what failed, why, and sending it back."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from postdate.cli.arguments import Limit, MessageId
from postdate.cli.command import Use, command, group, wrong_usage
from postdate.cli.exits import Exit

if TYPE_CHECKING:
    from postdate.operations import ErrorDetails, ErrorList, Returned
    from postdate.wiring import Plant

app = group("errors", "Look at failed messages, and send them back.")

Queue = Annotated[str | None, typer.Option("--queue", help="Error queue; default: endpoint.error_queue.")]


@command(app, "list")
def list_(use: Use, queue: Queue = None, limit: Limit = 50) -> None:
    """List failed messages, the oldest first."""
    from postdate import operations

    async def work(plant: Plant, now: datetime) -> ErrorList:
        return await operations.list_errors(plant, queue or plant.settings.endpoint.error_queue, limit)

    found = use.work(work)
    use.report(found, lambda: _print_list(found))


def _print_list(found: ErrorList) -> None:
    from postdate.cli.output import one_line, print_table

    if not found.total:
        print(f"queue {found.queue} is empty")
        return
    rows = [
        (each.message_id, each.failed_at, each.failed_queue, one_line(each.reason or each.exception_type or "-"))
        for each in found.messages
    ]
    print_table(["id", "failed at", "queue", "reason"], rows)
    if found.total > len(found.messages):
        print(f"… and {found.total - len(found.messages):,} more; use --limit")


@command(app, "show")
def show(use: Use, message_id: MessageId, queue: Queue = None) -> None:
    """Show a failed message: the stack trace, its headers, its body."""
    from postdate import operations

    async def work(plant: Plant, now: datetime) -> ErrorDetails:
        return await operations.show_error(plant, queue or plant.settings.endpoint.error_queue, message_id)

    found = use.work(work)
    use.report(found, lambda: _print_details(found))


def _print_details(found: ErrorDetails) -> None:
    from postdate.cli.output import clean, print_pairs, print_table
    from postdate.messages import Headers

    message = found.message
    print(f"message {clean(message.message_id)} in queue {found.queue}")
    print_pairs(
        {
            "failed at": message.failed_at,
            "in queue": message.failed_queue,
            "reason": message.reason,
            "exception": message.exception_type,
            "error code": message.error_code,
            "held by process": message.held_by and str(message.held_by),
        }
    )
    shown = {name: value for name, value in found.headers.items() if name != Headers.EXCEPTION_STACK_TRACE}
    print()
    print_table(["header", "value"], shown.items())
    if found.stack_trace:
        print(f"\n{clean(found.stack_trace).rstrip()}")
    print(f"\nbody ({found.body.size_bytes:,} bytes{'' if found.body.base64 is None else ', base64'})")
    if found.body.size_bytes:
        print(clean(found.body.text if found.body.text is not None else found.body.base64 or ""))


Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]…", help="Ids of messages; or use --all.")]
All = Annotated[bool, typer.Option("--all", help="Return every message of the error queue.")]
To = Annotated[str | None, typer.Option("--to", metavar="QUEUE", help="Put them there instead of where they failed.")]

WithoutExpiry = Annotated[
    bool, typer.Option("--without-expiry", help="Take off when their use ends: what is past it is handled, too.")
]


@command(app, "return")
def return_(
    use: Use,
    message_ids: Ids = None,
    queue: Queue = None,
    every: All = False,
    to: To = None,
    without_expiry: WithoutExpiry = False,
) -> None:
    """Put failed messages back where they failed, to be tried again. Mend the cause first."""
    from postdate import operations

    if bool(message_ids) == every:
        raise wrong_usage("name the messages to return, or all of them with --all")

    async def work(plant: Plant, now: datetime) -> list[Returned]:
        source = queue or plant.settings.endpoint.error_queue
        if every:
            return await operations.return_all(plant, source, now, to=to, without_expiry=without_expiry)
        ids = message_ids or []
        return await operations.return_messages(plant, source, ids, now, to=to, without_expiry=without_expiry)

    results = use.work(work)
    use.report({"messages": results}, lambda: _print_returned(results))
    if not all(each.done for each in results):
        raise typer.Exit(Exit.NOT_KEPT)


def _print_returned(results: list[Returned]) -> None:
    from postdate.cli.output import clean

    if not results:
        print("nothing to return")
    for each in results:
        remark = f": {clean(each.remark)}" if each.remark else ""
        said = f"returned to {clean(each.queue)}{remark}" if each.done else f"not returned{remark}"
        print(f"{clean(each.message_id)}: {said}")
