"""The encryption of a login to SQL Server, and its messages: bytes in, values out. Source: MS-TDS 2.2.

Options in addresses have the names of Microsoft's drivers. Every packet has a header of eight bytes: type, status (1:
the last packet of its message), length with the header, and four more.
"""

from __future__ import annotations

import ssl
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from postdate.errors import ConfigurationError

OPTIONS: Final = frozenset({"encrypt", "trustservercertificate", "hostnameincertificate", "cafile"})
_YES: Final = frozenset({"yes", "true", "mandatory"})
_NO: Final = frozenset({"no", "false"})
_STRICT: Final = "strict"


@dataclass(frozen=True, slots=True)
class Encryption:
    """The encryption of a connection.

    Args:
        context: of TLS; ``None``: nothing is encrypted, not even the password.
        is_strict: TLS begins before anything else (TDS 8, SQL Server 2022 and newer), as in HTTPS.
        expected_name: the name in the server's certificate; ``None``: the host of the address.
    """

    context: ssl.SSLContext | None
    is_strict: bool = False
    expected_name: str | None = None

    @property
    def is_on(self) -> bool:
        return self.context is not None


def encryption_of(options: Mapping[str, str]) -> Encryption:
    """Return the encryption for an address's options, whose names are in lower case. Raise `ConfigurationError`."""
    choice = options.get("encrypt", "yes").lower()
    is_trusting = _is_yes("trustservercertificate", options.get("trustservercertificate", "no"))
    if choice != _STRICT and not _is_yes("encrypt", choice, f"yes, no or {_STRICT}"):
        if ignored := sorted(set(options) - {"encrypt"}):
            raise ConfigurationError(f"{ignored[0]}= has no effect with encrypt=no; remove one of them")
        return Encryption(None)
    if is_trusting and choice == _STRICT:
        raise ConfigurationError("trustservercertificate=yes has no effect with encrypt=strict; remove one of them")
    cafile = options.get("cafile")
    try:
        context = ssl.create_default_context(cafile=cafile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"the certificates of cafile={cafile} cannot be read: {error}") from error
    if is_trusting:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if choice == _STRICT:
        context.set_alpn_protocols(["tds/8.0"])
    else:
        # Inside TDS packets servers use TLS 1.2 at most: after a handshake of TLS 1.3 more would follow in packets.
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return Encryption(context, choice == _STRICT, options.get("hostnameincertificate"))


def _is_yes(name: str, value: str, choices: str = "yes or no") -> bool:
    if value.lower() in _YES | _NO:
        return value.lower() in _YES
    raise ConfigurationError(f"{name}={value} is none of {choices}")


PRELOGIN: Final = 0x12
"""The type of the packets that negotiate encryption, and of those with the TLS handshake."""

ENCRYPT_ON: Final = 1
ENCRYPT_NOT_SUPPORTED: Final = 2
ENCRYPT_REQUIRED: Final = 3

HEADER: Final = struct.Struct(">BBHHBB")
_OPTION: Final = struct.Struct(">BHH")
_ENCRYPTION: Final = 1
_TERMINATOR: Final = 0xFF

_ERROR, _INFO, _LOGIN_ACK, _FEATURES, _CHANGE, _STATE, _SSPI, _FEDERATION = (
    0xAA, 0xAB, 0xAD, 0xAE, 0xE3, 0xE4, 0xED, 0xEE,
)  # fmt: skip
_DONE: Final = frozenset({0xFD, 0xFE, 0xFF})
_DONE_BYTES: Final = 12
_ROUTING: Final = 20


@dataclass(frozen=True, slots=True)
class LoginAnswer:
    """A server's answer to a login.

    Args:
        errors: number and text, in the order sent; empty: the login is complete.
        route: host and port of another server to log in to.
    """

    errors: tuple[tuple[int, str], ...] = ()
    route: tuple[str, int] | None = None


def packet(kind: int, content: bytes) -> bytes:
    """Return a whole message as one packet."""
    return HEADER.pack(kind, 1, HEADER.size + len(content), 0, 0, 0) + content


def read_encryption(content: bytes) -> int:
    """Return the encryption option of a PRELOGIN. Raise `ValueError`."""
    offset = _encryption_offset(content)
    return ENCRYPT_NOT_SUPPORTED if offset is None else content[offset]


def set_encryption(content: bytes, value: int) -> bytes:
    """Return a PRELOGIN with the encryption option set to ``value``. Raise `ValueError`."""
    offset = _encryption_offset(content)
    return content if offset is None else content[:offset] + bytes([value]) + content[offset + 1 :]


def _encryption_offset(content: bytes) -> int | None:
    position = 0
    while position < len(content) and content[position] != _TERMINATOR:
        if position + _OPTION.size > len(content):
            break
        kind, offset, length = _OPTION.unpack_from(content, position)
        if kind == _ENCRYPTION and length:
            if offset >= len(content):
                break
            return offset
        position += _OPTION.size
    else:
        if position < len(content):
            return None
    raise ValueError("the server's PRELOGIN is cut short")


def parse_login_answer(content: bytes) -> LoginAnswer:
    """Parse the tokens of an answer to a login. Raise `ValueError`."""
    errors, route, is_acknowledged = list[tuple[int, str]](), None, False
    try:
        for kind, token in _split_tokens(content):
            if kind == _LOGIN_ACK:
                is_acknowledged = True
            elif kind == _ERROR:
                number, _state, _class, length = struct.unpack_from("<iBBH", token)
                errors.append((number, token[8 : 8 + 2 * length].decode("utf-16-le")))
            elif kind == _CHANGE and token[:1] == bytes([_ROUTING]):
                _kind, _size, _protocol, port, length = struct.unpack_from("<BHBHH", token)
                route = token[8 : 8 + 2 * length].decode("utf-16-le"), port
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"the answer to the login cannot be read: {error}") from error
    if not is_acknowledged and not errors:
        raise ValueError("the answer to the login neither grants nor refuses it")
    return LoginAnswer(() if is_acknowledged else tuple(errors), route)


def _split_tokens(content: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(content):
        kind = content[position]
        position += 1
        if kind in _DONE:
            size = _DONE_BYTES
        elif kind in {_ERROR, _INFO, _LOGIN_ACK, _CHANGE, _SSPI}:
            (size,) = struct.unpack_from("<H", content, position)
            position += 2
        elif kind in {_STATE, _FEDERATION}:
            (size,) = struct.unpack_from("<I", content, position)
            position += 4
        elif kind == _FEATURES:
            size = _size_of_features(content, position)
        else:
            raise ValueError(f"the answer to the login has a token {kind:#04x}")
        if position + size > len(content):
            raise ValueError("the answer to the login is cut short")
        yield kind, content[position : position + size]
        position += size


def _size_of_features(content: bytes, at: int) -> int:
    start = at
    while content[at : at + 1] != bytes([_TERMINATOR]):
        (size,) = struct.unpack_from("<I", content, at + 1)
        at += 5 + size
    return at + 1 - start
