"""The HTTP server of a service for ``/metrics``, ``/healthz`` and ``/readyz``. It runs in its own threads."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from socket import AF_INET, AF_INET6
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, ClassVar, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from typing_extensions import override

from postdate.config import parse_host_and_port
from postdate.errors import ConfigurationError
from postdate.runtime import forks
from postdate.telemetry.vitals import Vitals

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        super().__init__((host, port), _Handler)
        self.set_app(application)


class _Handler(WSGIRequestHandler):
    timeout: ClassVar[float | None] = 10.0

    @override
    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # The client may close the connection or send nothing.
            super().handle()

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because monitoring sends a request every few seconds."""


def _build_application(vitals: Vitals, registry: Any) -> WSGIApplication:
    from prometheus_client import make_wsgi_app  # pyright: ignore[reportUnknownVariableType] - returns any callable

    metrics = cast("WSGIApplication", make_wsgi_app(registry))
    collection_lock = threading.Lock()  # Two collections at the same time would mix their numbers.
    health = {"/healthz": vitals.health_problems, "/readyz": vitals.readiness_problems}

    def handle_request(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if (path := environ["PATH_INFO"]) == "/metrics":
            with collection_lock:
                return metrics({**environ, "QUERY_STRING": ""}, start)
        lines = health.get(path, lambda: ["there are /metrics, /healthz and /readyz"])()
        status = "200 OK" if not lines else "503 Service Unavailable" if path in health else "404 Not Found"
        start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [f"{each}\n".encode() for each in lines or ["ok"]]

    return handle_request


@contextmanager
def serve_status(listen: str, vitals: Vitals, registry: Any) -> Generator[int]:
    """Serve the health and metrics of a service for the length of the block. Yield the port.

    The system chooses the port if it is 0. ``registry``: of ``prometheus_client``. Raises `ConfigurationError` if the
    server cannot listen at ``listen``, a host and a port.
    """
    try:
        server = _Server(*parse_host_and_port(listen), _build_application(vitals, registry))
    except OSError as error:
        raise ConfigurationError(f"metrics.listen: cannot listen at {listen}: {error.strerror or error}") from error
    forks.register_connection(server)
    threading.Thread(target=server.serve_forever, name="postdate-status", daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
