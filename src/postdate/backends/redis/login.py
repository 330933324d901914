"""The address of a Redis server, its credentials, and the tag of all keys.

``redis://user:password@host:port/database?prefix=shop``, and ``rediss://…?ca=/path/of/authority.pem`` for TLS. Only the
host is needed; the database defaults to 0 and the prefix to ``postdate``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from postdate.errors import ConfigurationError

_PORT: Final = 6379
_PREFIX: Final = "postdate"
_FORM: Final = "redis://user:password@host:port/database?prefix=NAME"


@dataclass(frozen=True, slots=True)
class RedisLogin:
    """One database of a Redis server, and the prefix that store and queues of a deployment share.

    ``user`` is for servers with access control; ``authority`` is a file with the trusted certificates, by default the
    system's.
    """

    host: str
    port: int = _PORT
    database: int = 0
    prefix: str = _PREFIX
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    authority: str | None = None

    @property
    def description(self) -> str:
        """For messages, without secrets."""
        return f"Redis at {self.host}:{self.port}, database {self.database}"

    @property
    def tag(self) -> str:
        """The beginning of all keys: in braces, by which a cluster keeps them in one slot."""
        return f"{{{self.prefix}}}"

    @property
    def identity(self) -> object:
        """Equal for a store and queues that can share a transaction."""
        return ("redis", self.host.lower(), self.port, self.database, self.prefix)


def parse_address(address: str) -> RedisLogin:
    """Return the parts of an address; the text of a `ConfigurationError` shows no password."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:  # its text may have a piece of a password that is not escaped
        raise ConfigurationError(f"the address of Redis cannot be read; write {_FORM}") from None
    if parts.scheme not in {"redis", "rediss"} or not parts.hostname:
        raise ConfigurationError(f"an address of Redis is written {_FORM}")
    database = parts.path.strip("/")
    if database and not (database.isascii() and database.isdigit()):
        raise ConfigurationError(f"{database!r} is not the number of a Redis database; write {_FORM}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - {"prefix", "ca"}):
        raise ConfigurationError(f"an address of Redis has the options prefix and ca, not {', '.join(unknown)}")
    tls = parts.scheme == "rediss"
    if "ca" in options and not tls:
        raise ConfigurationError("ca is for rediss:// addresses, whose connections are encrypted")
    prefix = options.get("prefix", _PREFIX)
    if not prefix or len(prefix) > 200 or any(sign in prefix for sign in "{}\0"):
        raise ConfigurationError(f"the prefix {prefix!r} must be 1 to 200 characters without braces")
    return RedisLogin(
        parts.hostname,
        port or _PORT,
        int(database or 0),
        prefix,
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        tls,
        options.get("ca"),
    )
