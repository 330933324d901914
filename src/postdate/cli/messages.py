"""``postdate messages``: pending messages, and why a message has not arrived."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated

import typer

from postdate import operations
from postdate.cli import command as cli
from postdate.cli import output
from postdate.clock import later
from postdate.core.changes import EVERYTHING, Pending
from postdate.messages import DelayedMessage, Origin
from postdate.operations.plain import Event, format_count, format_time
from postdate.wiring import OpenDeployment

app = cli.create_group("messages", "List and change delayed messages.")


@dataclass(frozen=True, slots=True)
class MessageSelection:
    """Which of the messages that wait: options of commands for many of them."""

    queue: Annotated[str | None, cli.name_option("--queue", "Only messages for this queue.", metavar="QUEUE")] = None
    due_from: Annotated[
        datetime | None, cli.instant_option("--due-from", "Only messages due at this time or later.")
    ] = None
    due_to: Annotated[datetime | None, cli.instant_option("--due-to", "Only messages due before this time.")] = None
    header: Annotated[
        list[str] | None,
        cli.option("--header", "Only messages with this header; may be repeated.", metavar="NAME=VALUE"),
    ] = None
    text: Annotated[str | None, cli.option("--text", "Only messages with this text in the body.", metavar="TEXT")] = (
        None
    )
    failing: Annotated[bool, cli.option("--failing", "Only messages whose delivery has failed so far.")] = False
    zone: Annotated[
        str | None,
        cli.name_option("--zone", "Only messages due at a wall time in this zone, as Europe/Paris.", metavar="ZONE"),
    ] = None
    origin: Annotated[
        list[Origin] | None,
        cli.option("--origin", "Messages of this origin instead of those that were scheduled; may be repeated."),
    ] = None

    def pending_filter(self) -> Pending:
        headers, failing = cli.pairs_of(self.header) or None, self.failing or None
        pending_filter = Pending(self.queue, self.due_from, self.due_to, headers, self.text, failing, self.zone)
        return replace(pending_filter, origins=self.origin) if self.origin else pending_filter


@cli.command(app, "list")
def list_(
    use: cli.Use,
    which: MessageSelection,
    limit: cli.Limit = 50,
    after: Annotated[
        str | None,
        cli.option("--after", "Continue after the cursor that the previous list ended with.", metavar="CURSOR"),
    ] = None,
    unreadable: Annotated[
        bool, cli.option("--unreadable", "List unreadable rows of the store and the queues instead.")
    ] = False,
) -> None:
    """List pending messages by due time."""
    pending_filter = which.pending_filter()
    if unreadable:
        if pending_filter.has_condition or which.origin or after is not None:
            raise cli.usage_error("--unreadable allows only --limit: the fields of an unreadable row are unknown")
        rows = use.call_with_deployment(lambda deployment, _: operations.list_unreadable(deployment, limit))
        use.report(rows, lambda: print_unreadable(rows))
        return
    if not (pending_filter.has_condition or which.origin):
        pending_filter = EVERYTHING
    messages = use.call_with_deployment(
        lambda deployment, now: operations.list_messages(deployment, pending_filter, limit, now, after)
    )
    use.report(messages, lambda: _print_list(messages, pending_filter))


def _print_list(messages: operations.MessageList, pending_filter: Pending) -> None:
    if not messages.messages:
        print("no messages wait" if pending_filter is EVERYTHING else "no message matches")
        return
    rows = [
        (each.message_id, each.due, _state(each), each.destination, each.number_of_failures)
        for each in messages.messages
    ]
    output.print_table(["id", "due", "state", "queue", "failures"], rows)
    if messages.cursor is not None:
        print(
            f"… and more; continue with --after {output.escape_control_characters(shlex.quote(messages.cursor))}, or "
            f"see `postdate messages stats`"
        )


def _state(message: operations.MessageLine) -> str:
    state = "held" if message.held else "overdue" if message.overdue else "waiting"
    return state if message.origin == Origin.APPLICATION.value else f"{state}, {message.origin}"


def print_unreadable(unreadable_list: operations.UnreadableList) -> None:
    if not unreadable_list.total:
        print("every message can be read")
        return
    rows = [
        (each.name, each.at, each.queue or "(store)", each.message_id or "-", output.one_line(each.reason))
        for each in unreadable_list.messages
    ]
    output.print_table(["unreadable", "since", "in", "id", "reason"], rows)
    if unreadable_list.total > len(unreadable_list.messages):
        print(f"… and {unreadable_list.total - len(unreadable_list.messages):,} more; use --limit")


@cli.command(app, "show")
def show(
    use: cli.Use,
    message_id: Annotated[
        str | None, typer.Argument(parser=cli.NAME, metavar="[ID]", help="Id of the message; or use --unreadable.")
    ] = None,
    unreadable: Annotated[
        str | None, cli.name_option("--unreadable", "Show an unreadable row, as s12 or q3.", metavar="NAME")
    ] = None,
) -> None:
    """Show a message: its location, content and history.

    What cannot be read is shown in hex.
    """
    if unreadable is not None:
        if message_id is not None:
            raise cli.usage_error("name one: either the ID of a message, or --unreadable NAME")
        row = use.call_with_deployment(lambda deployment, _: operations.show_unreadable(deployment, unreadable))
        use.report(row, lambda: _print_unreadable_row(row))
        return
    if message_id is None:
        raise cli.usage_error("name one: the ID of a message, or --unreadable NAME")
    details = use.call_with_deployment(lambda deployment, _: operations.show_message(deployment, message_id))
    use.report(details, lambda: _print_details(details))


def _print_details(details: operations.MessageDetails) -> None:
    print(f"message {output.escape_control_characters(details.message_id)}")
    for location in details.places:
        _print_location(location)
    for row in details.unreadable:
        print()
        _print_unreadable_row(row)
    if details.history:
        print("\nhistory")
        _print_history(details.history)


def _print_unreadable_row(details: operations.UnreadableDetails) -> None:
    message = details.message
    print(f"{message.name}, unreadable since {output.time_or_dash(message.at)}")
    output.print_pairs({"in": message.queue or "(store)", "id": message.message_id, "reason": message.reason})
    for column, digits in details.raw.items():
        value = bytes.fromhex(digits)
        print(f"\n{output.escape_control_characters(column)} ({len(value):,} bytes)")
        if value:
            print(output.hexdump(value))


def _print_history(history: Sequence[Event]) -> None:
    rows = [(event.at, event.what, event.destination, event.detail) for event in history]
    output.print_table(["at", "what", "queue", "reason"], rows)


def _print_location(location: operations.MessageLocation) -> None:
    print(f"\nwaiting for queue {location.queue}" if location.where == "waiting" else f"\nin queue {location.queue}")
    output.print_pairs(
        {
            "due": location.due,
            "origin": location.origin if location.origin != Origin.APPLICATION.value else None,
            "next attempt": location.next_attempt_at if location.next_attempt_at != location.due else None,
            "expires": location.expires_at,
            "failures": location.number_of_failures or None,
            "held by process": location.held_by and str(location.held_by),
        }
    )
    if location.headers:
        output.print_table(["header", "value"], location.headers.items())
    output.print_body(location.body)


@cli.command(app, "explain")
def explain(use: cli.Use, message_id: cli.MessageId) -> None:
    """Explain why a message has not arrived, and what to do."""
    explanation = use.call_with_deployment(lambda deployment, now: operations.explain(deployment, message_id, now))
    use.report(
        explanation,
        lambda: _print_explanation(explanation),
        succeeded=explanation.state is not operations.MessageState.UNKNOWN,
    )


def _print_explanation(explanation: operations.Explanation) -> None:
    print(f"{output.escape_control_characters(explanation.message_id)}: {explanation.state.value.replace('_', ' ')}")
    print(f"  {output.escape_control_characters(explanation.headline)}")
    for fact in explanation.facts:
        print(f"  - {output.escape_control_characters(fact)}")
    for advice in explanation.advice:
        print(f"  > {output.escape_control_characters(advice)}")
    if explanation.history:
        print()
        _print_history(explanation.history)


@cli.command(app, "cancel")
def cancel(
    use: cli.Use, message_ids: cli.SomeIds = None, *, which: MessageSelection, dry_run: cli.DryRun = False
) -> None:
    """Cancel pending messages permanently.

    Those named, or all that the options say. Those that do not wait any more are left alone.
    """
    pending_filter = which.pending_filter()
    if _has_ids(message_ids, pending_filter, dry_run=dry_run):
        _change_named(use, message_ids or (), operations.cancel, "cancelled")
        return
    result = use.call_with_deployment(
        lambda store, now: operations.cancel_all(
            store, pending_filter, now, dry_run=dry_run, progress=cli.create_progress_printer()
        )
    )
    _report_many(use, result, "cancelled")


@cli.command(app, "discard")
def discard(
    use: cli.Use,
    names: Annotated[
        list[str], typer.Argument(parser=cli.NAME, metavar="NAME…", help="Unreadable rows, as s12 or q3.")
    ],
) -> None:
    """Delete unreadable rows permanently.

    For failed messages there is `errors discard`, for waiting ones `cancel`.
    """
    results = use.call_with_deployment(lambda deployment, now: operations.discard_unreadable(deployment, names, now))

    def lines() -> None:
        for each in results:
            print(
                f"{output.escape_control_characters(each.name)}: "
                f"{'discarded' if each.done else f'not discarded: {output.escape_control_characters(each.remark)}'}"
            )

    use.report({"messages": results}, lines, succeeded=all(each.done for each in results))


@cli.command(app, "reschedule")
def reschedule(
    use: cli.Use,
    message_ids: cli.SomeIds = None,
    delay: cli.Delay = None,
    at: cli.AtWall = None,
    at_zone: Annotated[
        str | None,
        cli.name_option(
            "--at-zone",
            "Time zone of --at, such as Europe/Paris; the message then follows the clocks there.",
            metavar="ZONE",
        ),
    ] = None,
    later_by: Annotated[
        timedelta | None, cli.duration_option("--later-by", "How much later each message becomes due.")
    ] = None,
    *,
    which: MessageSelection,
    dry_run: cli.DryRun = False,
) -> None:
    """Change the due time of pending messages. They are named, or all that match the options."""
    pending_filter = which.pending_filter()
    has_ids = _has_ids(message_ids, pending_filter, dry_run=dry_run)
    if (delay, at, later_by).count(None) != 2 or (has_ids and later_by is not None):
        choice = "--delay or --at" if has_ids else "--delay, --at or --later-by"
        raise cli.usage_error(f"give the time: either {choice}")

    wall_time = cli.wall_time_of(at, at_zone, "--at-zone")
    at = at if wall_time is None else wall_time.instant()

    def due(message: DelayedMessage | None, now: datetime) -> datetime:
        if later_by is not None and message is not None:
            return later(message.due, later_by)
        return at if at is not None else later(now, delay or timedelta(0))

    if has_ids:

        async def change(deployment: OpenDeployment, message_id: str, now: datetime) -> operations.Change:
            return await operations.reschedule(deployment, message_id, due(None, now), now, wall_time)

        _change_named(use, message_ids or (), change, "rescheduled")
        return
    result = use.call_with_deployment(
        lambda store, now: operations.reschedule_all(
            store,
            pending_filter,
            due,
            now,
            dry_run=dry_run,
            progress=cli.create_progress_printer(),
            wall_time=wall_time,
        )
    )
    _report_many(use, result, "rescheduled")


def _has_ids(message_ids: list[str] | None, pending_filter: Pending, *, dry_run: bool) -> bool:
    """Return whether messages are named by ids and not selected by options. Refuse both together, and neither."""
    if message_ids and (pending_filter.has_condition or dry_run):
        raise cli.usage_error("select messages by their ids or by options, not both")
    if not message_ids and not pending_filter.has_condition:
        raise cli.usage_error("no messages are selected: name their ids, or use options such as --queue or --due-to")
    return bool(message_ids)


def _report_many(use: cli.Use, result: operations.ChangeCounts, participle: str) -> None:
    def lines() -> None:
        for answer, count in result.answers.items():
            outcome = (
                f"would be {participle}"
                if result.dry_run
                else participle
                if answer == "done"
                else f"not {participle}: {answer}"
            )
            print(f"{format_count(count, 'message')} {outcome}")
        if not result.answers:
            print("no message matches")

    use.report(result, lines)


def _change_named(
    use: cli.Use,
    message_ids: Sequence[str],
    change: Callable[[OpenDeployment, str, datetime], Awaitable[operations.Change]],
    participle: str,
) -> None:
    """Change the messages with these ids. Report what became of each, also of those before an error.

    An error gives the exit code; that of a single message is reported as any other error of a command is.
    """
    results = use.call_with_deployment(
        lambda deployment, now: operations.change_each(message_ids, lambda each: change(deployment, each, now))
    )
    changes, error = results
    if error is not None and len(message_ids) == 1:
        raise error

    def lines() -> None:
        for each in changes:
            due = "" if each.due is None else f", due at {format_time(each.due)}"
            outcome = (
                f"{participle}{due}"
                if each.done
                else f"not {participle}: {output.escape_control_characters(each.reason)}"
            )
            print(f"{output.escape_control_characters(each.message_id)}: {outcome}")

    use.report({"messages": changes}, lines, succeeded=error is not None or all(each.done for each in changes))
    if error is not None:
        raise typer.Exit(cli.exit_code_of(error))


@cli.command(app, "stats")
def stats(use: cli.Use) -> None:
    """Count pending messages, outcomes, and messages in the queues."""
    statistics = use.call_with_deployment(operations.statistics)
    use.report(statistics, lambda: _print_statistics(statistics))


def _print_statistics(statistics: operations.Statistics) -> None:
    output.print_pairs(
        {
            "store": statistics.store,
            "waiting": statistics.pending,
            "overdue": statistics.overdue,
            "claimed": statistics.claimed,
            "failing": statistics.failing,
            "next due": output.time_or_dash(statistics.next_due),
            **({"unreadable": statistics.unreadable} if statistics.unreadable else {}),
            "services": "not visible" if statistics.services is None else statistics.services,
        }
    )
    if statistics.records:
        print("\nrecords")
        output.print_pairs(dict(statistics.records))
    if statistics.queues:
        print()
        output.print_table(["queue", "messages"], statistics.queues.items())
