"""``postdate errors``: shows and returns failed messages; shows and mends unreadable ones."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from postdate import operations
from postdate.cli.command import (
    NAME,
    DryRun,
    Limit,
    MessageId,
    SomeIds,
    Use,
    command,
    group,
    instant,
    named,
    option,
    pairs_of,
    progress,
    wrong_usage,
)
from postdate.cli.output import clean, hexdump, one_line, print_body, print_pairs, print_table, time_or_dash
from postdate.errors import InvalidHeaders, MessageError
from postdate.messages import Headers, decode_headers
from postdate.operations.plain import shown_count
from postdate.ports import Mending
from postdate.wiring import OpenDeployment

app = group("errors", "Look at failed messages, mend them, send them back.")

T = TypeVar("T")

Queue = Annotated[str | None, named("--queue", "Error queue; default: endpoint.error_queue.", metavar="QUEUE")]
FailedQueue = Annotated[str | None, named("--failed-queue", "Only those that failed in this queue.", metavar="QUEUE")]
Exception_ = Annotated[str | None, named("--exception", "Only those with this type of exception.", metavar="TYPE")]
FailedText = Annotated[
    str | None, option("--text", "Only those with this text in their reason or body.", metavar="TEXT")
]


def _work(use: Use, queue: str | None, work: Callable[[OpenDeployment, str, datetime], Awaitable[T]]) -> T:
    """Do ``work`` with the error queue that is named, or with that of the settings."""
    return use.work(lambda deployment, now: work(deployment, queue or deployment.settings.endpoint.error_queue, now))


@command(app, "list")
def list_(
    use: Use,
    queue: Queue = None,
    failed_queue: FailedQueue = None,
    exception: Exception_ = None,
    text: FailedText = None,
    only_set_aside: Annotated[
        bool, option("--set-aside", "List only what cannot be read, wherever it was; the queue is not looked at.")
    ] = False,
    limit: Limit = 50,
) -> None:
    """List failed messages, and what cannot be read; oldest first."""
    if only_set_aside:
        if queue is not None:
            raise wrong_usage("--queue is for failed messages: what is set aside is in no queue")
        set_aside = use.work(lambda deployment, _: operations.list_set_aside(deployment, limit))
        use.report(set_aside, lambda: _print_set_aside(set_aside))
        return

    where = operations.ErrorFilter(failed_queue, exception, text)
    found = _work(use, queue, lambda deployment, source, _: operations.list_errors(deployment, source, limit, where))
    use.report(found, lambda: _print_list(found))


@command(app, "groups")
def groups(use: Use, queue: Queue = None) -> None:
    """Count failed messages by exception, and queue where they failed."""
    found = _work(use, queue, lambda deployment, source, _: operations.group_errors(deployment, source))
    use.report(found, lambda: _print_groups(found))


def _print_groups(found: operations.ErrorGroups) -> None:
    if not found.groups:
        print(f"queue {found.queue} is empty")
        return
    rows = [
        (f"{each.count:,}", each.exception_type or "-", each.failed_queue or "-", each.last_at, one_line(each.reason))
        for each in found.groups
    ]
    print_table(["messages", "exception", "queue", "last failed at", "last reason"], rows)


def _print_list(found: operations.ErrorList) -> None:
    if found.total:
        rows = [
            (each.message_id, each.failed_at, each.failed_queue, one_line(each.reason or each.exception_type or "-"))
            for each in found.messages
        ]
        print_table(["id", "failed at", "queue", "reason"], rows)
    else:
        print(f"queue {found.queue} is empty")
    if found.total > len(found.messages):
        print(f"… and {found.total - len(found.messages):,} more; use --limit")
    if found.set_aside.total:
        print()
        _print_set_aside(found.set_aside)


def _print_set_aside(found: operations.SetAsideList) -> None:
    if not found.total:
        print("nothing is set aside")
        return
    rows = [
        (each.name, each.at, each.queue or "(store)", each.message_id or "-", one_line(each.reason))
        for each in found.messages
    ]
    print_table(["set aside", "at", "was in", "id", "reason"], rows)
    if found.total > len(found.messages):
        print(f"… and {found.total - len(found.messages):,} more; use --limit")


@command(app, "show")
def show(
    use: Use,
    message_id: Annotated[
        str | None, typer.Argument(parser=NAME, metavar="[ID]", help="Id of the message; or use --set-aside.")
    ] = None,
    set_aside: Annotated[
        str | None, named("--set-aside", "Show one that cannot be read, as s12 or q3.", metavar="NAME")
    ] = None,
    queue: Queue = None,
) -> None:
    """Show a failed message: stack trace, headers, body. Or what one that cannot be read holds."""
    if (message_id is None) == (set_aside is None):
        raise wrong_usage("name one: either the ID of a failed message, or --set-aside NAME")
    if set_aside is not None:
        held = use.work(lambda deployment, _: operations.show_set_aside(deployment, set_aside))
        use.report(held, lambda: _print_held(held))
        return
    id_ = message_id or ""
    found = _work(use, queue, lambda deployment, source, now: operations.show_error(deployment, source, id_, now))
    use.report(found, lambda: _print_details(found))


def _print_held(found: operations.SetAsideDetails) -> None:
    message = found.message
    print(f"{message.name}, set aside at {time_or_dash(message.at)}")
    print_pairs({"was in": message.queue or "(store)", "id": message.message_id, "reason": message.reason})
    for column, held in found.raw.items():
        print(f"\n{clean(column)} ({held.size_bytes:,} bytes)")
        if held.size_bytes:
            print(clean(held.text) if held.text is not None else hexdump(b64decode(held.base64 or "")))


def _print_details(found: operations.ErrorDetails) -> None:
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
    print()
    print_body(found.body)


@command(app, "return")
def return_(
    use: Use,
    message_ids: SomeIds = None,
    queue: Queue = None,
    every: Annotated[bool, option("--all", "Return every message of the error queue.")] = False,
    failed_queue: FailedQueue = None,
    exception: Exception_ = None,
    text: FailedText = None,
    to: Annotated[str | None, named("--to", "Put them there instead of where they failed.", metavar="QUEUE")] = None,
    without_expiry: Annotated[
        bool, option("--without-expiry", "Take off when their use ends: what is past it is handled, too.")
    ] = False,
    set_aside: Annotated[
        list[str] | None,
        named("--set-aside", "Put back what could not be read, as s12 or q3; may be repeated.", metavar="NAME"),
    ] = None,
    headers: Annotated[
        str | None, option("--headers", "With --set-aside: headers in place of what it has.", metavar="JSON|@FILE")
    ] = None,
    due: Annotated[datetime | None, instant("--due", "With --set-aside, of the store: its due time.")] = None,
    destination: Annotated[
        str | None, named("--destination", "With --set-aside, of the store: its queue.", metavar="QUEUE")
    ] = None,
    body: Annotated[
        str | None, option("--body", "With --set-aside: a body in place of what it has.", metavar="TEXT|@FILE")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Put failed messages back where they failed, to be tried again. Mend the cause first.

    With --set-aside, what could not be read: as it is, if it was mended by hand, or with other parts.
    """
    mends = [part for part in (headers, due, destination, body) if part is not None]
    if set_aside:
        if message_ids or every or to or without_expiry or queue or failed_queue or exception or text or dry_run:
            raise wrong_usage("--set-aside goes with --headers, --due, --destination and --body only")
        if mends and len(set_aside) > 1:
            raise wrong_usage("mend one at a time: --headers, --due, --destination and --body are of one message")
        mending = _mending(headers, due, destination, body)
        mended = use.work(lambda deployment, now: operations.put_back(deployment, set_aside, mending, now))
        _report_mended(use, mended, "put back")
        return
    if mends:
        raise wrong_usage(
            "--headers, --due, --destination and --body mend what could not be read: add --set-aside NAME"
        )
    how = operations.Treatment(to, without_expiry, dry_run=dry_run)
    _deal(use, message_ids, queue, every, operations.ErrorFilter(failed_queue, exception, text), how)


