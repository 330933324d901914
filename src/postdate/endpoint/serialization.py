"""Messages of the application to bytes and back: JSON, by type.

A message type is a dataclass, a ``msgspec.Struct``, a model of pydantic, which reads and writes itself, or anything
else that msgspec reads and writes. Its name on the wire is ``module.Class`` unless the endpoint is told another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, Self, runtime_checkable
from weakref import WeakKeyDictionary

import msgspec

from postdate.errors import InvalidMessage, UnknownMessageType
from postdate.messages import Headers

JSON_CONTENT_TYPE = "application/json"

_KEPT: Final = 1_000
"""Decoders at most."""


@runtime_checkable
class _Model(Protocol):
    """The methods of a pydantic model that are used; pydantic itself is not imported."""

    def model_dump_json(self) -> str: ...

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Self: ...


_ENCODE: Final = msgspec.json.Encoder().encode


def _encode_model(message: _Model) -> bytes:
    return message.model_dump_json().encode()


def type_name(message_type: type[Any]) -> str:
    """Return the default name of a message type on the wire."""
    return f"{message_type.__module__}.{message_type.__qualname__}"


class MessageTypes:
    """Message types by the names under which they travel."""

    def __init__(self) -> None:
        self._by_name: dict[str, type[Any]] = {}
        self._names: dict[type[Any], str] = {}
        self._decoders: dict[str, Callable[[bytes], object]] = {}
        """By the header that names a message's types: nearly all messages have one of a few."""
        self._encoders: WeakKeyDictionary[type[Any], Callable[[Any], bytes]] = WeakKeyDictionary()

    def add(self, message_type: type[Any], name: str | None = None) -> str:
        known = name or self._names.get(message_type) or type_name(message_type)
        self._by_name[known] = message_type
        self._decoders.clear()
        self._names.setdefault(message_type, known)
        return known

    def name_of(self, message_type: type[Any]) -> str:
        """Return the name of a type, registered or not."""
        return self._names.get(message_type) or type_name(message_type)

    def encode(self, message: object) -> tuple[dict[str, str], bytes]:
        """Return content headers and body."""
        name = self.name_of(type(message))
        try:
            body = self._encoder(type(message))(message)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidMessage(f"a message of type {name} cannot be written as JSON: {error}") from error
        return {Headers.ENCLOSED_MESSAGE_TYPES: name, Headers.CONTENT_TYPE: JSON_CONTENT_TYPE}, body

    def decode(self, headers: Mapping[str, str], body: bytes) -> object:
        """Return the message; of one that names no type its body, if ``bytes`` are handled here.

        Several names may be enclosed, separated by semicolons, the most specific first; a name may be followed by
        assembly details after a comma, as .NET endpoints write them.
        """
        enclosed = headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "")
        decode = self._decoders.get(enclosed)
        if decode is None:
            if not enclosed and bytes in self._names:
                return body
            decode = self._decoder(enclosed)
        try:
            return decode(body)
        except (ValueError, msgspec.MsgspecError) as error:
            raise InvalidMessage(f"the body is no {self._first_known(enclosed)}: {error}") from error

    def _encoder(self, message_type: type[Any]) -> Callable[[Any], bytes]:
        encode = self._encoders.get(message_type)
        if encode is None:
            encode = self._encoders[message_type] = _encode_model if issubclass(message_type, _Model) else _ENCODE
        return encode

    def _decoder(self, enclosed: str) -> Callable[[bytes], object]:
        message_type = self._by_name[self._first_known(enclosed)]
        decode = (
            message_type.model_validate_json
            if issubclass(message_type, _Model)
            else msgspec.json.Decoder(message_type).decode
        )
        if len(self._decoders) < _KEPT:  # whoever sends can write what they like after a comma
            self._decoders[enclosed] = decode
        return decode

    def _first_known(self, enclosed: str) -> str:
        names = [name.split(",")[0].strip() for name in enclosed.split(";")]
        for name in names:
            if name in self._by_name:
                return name
        known = ", ".join(sorted(self._by_name)) or "none"
        raise UnknownMessageType(f"no handler here for message type {names[0]!r}; handled types: {known}")
