"""How connections to SQL Server are encrypted, read from the address. Options have the names of Microsoft's drivers."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from postdate.errors import ConfigurationError

OPTIONS: Final = frozenset({"encrypt", "trustservercertificate", "hostnameincertificate", "cafile"})
_YES: Final = frozenset({"yes", "true", "mandatory"})
_NO: Final = frozenset({"no", "false"})
_STRICT: Final = "strict"


@dataclass(frozen=True, slots=True)
class Encryption:
    """How a connection is encrypted.

    Args:
        context: of TLS; ``None``: nothing is encrypted, not even the password.
        is_strict: TLS begins before anything else (TDS 8, SQL Server 2022 and newer), as on the web.
        expected_name: in the server's certificate; ``None``: the host of the address.
    """

    context: ssl.SSLContext | None
    is_strict: bool = False
    expected_name: str | None = None

    @property
    def is_on(self) -> bool:
        return self.context is not None


def encryption_of(options: Mapping[str, str]) -> Encryption:
    """Return the encryption of an address' options; names in lower case. Raises `ConfigurationError`."""
    wanted = options.get("encrypt", "yes").lower()
    is_trusting = _is_yes("trustservercertificate", options.get("trustservercertificate", "no"))
    if wanted != _STRICT and not _is_yes("encrypt", wanted, f"yes, no or {_STRICT}"):
        useless = sorted(set(options) - {"encrypt"})
        if useless:
            raise ConfigurationError(f"{useless[0]}= means nothing beside encrypt=no; take one of them out")
        return Encryption(None)
    if is_trusting and wanted == _STRICT:
        raise ConfigurationError("trustservercertificate=yes means nothing beside encrypt=strict; take one of them out")
    context = _context(options.get("cafile"))
    if is_trusting:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if wanted == _STRICT:
        context.set_alpn_protocols(["tds/8.0"])
    else:
        # Inside TDS packets servers speak TLS 1.2 at most: after a handshake of TLS 1.3 more would follow in packets.
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return Encryption(context, wanted == _STRICT, options.get("hostnameincertificate"))


def _is_yes(name: str, value: str, choices: str = "yes or no") -> bool:
    if value.lower() in _YES | _NO:
        return value.lower() in _YES
    raise ConfigurationError(f"{name}={value} is none of {choices}")


def _context(cafile: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cafile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"the certificates of cafile={cafile} cannot be read: {error}") from error
