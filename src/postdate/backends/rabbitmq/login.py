"""The parts of an AMQP URL."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from postdate.errors import ConfigurationError

_PORTS = {"amqp": 5672, "amqps": 5671}
_MANAGEMENT_PORTS = {5672: 15672, 5671: 15671}
_OPTIONS = ("heartbeat", "management", "cacertfile", "certfile", "keyfile")
HEARTBEAT_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Login:
    """Server, virtual host and account.

    A server that is silent for two ``heartbeat_seconds`` is considered dead; 0: never. ``management_port`` is that of
    the interface that tells the limits of queues; 0: it is not asked.
    """

    host: str
    port: int
    virtual_host: str
    user: str
    password: str = field(repr=False)
    heartbeat_seconds: int = HEARTBEAT_SECONDS
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    management_port: int = 0

    @property
    def place(self) -> str:
        """For messages, without secrets."""
        return f"RabbitMQ at {self.host}:{self.port} (virtual host {self.virtual_host!r}, user {self.user!r})"


def parse_url(url: str) -> Login:
    """Return the parts of ``amqp://user:password@host:port/virtual%20host?heartbeat=20``.

    ``amqps`` is AMQP over TLS; ``cacertfile``, ``certfile`` and ``keyfile`` are then paths of PEM files.
    ``management`` is the port of the management interface; by default the usual one if AMQP's port is the usual one.
    The text of a `ConfigurationError` shows no password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text may have a piece of a password that is not escaped
        raise ConfigurationError(
            "the URL of RabbitMQ cannot be read; write amqp://user:password@host:5672/vhost, with / in a password as "
            "%2F, @ as %40, # as %23"
        ) from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigurationError(
            "the URL of RabbitMQ must look like amqp://user:password@host:5672/vhost or amqps://…; this one has no "
            "such scheme, or no host"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ConfigurationError(f"the URL of RabbitMQ has the unknown option {unknown[0]!r}; known: {_OPTIONS}")
    return Login(
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        virtual_host=unquote(parts.path[1:]) or "/",
        user=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        heartbeat_seconds=_number(options, "heartbeat", HEARTBEAT_SECONDS),
        tls=_tls(options) if parts.scheme == "amqps" else None,
        management_port=_number(options, "management", _MANAGEMENT_PORTS.get(port or _PORTS[parts.scheme], 0)),
    )


def _number(options: dict[str, str], name: str, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal() or int(text) > 65_535:
        raise ConfigurationError(f"{name} in the URL of RabbitMQ must be a whole number up to 65535, not {text!r}")
    return int(text)


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("cacertfile"))
        if "certfile" in options:
            context.load_cert_chain(options["certfile"], options.get("keyfile"))
    except OSError as error:
        raise ConfigurationError(f"a certificate that the URL of RabbitMQ names cannot be loaded: {error}") from error
    return context
