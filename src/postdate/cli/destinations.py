"""``postdate destinations``: limits of queues, which all services of a store keep together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from postdate.cli.command import Queue, Use, command, group, option
from postdate.cli.output import clean, print_table
from postdate.core.limits import Limits, change_limits, limited, limiting, limits_of, paused, resumed

app = group("destinations", "Pause queues, and limit how much they are sent, and when.")


@command(app, "list")
def list_(use: Use) -> None:
    """List queues that have limits."""
    found = use.work(lambda deployment, _: limits_of(limiting(deployment.store)))

    def lines() -> None:
        if found:
            print_table(["queue", "limits"], [(queue, str(limits)) for queue, limits in found.items()])
        else:
            print("no queue has limits")

    use.report({"destinations": found}, lines)


@command(app, "pause")
def pause(use: Use, queue: Queue) -> None:
    """Hold what is due for a queue, until it is resumed."""
    _change(use, queue, paused)


@command(app, "resume")
def resume(use: Use, queue: Queue) -> None:
    """Let a paused queue have what was held; its other limits stay."""
    _change(use, queue, resumed)


@command(app, "limit")
def limit(
    use: Use,
    queue: Queue,
    per_second: Annotated[float | None, option("--per-second", "So many messages a second at most.")] = None,
    windows: Annotated[
        list[str] | None,
        option("--window", "Only then: 'mon-fri 09:00-17:00 Europe/Paris'; may be repeated.", metavar="WINDOW"),
    ] = None,
) -> None:
    """Limit what a queue is sent, instead of the limits that it had. Without options: lift them."""
    _change(use, queue, limited(per_second, windows or ()))


def _change(use: Use, queue: str, change: Callable[[Limits], Limits]) -> None:
    limits = use.work(lambda deployment, now: change_limits(limiting(deployment.store), queue, change, now))
    use.report({"destination": queue, "limits": limits}, lambda: print(f"{clean(queue)}: {limits}"))
