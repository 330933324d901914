"""The address at which a service tells how it is: ``/metrics``, ``/healthz``, ``/readyz``. In threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any, ClassVar

from typing_extensions import override

from postdate.config import host_and_port
from postdate.errors import ConfigurationError
from postdate.telemetry.vitals import Vitals

Page = Callable[[str], tuple[HTTPStatus, str, bytes]]
"""Returns status, content type and content, for the header ``Accept`` of whoever asks."""


def pages_of(vitals: Vitals, registry: Any) -> Mapping[str, Page]:
    """Return the pages of a service by their paths; ``registry``: of ``prometheus_client``, with its metrics."""
    from prometheus_client import exposition

    collecting = threading.Lock()  # two at once would have each other's numbers

    def metrics(accept: str) -> tuple[HTTPStatus, str, bytes]:
        encode, kind = exposition.choose_encoder(accept)
        with collecting:
            return HTTPStatus.OK, kind, encode(registry)

    def health(problems: Sequence[str]) -> tuple[HTTPStatus, str, bytes]:
        status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
        return status, "text/plain; charset=utf-8", ("\n".join(problems or ["ok"]) + "\n").encode()

    return {
        "/metrics": metrics,
        "/healthz": lambda _: health(vitals.ill()),
        "/readyz": lambda _: health(vitals.unready()),
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        self.address_family, self.pages = AF_INET6 if ":" in host else AF_INET, pages
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout: ClassVar[float | None] = 10.0
    server_version, sys_version = "postdate", ""

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"there are {', '.join(self.server.pages)}")
            return
        status, kind, content = page(self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815 - named by the base class

    @override
    def handle(self) -> None:
        with suppress(ConnectionError):  # who hangs up
            super().handle()

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: somebody asks every few seconds."""


@contextmanager
def serving(listen: str, pages: Mapping[str, Page]) -> Generator[int]:
    """Serve ``pages`` by their paths for the length of the block; yield the port, which the system chooses for 0.

    Raises `ConfigurationError` if nothing can listen at ``listen``, a host and a port.
    """
    try:
        server = _Server(*host_and_port(listen), pages)
    except OSError as error:
        raise ConfigurationError(f"metrics.listen: cannot listen at {listen}: {error.strerror or error}") from error
    threading.Thread(target=server.serve_forever, name="postdate-status", daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
