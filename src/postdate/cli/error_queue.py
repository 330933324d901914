"""``postdate errors``: show failed messages, return or discard them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from postdate import operations
from postdate.cli import command as cli
from postdate.cli.messages import print_unreadable
from postdate.cli.output import escape_control_characters, one_line, print_body, print_pairs, print_table
from postdate.messages import Headers
from postdate.operations.plain import format_count
from postdate.wiring import OpenDeployment

app = cli.create_group("errors", "List failed messages, correct them, and return them.")

T = TypeVar("T")

Queue = Annotated[
    str | None, cli.name_option("--queue", "Error queue; default: endpoint.error_queue.", metavar="QUEUE")
]
FailedQueue = Annotated[
    str | None, cli.name_option("--failed-queue", "Only messages that failed in this queue.", metavar="QUEUE")
]
Exception_ = Annotated[
    str | None, cli.name_option("--exception", "Only messages with this type of exception.", metavar="TYPE")
]
FailedText = Annotated[
    str | None, cli.option("--text", "Only messages with this text in reason or body.", metavar="TEXT")
]


_UNREADABLE = (
    "an unreadable message stays in its row: see `postdate messages list --unreadable`, repair it in the database, or "
    "`postdate messages discard NAME`"
)


def _refuse_set_aside(text: str | None) -> None:
    """Refuse ``--set-aside NAME`` of earlier versions, and name the commands that replace it."""
    if text is not None:  # Typer also passes the default value through this function.
        raise typer.BadParameter(_UNREADABLE)


SetAside = Annotated[Any, cli.option("--set-aside", "Gone.", parser=_refuse_set_aside, hidden=True)]


def _call_with_error_queue(
    use: cli.Use, queue: str | None, work: Callable[[OpenDeployment, str, datetime], Awaitable[T]]
) -> T:
    """Call ``work`` with the error queue that is named, or with the error queue of the settings."""
    return use.call_with_deployment(
        lambda deployment, now: work(deployment, queue or deployment.settings.endpoint.error_queue, now)
    )


@cli.command(app, "list")
def list_(
    use: cli.Use,
    queue: Queue = None,
    failed_queue: FailedQueue = None,
    exception: Exception_ = None,
    text: FailedText = None,
    set_aside: Annotated[bool, cli.option("--set-aside", "Gone.", hidden=True)] = False,
    limit: cli.Limit = 50,
) -> None:
    """List failed and unreadable messages, oldest first."""
    if set_aside:
        raise cli.usage_error(f"--set-aside was removed: {_UNREADABLE}")
    error_filter = operations.ErrorFilter(failed_queue, exception, text)
    errors = _call_with_error_queue(
        use, queue, lambda deployment, source, _: operations.list_errors(deployment, source, limit, error_filter)
    )
    use.report(errors, lambda: _print_list(errors, error_filter))


@cli.command(app, "groups")
def groups(use: cli.Use, queue: Queue = None) -> None:
    """Count failed messages by exception and failed queue."""
    errors = _call_with_error_queue(
        use, queue, lambda deployment, source, _: operations.group_errors(deployment, source)
    )
    use.report(errors, lambda: _print_groups(errors))


def _print_groups(errors: operations.ErrorGroups) -> None:
    if not errors.groups:
        print(f"queue {errors.queue} is empty")
        return
    rows = [
        (f"{each.count:,}", each.exception_type or "-", each.failed_queue or "-", each.last_at, one_line(each.reason))
        for each in errors.groups
    ]
    print_table(["messages", "exception", "queue", "last failed at", "last reason"], rows)


def _print_list(errors: operations.ErrorList, error_filter: operations.ErrorFilter) -> None:
    if errors.total:
        rows = [
            (each.message_id, each.failed_at, each.failed_queue, one_line(each.reason or each.exception_type or "-"))
            for each in errors.messages
        ]
        print_table(["id", "failed at", "queue", "reason"], rows)
    elif error_filter != operations.ErrorFilter():
        print(f"no message of queue {errors.queue} matches")
    else:
        print(f"queue {errors.queue} is empty")
    if errors.total > len(errors.messages):
        print(f"… and {errors.total - len(errors.messages):,} more; use --limit")
    if errors.unreadable.total:
        print()
        print_unreadable(errors.unreadable)


@cli.command(app, "show")
def show(
    use: cli.Use,
    message_id: cli.MessageId,
    set_aside: SetAside = None,
    queue: Queue = None,
) -> None:
    """Show a failed message: stack trace, headers, body."""
    details = _call_with_error_queue(
        use, queue, lambda deployment, source, now: operations.show_error(deployment, source, message_id, now)
    )
    use.report(details, lambda: _print_details(details))


def _print_details(details: operations.ErrorDetails) -> None:
    message = details.message
    print(f"message {escape_control_characters(message.message_id)} in queue {details.queue}")
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
    shown_headers = {name: value for name, value in details.headers.items() if name != Headers.EXCEPTION_STACK_TRACE}
    print()
    print_table(["header", "value"], shown_headers.items())
    if details.stack_trace:
        print(f"\n{escape_control_characters(details.stack_trace).rstrip()}")
    print()
    print_body(details.body)


@cli.command(app, "return")
def return_(
    use: cli.Use,
    message_ids: cli.SomeIds = None,
    queue: Queue = None,
    every: Annotated[bool, cli.option("--all", "Return every message of the error queue.")] = False,
    failed_queue: FailedQueue = None,
    exception: Exception_ = None,
    text: FailedText = None,
    to: Annotated[str | None, cli.name_option("--to", "Return them to this queue instead.", metavar="QUEUE")] = None,
    without_expiry: Annotated[
        bool, cli.option("--without-expiry", "Remove the expiry, so that expired messages are handled, too.")
    ] = False,
    set_aside: SetAside = None,
    dry_run: cli.DryRun = False,
) -> None:
    """Return failed messages to the queues where they failed. Remove the cause first."""
    treatment = operations.Treatment(to, without_expiry, dry_run=dry_run)
    _treat_messages(use, message_ids, queue, every, operations.ErrorFilter(failed_queue, exception, text), treatment)


@cli.command(app, "discard")
def discard(
    use: cli.Use,
    message_ids: cli.SomeIds = None,
    queue: Queue = None,
    every: Annotated[bool, cli.option("--all", "Discard every message of the error queue.")] = False,
    failed_queue: FailedQueue = None,
    exception: Exception_ = None,
    text: FailedText = None,
    dry_run: cli.DryRun = False,
) -> None:
    """Discard failed messages permanently."""
    treatment = operations.Treatment(discard=True, dry_run=dry_run)
    _treat_messages(use, message_ids, queue, every, operations.ErrorFilter(failed_queue, exception, text), treatment)


def _treat_messages(
    use: cli.Use,
    message_ids: list[str] | None,
    queue: str | None,
    every: bool,
    error_filter: operations.ErrorFilter,
    treatment: operations.Treatment,
) -> None:
    """Return messages, or discard them."""
    action = "discard" if treatment.discard else "return"
    if [bool(message_ids), every, error_filter != operations.ErrorFilter()].count(True) != 1:
        raise cli.usage_error(
            f"name the messages to {action}, or select them: --all, --failed-queue, --exception, --text"
        )
    if message_ids and treatment.dry_run:
        raise cli.usage_error("--dry-run is for --all, --failed-queue, --exception and --text")

    async def work(deployment: OpenDeployment, source: str, now: datetime) -> list[operations.ReturnResult]:
        if not message_ids:
            return await operations.return_all(
                deployment, source, now, error_filter, treatment, cli.create_progress_printer()
            )
        return await operations.return_messages(deployment, source, message_ids, now, treatment)

    results = _call_with_error_queue(use, queue, work)
    if treatment.dry_run:
        use.report({"messages": results, "dry_run": True}, lambda: _print_preview(results, action))
        return
    use.report(
        {"messages": results}, lambda: _print_results(results, action), succeeded=all(each.done for each in results)
    )


def _print_preview(results: list[operations.ReturnResult], action: str) -> None:
    refused = [each for each in results if not each.done]
    print(f"{format_count(len(results) - len(refused), 'message')} would be {action}ed")
    if refused:
        _print_results(refused, action)


@cli.command(app, "edit")
def edit(
    use: cli.Use,
    message_id: cli.MessageId,
    queue: Queue = None,
    body: Annotated[str | None, cli.option("--body", "The new body.", metavar="TEXT|@FILE")] = None,
    header: Annotated[
        list[str] | None, cli.option("--header", "A header to set; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    to: Annotated[str | None, cli.name_option("--to", "Send it to this queue instead.", metavar="QUEUE")] = None,
) -> None:
    """Send a failed message changed, under a new id. The failed one stays in the error queue."""
    if body is None and not header:
        raise cli.usage_error("there is nothing to change: give --body or --header")
    change = operations.Edit(None if body is None else _read_content("--body", body), cli.pairs_of(header), to)
    result = _call_with_error_queue(
        use, queue, lambda deployment, source, now: operations.edit(deployment, source, message_id, now, change)
    )
    name, queue = escape_control_characters(message_id), escape_control_characters(result.queue)
    text = f"{name}: sent to {queue} as {result.message_id}"
    use.report({"message": result}, lambda: print(text))


def _read_content(option: str, text: str) -> bytes:
    """Return the content of a file for ``@FILE``. Otherwise return the bytes of the text."""
    if not text.startswith("@"):
        return text.encode(errors="surrogateescape")
    path = Path(text[1:])
    try:
        return path.read_bytes()
    except OSError as error:
        raise cli.usage_error(f"{option}: {path} cannot be read: {error.strerror}") from error


@cli.command(app, "delete", hidden=True)
def delete(
    use: cli.Use, names: Annotated[list[str] | None, typer.Argument(parser=cli.NAME, metavar="[NAME…]")] = None
) -> None:
    """Say which command replaces this one."""
    raise cli.usage_error(f"`errors delete` was removed: {_UNREADABLE}")


def _print_results(results: list[operations.ReturnResult], action: str) -> None:
    if not results:
        print(f"nothing to {action}")
    for each in results:
        remark = f": {escape_control_characters(each.remark)}" if each.remark else ""
        destination_text = f" to {escape_control_characters(each.queue)}" if action == "return" else ""
        outcome = f"{action}ed{destination_text}{remark}" if each.done else f"not {action}ed{remark}"
        print(f"{escape_control_characters(each.message_id)}: {outcome}")
