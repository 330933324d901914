"""Settings: fields of frozen dataclasses with annotations that define them. Source: ADR 0023.

``page_size: Annotated[int, Meta(ge=1, le=1_000, description="claimed at once")] = 50`` is the whole definition. It
defines how the setting is read from the file and the environment, the error for a wrong value, ``config show``, the
table of the documentation, and the check in the constructor. A field without a description is no setting.
"""

from __future__ import annotations

import difflib
import enum
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from postdate.errors import ConfigurationError, InvalidMessage
from postdate.messages import DESTINATION_LIMIT, check_text
from postdate.ports.common import Recording

_LONGEST_SUFFIX: Final = len(".timeouts")
_SECOND: Final = timedelta(seconds=1)


class InvalidValue(ValueError):
    """The error for a wrong value. It says what the value must be; the caller adds name and place of the setting."""


@dataclass(frozen=True, slots=True)
class Form:
    """A check and conversion for values with a form of their own; part of an annotation.

    Args:
        convert: converts a value, or raises :class:`InvalidValue`.
        many: the word for several such values, for error texts.
    """

    convert: Callable[[Any], Any]
    many: str = "texts"


@dataclass(frozen=True, slots=True)
class Span:
    """The bounds of a duration; part of an annotation. Without bounds, the duration must be above zero.

    Args:
        least, most: the bounds, both allowed; ``most`` is ``None``: there is no upper bound.
        step: the duration must be a multiple of this.
    """

    least: timedelta | None = None
    most: timedelta | None = None
    step: timedelta | None = None

    def contains(self, value: timedelta) -> bool:
        """Return whether a duration is within the bounds."""
        if self.least is None:
            return value > timedelta(0)
        return (
            self.least <= value and (self.most is None or value <= self.most) and not (self.step and value % self.step)
        )

    def allowed_values(self, kind: str) -> str:
        """Return a description of the allowed values, for error texts.

        Args:
            kind: ``duration`` for a value that is written as a text, ``timedelta`` for one that a program sets.
        """
        example = " such as {} or 1m30s" if kind == "duration" else ""
        if self.least is None:
            return f"a {kind} above zero" + ("," + example.format("30s") if example else "")
        if self.most is None:
            return f"a {kind} of zero or more" + ("," + example.format("0s") if example else "")
        steps = "" if self.step is None else f", in steps of {format_duration(self.step)}"
        return f"a {kind} of {format_duration(self.least)} to {format_duration(self.most)}{steps}"


ZERO_OR_MORE: Final = Span(timedelta(0))

_UNITS: Final = (
    ("d", 86_400_000_000),
    ("h", 3_600_000_000),
    ("m", 60_000_000),
    ("s", 1_000_000),
    ("ms", 1_000),
    ("us", 1),
)


def format_duration(duration: timedelta) -> str:
    """Return the shortest text that ``postdate.config.parse_duration`` reads back as ``duration``; not negative."""
    remaining, text = duration // timedelta(microseconds=1), ""
    for unit, size in _UNITS:
        if remaining >= size:
            count, remaining = divmod(remaining, size)
            text += f"{count}{unit}"
    return text or "0s"


