"""``postdate destinations``: limits of queues, which all services of a store respect together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from postdate.cli.command import Queue, Use, command, create_group, option
from postdate.cli.output import escape_control_characters, print_table
from postdate.core.limits import Limits, add_pause, limit_change, limiting_store, load_limits_in_force, remove_pause
from postdate.errors import QueueNotFound
from postdate.operations.destinations import change_destination

app = create_group("destinations", "Pause destination queues, and limit their rate and hours.")


@command(app, "list")
def list_(use: Use) -> None:
    """List queues that have limits."""
    limits_by_queue = use.call_with_deployment(
        lambda deployment, _: load_limits_in_force(limiting_store(deployment.store))
    )

    def lines() -> None:
        if limits_by_queue:
            print_table(["queue", "limits"], [(queue, str(limits)) for queue, limits in limits_by_queue.items()])
        else:
            print("no queue has limits")

    use.report({"destinations": limits_by_queue}, lines)


MissingOk = Annotated[bool, option("--missing-ok", "The queue need not exist yet.")]


@command(app, "pause")
def pause(use: Use, queue: Queue, missing_ok: MissingOk = False) -> None:
    """Keep due messages for a queue in the store until it is resumed."""
    _change(use, queue, add_pause, missing_ok=missing_ok)


@command(app, "resume")
def resume(use: Use, queue: Queue, missing_ok: MissingOk = False) -> None:
    """Deliver to a paused queue again. Its other limits stay."""
    _change(use, queue, remove_pause, missing_ok=missing_ok)


@command(app, "limit")
def limit(
    use: Use,
    queue: Queue,
    per_second: Annotated[float | None, option("--per-second", "Most messages a second.")] = None,
    windows: Annotated[
        list[str] | None,
        option(
            "--window",
            "When messages may be delivered: 'mon-fri 09:00-17:00 Europe/Paris'; may be repeated.",
            metavar="WINDOW",
        ),
    ] = None,
    missing_ok: MissingOk = False,
) -> None:
    """Set the rate and windows of a queue, in place of those it has. A pause stays. Without options: remove them."""
    _change(use, queue, limit_change(per_second, windows or ()), missing_ok=missing_ok)


def _change(use: Use, queue: str, change: Callable[[Limits], Limits], *, missing_ok: bool) -> None:
    try:
        limits, queue_exists = use.call_with_deployment(
            lambda deployment, now: change_destination(deployment, queue, change, now, must_exist=not missing_ok)
        )
    except QueueNotFound as error:
        raise QueueNotFound(f"{error} To limit it before it is created, add --missing-ok") from error
    unknown = "" if queue_exists is not None else " (Postdate cannot see from here whether that queue exists)"
    use.report(
        {"destination": queue, "limits": limits},
        lambda: print(f"{escape_control_characters(queue)}: {limits}{unknown}"),
    )
