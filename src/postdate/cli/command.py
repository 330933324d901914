"""Common parts of all commands: exit codes, options, settings, reports, arguments, logging."""

from __future__ import annotations

import enum
import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, TypeVar, get_type_hints

import typer

from postdate import errors

if TYPE_CHECKING:
    from types import FrameType

    from postdate.config import Settings
    from postdate.core.upkeep.wall_times import WallTime
    from postdate.wiring import OpenDeployment


class Exit(enum.IntEnum):
    """Exit codes of ``postdate``. They are stable."""

    OK = 0
    NOT_KEPT = 1
    WRONG_USAGE = 2
    UNAVAILABLE = 3
    INTERNAL = 70
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


EXPLANATIONS = {
    Exit.OK: "done",
    Exit.NOT_KEPT: "a promise is not kept, a check failed, or what was asked for is not there",
    Exit.WRONG_USAGE: "wrong usage, or a wrong setting or message",
    Exit.UNAVAILABLE: "the store or the transport is unavailable, not set up, or no database",
    Exit.INTERNAL: "a fault in Postdate; please report the traceback",
    Exit.INTERRUPTED: "interrupted",
    Exit.OUTPUT_CLOSED: "the reader of the output closed it",
}


def exit_code_of(error: errors.PostdateError) -> Exit:
    match error:
        case errors.DuplicateMessage():
            return Exit.NOT_KEPT
        case (
            errors.ConfigurationError()
            | errors.DelayConflict()
            | errors.MessageError()
            | errors.NotSupported()
            | errors.PipelineError()
        ):
            return Exit.WRONG_USAGE
        case errors.StoreError() | errors.TransportUnavailable():
            return Exit.UNAVAILABLE
        case _:
            return Exit.NOT_KEPT


def epilog() -> str:
    """Return the text about exit codes below ``postdate --help``."""
    lines = [f"{code.value:>4}  {meaning}" for code, meaning in EXPLANATIONS.items()]
    return "\b\n" + "\n".join(["Exit codes:", *lines])


P = ParamSpec("P")
T = TypeVar("T")


def option(name: str, meaning: str, **more: Any) -> Any:
    """Return an option of a command with its help text. ``more`` is as for ``typer.Option``."""
    return typer.Option(name, help=meaning, **more)


@dataclass(frozen=True, slots=True)
class Use:
    """The common options of one call of a command; ``None`` for an option that was not given."""

    config: Annotated[
        str | None, option("--config", "Settings; default: POSTDATE_CONFIG, or postdate.toml if there.", metavar="FILE")
    ] = None
    store: Annotated[
        str | None,
        option(
            "--store", "Where messages wait, as sqlite:///postdate.db or postgresql://user@host/db.", metavar="ADDRESS"
        ),
    ] = None
    transport: Annotated[
        str | None, option("--transport", "Where the queues are; default: with the store.", metavar="ADDRESS")
    ] = None
    as_json: Annotated[bool, option("--json", "Print one JSON object and nothing else.")] = False

    def settings(self) -> Settings:
        from postdate.config import load_settings

        options = {"store.address": self.store, "transport.address": self.transport}
        return load_settings(self.config, os.environ, options)

    def call_with_deployment(
        self, work: Callable[[OpenDeployment, datetime], Awaitable[T]], *, create: bool = False
    ) -> T:
        """Open store and queues, run ``work`` and return its result."""
        import anyio

        from postdate.operations import read_present
        from postdate.wiring import open_deployment

        settings = self.settings()

        async def run() -> T:
            async with open_deployment(settings, create=create) as deployment:
                return await work(deployment, await read_present(deployment))

        return anyio.run(run)

    def report(self, result: object, lines: Callable[[], None], *, succeeded: bool = True) -> None:
        """Print ``result`` as a JSON object, or call ``lines`` to print text; exit code 1 if not ``succeeded``."""
        if self.as_json:
            import msgspec

            typer.echo(msgspec.json.encode(result))
        else:
            lines()
        if not succeeded:
            raise typer.Exit(Exit.NOT_KEPT)


Command = Callable[Concatenate[Use, P], None]


def command(
    app: typer.Typer, name: str, *, reports: bool = True, **settings: Any
) -> Callable[[Command[P]], Command[P]]:
    """Register a function as the command ``name`` of ``app``. Its first argument is a :class:`Use`.

    A parameter whose type is a dataclass is a group of options: its fields are options like other parameters. So
    options of several commands are written once. With ``reports``, the command accepts ``--json``.
    """
    common = _common_options(reports=reports)

    def register(function: Command[P]) -> Command[P]:
        groups = _option_groups(function)

        def run(context: typer.Context, **arguments: Any) -> None:
            common_values = {each.name: arguments.pop(each.name) for each in common}
            for parameter, group in groups.items():
                arguments[parameter] = group(**{each.name: arguments.pop(each.name) for each in fields(group)})
            function(_merge_options(context.obj, common_values), **arguments)  # pyright: ignore[reportCallIssue] - typer has checked them

        add_command(app, name, function, run, common, **settings)
        return function

    return register