class Secret(str):
    """A text that is never shown; a setting of this type is hidden in ``config show``, in errors and in ``repr``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def resolve_reference(reference: str, environment: Mapping[str, str], mend: str) -> str | None:
    """Return the value of ``env:NAME``, or the first line of ``file:PATH``; ``None`` if the text is no reference.

    Raises `ConfigurationError` when the value is blank or cannot be read; ``mend`` says what to do about that.
    """
    kind, _, target = reference.partition(":")
    match kind:
        case "env":
            text = environment.get(target, "")
            missing = f"{reference} names the environment variable {target!r}, which is not set here"
        case "file":
            missing = f"{reference} names a file that is empty"
            try:
                text = Path(target).expanduser().read_text(encoding="utf-8").partition("\n")[0]
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise ConfigurationError(f"{reference} cannot be read: {reason}; {mend}") from error
        case _:
            return None
    if not text.strip():
        raise ConfigurationError(f"{missing}; {mend}")
    return text.strip()


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as its field defines it.

    Args:
        name: name of the field.
        kind: type of its values, without ``None``.
        meta: the other parts of its annotation.
        default: value where nothing is set.
        optional: the value may be ``None``, which means the default of the adapter with this setting.
    """

    name: str
    kind: Any
    meta: tuple[object, ...]
    default: Any
    optional: bool

    @property
    def meaning(self) -> str:
        """The description of the setting, in one line."""
        return next(each.description for each in self.meta if isinstance(each, Meta) and each.description)

    @property
    def is_list(self) -> bool:
        """Whether the setting is a list of values."""
        return get_origin(self.kind) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values as texts, if the type lists them; otherwise empty."""
        if isinstance(self.kind, enum.EnumType):
            return tuple(str(each.value) for each in cast("type[enum.Enum]", self.kind))
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def convert(self, value: object, duration: str = "timedelta") -> Any:
        """Return a value converted to the type of the setting.

        Args:
            value: of the setting's type, or of the type that TOML has instead.
            duration: the word for a duration in error texts, see :meth:`Span.allowed_values`.

        Raises:
            Wrong: says what the value must be.
        """
        form = next((each for each in self.meta if isinstance(each, Form)), None)
        if self.is_list:
            return self._convert_list(value)
        if form is not None:
            return form.convert(value)
        if self.kind is timedelta:
            if isinstance(value, timedelta) and self._span.contains(value):
                return value
            raise InvalidValue(f"must be {self.allowed_values(duration)}")
        try:
            converted = msgspec.convert(value, Annotated[self.kind, self._bounds])
        except msgspec.ValidationError:
            raise InvalidValue(f"must be {self.allowed_values(duration)}{self._suggestion(value)}") from None
        if self.kind is str and not converted.strip():
            raise InvalidValue(f"must be {self.allowed_values(duration)}")
        return converted

    def allowed_values(self, duration: str = "duration") -> str:
        """Return a description of the allowed values, for error texts."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return "true or false"
        if self.kind is timedelta:
            return self._span.allowed_values(duration)
        if self.kind is str or self.kind is Secret:
            return "a text that is not blank"
        bounds = self._bounds
        bounds_text = "" if bounds.ge is None else f", {bounds.ge} or more"
        if bounds.ge is not None and bounds.le is not None:
            bounds_text = f", {bounds.ge} to {bounds.le:,}"
        return f"a {'whole ' if self.kind is int else ''}number{bounds_text}"

    def _convert_list(self, value: object) -> tuple[Any, ...]:
        item, *_ = get_args(self.kind)
        form = next((each for each in get_args(item)[1:] if isinstance(each, Form)), None)
        if not isinstance(value, list | tuple):
            raise InvalidValue(f"must be a list of {form.many if form else 'texts'}, as in {_EXAMPLE}")
        each = Setting(self.name, str, get_args(item)[1:], None, optional=False)
        return tuple(each.convert(one) for one in cast("Sequence[object]", value))

    @property
    def _span(self) -> Span:
        return next((each for each in self.meta if isinstance(each, Span)), Span())

    @property
    def _bounds(self) -> Meta:
        return next((each for each in self.meta if isinstance(each, Meta)), Meta())

    def _suggestion(self, value: object) -> str:
        matches = difflib.get_close_matches(str(value), self.choices, n=1)
        return f" (did you mean {matches[0]!r}?)" if matches else ""


_EXAMPLE: Final = '["orders", "invoices"]'


