"""Addresses of stores and transports. Their secrets are never shown, and a reference can keep them elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Self

from postdate.backends.registry import place_of
from postdate.errors import ConfigurationError
from postdate.ports.backends import Place
from postdate.ports.settings import resolve_reference

# Only the end of a parameter's name is matched. With a prefix, the search of a long word would take quadratic time.
_SECRET_PARAMETER: Final = re.compile(r"(?i)(password|passwd|pwd|secret|token|key|sig)=([^;&\s]+)")
_WORD: Final = re.compile(r"\S+")
_USER: Final = re.compile(r"://[^\s:/@]*:")

_REFERENCES: Final = frozenset({"env", "file"})
_HOST: Final = re.compile(r"(?:\[[^\[\]@]*\]|[^:\[\]@]*)(?::(?P<port>[^:]*))?")
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_LARGEST_PORT: Final = 65_535
_ESCAPES: Final = "in a user's name or a password write / as %2F, @ as %40, # as %23, ? as %3F, % as %25"


class Address(str):
    """The address of a store or transport.

    Its ``repr`` and :attr:`redacted_text` hide passwords; the text itself contains them.

    Args:
        text: the address.
        reference: the ``env:NAME`` or ``file:PATH`` from which the address was read; ``None``: it was given directly.
    """

    __slots__ = ("reference",)
    reference: str | None

    def __new__(cls, text: str, reference: str | None = None) -> Self:
        """Create the address from the text as it is. References are not followed: see :func:`resolve_address`."""
        scheme, colon, location = text.partition(":")
        # The registry is asked only if necessary, because default addresses are created during imports.
        scheme_lower = scheme.lower()
        is_own_scheme = scheme_lower != scheme and place_of(scheme_lower) not in {None, Place.MACHINE}
        self = super().__new__(cls, f"{scheme_lower}{colon}{location}" if is_own_scheme else text)
        self.reference = reference
        return self

    @property
    def scheme(self) -> str:
        """The text before the first colon, in lower case."""
        return self.partition(":")[0].lower()

    @property
    def redacted_text(self) -> str:
        """The address without secrets; ``***`` if it cannot be parsed, because any part of it may be a password."""
        if (place := place_of(self.scheme)) in {Place.FILE, Place.MEMORY}:
            path = self.partition(":")[2]
            return f"{self.scheme}:***" if "@" in path and not path.startswith("///") else str(self)
        is_server = place is Place.SERVER
        if self.reference is not None and not is_server:
            return "***"
        scheme, separator, location = self.partition("://")
        if not separator:
            _, at, host = self.rpartition("@")
            text = f"{self.scheme}:***" if is_server else f"{'***' if at else ''}{at}{host}"
            return _SECRET_PARAMETER.sub(r"\1=***", text)
        if (is_server or "@" in location) and _fault(location):
            return f"{scheme}://***"
        credentials, at, host = location.rpartition("@")
        user, colon, _ = credentials.partition(":")
        return _SECRET_PARAMETER.sub(r"\1=***", f"{scheme}://{user}{':***' if colon else ''}{at}{host}")

    def __repr__(self) -> str:
        return repr(self.redacted_text)


def check_server(address: str) -> None:
    """Refuse a server's address that can be parsed in more than one way, before a driver parses it.

    Drivers differ about where a password ends, and may show a part of it as a port or a host. The error shows no part
    of the address after its scheme.
    """
    scheme, separator, location = Address(address).partition("://")
    if separator and place_of(scheme) is Place.SERVER and (fault := _fault(location)):
        raise ConfigurationError(f"the address {scheme}://*** {fault}")


def _fault(location: str) -> str:
    """Return what is wrong with the text after ``://``; empty if nothing is."""
    if re.search(r"[\s\x00-\x1f\x7f]", location):
        return f"has a space or a control character in it: write a space as %20; {_ESCAPES}"
    end = re.search(r"[/?]", location)
    authority, remainder = (location, "") if end is None else (location[: end.start()], location[end.end() :])
    if "#" in location or "@" in remainder or authority.count("@") > 1:
        return f"cannot be parsed: {_ESCAPES}"
    credentials, _, hosts = authority.rpartition("@")
    if _BAD_ESCAPE.search(credentials):
        return f"has a % without two hexadecimal digits after it: {_ESCAPES}"
    for host in hosts.split(","):
        match = _HOST.fullmatch(host)
        port = "" if match is None else match["port"] or ""
        if match is None or (port and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) <= _LARGEST_PORT)):
            return (
                f"has no port from 1 to {_LARGEST_PORT} after its host; write user:password@host:port, and {_ESCAPES}"
            )
    return ""


def redact_secrets(text: str) -> str:
    """Return a text, such as a driver's message, without the passwords of the addresses in it."""
    return _SECRET_PARAMETER.sub(r"\1=***", _WORD.sub(_redact_password, text))


def _redact_password(word: re.Match[str]) -> str:
    """Return a word without the password of an address in it.

    The password ends at the last @ of the word. An unescaped password may contain one, and it does no harm to hide too
    much.
    """
    text = word[0]
    at = text.rfind("@")
    user = _USER.search(text, 0, at) if at >= 0 else None
    return text if user is None else f"{text[: user.end()]}***{text[at:]}"


def resolve_address(address: str, environment: Mapping[str, str]) -> Address:
    """Return the address to which ``env:NAME`` or ``file:PATH`` refers. Return any other address unchanged."""
    text = resolve_reference(address, environment, "put an address into it, such as postgresql://user@host/database")
    if text is None:
        return address if isinstance(address, Address) else Address(address)
    if text.partition(":")[0] in _REFERENCES:
        raise ConfigurationError(f"{address} refers to another reference; put the address itself there")
    return Address(text, reference=str(address))
