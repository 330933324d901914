"""All commands in one place. Those that need Spark, or measure, are imported when they are called."""

from __future__ import annotations

import importlib
from typing import Any, Final

import typer
from typer.core import TyperGroup

from postdate.cli import diagnosis, error_queue, messages, sending, service, settings
from postdate.cli.command import keep_common, root_signature
from postdate.cli.exits import epilog

# In the order in which an operator needs them.
_ORDER: Final = (
    "demo",
    "run",
    "setup",
    "send",
    "messages",
    "errors",
    "pipeline",
    "bench",
    "config",
    "doctor",
    "version",
)


class _InOrder(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    name="postdate",
    cls=_InOrder,
    help="Keeps a message until it is due, then puts it in the queue it was meant for: on time, once, never lost.",
    epilog=epilog(),
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def postdate(context: typer.Context, version: bool = False, **options: Any) -> None:
    """Keeps a message until it is due, then puts it in the queue it was meant for: on time, once, never lost."""
    if version:
        import postdate

        typer.echo(f"postdate {postdate.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    keep_common(context, **options)


postdate.__signature__ = root_signature()
app.callback(invoke_without_command=True)(postdate)


_PASS_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": list[str]()}


def _later(name: str, module: str, meaning: str) -> None:
    """Register a command whose module, with an ``app`` or a function of its name, is imported when it is called."""

    @app.command(name, help=meaning, context_settings=_PASS_ON, add_help_option=False)
    def pass_on(context: typer.Context) -> None:
        room = importlib.import_module(module)
        inner: typer.Typer | None = getattr(room, "app", None)
        if inner is None:
            inner = typer.Typer(add_completion=False)
            inner.command()(getattr(room, name))
        inner.rich_markup_mode = None
        ended: object = inner(context.args, prog_name=context.command_path, obj=context.obj, standalone_mode=False)
        if isinstance(ended, int) and ended:
            raise typer.Exit(ended)


_later("demo", "postdate.demo.command", "Deliver reminders for real flights on time, and prove it.")
service.register(app)
sending.register(app)
app.add_typer(messages.app)
app.add_typer(error_queue.app)
_later("pipeline", "postdate.cli.pipeline", "Bulk jobs on Spark: schedule, sweep, delay, audit, forecast, archive.")
_later("bench", "postdate.cli.bench", "Measure this machine's own store and queues.")
app.add_typer(settings.app)
diagnosis.register(app)