@command(app, "discard")
def discard(
    use: Use,
    message_ids: SomeIds = None,
    queue: Queue = None,
    every: Annotated[bool, option("--all", "Discard every message of the error queue.")] = False,
    failed_queue: FailedQueue = None,
    exception: Exception_ = None,
    text: FailedText = None,
    dry_run: DryRun = False,
) -> None:
    """Throw failed messages away, for good."""
    how = operations.Treatment(discard=True, dry_run=dry_run)
    _deal(use, message_ids, queue, every, operations.ErrorFilter(failed_queue, exception, text), how)


def _deal(
    use: Use,
    message_ids: list[str] | None,
    queue: str | None,
    every: bool,
    where: operations.ErrorFilter,
    how: operations.Treatment,
) -> None:
    """Return messages, or discard them."""
    action = "discard" if how.discard else "return"
    if [bool(message_ids), every, where != operations.ErrorFilter()].count(True) != 1:
        raise wrong_usage(
            f"name the messages to {action}, or all of them with --all, or say which: --failed-queue, --exception, "
            f"--text"
        )
    if message_ids and how.dry_run:
        raise wrong_usage("--dry-run is for --all, --failed-queue, --exception and --text")

    async def work(deployment: OpenDeployment, source: str, now: datetime) -> list[operations.Returned]:
        if not message_ids:
            return await operations.return_all(deployment, source, now, where, how, progress())
        return await operations.return_messages(deployment, source, message_ids, now, how)

    results = _work(use, queue, work)
    if how.dry_run:
        use.report({"messages": results, "dry_run": True}, lambda: _print_would_be(results, action))
        return
    use.report({"messages": results}, lambda: _print_dealt(results, action), kept=all(each.done for each in results))


