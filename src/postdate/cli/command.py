"""Common parts of all commands: options, settings, reports."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from datetime import datetime
    from types import FrameType

    from postdate.config import Settings
    from postdate.wiring import OpenDeployment

P = ParamSpec("P")
T = TypeVar("T")

_COMMON: Final[dict[str, Any]] = {
    "config": Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="Settings; default: POSTDATE_CONFIG, or postdate.toml if there."),
    ],
    "store": Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="ADDRESS",
            help="Where messages wait, as sqlite:///postdate.db or postgresql://user@host/db.",
        ),
    ],
    "transport": Annotated[
        str | None,
        typer.Option(
            "--transport",
            metavar="ADDRESS",
            help="Where the queues are; default: with the store.",
        ),
    ],
}
_VERSION: Final[Any] = Annotated[bool, typer.Option("--version", help="Print the version and exit.")]
_JSON: Final[Any] = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@dataclass(frozen=True, slots=True)
class Use:
    """The common options of one call of a command; ``None`` when not given."""

    config: str | None = None
    store: str | None = None
    transport: str | None = None
    as_json: bool = False

    def settings(self) -> Settings:
        from postdate.config import load_settings

        options = {"store.address": self.store, "transport.address": self.transport}
        return load_settings(self.config, os.environ, options)

    def work(self, work: Callable[[OpenDeployment, datetime], Awaitable[T]], *, create: bool = False) -> T:
        """Open store and queues, run ``work`` and return its result."""
        import anyio

        from postdate.operations import present
        from postdate.wiring import opened

        settings = self.settings()

        async def working() -> T:
            async with opened(settings, create=create) as deployment:
                return await work(deployment, await present(deployment))

        return anyio.run(working)

    def report(self, found: object, lines: Callable[[], None]) -> None:
        """Print ``found`` as one JSON object, or call ``lines`` to print it as text."""
        if not self.as_json:
            lines()
            return
        import msgspec

        typer.echo(msgspec.json.encode(found))


Command = Callable[Concatenate[Use, P], None]


def command(
    app: typer.Typer, name: str, *, reports: bool = True, **settings: Any
) -> Callable[[Command[P]], Command[P]]:
    """Register a function as the command ``name`` of ``app``; its first argument is a :class:`Use`.

    A parameter whose type is a dataclass is a group of options: its fields are options like other parameters. So
    options that several commands have are written once. With ``reports``, the command takes ``--json``.
    """
    common = _parameters({**_COMMON, "as_json": _JSON} if reports else _COMMON)

    def register(function: Command[P]) -> Command[P]:
        groups = _groups(function)

        def run(context: typer.Context, **arguments: Any) -> None:
            given = {option.name: arguments.pop(option.name) for option in common}
            for parameter, group in groups.items():
                arguments[parameter] = group(**{each.name: arguments.pop(each.name) for each in fields(group)})
            function(_together(context.obj, given), **arguments)  # pyright: ignore[reportCallIssue] - typer has checked them

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

    ``run`` is called with the context and all options by name; the first parameter of ``function`` is no option.
    """
    run.__doc__ = function.__doc__
    run.__signature__ = inspect.Signature([_CONTEXT, *options_of(function)[1:], *common])
    app.command(name, **settings)(run)


def options_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return a function's parameters in the form that typer reads: types resolved, groups split into their fields."""
    hints, kind = get_type_hints(function, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    groups, found = _groups(function), list[inspect.Parameter]()
    for each in inspect.signature(function).parameters.values():
        if each.name in groups:
            found += _of_group(groups[each.name])
        else:
            found.append(each.replace(annotation=hints[each.name], kind=kind))
    return found


def keep_common(context: typer.Context, **options: Any) -> None:
    """Keep common options that stand before the command; see :func:`root_signature`."""
    context.obj = Use(**options)


def root_signature() -> inspect.Signature:
    """Return the signature of a callback that takes the context, the common options and ``--version``."""
    return inspect.Signature([_CONTEXT, *_parameters({**_COMMON, "version": _VERSION})])


def _together(before: object, given: dict[str, Any]) -> Use:
    """Merge common options: one behind the command wins over the same one before it."""
    known = before if isinstance(before, Use) else Use()
    return replace(known, **{option: value for option, value in given.items() if value})


_CONTEXT: Final = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)


def _parameters(common: dict[str, Any]) -> list[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    defaults = {"as_json": False, "version": False}
    return [
        inspect.Parameter(option, kind, default=defaults.get(option), annotation=annotation)
        for option, annotation in common.items()
    ]


def _groups(function: Callable[..., object]) -> dict[str, type[Any]]:
    """Return the parameters of a command that are groups of options."""
    _, *own = inspect.signature(function).parameters
    hints = get_type_hints(function)
    return {name: hints[name] for name in own if is_dataclass(hints[name])}


def _of_group(group: type[Any]) -> list[inspect.Parameter]:
    hints, kind = get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(each.name, kind, default=each.default, annotation=hints[each.name]) for each in fields(group)
    ]


@contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Generator[None]:
    """Have signals handled so for the length of the block."""
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, previous in before:
            signal.signal(number, previous)


class _WrongUsage(typer.TyperException):
    exit_code = 2


def wrong_usage(message: str) -> typer.TyperException:
    """Return the error for arguments that are valid alone but not together."""
    return _WrongUsage(message)


def group(name: str, meaning: str) -> typer.Typer:
    """Return an empty group of commands; called without a command, it lists those it has."""
    app = typer.Typer(name=name, help=meaning, rich_markup_mode=None, add_completion=False)

    @app.callback(invoke_without_command=True)
    def which(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            names = [each.name or "" for each in app.registered_commands]
            names += [each.typer_instance.info.name or "" for each in app.registered_groups if each.typer_instance]
            raise wrong_usage(f"which one? {context.command_path} {'|'.join(names)}")

    which.__doc__ = meaning
    return app
