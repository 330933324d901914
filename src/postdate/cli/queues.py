"""``postdate queues``: peek at the messages of any queue, receive them, purge them."""

from __future__ import annotations

import sys

from postdate.cli.command import DryRun, Limit, Queue, Use, command, group, progress
from postdate.cli.output import clean, print_body, print_pairs, print_table
from postdate.operations import queues
from postdate.operations.plain import shown_count
from postdate.operations.queues import QueuedMessage, QueuedMessages

app = group("queues", "Look into queues, take messages off them, empty them.")


@command(app, "peek")
def peek(use: Use, queue: Queue, limit: Limit = 10) -> None:
    """Show the first messages of a queue, and leave them there.

    RabbitMQ and Azure give them out for that, and get them back: they count as delivered once more.
    """
    messages = use.work(lambda deployment, now: queues.peek(deployment, queue, limit, now))
    use.report(messages, lambda: _print_all(messages))


def _print_all(queued: QueuedMessages) -> None:
    for each in queued.messages:
        _print(each)
    if not queued.messages:
        print(f"queue {clean(queued.queue)} is empty")
    if queued.total > len(queued.messages):
        print(f"… and {queued.total - len(queued.messages):,} more; use --limit")


def _print(message: QueuedMessage) -> None:
    print(f"message {clean(message.message_id)}")
    print_pairs({"due": message.due})
    if message.headers:
        print_table(["header", "value"], message.headers.items())
    print_body(message.body)
    print()


@command(app, "receive")
def receive(use: Use, queue: Queue, limit: Limit = 1) -> None:
    """Take messages off a queue, for good, and print them. With --json an object a line."""

    def print_out(message: QueuedMessage) -> None:
        use.report(message, lambda: _print(message))
        sys.stdout.flush()

    count = use.work(lambda deployment, now: queues.receive(deployment, queue, limit, now, print_out))
    if not count and not use.as_json:
        print(f"queue {clean(queue)} is empty")


@command(app, "purge")
def purge(use: Use, queue: Queue, dry_run: DryRun = False) -> None:
    """Throw away all messages of a queue that nobody holds now."""
    result = use.work(lambda deployment, now: queues.purge(deployment, queue, now, progress(), dry_run=dry_run))
    outcome = "would be thrown away" if dry_run else "thrown away"
    use.report(result, lambda: print(f"{shown_count(result.count, 'message')} {outcome}"))
