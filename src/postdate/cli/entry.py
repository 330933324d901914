"""The entry point: all commands in one place, and what turns every error of theirs into one line and an exit code.

Commands that need Spark, or measure, are imported when they are called.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TextIO, cast

import typer
from typer.core import TyperGroup

from postdate.cli import dashboard, destinations, diagnosis, error_queue, messages, queues, sending, service
from postdate.cli.command import Exit, Use, command, epilog, exit_of, root_signature
from postdate.errors import PostdateError

# In the order in which an operator needs them.
_ORDER = (
    *("demo", "run", "setup", "send", "messages", "errors", "queues", "destinations"),
    *("dashboard", "pipeline", "bench", "config", "doctor", "version"),
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
    context.obj = Use(**options)  # options that stand before the command


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
command(app, "run", reports=False, short_help="Deliver delayed messages until told to stop.")(service.run)
command(app, "setup", short_help="Create tables and queues.")(sending.setup)
command(app, "send")(sending.send)
app.add_typer(messages.app)
app.add_typer(error_queue.app)
app.add_typer(queues.app)
app.add_typer(destinations.app)
command(app, "dashboard", reports=False, short_help="Show what waits as a page for the browser.")(dashboard.dashboard)
_later("pipeline", "postdate.cli.pipeline", "Bulk jobs on Spark: schedule, sweep, delay, audit, forecast, archive.")
_later("bench", "postdate.cli.bench", "Measure this machine's own store and queues.")
app.add_typer(diagnosis.config)
command(app, "doctor", short_help="Check this installation, and say how to mend it.")(diagnosis.doctor)
command(app, "version")(diagnosis.version)


# --- running one ------------------------------------------------------------------------------------------------------


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str], commands: typer.Typer = app, name: str = "postdate") -> int:
    """Run ``postdate``, or other ``commands``, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        _write_every_character(stream)
    try:
        return _call(arguments, commands, name)
    except typer.TyperException as error:
        return _wrong_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", "stopped by the user", Exit.INTERRUPTED)
    except BrokenPipeError:
        return output_closed()
    except Exception as error:  # noqa: BLE001 - the last line of defence
        return _failed(error)


def _call(arguments: Sequence[str], commands: typer.Typer, name: str) -> int:
    try:
        ended: object = commands(list(arguments), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as ending:
        if isinstance(ending.__context__, BrokenPipeError):  # typer has made 1 of it
            return output_closed()
        ended = ending.code
    if ended == Exit.INTERRUPTED:  # typer has made that of it
        raise KeyboardInterrupt
    return ended if isinstance(ended, int) else Exit.OK


def _write_every_character(stream: TextIO) -> None:
    """Escape characters that the terminal's encoding lacks: no message may make a report fail."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def output_closed() -> Exit:
    """End quietly when the reader of the output went away, as other tools do."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.OUTPUT_CLOSED


def _wrong_usage(error: typer.TyperException) -> Exit:
    message = error.format_message()
    if message.startswith("Usage:"):  # a group that was named alone answers with its help
        print(message, file=sys.stderr)
        return Exit.WRONG_USAGE
    context: typer.Context | None = getattr(error, "ctx", None)
    hint = f"; see `{context.command_path} --help`" if context is not None else ""
    return _say("wrong_usage", message.rstrip(".") + hint, Exit.WRONG_USAGE)


def _failed(error: BaseException) -> Exit:
    error = _first(error)
    if isinstance(error, PostdateError):
        return _say(error.code, str(error), exit_of(error))
    print(_without_secrets("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    return _say("internal_error", f"{type(error).__name__}: {error}", Exit.INTERNAL)


def _first(error: BaseException) -> BaseException:
    """Return the first error of an exception group: it is the cause of the others."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def _without_secrets(text: str) -> str:
    from postdate.config import without_secrets

    return without_secrets(text)


def _say(code: str, message: str, ending: Exit) -> Exit:
    one_line = " ".join(_without_secrets(message).split())
    with suppress(OSError):
        print(f"postdate: error [{code}]: {one_line}", file=sys.stderr, flush=True)
    return ending