def add_command(
    app: typer.Typer,
    name: str,
    function: Callable[..., object],
    run: Callable[..., None],
    common: Sequence[inspect.Parameter],
    **settings: Any,
) -> None:
    """Register ``run`` as a command with the options and the help text of ``function``, and the ``common`` options.

    ``run`` is called with the context and all options by name. The first parameter of ``function`` is not an option.
    """
    run.__doc__ = function.__doc__
    run.__signature__ = inspect.Signature([_CONTEXT, *options_of(function)[1:], *common])
    app.command(name, **settings)(run)


def options_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the options of a function or a group as typer reads them: types resolved, groups split into fields."""
    hints, kind = get_type_hints(function, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    groups, parameters = _option_groups(function), list[inspect.Parameter]()
    for each in inspect.signature(function).parameters.values():
        if each.name in groups:
            parameters += options_of(groups[each.name])
        else:
            parameters.append(each.replace(annotation=hints[each.name], kind=kind))
    return parameters


def root_signature() -> inspect.Signature:
    """Return the signature of a callback that takes the context, the common options and ``--version``."""
    annotation: Any = Annotated[bool, option("--version", "Print the version and exit.")]
    version = inspect.Parameter("version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
    return inspect.Signature([_CONTEXT, *_common_options(reports=False), version])


def _merge_options(earlier_options: object, values: dict[str, Any]) -> Use:
    """Merge common options: an option after the command overrides the same option before it.

    An option that is blank was given: its value is refused where it is read. It must not stand for the default, because
    an unset variable of a script would then lead to another store.
    """
    use = earlier_options if isinstance(earlier_options, Use) else Use()
    return replace(use, **{name: value for name, value in values.items() if value is not None and value is not False})


_CONTEXT: Final = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)


def _common_options(*, reports: bool) -> list[inspect.Parameter]:
    """Return the common options. Only commands that report have ``--json``."""
    return [each for each in options_of(Use) if reports or each.name != "as_json"]


def _option_groups(function: Callable[..., object]) -> dict[str, type[Any]]:
    """Return the parameters of a command that are groups of options."""
    _, *parameter_names = inspect.signature(function).parameters
    hints = get_type_hints(function)
    return {name: hints[name] for name in parameter_names if is_dataclass(hints[name])}


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Generator[None]:
    """Call ``handler`` for these signals for the length of the block, then restore the previous handlers."""
    previous_handlers = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, previous in previous_handlers:
            signal.signal(number, previous)


def usage_error(message: str) -> typer.TyperException:
    """Return the error for arguments that are valid alone but not together."""
    return typer.TyperException(message)


def create_group(name: str, meaning: str) -> typer.Typer:
    """Return an empty group of commands. If it is called without a command, it lists its commands."""
    app = typer.Typer(name=name, help=meaning, rich_markup_mode=None, add_completion=False)

    @app.callback(invoke_without_command=True)
    def refuse_without_command(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            names = [each.name or "" for each in app.registered_commands if not each.hidden]
            names += [each.typer_instance.info.name or "" for each in app.registered_groups if each.typer_instance]
            raise usage_error(f"name a subcommand: {context.command_path} {'|'.join(names)}")

    refuse_without_command.__doc__ = meaning
    return app


# --- arguments that several commands take -----------------------------------------------------------------------------


def _convert_errors(read: Callable[[str], T]) -> Callable[[Any], T]:
    """Return ``read`` with errors converted, so that typer can show the option to which they belong."""

    def convert(text: Any) -> T:
        if not isinstance(text, str):  # Typer also passes the default value through this function.
            return text
        try:
            return read(text)
        except errors.PostdateError as error:
            raise typer.BadParameter(str(error)) from error

    return convert


def _parse_duration(text: str) -> timedelta:
    from postdate.config import parse_duration

    return parse_duration(text)


def _parse_instant(text: str) -> datetime:
    from postdate.config import parse_instant

    return parse_instant(text)


def _parse_instant_or_wall(text: str) -> datetime | str:
    """Return an instant. Return a text without an offset unchanged, because it is a local time in some zone."""
    try:
        is_wall = datetime.fromisoformat(text.strip()).tzinfo is None
    except ValueError:
        is_wall = False
    return text.strip() if is_wall else _parse_instant(text)


def wall_time_of(at: datetime | str | None, zone: str | None, option_name: str) -> WallTime | None:
    """Return the wall time of ``--at`` and of the option for its zone, or ``None`` without a zone.

    Raises a usage error if ``--at`` has no offset and no zone, or if the zone is given without a local time.
    """
    from postdate.core.upkeep.wall_times import WallTime

    if zone is None:
        if isinstance(at, str):
            text = f"{at!r} has no time zone: add Z or an offset, or name a zone with {option_name}"
            raise typer.BadParameter(text, param_hint="'--at'")
        return None
    if not isinstance(at, str):
        raise usage_error(
            f"{option_name} needs --at with a local time of that zone, without an offset: 2027-03-28T09:00"
        )
    return WallTime.parse(at, zone)


def _check_name(text: str) -> str:
    """Refuse a blank name, such as that of an unset script variable: it would count as not given, or as another name.

    Refuse bytes that are not UTF-8, because no message and no queue has such a name.
    """
    from postdate.errors import InvalidMessage

    if not text.strip():
        raise InvalidMessage("it is blank; name one, or leave the option out")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{text!r} is not UTF-8") from error
    return text


NAME = _convert_errors(_check_name)


def duration_option(name: str, meaning: str, metavar: str = "DURATION") -> Any:
    """Return an option that is a duration, such as ``1h30m``."""
    return option(name, meaning, parser=_convert_errors(_parse_duration), metavar=metavar)


def instant_option(name: str, meaning: str, *, hidden: bool = False) -> Any:
    """Return an option that is an instant, in ISO 8601 with an offset."""
    return option(name, meaning, parser=_convert_errors(_parse_instant), metavar="TIME", hidden=hidden)


def name_option(name: str, meaning: str, metavar: str) -> Any:
    """Return an option that is a name, for example of a queue, and not blank."""
    return option(name, meaning, parser=NAME, metavar=metavar)


Delay = Annotated[timedelta | None, duration_option("--delay", "Due this long from now: 30s, 10m, 1h30m, 2d.")]
At = Annotated[datetime | None, instant_option("--at", "Due then: ISO 8601 with offset, 2026-01-31T12:00+01:00.")]
AtWall = Annotated[
    Any,
    option(
        "--at",
        "Due then: ISO 8601 with offset, 2026-01-31T12:00+01:00; with --zone, without.",
        parser=_convert_errors(_parse_instant_or_wall),
        metavar="TIME",
    ),
]
Limit = Annotated[int, option("--limit", "The most entries to list.", min=1, max=1_000_000)]
DryRun = Annotated[bool, option("--dry-run", "Only say how many it would be.")]
Queue = Annotated[str, typer.Argument(parser=NAME, metavar="QUEUE", help="Name of the queue.")]
MessageId = Annotated[str, typer.Argument(parser=NAME, metavar="ID", help="Id of the message.")]
SomeIds = Annotated[
    list[str] | None, typer.Argument(parser=NAME, metavar="[ID…]", help="Ids of messages; or select them by options.")
]


REPORT_EVERY = 10_000
"""Number of items after which progress is reported again."""


def create_progress_printer() -> Callable[[int], None]:
    """Return a callback that reports the number of finished items on standard error."""
    reported = 0

    def print_progress(done: int) -> None:
        nonlocal reported
        if done >= reported + REPORT_EVERY:
            reported = done
            print(f"{done:,} so far", file=sys.stderr)

    return print_progress


def pairs_of(texts: list[str] | None, option: str = "--header", form: str = "NAME=VALUE") -> dict[str, str]:
    """Return the names and values of an option of this form that may be given several times."""
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise usage_error(f"{option} {text!r} is not {form}")
        if name in pairs:
            raise usage_error(f"{option} {name!r} is given twice: each name has one value")
        pairs[name] = value
    return pairs


# --- logging ----------------------------------------------------------------------------------------------------------


_LEVELS: Final = ("debug", "info", "warning", "error", "critical")


def _parse_level(text: str) -> str:
    if text.lower() not in _LEVELS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(_LEVELS)}")
    return text.upper()


LogLevel = Annotated[
    str, option("--log-level", f"Least level to log: {', '.join(_LEVELS)}.", parser=_parse_level, metavar="LEVEL")
]


class _Formatter(logging.Formatter):
    """Formats times in UTC, and hides passwords whichever driver logs them."""

    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        from postdate.config import redact_secrets

        return redact_secrets(super().format(record))


class _JsonFormatter(_Formatter):
    """Formats records as JSON objects, one a line."""

    def format(self, record: logging.LogRecord) -> str:
        import json

        from postdate.config import redact_secrets

        entry = {
            "time": f"{self.formatTime(record, self.datefmt)}.{record.msecs:03.0f}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": redact_secrets(record.getMessage()),
        }
        if record.exc_info:
            entry["exception"] = redact_secrets(self.formatException(record.exc_info))
        return json.dumps(entry, separators=(",", ":"))


@contextmanager
def log_to_stderr(level: str, *, as_json: bool = False) -> Generator[None]:
    """Log to standard error, and nowhere else, for the length of the block. Then restore the program's own logging.

    Loggers other than Postdate's stay at warnings unless ``level`` is ``DEBUG``, because drivers log every statement at
    ``INFO``.
    """
    handler = logging.StreamHandler(sys.stderr)
    kind = _JsonFormatter if as_json else _Formatter
    formatter = kind("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    handler.setFormatter(formatter)
    root, postdate_logger = logging.getLogger(), logging.getLogger("postdate")
    handlers_before, levels_before = root.handlers[:], (root.level, postdate_logger.level)
    root.handlers[:] = [handler]
    root.setLevel(level if level == "DEBUG" else max(logging.WARNING, logging.getLevelNamesMapping()[level]))
    postdate_logger.setLevel(level)
    try:
        yield
    finally:
        root.handlers[:] = handlers_before
        root.setLevel(levels_before[0])
        postdate_logger.setLevel(levels_before[1])
