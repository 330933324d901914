"""The place of a storage account, and the login: the parts of an address or of a connection string; its connections.

``azure-queues`` and ``azure-table`` addresses differ only in the service that their host names:

``azure-queues://ACCOUNT:KEY@ACCOUNT.queue.core.windows.net``
    An account and its key, in which ``/`` is written ``%2F``, ``+`` ``%2B`` and ``=`` may stand. The hosts of the other
    services follow from it.
``azure-queues://ACCOUNT:KEY@127.0.0.1:10001/ACCOUNT?protocol=http&blobs=127.0.0.1:10000&tables=127.0.0.1:10002``
    Explicit endpoints. An endpoint that is neither named nor follows from the host is an error when it is needed.
``azure-queues://?connection=env:NAME``, ``azure-queues://?connection=file:PATH``
    The connection string of the account is in a variable of the environment, or in the first line of a file.
``azure-queues://UseDevelopmentStorage``
    The emulator on this machine, on its own ports.

Outside a configuration, which must tell queues from tables, a connection string is accepted as the portal shows it.
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import anyio
from aiohttp import ClientConnectorError, ClientOSError, ServerDisconnectedError, TraceConfig
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.core.exceptions import AzureError
from azure.core.pipeline.transport import AioHttpTransport

from postdate.errors import ConfigurationError
from postdate.ports.settings import resolve_reference

if TYPE_CHECKING:
    from azure.data.tables.aio import TableServiceClient
    from azure.storage.blob.aio import BlobServiceClient
    from azure.storage.queue.aio import QueueServiceClient

SCHEMES: Final = ("azure-queues", "azure-table")
SERVICES: Final = ("queue", "table", "blob")
CONNECTS_WITHIN_SECONDS: Final = 5.0
ANSWERS_WITHIN_SECONDS: Final = 20.0
"""Longer than Azure works on any of our requests, and shorter than a message stays invisible."""

LEAVES_WITHIN_SECONDS: Final = 5.0
"""The limit for closing. The lease, and the hiding of messages, end by themselves."""

_PUBLIC_SUFFIX: Final = "core.windows.net"
_EMULATOR: Final = "UseDevelopmentStorage"
_EMULATOR_ACCOUNT: Final = "devstoreaccount1"
# It is the same in every emulator, and no secret.
_EMULATOR_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_EMULATOR_PORTS: Final = {"blob": 10_000, "queue": 10_001, "table": 10_002}
_OPTIONS: Final = {"queues": "queue", "tables": "table", "blobs": "blob"}
_FORMS: Final = "azure-queues://ACCOUNT:KEY@ACCOUNT.queue.core.windows.net or azure-queues://?connection=env:NAME"

requests_log = logging.getLogger("postdate.azure.requests")
"""A logger of its own for the SDK, which logs each request at level INFO: too much for the other loggers."""
if requests_log.level == logging.NOTSET:
    requests_log.setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class AzureLogin:
    """A storage account and its credentials: a key in base64, or a shared access signature without its question mark.

    ``endpoints`` has the URL of each known service: ``queue``, ``table``, ``blob``.
    """

    account: str
    endpoints: Mapping[str, str]
    key: str | None = field(default=None, repr=False)
    signature: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.key is None) == (self.signature is None):
            raise ConfigurationError(f"Azure account {self.account!r} needs a key, or a shared access signature")
        try:
            is_key = self.key is None or bool(base64.b64decode(self.key, validate=True))
        except ValueError:
            is_key = False
        if not is_key:
            raise ConfigurationError(
                f"the key of Azure account {self.account!r} is not base64; copy it whole, and in an address write / in "
                f"it as %2F and + as %2B"
            )

    def endpoint(self, service: str) -> str:
        """Return the URL of a service; raises `ConfigurationError` when the address does not give it."""
        if (url := self.endpoints.get(service)) is None:
            raise ConfigurationError(
                f"the address of Azure account {self.account!r} does not say where its {service} service is; "
                f"add {service}s=HOST:PORT to it, after a question mark"
            )
        return url

    def describe_service(self, service: str) -> str:
        """Return the account and host for texts, without secrets."""
        url = self.endpoints.get(service)
        return f"Azure account {self.account!r}" + (f" at {urlsplit(url).netloc}" if url else "")

    @property
    def credential(self) -> AzureNamedKeyCredential | AzureSasCredential:
        if self.key is not None:
            return AzureNamedKeyCredential(self.account, self.key)
        assert self.signature is not None
        return AzureSasCredential(self.signature)

    def create_queue_service(self) -> QueueServiceClient:
        """Return a client; it connects at first use, and the caller must close it."""
        from azure.storage.queue.aio import QueueServiceClient

        return QueueServiceClient(self.endpoint("queue"), self.credential, **_client_settings())

    def create_table_service(self) -> TableServiceClient:
        from azure.data.tables.aio import TableServiceClient

        return TableServiceClient(endpoint=self.endpoint("table"), credential=self.credential, **_client_settings())

    def create_blob_service(self) -> BlobServiceClient:
        from azure.storage.blob.aio import BlobServiceClient

        return BlobServiceClient(self.endpoint("blob"), self.credential, **_client_settings())


def _client_settings() -> dict[str, Any]:
    """Return the settings of every client.

    The SDK must not retry: that would hide an outage from our circuit breakers.
    """
    transport = RetryingTransport(connection_timeout=CONNECTS_WITHIN_SECONDS, read_timeout=ANSWERS_WITHIN_SECONDS)
    return {"transport": transport, "retry_total": 0, "logger": requests_log}


# --- addresses --------------------------------------------------------------------------------------------------------


def parse_login(address: str, environment: Mapping[str, str] | None = None) -> AzureLogin:
    """Return the login in an address or a connection string.

    Raises:
        ConfigurationError: the text cannot be parsed, or its variable or file is missing; the message shows no key.
    """
    scheme, separator, location = address.partition("://")
    if not separator or "=" in scheme:
        return parse_connection_string(address)
    if scheme.lower() not in SCHEMES:
        raise ConfigurationError(f"an address of Azure Storage looks like {_FORMS}; this one has another scheme")
    if location.partition("=")[0].rstrip("/").lower() == _EMULATOR.lower():
        return _emulator()
    try:
        parts = urlsplit(f"//{location}")
        _ = parts.port
    except ValueError:  # The text of the error may contain a part of a key that is not escaped.
        raise ConfigurationError(
            f"the address of Azure Storage cannot be read; write {_FORMS}, with / in the key as %2F"
        ) from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - {"protocol", "connection", *_OPTIONS}):
        allowed = ", ".join(("protocol", "connection", *_OPTIONS))
        raise ConfigurationError(
            f"the address of Azure Storage has the unknown option {unknown[0]!r}; known: {allowed}"
        )
    if "connection" in options:
        if parts.netloc:
            raise ConfigurationError(
                "the address of Azure Storage names both an account and a connection string: use only one"
            )
        return parse_connection_string(_resolve_reference(options["connection"], environment))
    return _login("queue" if scheme.lower() == "azure-queues" else "table", parts.netloc, parts.path, options)


def _login(service: str, authority: str, path: str, options: Mapping[str, str]) -> AzureLogin:
    credentials, at, host = authority.rpartition("@")
    account, colon, key = credentials.partition(":")
    if not (at and colon and account and key and host):
        raise ConfigurationError(f"the address of Azure Storage has no account, key or host; write {_FORMS}")
    if (protocol := options.get("protocol", "https")) not in {"http", "https"}:
        raise ConfigurationError(f"protocol in the address of Azure Storage must be http or https, not {protocol!r}")
    hosts = {service: host, **_neighbours(service, host)}
    hosts |= {of: options[name] for name, of in _OPTIONS.items() if name in options}
    path = path.rstrip("/")
    endpoints = {of: f"{protocol}://{at_host}{path}" for of, at_host in hosts.items()}
    return AzureLogin(unquote(account), endpoints, key=unquote(key))


def _neighbours(service: str, host: str) -> dict[str, str]:
    """Return the hosts of the other services, if the host of one service contains its name."""
    account, separator, suffix = host.partition(f".{service}.")
    return {of: f"{account}.{of}.{suffix}" for of in SERVICES} if separator else {}


def _resolve_reference(reference: str, environment: Mapping[str, str] | None) -> str:
    """Return the connection string behind ``env:NAME`` or ``file:PATH``."""
    text = resolve_reference(
        reference,
        os.environ if environment is None else environment,
        "put the connection string of the Azure account into it",
    )
    if text is None:
        raise ConfigurationError(
            "connection in the address of Azure Storage must refer to the connection string, which is a secret: "
            "env:NAME or file:PATH"
        )
    return text


# --- connection strings -----------------------------------------------------------------------------------------------


def parse_connection_string(text: str) -> AzureLogin:
    pairs = [part.partition("=") for part in text.strip().strip(";").split(";")]
    settings = {name.strip().lower(): value.strip() for name, equals, value in pairs if equals}
    if settings.get(_EMULATOR.lower(), "").lower() == "true":
        return _emulator()
    endpoints = _endpoints(settings)
    account = settings.get("accountname") or _account_of(endpoints)
    key, signature = settings.get("accountkey"), settings.get("sharedaccesssignature")
    if not (account and endpoints and (key or signature)):
        raise ConfigurationError(
            "this is not a connection string of Azure Storage: it needs AccountName and AccountKey, or endpoints and "
            "SharedAccessSignature; copy it whole from the account's access keys"
        )
    return AzureLogin(
        account, endpoints, key=key or None, signature=None if key else signature and signature.lstrip("?")
    )


def _endpoints(settings: Mapping[str, str]) -> dict[str, str]:
    named = {service: settings[f"{service}endpoint"] for service in SERVICES if settings.get(f"{service}endpoint")}
    if not (account := settings.get("accountname")):
        return {service: url.rstrip("/") for service, url in named.items()}
    protocol = settings.get("defaultendpointsprotocol") or "https"
    suffix = settings.get("endpointsuffix") or _PUBLIC_SUFFIX
    usual = {service: f"{protocol}://{account}.{service}.{suffix}" for service in SERVICES}
    return {service: url.rstrip("/") for service, url in (named or usual).items()}


def _account_of(endpoints: Mapping[str, str]) -> str:
    for url in endpoints.values():
        parts = urlsplit(url)
        return parts.path.strip("/") or (parts.hostname or "").partition(".")[0]
    return ""


def _emulator() -> AzureLogin:
    endpoints = {service: f"http://127.0.0.1:{port}/{_EMULATOR_ACCOUNT}" for service, port in _EMULATOR_PORTS.items()}
    return AzureLogin(_EMULATOR_ACCOUNT, endpoints, key=_EMULATOR_KEY)


# --- connections that are kept open, and may have ended meanwhile -----------------------------------------------------
# Azure, a load balancer or a firewall closes idle connections while a request is in flight. That is no outage: the
# request is repeated at once on a new connection. All our requests can be repeated (ADR 0013).


log = logging.getLogger("postdate.azure.connections")

_MOST_CALLS: Final = 16


@dataclass(slots=True)
class RequestAttempts:
    """The attempts of one request; ``count`` is the number of connections that it used."""

    count: int = 0

    @property
    def is_repeated(self) -> bool:
        """Return whether the last answer may be about the effect of an earlier attempt, whose answer was lost."""
        return self.count > 1


_attempts: ContextVar[RequestAttempts | None] = ContextVar("postdate-azure-attempts", default=None)


@contextmanager
def track_attempts(attempts: RequestAttempts) -> Generator[None]:
    """Count the attempts of the one request within the block, including those that aiohttp makes by itself."""
    token = _attempts.set(attempts)
    try:
        yield
    finally:
        _attempts.reset(token)


class RetryingTransport(AioHttpTransport):
    """A transport that repeats a request when a reused connection ends before any part of the answer."""

    async def open(self) -> None:
        """Open the session, with a trace that remembers which connections are reused."""
        sdk: Any = super()  # untyped
        previous_session = self.session
        await sdk.open()
        if self.session is not None and self.session is not previous_session:
            self.session.trace_configs.append(_create_tracing())

    async def send(self, request: Any, **settings: Any) -> Any:
        sdk: Any = super()
        while True:  # each repetition uses up one idle connection
            request_context = SimpleNamespace(is_again=False, attempts=_attempts.get() or RequestAttempts())
            try:
                return await sdk.send(request, trace_request_ctx=request_context, **settings)
            except AzureError as error:
                if not (request_context.is_again and _is_disconnection(error.__cause__)):
                    raise
                log.debug("%s is asked for again, as its connection had ended: %s", request.method, error)


def _create_tracing() -> TraceConfig:
    async def on_reuse(_session: object, context: SimpleNamespace, _what: object) -> None:
        context.trace_request_ctx.is_again = True
        context.trace_request_ctx.attempts.count += 1

    async def on_create(_session: object, context: SimpleNamespace, _what: object) -> None:
        context.trace_request_ctx.is_again = False
        context.trace_request_ctx.attempts.count += 1

    tracing = TraceConfig()
    tracing.on_connection_reuseconn.append(on_reuse)
    tracing.on_connection_create_start.append(on_create)
    tracing.freeze()
    return tracing


def _is_disconnection(error: BaseException | None) -> bool:
    """Return whether an open connection ended without an answer; ``False`` if no connection could be opened."""
    return isinstance(error, ServerDisconnectedError | ClientOSError) and not isinstance(error, ClientConnectorError)


async def fetch_headers(service: Any) -> Mapping[str, str]:  # the SDK leaves the types of its keyword arguments open
    """Return the headers of an answer of a service, with names in lower case."""
    headers: dict[str, str] = {}

    def remember_headers(response: Any) -> None:
        headers.update({name.lower(): value for name, value in response.http_response.headers.items()})

    await service.get_service_properties(raw_response_hook=remember_headers)
    return headers


async def run_concurrently(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run calls, :data:`_MOST_CALLS` at a time; raise the first failure after all have ended."""
    failures: list[Exception] = []
    slots = anyio.Semaphore(_MOST_CALLS)

    async def call(each: Callable[[], Awaitable[None]]) -> None:
        async with slots:
            try:
                await each()
            except Exception as error:  # noqa: BLE001 - raised below, once the others are done
                failures.append(error)

    if len(calls) == 1:
        await calls[0]()
        return
    async with anyio.create_task_group() as tasks:
        for each in calls:
            tasks.start_soon(call, each)
    if failures:
        raise failures[0]
