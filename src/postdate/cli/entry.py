"""The entry point: it has all commands, and turns every error of a command into one line and an exit code.

Commands are imported when they are called. So the help answers at once, and a command imports only what it needs.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TextIO, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command
from typing_extensions import override

from postdate.cli.command import Exit, Use, epilog, exit_code_of, root_signature
from postdate.errors import ConfigurationError, PostdateError, extra_of

_MODULES = dict[str, str]()
"""The module of each command."""


class _Commands(TyperGroup):
    """The group of all commands. Its help needs their names only."""

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, remainder = super().resolve_command(ctx, args)
        return name, None if name is None or command is None else _import_command(name), remainder


app = typer.Typer(
    name="postdate",
    cls=_Commands,
    help="Keeps a message until it is due, then puts it in the queue it was meant for: on time, once, never lost.",
    epilog=epilog(),
    rich_markup_mode=None,
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


def _register_command(name: str, module: str, meaning: str) -> None:
    """Register a command whose module is imported when the command is called or completed.

    The module has the command in its ``app``; or its ``app`` is the command; or, without an ``app``, the function
    ``name`` is the command.
    """
    _MODULES[name] = module

    @app.command(name, help=meaning)
    def show_in_help() -> None:
        """Stand for the command in the help. :class:`_Commands` calls the command itself."""


def _import_command(name: str) -> Any:
    module = importlib.import_module(_MODULES[name])
    commands: typer.Typer | None = getattr(module, "app", None)
    if commands is None:
        commands = typer.Typer(add_completion=False)
        commands.command()(getattr(module, name))
    commands.rich_markup_mode = None
    command = get_command(commands)
    if isinstance(command, TyperGroup) and commands.info.name != name:  # The module has several commands.
        return command.commands[name]
    return command


# The order is the order in which an operator needs the commands.
_register_command("run", "postdate.cli.service", "Deliver delayed messages until told to stop.")
_register_command("setup", "postdate.cli.sending", "Create tables and queues.")
_register_command("send", "postdate.cli.sending", "Send a message, now or when it is due.")
_register_command("messages", "postdate.cli.messages", "List and change delayed messages.")
_register_command("errors", "postdate.cli.error_queue", "List failed messages, correct them, and return them.")
_register_command("queues", "postdate.cli.queues", "Show, receive and remove messages of queues.")
_register_command(
    "destinations", "postdate.cli.destinations", "Pause destination queues, and limit their rate and hours."
)
_register_command("dashboard", "postdate.cli.dashboard", "Show messages as a page for the browser.")
_register_command("move", "postdate.cli.move", "Move pending messages to another store.")
_register_command("pipeline", "postdate.cli.pipeline", "Bulk jobs on Spark, in this process or on a cluster.")
_register_command("bench", "postdate.cli.bench.commands", "Measure this machine's own store and queues.")
_register_command("config", "postdate.cli.diagnosis", "Show the settings.")
_register_command("doctor", "postdate.cli.diagnosis", "Check this installation, and say how to correct it.")
_register_command("version", "postdate.cli.diagnosis", "Print the versions of Postdate, Python and SQLite.")


# --- running one ------------------------------------------------------------------------------------------------------


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str], commands: typer.Typer = app, name: str = "postdate") -> int:
    """Run ``postdate``, or other ``commands``, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        _escape_unencodable(stream)
    try:
        return _call(arguments, commands, name)
    except typer.TyperException as error:
        return _report_usage_error(error)
    except (KeyboardInterrupt, typer.Abort):
        return _report_error("interrupted", "stopped by the user", Exit.INTERRUPTED)
    except BrokenPipeError:
        return redirect_closed_output()
    except Exception as error:  # noqa: BLE001 - the last line of defence
        return _report_failure(error)


def _call(arguments: Sequence[str], commands: typer.Typer, name: str) -> int:
    try:
        exit_code: object = commands(list(arguments), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as system_exit:
        if isinstance(system_exit.__context__, BrokenPipeError):  # Typer converts a broken pipe into exit code 1.
            return redirect_closed_output()
        exit_code = system_exit.code
    if exit_code == Exit.INTERRUPTED:  # Typer converts KeyboardInterrupt into this exit code.
        raise KeyboardInterrupt
    return exit_code if isinstance(exit_code, int) else Exit.OK


def _escape_unencodable(stream: TextIO) -> None:
    """Escape characters that the terminal's encoding does not have, so that no message can make a report fail."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def redirect_closed_output() -> Exit:
    """End without an error when the reader of the output has closed it, as other tools do."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.OUTPUT_CLOSED


def _report_usage_error(error: typer.TyperException) -> Exit:
    message = error.format_message()
    context: typer.Context | None = getattr(error, "ctx", None)
    hint = f"; see `{context.command_path} --help`" if context is not None else ""
    return _report_error("wrong_usage", message.rstrip(".") + hint, Exit.WRONG_USAGE)


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk, or of a file that may not grow. A store has its own errors for its file."""


def _report_failure(error: BaseException) -> Exit:
    error = _first_error(error)
    if isinstance(error, ModuleNotFoundError) and (extra := extra_of(error)):
        error = ConfigurationError(f"{error.name} is missing: pip install 'postdate[{extra}]'")
    if isinstance(error, PostdateError):
        return _report_error(error.code, str(error), exit_code_of(error))
    if isinstance(error, OSError) and error.errno in _FULL:
        redirect_closed_output()
        return _report_error("output_error", f"the output cannot be written: {error}", Exit.NOT_KEPT)
    from postdate.config import redact_secrets

    print(redact_secrets("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    return _report_error("internal_error", f"{type(error).__name__}: {error}", Exit.INTERNAL)


def _first_error(error: BaseException) -> BaseException:
    """Return the first error of an exception group, because it is the cause of the other errors."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def _report_error(code: str, message: str, exit_code: Exit) -> Exit:
    from postdate.config import redact_secrets

    one_line = " ".join(redact_secrets(message).split())
    with suppress(OSError):
        print(f"postdate: error [{code}]: {one_line}", file=sys.stderr, flush=True)
    return exit_code
