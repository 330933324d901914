"""Types of messages: their conversion to JSON and back, and their times to be received.

A message type is a dataclass, a ``msgspec.Struct``, a model of pydantic, which reads and writes itself, or anything
else that msgspec reads and writes. Its name on the wire is that of :func:`message`, or ``module.Class``.
A decorator or a convention sets the time to be received of a type (docs/specification-rows.md, row 74).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar, cast, runtime_checkable
from weakref import WeakKeyDictionary

import msgspec

from postdate.errors import ConfigurationError, InvalidMessage, UnknownMessageType
from postdate.messages import LONGEST_TIME_TO_BE_RECEIVED, Headers, parse_time_span

JSON_CONTENT_TYPE = "application/json"

T = TypeVar("T", bound=type[Any])

_MOST_DECODERS: Final = 1_000
"""The largest number of remembered decoders."""


@runtime_checkable
class _Model(Protocol):
    """The methods of a pydantic model that are used; pydantic itself is not imported."""

    def model_dump_json(self) -> str: ...

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Self: ...


_ENCODE: Final = msgspec.json.Encoder().encode


def _encode_model(message: Any) -> bytes:
    return message.model_dump_json().encode()


_NAME: Final = "__postdate_message_name__"
_ALIASES: Final = "__postdate_message_aliases__"


def message(name: str, *, aliases: Sequence[str] = ()) -> Callable[[T], T]:
    """Set the name under which messages of a type travel and wait. It stays when the class moves or gets another name.

    Without it the name is ``module.Class``, and messages that wait while the class moves cannot be handled afterwards.
    Subclasses do not inherit the name.

    Args:
        name: text without commas and semicolons.
        aliases: earlier names. Messages with these names are handled, too, and none is sent.

    Raises:
        ConfigurationError: a name is no such text. Raised when the type is defined.
    """
    if isinstance(name, type):
        raise ConfigurationError(f"@message on {type_name(name)} has no name: write @message('{name.__name__}')")
    if isinstance(aliases, str):  # a text is a sequence of texts, too
        raise ConfigurationError(f"aliases must be a list of names, not the text {aliases!r}")
    for each in (name, *aliases):
        value = cast("object", each)
        if not isinstance(value, str) or not value.strip() or value != value.strip() or not {*value}.isdisjoint(",;\n"):
            raise ConfigurationError(
                f"a message type has a name without blanks at its ends, commas and semicolons, not {value!r}"
            )

    def decorate(message_type: T) -> T:
        setattr(message_type, _NAME, name)
        setattr(message_type, _ALIASES, tuple(aliases))
        return message_type

    return decorate


def type_name(message_type: type[Any]) -> str:
    """Return the name of a message type on the wire, unless an endpoint has registered it under another one."""
    return vars(message_type).get(_NAME) or f"{message_type.__module__}.{message_type.__qualname__}"


class MessageTypes:
    """Message types by the names under which they travel."""

    def __init__(self) -> None:
        self._by_name: dict[str, type[Any]] = {}
        self._names: dict[type[Any], str] = {}
        self._decoders: dict[str, Callable[[bytes], object]] = {}
        """Decoders by the header that names the types of a message. Nearly all messages have one of a few."""
        self._encoders: WeakKeyDictionary[type[Any], Callable[[Any], bytes]] = WeakKeyDictionary()

    def add(self, message_type: type[Any], name: str | None = None) -> str:
        own_name = name or self._names.get(message_type) or type_name(message_type)
        self._by_name[own_name] = message_type
        for alias in vars(message_type).get(_ALIASES, ()):
            self._by_name.setdefault(alias, message_type)  # another type may have this name now
        self._decoders.clear()
        self._names.setdefault(message_type, own_name)
        return own_name

    def name_of(self, message_type: type[Any]) -> str:
        """Return the name of a type, registered or not."""
        return self._names.get(message_type) or type_name(message_type)

    def encode(self, message: object) -> tuple[dict[str, str], bytes]:
        """Return content headers and body."""
        message_type = type(message)
        name, encode = self.name_of(message_type), self._encoders.get(message_type)
        try:
            if encode is None:
                is_model = issubclass(message_type, _Model)
                encode = self._encoders[message_type] = _encode_model if is_model else _ENCODE
            body = encode(message)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidMessage(f"a message of type {name} cannot be written as JSON: {error}") from error
        return {Headers.ENCLOSED_MESSAGE_TYPES: name, Headers.CONTENT_TYPE: JSON_CONTENT_TYPE}, body

    def decode(self, headers: Mapping[str, str], body: bytes) -> object:
        """Return the message, or its body if the headers name no type and ``bytes`` are handled here.

        Several names may be enclosed, separated by semicolons, the most specific first; a name may be followed by
        assembly details after a comma, as .NET endpoints write them.
        """
        type_header = headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "")
        decode = self._decoders.get(type_header)
        if decode is None:
            if not type_header and bytes in self._names:
                return body
            decode = self._create_decoder(type_header)
        try:
            return decode(body)
        except (ValueError, msgspec.MsgspecError) as error:
            raise InvalidMessage(f"the body is not a {self._handled_type_name(type_header)}: {error}") from error

    def _create_decoder(self, type_header: str) -> Callable[[bytes], object]:
        message_type = self._by_name[self._handled_type_name(type_header)]
        decode = (
            message_type.model_validate_json
            if issubclass(message_type, _Model)
            else msgspec.json.Decoder(message_type).decode
        )
        # A limit, as a sender can write any text after a comma of the header.
        if len(self._decoders) < _MOST_DECODERS:
            self._decoders[type_header] = decode
        return decode

    def _handled_type_name(self, type_header: str) -> str:
        names = [name.split(",")[0].strip() for name in type_header.split(";")]
        for name in names:
            if name in self._by_name:
                return name
        handled_types = ", ".join(sorted(self._by_name)) or "none"
        raise UnknownMessageType(
            f"no handler here for message type {names[0]!r}; handled types: {handled_types}. If its class has moved, "
            f"decorate it with @postdate.message(name, aliases=[{names[0]!r}])"
        )


Convention: TypeAlias = Callable[[type[Any]], timedelta | None]
"""A function that returns the time to be received of a message type; ``None``: that of its decorator, or for ever."""

INFINITE: Final = timedelta.max
"""A time to be received that never ends; it overrides the type or the convention."""

_ATTRIBUTE: Final = "__postdate_time_to_be_received__"
_INFINITE_TEXT: Final = "10675199.02:48:05.4775807"
"""The longest time span of the wire format: how .NET writes "infinite"."""

# An attribute also stays with the new type that a decorator such as dataclass(slots=True) creates. In a protocol an
# attribute would be one more member that its types must have, so protocols are kept in a dictionary.
_PROTOCOLS: Final = WeakKeyDictionary[type[Any], timedelta]()


def time_to_be_received(span: timedelta | str) -> Callable[[T], T]:
    """Set the time to be received of a message type: a message that is older than this is discarded.

    Subclasses inherit it, and may set another one: the most derived type wins. ``timedelta.max`` means for ever.

    Args:
        span: above zero; as text ``[d.]hh:mm:ss[.fffffff]``.

    Raises:
        ConfigurationError: the text is no time span, or the span is not above zero. Raised when the type is defined.

    Source: docs/guides/time-to-be-received.md.
    """
    if isinstance(span, type):
        raise ConfigurationError(
            f"@time_to_be_received on {type_name(span)} has no time: write @time_to_be_received('00:00:30')"
        )

    def decorate(message_type: T) -> T:
        duration = _parse_type_span(span, message_type, "its time to be received")
        if getattr(message_type, "_is_protocol", False):
            _PROTOCOLS[message_type] = duration
        else:
            setattr(message_type, _ATTRIBUTE, duration)
        return message_type

    return decorate


class TimesToBeReceived:
    """The times to be received of message types, by the convention or else by the type."""

    def __init__(self, convention: Convention | None = None) -> None:
        self._convention = convention
        self._spans: dict[type[Any], timedelta | None] = {}

    def span_of(self, message_type: type[Any]) -> timedelta | None:
        """Return the time to be received of a type; ``None``: its messages do not expire."""
        if message_type not in self._spans:
            span = None if self._convention is None else self._convention(message_type)
            if span is None:
                span = _declared_span(message_type)
            else:
                span = _parse_type_span(
                    span, message_type, "the time to be received that the convention returns for it"
                )
            self._spans[message_type] = finite_span(span)
        return self._spans[message_type]

    def expiring_types(self) -> list[str]:
        """Return the names of the types known so far whose messages expire."""
        return sorted(type_name(message_type) for message_type, span in self._spans.items() if span is not None)


def finite_span(span: timedelta | None) -> timedelta | None:
    """Return the span, or ``None`` if it is :data:`INFINITE`."""
    return None if span == INFINITE else span


def parse_span(span: object, subject: str) -> timedelta:
    """Return a span as a duration. A text needs a colon, as a number alone could mean days or seconds."""
    if isinstance(span, str):
        parsed = INFINITE if span.strip() == _INFINITE_TEXT else parse_time_span(span)
        if parsed is None or ":" not in span:
            raise ConfigurationError(
                f"{subject} is not a time span: {span!r}; write [d.]hh:mm:ss, for example '00:00:30'"
            )
    elif isinstance(span, timedelta):
        parsed = span
    else:
        raise ConfigurationError(f"{subject} must be a timedelta or text, not {type(span).__name__} {span!r}")
    if parsed <= timedelta(0):
        raise ConfigurationError(f"{subject} must be greater than 0, not {span}")
    if LONGEST_TIME_TO_BE_RECEIVED < parsed < INFINITE:
        raise ConfigurationError(
            f"{subject} is longer than {LONGEST_TIME_TO_BE_RECEIVED.days:,} days: {parsed}; timedelta.max means no "
            f"limit"
        )
    return parsed


def _parse_type_span(span: object, message_type: type[Any], subject: str) -> timedelta:
    return parse_span(span, f"message type {type_name(message_type)}: {subject}")


def _declared_span(message_type: type[Any]) -> timedelta | None:
    declared_spans = (_PROTOCOLS.get(each) or vars(each).get(_ATTRIBUTE) for each in message_type.__mro__)
    return next((span for span in declared_spans if span is not None), None)