@lru_cache(maxsize=256)
def settings_of(kind: type) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by name: its fields with a description.

    Raises:
        TypeError: ``kind`` is no dataclass.
        NameError: an annotation names a type that is not imported in the module of the dataclass.
    """
    hints = get_type_hints(kind, include_extras=True)
    settings = {each.name: setting(each.name, hints[each.name], each.default) for each in fields(kind)}
    return types.MappingProxyType({name: each for name, each in settings.items() if each is not None})


def setting(name: str, annotation: Any, default: Any = None) -> Setting | None:
    """Return the setting that a field with this annotation defines, or ``None`` if it defines no setting."""
    kind, *meta = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    kinds = get_args(kind) if get_origin(kind) in {Union, types.UnionType} else (kind,)
    candidates = [each for each in kinds if each is not types.NoneType]
    if len(candidates) != 1 or not any(isinstance(each, Meta) and each.description for each in meta):
        return None
    if get_origin(candidates[0]) is Annotated:
        candidates[0], *more = get_args(candidates[0])
        meta += more
    if candidates[0] is Secret:
        meta.append(Form(_convert_secret))
    return Setting(name, candidates[0], tuple(meta), default, optional=len(kinds) > 1)


def check_settings(settings: object) -> None:
    """Refuse wrong values of a dataclass of settings; for its ``__post_init__``.

    Raises:
        ConfigurationError: names the setting, and says what the value must be and what it is.
    """
    for name, each in settings_of(type(settings)).items():
        value: object = getattr(settings, name)
        if value is None and each.optional:
            continue
        try:
            each.convert(value)
        except InvalidValue as error:
            raise ConfigurationError(f"{name} {error}, not {value!r}") from None


# --- forms ------------------------------------------------------------------------------------------------------------


def _queue_name_form(limit: int) -> Form:
    def convert(raw: Any) -> str:
        try:
            check_text(raw, "it", limit)
        except InvalidMessage as error:
            raise InvalidValue(f"must be the name of a queue: {error}") from error
        return str(raw)

    return Form(convert, "queue names")


def _convert_secret(raw: Any) -> Secret:
    if not isinstance(raw, str) or not raw.strip():
        raise InvalidValue("must be a text that is not blank")
    return Secret(raw)


QueueName = Annotated[str, _queue_name_form(DESTINATION_LIMIT - _LONGEST_SUFFIX)]
"""The name of a queue, with space left for the suffixes of names that are made from it, such as ``.timeouts``."""

Destination = Annotated[str, _queue_name_form(DESTINATION_LIMIT)]
"""The name of a queue."""


# --- settings that several backends have ------------------------------------------------------------------------------

Schema = Annotated[str | None, Meta(description="of the tables, on a server; default: the store's own")]
HoldsAtMost = Annotated[
    timedelta | None,
    Span(_SECOND, timedelta(hours=1)),
    Meta(
        description="a process without a heartbeat for this long loses its claims to other processes, 1 s to 1 h; "
        "default: the "
        "store's own, 60 s. Of queues in the store's database, too"
    ),
]
AnswersWithin = Annotated[
    timedelta | None,
    Span(_SECOND, timedelta(minutes=10)),
    Meta(
        description="after this long without an answer of the server a connection is abandoned, 1 s to 10 min; "
        "default: 20 s at "
        "PostgreSQL, else 30 s. Of queues there, too"
    ),
]
LargestMessageBytes = Annotated[
    int | None, Meta(ge=1, description="headers and body together; default: the adapter's own, 16 MiB on most")
]
HowMuchIsRecorded = Annotated[Recording, Meta(description="how much is kept for audits")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesOnServer:
    """Settings of a store whose tables are on a database server."""

    schema: Schema = None
    table: Annotated[
        str | None, Meta(description="of the waiting messages, on a server; default: {endpoint.name}.timeouts")
    ] = None
    recording: HowMuchIsRecorded = Recording.ALL
    largest_message_bytes: LargestMessageBytes = None
    holds_at_most: HoldsAtMost = None
    answers_within: AnswersWithin = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixedTables:
    """Settings of a storage of timeouts."""

    table_prefix: Annotated[
        str | None,
        Meta(description="prefix of the table's name; default: the endpoint's name, with _ for every point, and _"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixedTablesOnServer(PrefixedTables):
    """Settings of a storage of timeouts whose tables are on a database server."""

    schema: Annotated[str | None, Meta(description="of the tables, on a server; default: where upstream has them")] = (
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InSchema:
    """The setting of an adapter with a table on a database server, beside the store's."""

    schema: Annotated[str | None, Meta(description="of the table, on a server; default: the store's")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedMessages:
    """The setting of queues or stores that have a limit of their own."""

    largest_message_bytes: LargestMessageBytes = None
