"""The entry point: runs a command and turns every error into one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO, cast

import typer

from postdate.cli.app import app
from postdate.cli.exits import Exit, exit_of
from postdate.errors import PostdateError


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
