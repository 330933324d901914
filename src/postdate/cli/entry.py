"""The entry point: it has all commands, and turns every error of a command into one line and an exit code.

Commands are imported when they are called. So the help answers at once, and a command imports only what it needs.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

import typer
from typer.core import TyperCommand

from postdate.cli.command import Exit, Use, epilog, exit_of, root_signature, wrong_usage
from postdate.errors import ConfigurationError, PostdateError, extra_of

app = typer.Typer(
    name="postdate",
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
    context.obj = Use(**options)  # These are the options before the command.


postdate.__signature__ = root_signature()
app.callback(invoke_without_command=True)(postdate)


class _PassesOn(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args


def _later(name: str, module: str, meaning: str) -> None:
    """Register a command whose module is imported when the command is called.

    The module has the command in its ``app``; or its ``app`` is the command; or, without an ``app``, the function
    ``name`` is the command.
    """

    @app.command(name, cls=_PassesOn, help=meaning)
    def pass_on(context: typer.Context) -> None:
        room = importlib.import_module(module)
        inner: typer.Typer | None = getattr(room, "app", None)
        path, arguments = context.command_path, context.args
        if inner is None:
            inner = typer.Typer(add_completion=False)
            inner.command()(getattr(room, name))
        elif inner.info.name != name:
            path, arguments = path.removesuffix(f" {name}"), [name, *arguments]
        inner.rich_markup_mode = None
        ended: object = inner(arguments, prog_name=path, obj=context.obj, standalone_mode=False)
        if isinstance(ended, int) and ended:
            raise typer.Exit(ended)


# The order is the order in which an operator needs the commands.
_later("run", "postdate.cli.service", "Deliver delayed messages until told to stop.")
_later("setup", "postdate.cli.sending", "Create tables and queues.")
_later("send", "postdate.cli.sending", "Send a message, now or when it is due.")
_later("messages", "postdate.cli.messages", "Look at delayed messages, and change them.")
_later("errors", "postdate.cli.error_queue", "Look at failed messages, mend them, send them back.")
_later("queues", "postdate.cli.queues", "Look into queues, take messages off them, empty them.")
_later("destinations", "postdate.cli.destinations", "Pause queues, and limit how much they are sent, and when.")
_later("dashboard", "postdate.cli.dashboard", "Show what waits as a page for the browser.")
_later("move", "postdate.cli.move", "Move what waits into another store.")
_later("pipeline", "postdate.cli.pipeline", "Bulk jobs on Spark, in this process or on a cluster.")
_later("bench", "postdate.cli.bench.commands", "Measure this machine's own store and queues.")
_later("config", "postdate.cli.diagnosis", "Look at the settings.")
_later("doctor", "postdate.cli.diagnosis", "Check this installation, and say how to mend it.")
_later("version", "postdate.cli.diagnosis", "Say which Postdate, Python and SQLite these are.")


@app.command("demo", cls=_PassesOn, hidden=True)
def demo() -> None:
    """Say where the demo is."""
    raise wrong_usage("the demo is in the repository of Postdate, not in the package: run `make demo` there")


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
        if isinstance(ending.__context__, BrokenPipeError):  # Typer converts a broken pipe into exit code 1.
            return output_closed()
        ended = ending.code
    if ended == Exit.INTERRUPTED:  # Typer converts KeyboardInterrupt into this exit code.
        raise KeyboardInterrupt
    return ended if isinstance(ended, int) else Exit.OK


def _write_every_character(stream: TextIO) -> None:
    """Escape characters that the terminal's encoding does not have, so that no message can make a report fail."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def output_closed() -> Exit:
    """End without an error when the reader of the output has closed it, as other tools do."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.OUTPUT_CLOSED


def _wrong_usage(error: typer.TyperException) -> Exit:
    message = error.format_message()
    context: typer.Context | None = getattr(error, "ctx", None)
    hint = f"; see `{context.command_path} --help`" if context is not None else ""
    return _say("wrong_usage", message.rstrip(".") + hint, Exit.WRONG_USAGE)


def _failed(error: BaseException) -> Exit:
    error = _first(error)
    if isinstance(error, ModuleNotFoundError) and (extra := extra_of(error)):
        error = ConfigurationError(f"{error.name} is missing: pip install 'postdate[{extra}]'")
    if isinstance(error, PostdateError):
        return _say(error.code, str(error), exit_of(error))
    from postdate.config import without_secrets

    print(without_secrets("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    return _say("internal_error", f"{type(error).__name__}: {error}", Exit.INTERNAL)


def _first(error: BaseException) -> BaseException:
    """Return the first error of an exception group, because it is the cause of the other errors."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def _say(code: str, message: str, ending: Exit) -> Exit:
    from postdate.config import without_secrets

    one_line = " ".join(without_secrets(message).split())
    with suppress(OSError):
        print(f"postdate: error [{code}]: {one_line}", file=sys.stderr, flush=True)
    return ending