def _print_would_be(results: list[operations.Returned], action: str) -> None:
    stay = [each for each in results if not each.done]
    print(f"{shown_count(len(results) - len(stay), 'message')} would be {action}ed")
    if stay:
        _print_dealt(stay, action)


@command(app, "edit")
def edit(
    use: Use,
    message_id: MessageId,
    queue: Queue = None,
    body: Annotated[str | None, option("--body", "Its body from now on.", metavar="TEXT|@FILE")] = None,
    header: Annotated[
        list[str] | None, option("--header", "A header that it gets; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    to: Annotated[str | None, named("--to", "Send it there instead of where it failed.", metavar="QUEUE")] = None,
) -> None:
    """Send a failed message changed, under a new id. The failed one stays in the error queue."""
    if body is None and not header:
        raise wrong_usage("what is to be changed? give --body or --header")
    change = operations.Edit(None if body is None else _content("--body", body), pairs_of(header), to)
    sent = _work(
        use, queue, lambda deployment, source, now: operations.edit(deployment, source, message_id, now, change)
    )
    said = f"{clean(message_id)}: sent to {clean(sent.queue)} as {sent.message_id}"
    use.report({"message": sent}, lambda: print(said))


def _mending(headers: str | None, due: datetime | None, destination: str | None, body: str | None) -> Mending:
    try:
        read = None if headers is None else decode_headers(_content("--headers", headers))
    except InvalidHeaders as error:
        raise wrong_usage(f"--headers: {error}") from error
    try:
        return Mending(read, due, destination, None if body is None else _content("--body", body))
    except MessageError as error:
        raise wrong_usage(f"what is to take its place cannot be stored: {error}") from error


def _content(option: str, given: str) -> bytes:
    """Return the content of a file, for ``@FILE``, or of the text itself."""
    if not given.startswith("@"):
        return given.encode(errors="surrogateescape")
    path = Path(given[1:])
    try:
        return path.read_bytes()
    except OSError as error:
        raise wrong_usage(f"{option}: {path} cannot be read: {error.strerror}") from error


@command(app, "delete")
def delete(
    use: Use,
    names: Annotated[list[str], typer.Argument(parser=NAME, metavar="NAME…", help="What is set aside, as s12 or q3.")],
) -> None:
    """Delete what was set aside, for good. For failed messages that can be read there is `discard`."""
    deleted = use.work(lambda deployment, now: operations.delete_set_aside(deployment, names, now))
    _report_mended(use, deleted, "deleted")


def _report_mended(use: Use, results: list[operations.Mended], done: str) -> None:
    def lines() -> None:
        for each in results:
            print(f"{clean(each.name)}: {done if each.done else f'not {done}: {clean(each.remark)}'}")

    use.report({"messages": results}, lines, kept=all(each.done for each in results))


def _print_dealt(results: list[operations.Returned], action: str) -> None:
    if not results:
        print(f"nothing to {action}")
    for each in results:
        remark = f": {clean(each.remark)}" if each.remark else ""
        where = f" to {clean(each.queue)}" if action == "return" else ""
        said = f"{action}ed{where}{remark}" if each.done else f"not {action}ed{remark}"
        print(f"{clean(each.message_id)}: {said}")
