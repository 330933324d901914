"""``postdate queues``: peek at the messages of any queue, receive them, purge them."""

from __future__ import annotations

import sys

from postdate.cli import command as cli
from postdate.cli.output import escape_control_characters, print_body, print_pairs, print_table
from postdate.operations import queues
from postdate.operations.plain import format_count
from postdate.operations.queues import MessageContent, QueueContents

app = cli.create_group("queues", "Show, receive and remove messages of queues.")


@cli.command(app, "peek")
def peek(use: cli.Use, queue: cli.Queue, limit: cli.Limit = 10) -> None:
    """Show the first messages of a queue, and leave them there.

    RabbitMQ and Azure give them out for that, and get them back: they count as delivered once more.
    """
    messages = use.call_with_deployment(lambda deployment, now: queues.peek(deployment, queue, limit, now))
    use.report(messages, lambda: _print_messages(messages))


def _print_messages(queue_page: QueueContents) -> None:
    for each in queue_page.messages:
        _print_message(each)
    if not queue_page.messages:
        print(f"queue {escape_control_characters(queue_page.queue)} is empty")
    if queue_page.total > len(queue_page.messages):
        print(f"… and {queue_page.total - len(queue_page.messages):,} more; use --limit")


def _print_message(message: MessageContent) -> None:
    print(f"message {escape_control_characters(message.message_id)}")
    print_pairs({"due": message.due})
    if message.headers:
        print_table(["header", "value"], message.headers.items())
    print_body(message.body)
    print()


@cli.command(app, "receive")
def receive(use: cli.Use, queue: cli.Queue, limit: cli.Limit = 1) -> None:
    """Remove messages from a queue permanently, and print them. With --json, one object a line."""

    def print_out(message: MessageContent) -> None:
        use.report(message, lambda: _print_message(message))
        sys.stdout.flush()

    count = use.call_with_deployment(lambda deployment, now: queues.receive(deployment, queue, limit, now, print_out))
    if not count and not use.as_json:
        print(f"queue {escape_control_characters(queue)} is empty")


@cli.command(app, "purge")
def purge(use: cli.Use, queue: cli.Queue, dry_run: cli.DryRun = False) -> None:
    """Discard all messages of a queue. Messages that a receiver has at the moment stay."""
    result = use.call_with_deployment(
        lambda deployment, now: queues.purge(deployment, queue, now, cli.create_progress_printer(), dry_run=dry_run)
    )
    outcome = "would be thrown away" if dry_run else "thrown away"
    use.report(result, lambda: print(f"{format_count(result.count, 'message')} {outcome}"))
